"""Evict what is least likely to return soon: a hazard model of reuse and its Gittins index.

Doors: `policy.Hazard`, and `history.History`, which the model is fitted from.
"""

"""Eviction policies, one small file each: which leaf of a tier is evicted first.

Doors: `catalog` (policies by name), `base` (what a policy implements).
"""

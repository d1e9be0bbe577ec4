"""Decides per hit whether to reload or to recompute, from measured costs of both.

Doors: `planner.Planner`, `cost` and `reload_time` (the estimates), `decision_log` (predicted and
actual times), `counters` (for `stats`), `estimates` (saving them across restarts).
"""

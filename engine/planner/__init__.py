"""Reload or recompute, decided per hit, and what was learned about the cost of each.

Doors: `planner.Planner`, `cost` and `reload_time` (the estimates), `decision_log` (what came of
decisions), `counters` (for `stats`), `estimates` (what outlives the daemon).
"""

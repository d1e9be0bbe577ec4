"""Recorded requests replayed through the cache engine, to compare policies and to size tiers.

Doors: `traces` (read a trace), `simulate` (replay it), `whatif` (hit rate by size, for a live
daemon), `plot` (the curves). Called from `hicache.commands`.
"""

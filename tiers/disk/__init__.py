"""The `disk` tier: LMDB environments under one device path, checked, repaired and compacted.

Doors: `disk_tier.DiskTier` for its worker, `format` for capacity, `scrub` and `repair` for
commands. Only this package imports lmdb.
"""

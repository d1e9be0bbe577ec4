"""Tiers: what a medium holds, and how one slot is read, written, freed and recovered."""

if __name__ != "hicache.tiers":
    raise ImportError(f"import this room as hicache.tiers, not as {__name__}")

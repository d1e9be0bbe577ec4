"""Tiers: what a medium holds, and how one slot is read, written, freed and recovered.

Doors: `block` (the vocabulary), `arena` (mapped memory), `pool` (free slots), and one module or
package per tier: `dram`, `hbm`, `disk`.
"""

if __name__ != "hicache.tiers":
    raise ImportError(f"import this room as hicache.tiers, not as {__name__}")

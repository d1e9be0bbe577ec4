"""How much of the tiers that clients read from is held by leases.

Every request that waits in an inference engine's queue may hold a lease. Together they could hold
all of memory: then nothing finds room that must come up from below, and those at the front of the
queue wait for those behind them. Above a share the service grants no more. Counted from the ground,
and not with every lease: prefixes that many requests share count once.
"""

from __future__ import annotations

import numpy as np

from hicache.engine.blocks import State
from hicache.engine.residency import Residency


def leased_share(house: Residency) -> float:
    """Of the mapped tier where it is least: what finds no room in one may find it in another."""
    blocks = house.blocks
    if not blocks.num_pins:
        return 0.0
    ids = np.flatnonzero(blocks.leases)
    numbers, of_block = np.unique(blocks.node[ids], return_inverse=True)
    nodes = [house.index.nodes[number] for number in numbers.tolist()]
    sizes = [house.namespace_of(node).slot_bytes if node is not None else 0 for node in nodes]
    bytes_of = np.array(sizes, np.int64)[of_block]
    shares = []
    for tier, spec in enumerate(house.tiers):
        if spec.mapped:
            held = bytes_of[blocks.state[tier][ids] != State.ABSENT]
            shares.append(int(held.sum()) / max(1, house.pools[tier].capacity_bytes))
    return min(shares, default=0.0)

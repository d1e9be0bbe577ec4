"""How much of the tiers that clients read from is held by leases.

Every request that waits in an inference engine's queue may hold a lease. Together they could hold
all of memory: then nothing finds room that must come up from below, and those at the front of the
queue wait for those behind them. Above a share the service grants no more. Counted from the ground,
and not with every lease: prefixes that many requests share count once.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from hicache.engine.blocks import State
from hicache.engine.residency import Residency
from hicache.tiers.block import Ids

SCAN_SHARE: Final = 256
"""One pin in so many blocks, or more, and looking through all of them takes less time than sorting
those pinned: 7 ms for six million."""


def leased_share(house: Residency) -> float:
    """Of the mapped tier where it is least: what finds no room in one may find it in another."""
    if not house.blocks.num_pins:
        return 0.0
    ids = _leased(house)
    shares = [
        _held_bytes(house, ids, tier) / max(1, house.pools[tier].capacity_bytes)
        for tier, spec in enumerate(house.tiers)
        if spec.mapped
    ]
    return min(shares, default=0.0)


def _held_bytes(house: Residency, ids: Ids, tier: int) -> int:
    """Of these blocks, what lies in the tier, in slots. Counted by node: sorting them takes a
    hundred times as long."""
    blocks, index = house.blocks, house.index
    counts = np.bincount(blocks.node[ids[blocks.state[tier][ids] != State.ABSENT]])
    numbers = np.flatnonzero(counts)
    nodes = [index.nodes[number] for number in numbers.tolist()]
    return sum(
        count * house.namespace_of(node).slot_bytes
        for node, count in zip(nodes, counts[numbers].tolist(), strict=True)
        if node is not None
    )


def _leased(house: Residency) -> Ids:
    """Each block that is leased, once."""
    blocks = house.blocks
    if blocks.num_pins * SCAN_SHARE < len(blocks.leases):
        return np.unique(np.concatenate([lease.ids for lease in house.leases.leases.values()]))
    return np.flatnonzero(blocks.leases != 0).astype(np.int32)

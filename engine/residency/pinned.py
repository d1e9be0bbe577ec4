"""The share of the mapped tiers that leases and pins hold.

Every request that waits in an inference engine's queue may hold a lease. Together they could hold
all of memory: then no block finds room that must be copied from a slower tier, and the requests at
the front of the queue wait for those behind them. Above a share, no more leases are granted. It is
computed from the blocks, not summed over leases: prefixes that many requests share count once.

It is a share of what pins leave. Pins do not end soon, and after memory was returned to the machine
they may hold all that is left: then only pinned blocks are hits.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from hicache.engine.residency.blocks import CopyState
from hicache.engine.residency.copies import Residency
from hicache.tiers.block import Ids

SCAN_SHARE: Final = 256
"""If at least one block in this many is pinned, scanning all blocks is faster than sorting the
pinned ones: 7 ms for six million."""


def pinned_bytes(residency: Residency, tier: int) -> int:
    """The bytes of the tier's slots that pins hold now."""
    return _held_bytes(residency, residency.leases.kept, tier)


def within_share(residency: Residency, ids: Ids, tier: int) -> Ids:
    """The blocks of `ids` (of one size) that may be copied to the tier: pinned ones only within the
    share of pins there, from the front."""
    book = residency.leases
    if not len(book.kept) or not len(ids):
        return ids
    places = np.minimum(np.searchsorted(book.kept, ids), len(book.kept) - 1)
    is_pinned = book.kept[places] == ids
    if not is_pinned.any():
        return ids
    slot_bytes = residency.namespace_of(residency.index.node_of(int(ids[0]))).slot_bytes[tier]
    left = book.max_share * residency.pools[tier].capacity_bytes - pinned_bytes(residency, tier)
    may_come: Ids = ids[~is_pinned | (np.cumsum(is_pinned) <= left // slot_bytes)]
    return may_come


def leased_share(residency: Residency) -> float:
    """The share that leases hold of what pins leave, in the mapped tier where it is smallest, since
    a block may use any of them."""
    if not residency.leases.leases:
        return 0.0
    ids = _leased(residency)
    shares = [
        _held_bytes(residency, ids, tier)
        / max(1, residency.pools[tier].capacity_bytes - pinned_bytes(residency, tier))
        for tier, spec in enumerate(residency.tiers)
        if spec.mapped
    ]
    return min(shares, default=0.0)


def _held_bytes(residency: Residency, ids: Ids, tier: int) -> int:
    """The bytes of these blocks' slots in the tier."""
    return bytes_in(residency, ids[residency.blocks.state[tier][ids] != CopyState.ABSENT], tier)


def bytes_in(residency: Residency, ids: Ids, tier: int) -> int:
    """The bytes of slots that these blocks would take if all were in the tier. Counted by node:
    sorting them takes a hundred times as long."""
    counts = np.bincount(residency.blocks.node[ids])
    numbers = np.flatnonzero(counts)
    nodes = [residency.index.nodes[number] for number in numbers.tolist()]
    total = 0
    for node, count in zip(nodes, counts[numbers].tolist(), strict=True):
        assert node is not None
        slot_bytes = residency.namespace_of(node).slot_bytes[tier]
        total += count * slot_bytes if residency.pools[tier].can_hold(slot_bytes) else 0
    return total


def _leased(residency: Residency) -> Ids:
    """The leased blocks that are not pinned, each once."""
    blocks, book = residency.blocks, residency.leases
    if blocks.num_pins * SCAN_SHARE < len(blocks.leases):
        leased = np.unique(np.concatenate([lease.ids for lease in book.leases.values()]))
    else:
        leased = np.flatnonzero(blocks.leases != 0).astype(np.int32)
    return book.unkept(leased)

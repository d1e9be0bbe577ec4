"""How much of the tiers that clients read from is held by leases and pins.

Every request that waits in an inference engine's queue may hold a lease. Together they could hold
all of memory: then nothing finds room that must come up from below, and those at the front of the
queue wait for those behind them. Above a share the service grants no more. Counted from the ground,
and not with every lease: prefixes that many requests share count once.

It is a share of what pins leave. Nobody waits for those to end, and where memory was given back to
the machine they may hold all that is left: then what they hold is a hit, and the rest is not.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from hicache.engine.residency.blocks import CopyState
from hicache.engine.residency.copies import Residency
from hicache.tiers.block import Ids

SCAN_SHARE: Final = 256
"""One pin in so many blocks, or more, and looking through all of them takes less time than sorting
those pinned: 7 ms for six million."""


def pinned_bytes(residency: Residency, tier: int) -> int:
    """What of the tier pins hold now, in slots."""
    return _held_bytes(residency, residency.leases.kept, tier)


def within_share(residency: Residency, ids: Ids, tier: int) -> Ids:
    """Of blocks of one size those that may be copied to the tier: of pinned ones no more than pins
    may hold there, from the front."""
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
    """Of what pins leave of the mapped tier where it is least: what finds no room in one may find
    it in another."""
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
    """Of these blocks, what lies in the tier, in slots."""
    return bytes_in(residency, ids[residency.blocks.state[tier][ids] != CopyState.ABSENT], tier)


def bytes_in(residency: Residency, ids: Ids, tier: int) -> int:
    """What these blocks take in the tier if all that it can hold lie there, in slots. Counted by
    node: sorting them takes a hundred times as long."""
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
    """Each block that is leased and not pinned, once."""
    blocks, book = residency.blocks, residency.leases
    if blocks.num_pins * SCAN_SHARE < len(blocks.leases):
        leased = np.unique(np.concatenate([lease.ids for lease in book.leases.values()]))
    else:
        leased = np.flatnonzero(blocks.leases != 0).astype(np.int32)
    return book.unkept(leased)

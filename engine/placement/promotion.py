"""Promotion: blocks just used are copied to the next faster tier, if worth more than what they
displace.

By the policy of the faster tier: a run of blocks of less worth than all candidates there stays
where it is; one of more worth takes their room. Where the policy does not rank (LRU), nothing is
evicted for a promotion: watermarks keep some room free in every tier, and the coldest blocks of
that tier are evicted afterwards. Owned by the daemon's one loop.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from hicache.engine.placement.evictor import Evictor
from hicache.engine.plan import Priority
from hicache.engine.policies.base import ALWAYS
from hicache.engine.residency.blocks import CopyState
from hicache.engine.residency.copies import Namespace, Residency
from hicache.engine.residency.pinned import within_share
from hicache.tiers.block import Ids


def promote(
    residency: Residency,
    evictor: Evictor,
    namespace: Namespace,
    ids: Ids,
    max_moving_bytes: int,
) -> None:
    """Copy blocks that were just used to the next faster tier, from the front, as far as their
    worth there allows."""
    for src, dst in residency.promotions:
        if not residency.is_up(dst) or not residency.is_up(src):
            continue
        readable = residency.blocks.tags[ids] >> src & 1
        absent = residency.blocks.state[dst][ids] == CopyState.ABSENT
        wanted = within_share(residency, ids[(readable == 1) & absent], dst)
        if len(wanted) == 0:
            continue
        budget = max_moving_bytes - residency.moves.bytes_over((src, dst), Priority.DEMOTION)
        wanted = wanted[: max(0, budget // namespace.block_bytes)]
        for run, worth in _runs(residency, dst, wanted):
            run = run[residency.blocks.tags[run] >> src & 1 == 1]  # making room may have evicted it
            with residency.pinned([run]):
                room = _room(evictor, dst, namespace.slot_bytes[dst], len(run), worth)
            slots = residency.pools[dst].allocate(namespace.slot_bytes[dst], min(room, len(run)))
            if len(slots):
                chosen = run[: len(slots)]
                residency.start(namespace, chosen, src, dst, slots, Priority.PREFETCH)


def _runs(residency: Residency, dst: int, ids: Ids) -> list[tuple[Ids, float]]:
    """The blocks grouped by their worth in the tier, front to back."""
    numbers = residency.blocks.node[ids]
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(ids)]
    policy = residency.candidates.policies[dst]
    runs: list[tuple[Ids, float]] = []
    for first, last in pairwise(starts):
        if first < last:
            node = residency.index.node_of(int(ids[first]))
            runs.append((ids[first:last], policy.worth(node.kind, node.touched_s)))
    return runs


def _room(evictor: Evictor, tier: int, slot_bytes: int, count: int, worth: float) -> int:
    """The number of slots for blocks of this worth."""
    if worth == ALWAYS:
        return evictor.residency.pools[tier].available(slot_bytes)
    if not evictor.may_displace(tier, slot_bytes * count, worth):
        return 0
    return evictor.make_room(tier, slot_bytes, count, worth)

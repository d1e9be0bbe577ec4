"""Promotion: what was just used moves up, into room that a faster tier keeps free.

Nothing is evicted for it here: watermarks keep a little room free in every tier, and whatever a
promotion takes of it, the coldest blocks of that tier give back. Owned by the daemon's one loop.
"""

from __future__ import annotations

from collections.abc import Iterable

from hicache.engine.blocks import State
from hicache.engine.plan import Priority
from hicache.engine.residency import Namespace, Residency
from hicache.tiers.block import Ids


def promote(
    residency: Residency,
    links: Iterable[tuple[int, int]],
    namespace: Namespace,
    ids: Ids,
    max_moving_bytes: int,
) -> None:
    """Blocks that were just used move up into the room that the fastest tier keeps free."""
    house = residency
    for dst in range(len(house.tiers)):
        sources = [src for src, to in links if to == dst and src > dst]
        if not sources or not house.is_up(dst) or not house.is_up(sources[0]):
            continue
        src = sources[0]
        if not house.tiers[src].mapped:  # demand brings those up
            continue
        readable = house.blocks.tags[ids] >> src & 1
        absent = house.blocks.state[dst][ids] == State.ABSENT
        wanted = ids[(readable == 1) & absent]
        if len(wanted) == 0:
            continue
        budget = max_moving_bytes - house.bytes_moving((src, dst), Priority.DEMOTION)
        count = min(len(wanted), max(0, budget // namespace.block_bytes))
        slots = house.pools[dst].allocate(namespace.slot_bytes, count)
        if len(slots):
            house.start(namespace, wanted[: len(slots)], src, dst, slots, Priority.PREFETCH)

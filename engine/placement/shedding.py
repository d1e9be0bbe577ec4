"""Doing without a part of a tier's room, slab by slab: because the machine wants its memory back,
or because a client of an earlier daemon may still write there.

    free slabs                              ──▶ out of use at once
    else the slab that costs least to empty ──▶ its blocks leave as in slab_evacuation; it is out of
                                                use next time, and one more is begun with

In haste a slab's blocks do not wait for a slower tier: what is only there is forgotten, so that
slab after slab is free within one call. Leased slabs stay, however short memory is. How much goes,
how, and when it is room again (`weigh`):

    available < least            what is missing goes
    available < least / 2        it goes in haste
    available > 1.5 × least, and a slab more, of whatever is looked at
                                 one slab is room again

What may still be written is quarantined, as the slots of an expired ticket are, but whole slabs of
it, before anything is in the tier.

Owned by the daemon's one loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hicache.engine.placement.evictor import Evictor
from hicache.engine.plan import Regain, SetAside, Shed
from hicache.engine.residency.copies import Residency
from hicache.engine.residency.leases import Quarantined
from hicache.tiers.block import PAGE_BYTES


class Wanted(NamedTuple):
    """What the machine wants of a tier. `tightest`: the look that says so; None: nothing lacks."""

    num_slabs: int
    in_haste: bool
    may_regain: bool
    tightest: int | None


def weigh(looks: Sequence[tuple[int, int]], slab_bytes: int) -> Wanted:
    """`looks`: bytes that are available and that should be, of the host and of each control group;
    the one that misses most decides. None at all: everything may be room again."""
    lacks = [least - available for available, least in looks]
    missing = max(lacks, default=0)
    if missing > 0:
        tightest = lacks.index(missing)
        in_haste = missing > looks[tightest][0]
        return Wanted(-(-missing // slab_bytes), in_haste, False, tightest)
    is_plenty = all(available - least - least // 2 > slab_bytes for available, least in looks)
    return Wanted(0, False, is_plenty, None)


def shed(residency: Residency, evictor: Evictor, event: Shed) -> list[int]:
    """Carry out the event; its answer."""
    tier = residency.number_of(event.tier)
    pool, evacuations = residency.pools[tier], evictor.evacuations
    evacuations.watch()
    given = list(pool.withhold(event.num_slabs))
    while len(given) < event.num_slabs and pool.clearing is None:
        if not event.in_haste:
            evacuations.begin(tier, pool.slab_bytes)
        else:
            evacuations.begin_in_haste(tier, pool.slab_bytes)
        more = pool.withhold(event.num_slabs - len(given))
        evacuations.watch()
        if not more:
            break
        given += more
    return given


def regain(residency: Residency, event: Regain) -> None:
    """Carry out the event."""
    residency.pools[residency.number_of(event.tier)].restore(event.first_page)


def set_aside(residency: Residency, event: SetAside) -> int:
    """Carry out the event; its answer."""
    tier = residency.number_of(event.tier)
    pool = residency.pools[tier]
    slabs = pool.allocate(pool.slab_bytes, pool.capacity_bytes // pool.slab_bytes)
    pages = pool.slab_bytes // PAGE_BYTES
    firsts = np.array([first for first, _ in event.pages], np.int64)
    ends = firsts + np.array([count for _, count in event.pages], np.int64)
    is_touched = ((slabs[:, None] < ends) & (slabs[:, None] + pages > firsts)).any(axis=1)
    pool.free(pool.slab_bytes, slabs[~is_touched])
    touched = slabs[is_touched]
    if len(touched):
        pool.quarantine(pool.slab_bytes, touched)
        held = Quarantined(event.owner, tier, pool.slab_bytes, touched)
        residency.leases.quarantine[residency.leases.next_id()] = held
    return len(touched)

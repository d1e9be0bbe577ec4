"""Doing without a part of a tier's room, slab by slab: because the machine wants its memory back,
or because a client of an earlier daemon may still write there.

    free slabs                              ──▶ out of use at once
    else the slab that costs least to empty ──▶ its blocks leave as in evacuation.py; it is out of
                                                use next time, and one more is begun with

In haste a slab's blocks do not wait for a slower tier: what is only there is forgotten, so that
slab after slab is free within one call. Leased slabs stay, however short memory is.

What may still be written is quarantined, as the slots of an expired ticket are, but whole slabs of
it, before anything is in the tier.

Owned by the daemon's one loop.
"""

from __future__ import annotations

import numpy as np

from hicache.engine.evictor import Evictor
from hicache.engine.lease import Quarantined
from hicache.engine.plan import SetAside, Shed
from hicache.engine.residency import Residency
from hicache.tiers.block import PAGE_BYTES


def shed(house: Residency, evictor: Evictor, event: Shed) -> list[int]:
    """Carry out the event; its answer."""
    tier = house.number_of(event.tier)
    pool, evacuations = house.pools[tier], evictor.evacuations
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


def set_aside(house: Residency, event: SetAside) -> int:
    """Carry out the event; its answer."""
    tier = house.number_of(event.tier)
    pool = house.pools[tier]
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
        house.leases.quarantine[house.leases.next_id()] = held
    return len(touched)

"""Giving up a part of a tier's room, slab by slab, because the machine wants its memory back.

    free slabs                              ──▶ out of use at once
    else the slab that costs least to empty ──▶ its blocks leave as in evacuation.py; it is out of
                                                use next time, and one more is begun with

In haste a slab's blocks do not wait for a slower tier: what is only there is forgotten, so that
slab after slab is free within one call. Leased slabs stay, however short memory is.

Owned by the daemon's one loop.
"""

from __future__ import annotations

from hicache.engine.evictor import Evictor
from hicache.engine.plan import Shed
from hicache.engine.residency import Residency


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

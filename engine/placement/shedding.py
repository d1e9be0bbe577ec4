"""Takes slabs of a tier out of use: because the machine is short of memory, or because a client of
an earlier daemon may still write there.

    free slabs                              ──▶ out of use at once
    else the slab that costs least to empty ──▶ its blocks leave as in slab_evacuation; it is out of
                                                use at the next call, which starts another one

In haste blocks that only this tier holds are dropped, not demoted, so that several slabs are free
within one call. Leased slabs stay in use, however short memory is. How much is taken, and when it
is used again (`weigh`):

    available < least            slabs for the missing bytes
    available < least / 2        the same, in haste
    available > 1.5 × least plus a slab, in all measurements
                                 one slab is used again

Slabs that a client may still write are quarantined, like the slots of an expired ticket, before any
block is in the tier. Owned by the daemon's one loop.
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
    """What the machine needs from a tier. `tightest`: the measurement that decided; None: there is
    enough memory."""

    num_slabs: int
    in_haste: bool
    may_regain: bool
    tightest: int | None


def weigh(looks: Sequence[tuple[int, int]], slab_bytes: int) -> Wanted:
    """`looks`: (available bytes, least bytes) of the host and of each control group; the one that
    lacks most decides. Without any, all slabs may be used again."""
    lacks = [least - available for available, least in looks]
    missing = max(lacks, default=0)
    if missing > 0:
        tightest = lacks.index(missing)
        in_haste = missing > looks[tightest][0]
        return Wanted(-(-missing // slab_bytes), in_haste, False, tightest)
    is_plenty = all(available - least - least // 2 > slab_bytes for available, least in looks)
    return Wanted(0, False, is_plenty, None)


def shed(residency: Residency, evictor: Evictor, event: Shed) -> list[int]:
    """Apply the event. Returns its answer."""
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
    """Apply the event. Returns its answer."""
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

"""Returns memory of the near tier to the machine before the kernel's OOM killer acts: slab by slab,
and uses it again slab by slab when there is enough. `available_memory.py` measures;
`engine/placement/shedding.py` decides how much, and whether in haste.

A slab's memory is freed by a hole in the arena's file, although clients map it. A starting worker
maps the whole arena once, which fills holes, so they are cut again while memory is short. If a
GPU's worker has pinned the arena, nothing can be returned: the copy engines would continue to use
the old pages. Used from the daemon's loop only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from hicache.config.units import Share, format_size
from hicache.daemon.upkeep.available_memory import Headroom, look
from hicache.engine import plan as p
from hicache.engine.placement.shedding import weigh
from hicache.tiers.arena import Arena
from hicache.tiers.block import SlotAllocator

EVERY_S: Final = 0.25
MAX_CUT_AGAIN: Final = 16

log = logging.getLogger("hicache")


class Shedding:
    """Sheds memory of `tier` in this arena. `do` passes an event to the cache engine; `headrooms`
    measures the machine's memory."""

    def __init__(
        self,
        tier: str,
        arena: Arena,
        pool: SlotAllocator,
        is_pinned: bool,
        do: Callable[[p.Event[Any]], Any],
        headrooms: Callable[[], Sequence[Headroom]] = look,
    ) -> None:
        self.num_given = 0
        self.num_taken = 0
        self.note = ""
        self._tier, self._arena, self._pool, self._is_pinned = tier, arena, pool, is_pinned
        self._do = do
        self._headrooms = headrooms
        self._due_s = 0.0
        self._again: list[int] = []
        self._is_short = False

    def tick(self, now_s: float, min_available: int | Share | None) -> None:
        """Measure the machine's memory if it is due, and free or reuse slabs."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + EVERY_S
        headrooms = self._headrooms() if min_available is not None else ()
        looks = [(h.available_bytes, _least_of(h, min_available)) for h in headrooms]
        wanted = weigh(looks, self._pool.slab_bytes)
        if wanted.num_slabs and not self._is_pinned:
            for page in self._do(p.Shed(self._tier, wanted.num_slabs, wanted.in_haste)):
                self._cut(page)
                self.num_given += 1
        elif wanted.may_regain and self._pool.withheld:
            self._take()
        if wanted.num_slabs or self._pool.withheld:
            self._cut_again()
        self._tell(None if wanted.tightest is None else headrooms[wanted.tightest])

    def _take(self) -> None:
        page = min(self._pool.withheld)
        try:
            self._arena.refill(page, self._pool.slab_bytes)
        except OSError:
            return  # another process has taken it; try again later
        self._do(p.Regain(self._tier, page))
        self.num_taken += 1

    def _cut_again(self) -> None:
        if not self._again:
            self._again = sorted(self._pool.withheld)
        part, self._again = self._again[:MAX_CUT_AGAIN], self._again[MAX_CUT_AGAIN:]
        for page in part:
            if page in self._pool.withheld:
                self._cut(page)

    def _cut(self, page: int) -> None:
        try:
            self._arena.discard(page, self._pool.slab_bytes)
        except OSError as error:  # a file system without holes: the slab stays out of use
            self.note = f"its memory cannot be freed: {error.strerror}"

    def _tell(self, tightest: Headroom | None) -> None:
        """Log one line when memory becomes short, and one when there is enough again."""
        is_short = tightest is not None
        if tightest is not None and not self._is_short:
            log.warning(
                "memory is short: %s of %s are left of %s; %s",
                format_size(tightest.available_bytes),
                format_size(tightest.total_bytes),
                tightest.of,
                f"{self._tier} is pinned for the GPU and cannot free any"
                if self._is_pinned
                else f"{self._tier} frees some of its memory",
            )
        if self._is_short and not is_short and not self._pool.withheld:
            log.info("there is enough memory again: %s has its full size", self._tier)
        self._is_short = is_short or (self._is_short and bool(self._pool.withheld))


def _least_of(headroom: Headroom, min_available: int | Share | None) -> int:
    """The bytes that should be available of it."""
    if isinstance(min_available, Share):
        return min_available.of(headroom.total_bytes)
    return min_available or 0

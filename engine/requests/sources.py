"""Chooses the copy of a block that a reload reads: one in memory, if there is one. Of copies in
several persistent tiers, it is the one expected to arrive first, by the planner's estimates: the
measured speed of each tier's link, its queue, and how late that is.

    memory    disk (queue: 2 s)    shelf (0.3 s away)
              [ a ][ b ]           [ a ][ b ][ c ]        a, b and c come from the shelf

One order for all blocks of a hit. Owned by the daemon's one loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from hicache.engine.planner.cost import LinkCost
from hicache.engine.planner.reload_time import QueuedLink
from hicache.engine.residency.copies import NO_TIER, Residency
from hicache.engine.residency.moves import IN_FLIGHT_BYTES
from hicache.tiers.block import Ids

Order = tuple[int, ...]
"""Persistent tiers, in the order to read from; empty: by their numbers."""


class Sources:
    """Chooses sources. `has_choice`: whether there are several persistent tiers."""

    def __init__(self, residency: Residency, links: Mapping[tuple[int, int], LinkCost]) -> None:
        self.residency = residency
        self.links = links
        self.has_choice = residency.persistent.bit_count() > 1
        self._tables: dict[tuple[int, Order], Ids] = {}

    def order(self, num_bytes: int, now_s: float) -> Order:
        """The persistent tiers that are up, by the expected time for `num_bytes` from each."""
        residency = self.residency
        if not self.has_choice:
            return ()
        serving = residency.persistent & residency.up
        tiers = [tier for tier in range(len(residency.tiers)) if serving >> tier & 1]
        return tuple(sorted(tiers, key=lambda tier: self._seconds(tier, num_bytes, now_s)))

    def cheapest(self, bits: int, order: Order) -> int:
        """The tier to read from, of those in a bit set that are up; NO_TIER if there is none."""
        fastest = self.residency.fastest(bits)
        if not order or fastest == NO_TIER or not self.residency.persistent >> fastest & 1:
            return fastest
        return next(tier for tier in order if bits >> tier & 1)

    def table(self, usable: int, order: Order = ()) -> Ids:
        """`cheapest` for each bit set, with only `usable` tiers."""
        table = self._tables.get((usable, order))
        if table is None:
            if len(self._tables) > 256:
                self._tables.clear()
            choices = [self.cheapest(bits & usable, order) for bits in range(256)]
            table = self._tables[usable, order] = np.array(choices, np.int32)
        return table

    def queued(self, link: tuple[int, int], now_s: float) -> QueuedLink:
        """The link with its queue, and how late that is."""
        residency, cost = self.residency, self.links[link]
        ahead = residency.moves.bytes_ahead(link)
        if not ahead:
            return QueuedLink(cost, 0)
        due_s = cost.seconds(min(ahead, IN_FLIGHT_BYTES))
        return QueuedLink(cost, ahead, max(residency.moves.silent_s(link, now_s) - due_s, 0.0))

    def _seconds(self, tier: int, num_bytes: int, now_s: float) -> float:
        link = tier, self.residency.landing[tier]
        if link not in self.links:
            return math.inf
        queued = self.queued(link, now_s)
        queued.num_bytes = num_bytes
        return queued.seconds

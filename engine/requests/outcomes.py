"""Outcomes of moves: copies change, and leases learn which of their blocks can be read now.

Owned by the daemon's one loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from hicache.engine import plan as p
from hicache.engine.requests.fetch import Fetching, Positions
from hicache.engine.requests.put import Storing
from hicache.engine.requests.warm import Warming
from hicache.engine.residency.copies import Residency
from hicache.engine.residency.leases import NOBODY, Lease
from hicache.tiers.block import Ids

Told = dict[int, Lease]
"""The leases that there is news for, by id."""


class Outcomes:
    """Applies outcomes and tells what came of them."""

    def __init__(
        self, residency: Residency, fetching: Fetching, storing: Storing, warming: Warming
    ) -> None:
        self.residency = residency
        self.fetching = fetching
        self.storing = storing
        self.warming = warming

    def apply(
        self, outcomes: Iterable[p.Outcome], now_s: float
    ) -> tuple[Told, dict[int, list[int]], int]:
        """Apply outcomes. Returns the leases to tell, what came for each, and blocks changed."""
        residency = self.residency
        arrived: dict[int, list[int]] = {}
        finished = [(residency.finish(outcome, now_s, arrived), outcome) for outcome in outcomes]
        residency.arrive(arrived)
        changed: list[int] = []
        told: Told = {}
        came: dict[int, list[int]] = {}
        for move, outcome in finished:
            if move is None:
                continue
            changed.append(move.block)
            if move.dst is None or not residency.tiers[residency.number_of(move.dst)].mapped:
                continue
            for lease in self.fetching.came(move, outcome.ok, residency.leases.leases):
                if lease.owner == NOBODY:
                    continue
                told[lease.id] = lease
                if outcome.ok:
                    came.setdefault(lease.id, []).append(move.block)
        ids = np.unique(np.array(changed, np.int32))
        residency.free_drained(ids)
        residency.settle(ids)
        residency.candidates.unpark()
        return told, came, len(ids)

    def lose(self, ids: Ids) -> Told:
        """Copies went. The leases whose readable prefix ends there now, of those being fetched."""
        residency = self.residency
        told = {}
        gone = ids[residency.blocks.tags[ids] == 0]
        for lease in residency.leases.leases.values() if len(gone) else ():
            lost = np.flatnonzero(np.isin(lease.ids, gone))
            if len(lost):
                lease.failed_at = min(lease.failed_at, int(lost[0]))
                if lease.fetching:
                    told[lease.id] = lease
        return told

    def arrivals(self, told: Told, came: dict[int, list[int]], freed: bool) -> p.Arrivals:
        """What there is to tell, once all that follows from the event has been done."""
        arrived = {}
        for lease_id, blocks in came.items():
            lease = told[lease_id]
            positions = np.flatnonzero(np.isin(lease.ids, np.array(blocks, np.int32)))
            arrived[lease_id] = self._runs_at(lease, positions)
        finished = [lease.id for lease in told.values() if self.fetching.is_finished(lease)]
        return self.told(arrived, finished, freed)

    def told(
        self, arrived: dict[int, list[p.ReadyRun]], finished: list[int], freed: bool
    ) -> p.Arrivals:
        """The same with what has ended besides, each told once."""
        finished = finished + self.fetching.take_ended()
        durable, warmed = self.storing.durable_now(), self.warming.take_ended()
        return p.Arrivals(arrived, finished, durable, freed, warmed)

    def _runs_at(self, lease: Lease, positions: Positions) -> list[p.ReadyRun]:
        """Ready runs at these positions of a lease, split where positions are not consecutive."""
        runs: list[p.ReadyRun] = []
        mapped = self.fetching.readable_tier(lease, lease.ids[positions])
        gaps = np.flatnonzero(np.diff(positions) != 1) + 1
        bounds = [0, *gaps.tolist(), len(positions)]
        for first, last in itertools.pairwise(bounds):
            offset = int(positions[first])
            part = self.fetching.ready_runs(lease.ids[positions[first:last]], mapped[first:last])
            runs.extend(p.ReadyRun(run.first + offset, run.tier, run.slots) for run in part)
        return runs

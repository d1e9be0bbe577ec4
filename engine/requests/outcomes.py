"""Applies outcomes of moves to copies, and finds the leases with newly readable blocks.

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
from hicache.engine.residency.leases import NO_OWNER, Lease
from hicache.tiers.block import Ids

Leases = dict[int, Lease]
"""The leases with changes to report, by id."""


class Outcomes:
    """Applies outcomes, and collects what to report."""

    def __init__(
        self, residency: Residency, fetching: Fetching, storing: Storing, warming: Warming
    ) -> None:
        self.residency = residency
        self.fetching = fetching
        self.storing = storing
        self.warming = warming

    def apply(
        self, outcomes: Iterable[p.Outcome], now_s: float
    ) -> tuple[Leases, dict[int, list[int]], int]:
        """Apply outcomes. Returns the leases to report, the blocks that came for each, and the
        number of blocks changed."""
        residency = self.residency
        arrived: dict[int, list[int]] = {}
        finished = [(residency.finish(outcome, now_s, arrived), outcome) for outcome in outcomes]
        residency.arrive(arrived)
        changed: list[int] = []
        leases: Leases = {}
        came: dict[int, list[int]] = {}
        for move, outcome in finished:
            if move is None:
                continue
            changed.append(move.block)
            if move.dst is None or not residency.tiers[residency.number_of(move.dst)].mapped:
                continue
            for lease in self.fetching.came(move, outcome.ok, residency.leases.leases):
                if lease.owner == NO_OWNER:
                    continue
                leases[lease.id] = lease
                if outcome.ok:
                    came.setdefault(lease.id, []).append(move.block)
        ids = np.unique(np.array(changed, np.int32))
        residency.free_drained(ids)
        residency.settle(ids)
        residency.candidates.unpark()
        return leases, came, len(ids)

    def lose(self, ids: Ids) -> Leases:
        """Copies were lost. Returns the leases, of those being fetched, that lose readable
        blocks."""
        residency = self.residency
        leases = {}
        gone = ids[residency.blocks.tags[ids] == 0]
        for lease in residency.leases.leases.values() if len(gone) else ():
            lost = np.flatnonzero(np.isin(lease.ids, gone))
            if len(lost):
                lease.failed_at = min(lease.failed_at, int(lost[0]))
                if lease.fetching:
                    leases[lease.id] = lease
        return leases

    def arrivals(self, leases: Leases, came: dict[int, list[int]], freed: bool) -> p.Arrivals:
        """The report on these leases, after all consequences of the event."""
        arrived = {}
        for lease_id, blocks in came.items():
            lease = leases[lease_id]
            positions = np.flatnonzero(np.isin(lease.ids, np.array(blocks, np.int32)))
            arrived[lease_id] = self._runs_at(lease, positions)
        finished = [lease.id for lease in leases.values() if self.fetching.is_finished(lease)]
        return self.report(arrived, finished, freed)

    def report(
        self, arrived: dict[int, list[p.ReadyRun]], finished: list[int], freed: bool
    ) -> p.Arrivals:
        """The report on these runs and fetches, with everything else that has ended, each once."""
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

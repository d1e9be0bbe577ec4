"""Makes leased blocks readable, and tracks which leases wait for which blocks.

Blocks with a copy in a mapped tier are readable at once; those in GPU memory, too, if the GPU's
worker is to read them (`by_worker`). The others are copied, with the priority of a demand, to the
mapped tier that their tier has a link to. A block that is being copied already (for another fetch,
or as a promotion) is only waited for: one move serves all leases. Without room, the rest of the
lease is placed later, as room is made; a block that cannot be placed at all ends the prefix.

    lease   [ 0 … 4 hbm ][ 5 … 9 disk          ][ 10 … 15 disk ]
              ready        awaited (moves)        unplaced (no room yet)

Owned by the daemon's one loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.engine.placement.evictor import Evictor
from hicache.engine.plan import CutShort, Loading, Move, Priority, ReadyRun
from hicache.engine.planner.planner import PlannerSettings, load_limit_s
from hicache.engine.requests.sources import Sources
from hicache.engine.residency.blocks import CopyState
from hicache.engine.residency.copies import NO_TIER, Namespace, Residency
from hicache.engine.residency.leases import Lease
from hicache.tiers.block import Ids

Positions = npt.NDArray[np.intp]
"""Positions within a lease: shape [n]."""

READING_S: Final = 0.5
"""Most readers have read everything within this time. Some keep their lease far longer: a model
that reads in place, or one that releases at the end of its answer."""


class Fetching:
    """The leases being fetched, and the blocks that they wait for."""

    def __init__(self, residency: Residency, evictor: Evictor, sources: Sources) -> None:
        self.residency = residency
        self.evictor = evictor
        self.sources = sources
        self.waiters: dict[int, set[int]] = {}
        self.unplaced: dict[int, None] = {}
        self.now_s = 0.0
        self._ended: list[int] = []

    def fetch(self, lease: Lease, settings: PlannerSettings) -> tuple[list[ReadyRun], float]:
        """Start the moves of a lease. Returns the runs readable now, and the expected seconds until
        the rest is; shortens the lease's deadline to the time after which recomputing is better.

        The runs are numbered by blocks of the prompt (the lease's first block is `first_block`).
        """
        lease.fetching = True
        self.now_s = lease.started_s
        mapped = self.readable_tier(lease, lease.ids)
        ready = self.ready_runs(lease.ids, mapped)
        missing = np.flatnonzero(mapped == NO_TIER)
        if len(missing) == 0:
            return ready, 0.0
        lease.unplaced = len(lease.ids)
        expected_s, doubt_s = self._expected(lease, lease.ids[missing])
        if settings.mode != "always_reload":
            saves_s = lease.decision.recompute_s - lease.decision.prefill_s
            patience_s = load_limit_s(settings, expected_s, doubt_s, saves_s)
            lease.deadline_s = min(lease.deadline_s, lease.started_s + patience_s)
        self._place(lease, missing)
        return ready, expected_s

    def _expected(self, lease: Lease, ids: Ids) -> tuple[float, float]:
        """Expected seconds until these blocks are readable, and their standard deviation: links
        work in parallel, each behind its queue."""
        residency = self.residency
        block_bytes = residency.namespaces[lease.namespace].block_bytes
        src = self.source_of(lease, ids)
        expected_s = doubt_s = 0.0
        for number in np.unique(src[src != NO_TIER]).tolist():
            link = number, residency.landing[number]
            cost = self.sources.links.get(link)
            if cost is None:
                continue
            is_absent = residency.blocks.state[link[1]][ids[src == number]] == CopyState.ABSENT
            num_bytes, ahead = int(is_absent.sum()) * block_bytes, residency.moves.bytes_ahead(link)
            seconds = cost.seconds(max(num_bytes, 1), ahead)
            if seconds > expected_s:
                expected_s, doubt_s = seconds, cost.doubt_s(max(num_bytes, 1), ahead)
        return expected_s, doubt_s

    def place_more(self, leases: Iterable[Lease]) -> None:
        """Room was made: place blocks that need it."""
        residency = self.residency
        for lease in leases:
            mapped = self.readable_tier(lease, lease.ids)
            missing = np.flatnonzero(mapped == NO_TIER)
            missing = missing[missing >= lease.unplaced]
            self._place(lease, missing)
            while lease.unplaced < len(lease.ids) and not (
                residency.moves or any(residency.draining_bytes) or self._others_are_read(lease)
            ):  # nothing else will make room: drop the lease's end
                self._shorten(lease)
                missing = missing[(missing >= lease.unplaced) & (missing < len(lease.ids))]
                self._place(lease, missing)
            if lease.unplaced >= len(lease.ids):
                self.unplaced.pop(lease.id, None)
                if not lease.awaited:
                    self._ended.append(lease.id)  # no outcome will report it

    def take_ended(self) -> list[int]:
        """Leases that ended because no room could be made; each is returned once."""
        ended, self._ended = self._ended, []
        return ended

    def came(self, move: Move, ok: bool, leases: dict[int, Lease]) -> list[Lease]:
        """A move to a mapped tier has ended. Returns the leases that waited for its block."""
        waiting = self.waiters.pop(move.block, None)
        if not waiting:
            return []
        waited = []
        for lease_id in waiting:
            lease = leases.get(lease_id)
            if lease is None:
                continue
            lease.awaited.discard(move.block)
            if not ok:
                position = int(np.flatnonzero(lease.ids == move.block)[0])
                lease.failed_at = min(lease.failed_at, position)
            waited.append(lease)
        return waited

    def is_finished(self, lease: Lease) -> bool:
        """Whether no block is still to come that would extend the readable prefix."""
        if lease.id in self.unplaced and lease.failed_at > lease.unplaced:
            return False
        if not lease.awaited:
            return True
        if lease.failed_at >= len(lease.ids):
            return False
        before = set(lease.ids[: lease.failed_at].tolist())
        return not (before & lease.awaited)

    def prefix_blocks(self, lease: Lease) -> int:
        """The number of blocks at its front that could be read, or were loaded by the worker: those
        before the first that failed or is still to come."""
        blocks = min(lease.failed_at, len(lease.ids), *lease.not_loaded)
        if lease.id in self.unplaced:
            blocks = min(blocks, lease.unplaced)
        if lease.awaited:
            is_awaited = np.isin(lease.ids, np.array(list(lease.awaited), np.int32))
            blocks = min(blocks, int(is_awaited.argmax()) if is_awaited.any() else blocks)
        return blocks

    def forget(self, lease: Lease) -> list[int]:
        """The lease is closed. Returns the moves that no other lease waits for."""
        self.unplaced.pop(lease.id, None)
        unwanted: list[int] = []
        for block in lease.awaited:
            waiting = self.waiters.get(block)
            if waiting is None:
                continue
            waiting.discard(lease.id)
            if not waiting:
                del self.waiters[block]
                unwanted.extend(
                    move.id
                    for move in self.residency.moves.of_block.get(block, ())
                    if move.priority == Priority.DEMAND
                )
        return unwanted

    def ready_runs(self, ids: Ids, mapped: Ids) -> list[ReadyRun]:
        """Readable blocks grouped by tier; `first` counts from the lease's start."""
        if len(ids) == 0:
            return []
        cuts = np.flatnonzero(mapped[1:] != mapped[:-1]) + 1
        bounds = [0, *cuts.tolist(), len(ids)]
        residency = self.residency
        runs = []
        for first, last in itertools.pairwise(bounds):
            tier = int(mapped[first])
            if tier != NO_TIER:
                slots = residency.blocks.slot[tier][ids[first:last]]
                runs.append(ReadyRun(first, residency.tiers[tier].name, slots))
        return runs

    def _others_are_read(self, lease: Lease) -> bool:
        """Whether another lease has all its blocks and is being read: such leases mostly end soon,
        so their room is waited for, up to READING_S and half of the time until the deadline."""
        patience_s = min(READING_S, (lease.deadline_s - lease.started_s) / 2)
        return self.now_s < lease.started_s + patience_s and any(
            other.fetching and not other.awaited and other.id not in self.unplaced
            for other in self.residency.leases.leases.values()
        )

    def _shorten(self, lease: Lease) -> None:
        """A prompt larger than the memory that it is to be read from: drop half of the blocks not
        placed yet, at its end, so that their copies there can be evicted for the front."""
        kept = lease.unplaced + (len(lease.ids) - lease.unplaced) // 2
        self.residency.leases.shorten(lease, kept)
        self.residency.candidates.unpark()

    def _place(self, lease: Lease, missing: Positions) -> None:
        """Wait for the lease's `missing` positions: join moves in flight, start the others."""
        residency = self.residency
        namespace = residency.namespaces[lease.namespace]
        ids = lease.ids[missing]
        src = self.source_of(lease, ids)
        landing = [
            dst if dst != NO_TIER and residency.is_up(dst) else NO_TIER for dst in residency.landing
        ]
        dst = np.array([*landing, NO_TIER], np.int32)[np.minimum(src, len(landing))]
        lost = np.flatnonzero(dst == NO_TIER)
        if len(lost):
            lease.failed_at = min(lease.failed_at, int(missing[lost[0]]))
            missing, ids = missing[: lost[0]], ids[: lost[0]]
            src, dst = src[: lost[0]], dst[: lost[0]]
        is_absent = np.zeros(len(ids), bool)
        for tier in np.unique(dst).tolist():
            is_absent |= (dst == tier) & (residency.blocks.state[tier][ids] == CopyState.ABSENT)
        for block in ids[~is_absent].tolist():
            self.wait(lease, block)
            for move in residency.moves.of_block.get(block, ()):
                if move.deadline_s is not None and move.dst is not None:
                    move.deadline_s = max(move.deadline_s, lease.deadline_s)
        missing, src, dst = missing[is_absent], src[is_absent], dst[is_absent]
        cuts = np.flatnonzero((src[1:] != src[:-1]) | (dst[1:] != dst[:-1])) + 1
        bounds = [0, *cuts.tolist(), len(missing)] if len(missing) else []
        for first, last in itertools.pairwise(bounds):
            link = int(src[first]), int(dst[first])
            placed = self._start(namespace, lease, missing[first:last], link)
            if placed < last - first:
                lease.unplaced = int(missing[first + placed])
                self.unplaced[lease.id] = None
                return
        lease.unplaced = len(lease.ids)

    def _start(
        self,
        namespace: Namespace,
        lease: Lease,
        positions: Positions,
        link: tuple[int, int],
    ) -> int:
        residency = self.residency
        src, dst = link
        self.evictor.make_room(dst, namespace.slot_bytes[dst], len(positions))
        slots = residency.pools[dst].allocate(namespace.slot_bytes[dst], len(positions))
        if len(slots):
            ids = lease.ids[positions[: len(slots)]]
            residency.start(namespace, ids, src, dst, slots, Priority.DEMAND, lease.deadline_s)
            residency.moves.progress_s.setdefault(link, lease.started_s)
            for block in ids.tolist():
                self.wait(lease, block)
        return len(slots)

    def wait(self, lease: Lease, block: int) -> None:
        """Report to the lease when a copy of the block is in a mapped tier."""
        lease.awaited.add(block)
        self.waiters.setdefault(block, set()).add(lease.id)

    def readable_tier(self, lease: Lease, ids: Ids) -> Ids:
        """Per block the fastest tier that this lease's reader can read it from, NO_TIER where there
        is none. A client reads mapped tiers, the GPU worker all memory."""
        residency = self.residency
        usable = 0
        for tier in range(len(residency.tiers)):
            if residency.is_readable(tier, by_worker=lease.by_worker):
                usable |= 1 << tier
        readable: Ids = self.sources.table(residency.up & usable)[residency.blocks.tags[ids] & 0xFF]
        return readable

    def loading(self, event: Loading) -> None:
        """See Loading."""
        lease = self.residency.leases.leases.get(event.lease)
        if lease is not None:
            lease.not_loaded.add(event.first)

    def cut_short(self, event: CutShort) -> None:
        """See CutShort."""
        lease = self.residency.leases.leases.get(event.lease)
        if lease is not None:
            lease.failed_at = min(lease.failed_at, event.num_blocks)

    def is_still_at(self, lease: Lease, run: ReadyRun) -> bool:
        """Whether a run that was readable still is: its tier may have gone down."""
        residency = self.residency
        tier = residency.number_of(run.tier)
        ids = lease.ids[run.first : run.first + len(run.slots)]
        is_readable = bool((residency.blocks.tags[ids] >> tier & 1).all())
        return is_readable and np.array_equal(residency.blocks.slot[tier][ids], run.slots)

    def readable_now(self, lease: Lease, first: int, last: int) -> list[ReadyRun]:
        """Where the blocks at positions `first … last-1` of a lease can be read by the client or
        worker that fetches it, up to the first that cannot."""
        ids = lease.ids[first:last]
        tiers = self.readable_tier(lease, ids)
        gaps = np.flatnonzero(tiers == NO_TIER)
        end = int(gaps[0]) if len(gaps) else len(ids)
        runs = self.ready_runs(ids[:end], tiers[:end])
        return [ReadyRun(run.first + first, run.tier, run.slots) for run in runs]

    def source_of(self, lease: Lease, ids: Ids) -> Ids:
        """Per block of a lease the tier to read it from, NO_TIER where there is none."""
        residency = self.residency
        block_bytes = residency.namespaces[lease.namespace].block_bytes
        order = self.sources.order(len(ids) * block_bytes, self.now_s)
        source: Ids = self.sources.table(residency.up, order)[residency.blocks.tags[ids] & 0xFF]
        return source

"""Warming: copies a prompt's held blocks to where they can be read, before it is requested.

For prompts with a known time, for example nine o'clock every morning. Blocks that a fetch would
have to wait for are copied beforehand by the same moves, but with a lower priority than demands and
only into free room:

    lease   [ 0 … 4 dram ][ 5 … 9 disk           ][ 10 … 15 disk ]
              warm          awaited (a few moves)    not started yet

One piece at a time, from the front. So a fetch that comes meanwhile starts the remaining moves as
demands, and joins only a few with a lower priority; and if a piece exceeds the tier's high
watermark, the coldest blocks there are demoted before the next piece is started. Nothing is dropped
for a warming: where no slower tier takes the coldest blocks, the rest of the warming is refused.

A warming holds its blocks by a lease that belongs to no session. It ends when nothing more can
come, at the latest after its `ttl_s`. Owned by the daemon's one loop.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np

from hicache.engine import plan as p
from hicache.engine.placement.evictor import Evictor
from hicache.engine.placement.promotion import promote
from hicache.engine.plan import Priority
from hicache.engine.requests.fetch import Fetching, Positions
from hicache.engine.requests.match import Matching
from hicache.engine.residency.block_ids import ids_along
from hicache.engine.residency.blocks import CopyState
from hicache.engine.residency.copies import NO_TIER, Residency
from hicache.engine.residency.leases import NO_OWNER, Lease
from hicache.tiers.block import Ids

PIECE_BYTES: Final = 64 << 20
"""The bytes started at a time: two batches of a disk's worker in flight, and two that wait."""
_FORESEEN: Final = p.ReloadDecision("reload", 0, "foreseen", 0.0, 0.0, 0.0)


class Warming:
    """The prompts being warmed."""

    def __init__(
        self, residency: Residency, matching: Matching, evictor: Evictor, fetching: Fetching
    ) -> None:
        self.residency = residency
        self.matching = matching
        self.evictor = evictor
        self.fetching = fetching
        self._under_way: dict[int, Lease] = {}
        self._lacking: dict[int, int] = {}  # the tier in which each lease waits for room
        self._ended: dict[int, p.WarmStarted] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, event: p.Warm) -> Lease:
        """Start warming a prompt. Counts as a use of its path, and rescues draining copies. If
        blocks must be copied, the lease is opened, and `advance` continues it."""
        residency = self.residency
        namespace = residency.namespaces[event.namespace]
        spans = self.matching.take_up(namespace, event.tokens, event.now_s)
        lease = Lease(
            residency.leases.next_id(),
            NO_OWNER,
            event.namespace,
            ids_along(spans),
            spans,
            event.now_s + event.ttl_s,
            (),
            _FORESEEN,
        )
        lease.failed_at = len(lease.ids)
        lease.by_worker = event.by_worker
        if len(self._cold(lease)):
            residency.leases.open(lease)
            self._under_way[lease.id] = lease
        return lease

    def answer(self, lease: Lease) -> p.WarmStarted:
        """The state of a warming, for the reply."""
        ended = self._ended.pop(lease.id, None)
        return ended or self._state(lease, lease.id if lease.id in self._under_way else 0)

    def advance(self) -> None:
        """Start further pieces, and end finished warmings. Called after every event."""
        for lease in list(self._under_way.values()):
            if not self._go_on(lease):
                self.end(lease)

    def is_warming(self, lease: int) -> bool:
        """Whether this lease belongs to a warming."""
        return lease in self._under_way

    def end(self, lease: Lease) -> None:
        """End a warming and its lease. Moves in flight complete."""
        residency = self.residency
        self._ended[lease.id] = self._state(lease, 0)
        del self._under_way[lease.id]
        self._lacking.pop(lease.id, None)
        residency.leases.close(lease.id)
        self.fetching.forget(lease)
        lost = lease.ids[residency.blocks.tags[lease.ids] == 0]
        came = self._came(lease)
        if len(lost):
            residency.settle(lost)
        promote(
            residency,
            self.evictor,
            residency.namespaces[lease.namespace],
            came,
            self.evictor.max_moving_bytes,
        )
        residency.candidates.unpark()

    def end_all(self) -> None:
        """End all warmings: the daemon stops, or requests need their memory."""
        for lease in list(self._under_way.values()):
            self.end(lease)

    def take_ended(self) -> dict[int, p.WarmStarted]:
        """The warmings that have ended; each is returned once."""
        ended, self._ended = self._ended, {}
        return ended

    def _state(self, lease: Lease, number: int) -> p.WarmStarted:
        held = len(lease.ids)
        warm = held - len(self._cold(lease))
        return p.WarmStarted(number, held, warm, 0 if number else held - warm)

    def _cold(self, lease: Lease) -> Positions:
        """The positions of blocks that cannot be read now."""
        readable = self.fetching.readable_tier(lease, lease.ids)
        return np.flatnonzero(readable == NO_TIER)

    def _came(self, lease: Lease) -> Ids:
        """The blocks at the front that can be read now."""
        cold = self._cold(lease)
        return lease.ids[: int(cold[0])] if len(cold) else lease.ids

    def _go_on(self, lease: Lease) -> bool:
        """Start a piece if the last one has nearly arrived. Returns False when nothing more will
        come."""
        namespace = self.residency.namespaces[lease.namespace]
        most = max(1, PIECE_BYTES // namespace.block_bytes)
        if len(lease.awaited) > most // 2:
            return True
        lacking = self._lacking.pop(lease.id, None)
        if lacking is not None and not self._room(lacking, namespace.slot_bytes[lacking]):
            return self._waits_for_room(lease, lacking)
        cold = self._cold(lease)
        cold = cold[(cold >= lease.unplaced) & (cold < lease.failed_at)]
        is_coming = bool(len(cold)) and self._begin(lease, cold[: most - len(lease.awaited)])
        return is_coming or bool(lease.awaited)

    def _begin(self, lease: Lease, cold: Positions) -> bool:
        """Start moves for these positions, or join moves in flight. Returns False when there is no
        room or no link for the rest: then the warming ends with the moves started."""
        residency = self.residency
        ids = lease.ids[cold]
        src = self.fetching.source_of(lease, ids)
        cuts = np.flatnonzero(src[1:] != src[:-1]) + 1
        for first, last in pairwise([0, *cuts.tolist(), len(ids)]):
            tier = int(src[first])
            landing = residency.landing[tier] if tier != NO_TIER else NO_TIER
            if landing == NO_TIER or not residency.is_up(landing):
                lease.failed_at = int(cold[first])
                return False
            run = ids[first:last]
            begun = self._start(lease, run, tier, landing)
            if begun < len(run):
                lease.unplaced = int(cold[first + begun])
                return self._waits_for_room(lease, landing)
        lease.unplaced = int(cold[-1]) + 1
        return True

    def _waits_for_room(self, lease: Lease, tier: int) -> bool:
        """Whether room will come; then the lease is not checked again before it does."""
        self._lacking[lease.id] = tier
        return bool(lease.awaited) or self.evictor.room_is_coming(tier)

    def _start(self, lease: Lease, run: Ids, src: int, dst: int) -> int:
        """As `_begin` for blocks of one tier. Returns the number started, from the front."""
        residency = self.residency
        namespace = residency.namespaces[lease.namespace]
        absent = np.flatnonzero(residency.blocks.state[dst][run] == CopyState.ABSENT)
        room = min(self._room(dst, namespace.slot_bytes[dst]), len(absent))
        if room:
            slots = residency.pools[dst].allocate(namespace.slot_bytes[dst], room)
            room = len(slots)
            started = run[absent[:room]]
            until_s = lease.expires_s
            residency.start(namespace, started, src, dst, slots, Priority.PREFETCH, until_s)
        begun = int(absent[room]) if room < len(absent) else len(run)
        for block in run[:begun].tolist():
            self.fetching.wait(lease, block)
        return begun

    def _room(self, tier: int, slot_bytes: int) -> int:
        """The number of free slots up to the tier's high watermark."""
        residency = self.residency
        pool = residency.pools[tier]
        staying = pool.used_bytes - residency.draining_bytes[tier]
        is_above = staying > residency.tiers[tier].high_watermark * pool.capacity_bytes
        return 0 if is_above else pool.available(slot_bytes)

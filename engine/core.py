"""The cache engine: index + residency + policy + planner. (Never the inference engine, its client.)

Turns events into plans without I/O: time comes with each event, randomness with the constructor,
and an outcome comes back as another event. So policies and races are tested as tables with a fake
clock. Everything here belongs to the daemon's one loop.

    event ──▶ handle ──▶ Plan(answer, moves to start, moves to cancel, pages reshaped)
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from hicache.engine import plan as p
from hicache.engine.kv_changes.diff import Changes
from hicache.engine.placement.evictor import Evictor
from hicache.engine.placement.promotion import promote
from hicache.engine.placement.shedding import regain, set_aside, shed
from hicache.engine.placement.write_back import WriteBack
from hicache.engine.placement.write_gate import WriteGate
from hicache.engine.planner.cost import LinkCost
from hicache.engine.planner.counters import Ledger, TierCounts
from hicache.engine.planner.estimates import SavedEstimates
from hicache.engine.planner.planner import Planner
from hicache.engine.policies.base import EvictionPolicy
from hicache.engine.policies.catalog import policies_of
from hicache.engine.policies.hazard.history import History
from hicache.engine.policies.lru import Lru
from hicache.engine.queries import Queries
from hicache.engine.requests.block_keys import Identities
from hicache.engine.requests.fetch import Fetching
from hicache.engine.requests.hints import Hints
from hicache.engine.requests.match import Estimates, Matching
from hicache.engine.requests.measurements import Measurements
from hicache.engine.requests.namespaces import Namespaces
from hicache.engine.requests.outages import Outages
from hicache.engine.requests.outcomes import Outcomes
from hicache.engine.requests.pin import Pinning
from hicache.engine.requests.put import Storing
from hicache.engine.requests.sources import Sources
from hicache.engine.requests.uses import Uses
from hicache.engine.requests.warm import Warming
from hicache.engine.residency.blocks import CopyState
from hicache.engine.residency.copies import Residency
from hicache.engine.residency.leases import Lease
from hicache.engine.settings import EngineSettings
from hicache.tiers.block import SlotAllocator, TierSpec


class CacheEngine:
    """Decides which blocks to copy from where to where, and which to evict.

    `tiers` fastest first; `links` are the (from, to) pairs of tier numbers that can copy; `rng()`
    returns a float in [0, 1); `history` is given where a policy needs one (`policies/catalog.py`).
    Tiers start down, until `TierUp`.
    """

    def __init__(
        self,
        tiers: Sequence[TierSpec],
        pools: Sequence[SlotAllocator],
        links: Sequence[tuple[int, int]],
        settings: EngineSettings,
        rng: Callable[[], float],
        new_policy: Callable[[int], EvictionPolicy] | None = None,
        history: History | None = None,
    ) -> None:
        self.settings = settings
        self.history = history
        self.residency = Residency(
            tiers, pools, links, new_policy or policies_of([Lru] * len(tiers))[0]
        )
        if history is not None:
            history.num_held = self.residency.num_held
        self.queries = Queries(self.residency)
        self.residency.leases.max_share = settings.max_pinned
        self.links = {link: LinkCost() for link in links}
        self.estimates = Estimates(self.links)
        self.prefill = self.estimates.prefill
        self.hop_s_per_byte = self.estimates.hop_s_per_byte
        self.planner = Planner(settings.planner, rng)
        self.evictor = Evictor(self.residency, settings.max_moving_bytes)
        self.write_back = WriteBack(self.residency, self.evictor, settings, history)
        self.evictor.write_back = self.write_back
        self.sources = Sources(self.residency, self.links)
        self.fetching = Fetching(self.residency, self.evictor, self.sources)
        self.identities = Identities(self.residency)
        self.ledger = Ledger({tier.name: TierCounts() for tier in tiers})
        self.matching = Matching(
            self.residency,
            self.estimates,
            self.planner,
            self.sources,
            self.write_back,
            self.ledger,
            settings,
            history,
        )
        self.record = self.matching.record
        self.warming = Warming(self.residency, self.matching, self.evictor, self.fetching)
        self.pinning = Pinning(self.residency, self.matching)
        self.changes = Changes(self.residency)
        self.memory = SavedEstimates(self.residency, self.estimates)
        self.storing = Storing(self.residency, self.evictor, self.write_back, settings, history)
        self.uses = Uses(self.residency, self.identities)
        self.hints = Hints(self.residency, self.evictor, history)
        self.measurements = Measurements(self.residency, self.estimates, self.record)
        self.outcomes = Outcomes(self.residency, self.fetching, self.storing, self.warming)
        self.outages = Outages(self.residency, self.outcomes)
        self.namespaces = Namespaces(
            self.residency, self.estimates, self.memory, self.record, self.outages, settings
        )
        self._moves = self.residency.moves
        self._cancel: list[int] = []
        self._handlers: dict[type, Callable[[Any], Any]] = {
            p.OpenNamespace: self.namespaces.open,
            p.MatchPrompt: self.matching.match,
            p.Fetch: self._fetch,
            p.Loading: self.fetching.loading,
            p.Loaded: self.measurements.load,
            p.CutShort: self.fetching.cut_short,
            p.Release: self._release,
            p.Put: self._put,
            p.WriterGone: self._writer_gone,
            p.Observe: self.measurements.prefill,
            p.ObserveReload: self.measurements.reload,
            p.Warm: self._warm,
            p.MovesDone: self._moves_done,
            p.LinkMeasured: self.measurements.link,
            p.Spoiled: self._spoiled,
            p.TakeUses: self.uses.take,
            p.TierDown: self._tier_down,
            p.TierUp: self.outages.up,
            p.SetAside: partial(set_aside, self.residency),
            p.Tick: self._tick,
            p.Flush: self._flush,
        }
        freeing: dict[type, Callable[[Any], Any]] = {  # these may have made room
            p.Hint: self.hints.take,
            p.Commit: self.storing.commit,
            p.Abort: self.storing.abort,
            p.PinPrompt: self.pinning.pin,
            p.Unpin: lambda event: self.pinning.unpin(event.pin),
            p.Clear: self.outages.clear,
            p.Restore: self.outages.restore,
            p.Restored: self.outages.restored,
            p.Shed: partial(shed, self.residency, self.evictor),
            p.Regain: partial(regain, self.residency),
            p.EndWarmings: lambda _: self.warming.end_all(),
        }
        self._handlers |= {event: self._freeing(take) for event, take in freeing.items()}

    def _freeing(self, take: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A handler after which events that wait for room are continued."""

        def handle(event: Any) -> Any:
            answer = take(event)
            self._make_progress()
            return answer

        return handle

    @property
    def num_leases(self) -> int:
        """The number of open leases."""
        return len(self.residency.leases.leases)

    def handle(self, event: p.Event[p.Answer]) -> p.Plan[p.Answer]:
        """Apply one event. Raises UnknownLease or UnknownTicket, and changes nothing."""
        self.matching.settle()
        answer = self._handlers[type(event)](event)
        in_flight = self._moves
        moves, in_flight.outbox = in_flight.outbox, []
        cancel, self._cancel = self._cancel, []
        return p.Plan(answer, moves, cancel, self.residency.take_reshaped())

    def catch_up(self) -> p.Plan[None] | None:
        """Bookkeeping after an answer. The daemon calls it once the answer is sent, so that the
        client need not wait for it; else the next `handle` begins with it. Returns a plan if there
        are moves to start."""
        self.matching.settle()
        in_flight = self._moves
        if not in_flight.outbox:
            return None
        moves, in_flight.outbox = in_flight.outbox, []
        return p.Plan(None, moves, [], self.residency.take_reshaped())

    def identify(self, moves: Iterable[p.Move]) -> None:
        """Fill in `identity` of moves that touch a persistent tier, just before they leave."""
        self.identities.fill(moves)

    def configure(self, settings: EngineSettings, tiers: Sequence[TierSpec]) -> None:
        """Apply changes of the live configuration: settings, and the tiers' watermarks."""
        self.settings = self.matching.settings = self.storing.settings = settings
        self.namespaces.settings = settings
        self.residency.tiers = tuple(tiers)
        self.residency.leases.max_share = settings.max_pinned
        self.planner.settings = settings.planner
        self.evictor.max_moving_bytes = settings.max_moving_bytes
        self.write_back.configure(settings)

    # --- requests of inference engines ----------------------------------------------------------

    def _fetch(self, event: p.Fetch) -> p.FetchStarted:
        lease = self._lease(event.lease)
        lease.started_s = event.now_s
        lease.deadline_s = event.deadline_s
        lease.by_worker = event.by_worker
        ready, expected_s = self.fetching.fetch(lease, self.settings.planner)
        self._make_progress()
        unplaced = len(lease.ids) - lease.unplaced if lease.id in self.fetching.unplaced else 0
        self.fetching.take_ended()  # the answer contains it already
        waiting = len(lease.awaited)
        return p.FetchStarted(tuple(ready), waiting, unplaced, expected_s, lease.deadline_s)

    def _release(self, event: p.Release) -> bool:
        residency = self.residency
        lease = residency.leases.close(event.lease)
        if lease is None:
            return False
        came = self.fetching.prefix_blocks(lease) if lease.fetching else 0
        if lease.fetching:
            self.record.reloaded(lease.id, came, lease.took_s or None)
        else:
            self.record.dropped(lease.id)
        for move in self.fetching.forget(lease):
            block = residency.moves[move].block
            dst = residency.number_of(cast(str, residency.moves[move].dst))
            if residency.blocks.state[dst][block] == CopyState.FILLING:
                residency.blocks.change(dst, np.array([block], np.int32), CopyState.CANCELLED)
                self._cancel.append(move)
        lost = lease.ids[residency.blocks.tags[lease.ids] == 0]
        if len(lost):  # before promotions: making room for them may drop blocks of this prompt
            residency.settle(lost)
        namespace = residency.namespaces[lease.namespace]
        if lease.fetching:
            self.ledger.served(lease, came, namespace.block_tokens, namespace.block_bytes)
            ids, limit = lease.ids[:came], self.settings.max_moving_bytes
            promote(residency, self.evictor, namespace, ids, limit)
        residency.candidates.unpark()
        self._make_progress()
        return True

    def _writer_gone(self, event: p.WriterGone) -> int:
        book = self.residency.leases
        freed = 0
        for ticket in [t.id for t in book.tickets.values() if t.owner == event.owner]:
            freed += self.storing.abort(p.Abort(ticket, event.now_s, writer_gone=True))
        for ticket in [t for t, held in book.quarantine.items() if held.owner == event.owner]:
            freed += self.storing.end_quarantine(ticket)
        for lease in [item.id for item in book.leases.values() if item.owner == event.owner]:
            self._release(p.Release(lease, event.now_s))
        self._make_progress()  # its tickets' slots are free now, even if it held no lease
        return freed

    def _warm(self, event: p.Warm) -> p.WarmStarted:
        lease = self.warming.begin(event)
        self._make_progress()
        return self.warming.answer(lease)

    def _put(self, event: p.Put) -> p.Placed:
        self.write_back.pass_time(event.now_s)
        placed = self.storing.put(event)
        self._make_progress()
        return placed

    # --- outcomes, tiers, time ------------------------------------------------------------------

    def _moves_done(self, event: p.MovesDone) -> p.Arrivals:
        reported, came, num_changed = self.outcomes.apply(event.outcomes, event.now_s)
        self._make_progress()
        arrivals = self.outcomes.arrivals(reported, came, num_changed > 0)
        for number in arrivals.finished:
            lease = self.residency.leases.leases.get(number)
            if lease is not None:  # until the client reports its measurement
                lease.took_s = event.now_s - lease.started_s
        return arrivals

    def _spoiled(self, event: p.Spoiled) -> p.Arrivals:
        reported = self.outages.spoiled(event, self.namespaces.by_digest[event.digest])
        self._make_progress()
        return self.outcomes.arrivals(reported, {}, True)

    def _tier_down(self, event: p.TierDown) -> p.Arrivals:
        reported = self.outages.down(event)
        self._make_progress()
        return self.outcomes.arrivals(reported, {}, True)

    def _tick(self, event: p.Tick) -> p.Arrivals:
        self.residency.backoff.tick(event.now_s)
        self.write_back.pass_time(event.now_s)
        self.fetching.now_s = event.now_s
        leases, tickets = self.residency.leases.expired(event.now_s)
        for ticket in tickets:
            self.storing.abort(p.Abort(ticket, event.now_s, writer_gone=False))
        for lease in leases:
            if self.warming.is_warming(lease):
                self.warming.end(self._lease(lease))
            else:
                self._release(p.Release(lease, event.now_s))
        self.pinning.expire(event.now_s)
        self.evictor.evacuations.tick(event.now_s)
        self._make_progress()
        return self.outcomes.report({}, leases, bool(leases or tickets))

    def _flush(self, event: p.Flush) -> int:
        self.warming.end_all()
        self.write_back.flush()
        self._make_progress()
        residency = self.residency
        persistent = {tier.name for tier in residency.tiers if tier.persistent}
        reads = sum([m.src in persistent and m.dst is not None for m in residency.moves.values()])
        return self.write_back.num_pending + len(residency.moves) - reads

    # --- after every event ----------------------------------------------------------------------

    def _make_progress(self) -> None:
        """There may be new room or new copies: start what waited for them."""
        residency = self.residency
        if self.fetching.unplaced:
            leases = residency.leases.leases
            self.fetching.place_more([leases[i] for i in list(self.fetching.unplaced)])
        self.write_back.advance()
        self.evictor.keep_watermarks()
        self.warming.advance()

    def _lease(self, lease_id: int) -> Lease:
        lease = self.residency.leases.leases.get(lease_id)
        if lease is None:
            raise p.UnknownLease(lease_id)
        return lease

    def too_small_for(self, block_bytes: int, slot_bytes: Sequence[int] = ()) -> list[TierSpec]:
        """The tiers that cannot hold a single block of this size (`slot_bytes`: as in
        OpenNamespace). The other tiers work without them."""
        return self.namespaces.too_small(block_bytes, slot_bytes)

    def is_still_at(self, lease_id: int, run: p.ReadyRun) -> bool:
        """Whether a run that was reported as readable still is: the lease may have ended since, or
        the tier may be down."""
        lease = self.residency.leases.leases.get(lease_id)
        return lease is not None and self.fetching.is_still_at(lease, run)

    def readable_now(self, lease_id: int, first: int, last: int) -> list[p.ReadyRun]:
        """Where the blocks at positions `first … last-1` of a lease can be read by the client or
        worker that fetches it, up to the first that cannot. Raises UnknownLease."""
        return self.fetching.readable_now(self._lease(lease_id), first, last)

    def score(self, event: p.MatchPrompt) -> p.Scored:
        """What this match would find, and its expected time. A query: it changes nothing."""
        return self.matching.score(event)

    def gates(self) -> dict[str, WriteGate]:
        """What decides on writes to each persistent tier, the fastest first."""
        return {self.residency.tiers[w.tier].name: w.gate for w in self.write_back.writers}

    def knows(self, digest: bytes) -> bool:
        """Whether this namespace has a number."""
        return digest in self.namespaces.by_digest

    def number_of(self, digest: bytes) -> int | None:
        """The number of a namespace, None where it is not known."""
        return self.namespaces.by_digest.get(digest)

    def idle_namespace(self, used: Container[int]) -> int | None:
        """A namespace, not one of `used`, of which nothing is left (see Namespaces.idle)."""
        return self.namespaces.idle(used)

    def story(self, block: int) -> str:
        """A block's state in words, for error messages."""
        return self.residency.blocks.story(block)

    def validate(self) -> None:
        """Recompute every counter. Raises AssertionError where one differs."""
        self.matching.settle()
        self.residency.validate()
        self.evictor.evacuations.validate()

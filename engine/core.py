"""The cache engine: index + residency + policy + planner. (Never the inference engine, its client.)

Turns events into plans without I/O: time comes with each event, randomness with the constructor,
and an outcome comes back as another event. So policies and races are tested as tables with a fake
clock. Everything here belongs to the daemon's one loop.

    event ──▶ handle ──▶ Plan(answer, moves to start, moves to cancel, pages reshaped)
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np

from hicache.engine import plan as p
from hicache.engine.index.node import Node
from hicache.engine.kv_changes.diff import Changes
from hicache.engine.placement.evictor import Evictor
from hicache.engine.placement.promotion import promote
from hicache.engine.placement.shedding import set_aside, shed
from hicache.engine.placement.write_back import WriteDown
from hicache.engine.placement.write_gate import WriteGate
from hicache.engine.planner.cost import LinkCost, PrefillCost, is_measurable, learn_hop
from hicache.engine.planner.counters import Ledger, TierCounts
from hicache.engine.planner.estimates import SavedEstimates
from hicache.engine.planner.planner import Planner
from hicache.engine.policies.base import EvictionPolicy
from hicache.engine.policies.catalog import policies_of
from hicache.engine.policies.hazard.history import History
from hicache.engine.policies.lru import Lru
from hicache.engine.queries import Queries
from hicache.engine.requests.block_keys import Identities
from hicache.engine.requests.clear import Clearing
from hicache.engine.requests.fetch import Fetching, Positions
from hicache.engine.requests.hints import Hints
from hicache.engine.requests.match import Estimates, Matching
from hicache.engine.requests.pin import Pinning
from hicache.engine.requests.put import Storing
from hicache.engine.requests.restore import Restoration
from hicache.engine.requests.uses import Uses
from hicache.engine.requests.warm import Warming
from hicache.engine.residency.blocks import CopyState
from hicache.engine.residency.copies import NO_TIER, Namespace, Residency
from hicache.engine.residency.leases import NOBODY, Lease
from hicache.engine.settings import EngineSettings
from hicache.tiers.block import Ids, SlotAllocator, TierSpec, slot_bytes_for


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
        self.gate = WriteGate(history, settings.min_return, settings.write_bytes_per_s)
        self.evictor = Evictor(self.residency, settings.max_moving_bytes, self.gate)
        self.writedown = WriteDown(self.residency, self.evictor)
        self.evictor.durable = self.writedown
        self.fetching = Fetching(self.residency, self.evictor, self.links)
        self.identities = Identities(self.residency)
        self.ledger = Ledger({tier.name: TierCounts() for tier in tiers})
        self.matching = Matching(
            self.residency,
            self.estimates,
            self.planner,
            self.writedown,
            self.ledger,
            settings,
            history,
        )
        self.record = self.matching.record
        self.warming = Warming(self.residency, self.matching, self.evictor, self.fetching)
        self.pinning = Pinning(self.residency, self.matching)
        self.changes = Changes(self.residency)
        self.memory = SavedEstimates(self.residency, self.estimates)
        self.storing = Storing(self.residency, self.evictor, self.writedown, settings, history)
        self.uses = Uses(self.residency, self.identities, self.writedown.tier)
        self._restorations: dict[int, Restoration] = {}
        self._clearings: dict[int, Clearing] = {}
        self._cleared_unseen: defaultdict[int, set[bytes]] = defaultdict(set)
        self.hints = Hints(self.residency, self.evictor, history)
        self._by_digest: dict[bytes, int] = {}
        self._cancel: list[int] = []
        self._handlers: dict[type, Callable[[Any], Any]] = {
            p.OpenNamespace: self._open_namespace,
            p.MatchPrompt: self.matching.match,
            p.Hint: self._hint,
            p.Fetch: self._fetch,
            p.Loading: self._loading,
            p.Loaded: self._loaded,
            p.CutShort: self._cut_short,
            p.Release: self._release,
            p.Put: self._put,
            p.Commit: self._commit,
            p.Abort: self._abort,
            p.WriterGone: self._writer_gone,
            p.Observe: self._observe,
            p.ObserveReload: self._observe_reload,
            p.Warm: self._warm,
            p.PinPrompt: self._pin,
            p.Unpin: self._unpin,
            p.Clear: self._clear,
            p.MovesDone: self._moves_done,
            p.LinkMeasured: self._link_measured,
            p.Restore: self._restore,
            p.Restored: self._restored,
            p.Spoiled: self._spoiled,
            p.TakeUses: self.uses.take,
            p.TierDown: self._tier_down,
            p.TierUp: self._tier_up,
            p.SetAside: self._set_aside,
            p.Shed: self._shed,
            p.Regain: self._regain,
            p.Tick: self._tick,
            p.EndWarmings: self._end_warmings,
            p.Flush: self._flush,
        }

    def handle(self, event: p.Event[p.Answer]) -> p.Plan[p.Answer]:
        """Apply one event. Raises UnknownLease or UnknownTicket, and changes nothing."""
        self.matching.settle()
        answer = self._handlers[type(event)](event)
        residency = self.residency
        moves, residency.outbox = residency.outbox, []
        cancel, self._cancel = self._cancel, []
        return p.Plan(cast(p.Answer, answer), moves, cancel, residency.take_reshaped())

    def catch_up(self) -> p.Plan[None] | None:
        """Bookkeeping after an answer. The daemon calls it once the answer is sent, so that the
        client need not wait for it; else the next `handle` begins with it. Returns a plan if there
        are moves to start."""
        self.matching.settle()
        residency = self.residency
        if not residency.outbox:
            return None
        moves, residency.outbox = residency.outbox, []
        return p.Plan(None, moves, [], residency.take_reshaped())

    def identify(self, moves: Iterable[p.Move]) -> None:
        """Set `identity` of moves from or to a persistent tier, just before they are sent."""
        self.identities.fill(moves)

    def configure(self, settings: EngineSettings, tiers: Sequence[TierSpec]) -> None:
        """Apply changes of the live configuration: settings, and the tiers' watermarks."""
        self.settings = self.matching.settings = self.storing.settings = settings
        self.residency.tiers = tuple(tiers)
        self.residency.leases.max_share = settings.max_pinned
        self.planner.settings = settings.planner
        self.evictor.max_moving_bytes = settings.max_moving_bytes
        self.gate.configure(settings.min_return, settings.write_bytes_per_s)

    # --- requests of inference engines ----------------------------------------------------------

    def _open_namespace(self, event: p.OpenNamespace) -> int:
        number = self._by_digest.get(event.digest)
        prior = self.settings.prior.for_model(
            event.flop_per_token, event.flop_per_pair, self.settings.flop_per_s
        )
        if number is not None:
            if event.flop_per_token and not self.prefill[number].num_observed:
                self.prefill[number] = PrefillCost(prior)  # it was restored, and is opened only now
            return number
        if event.instead_of is None:
            number = len(self.residency.namespaces)
            namespace = self._new_namespace(event, number, self.residency.index.add_root(number))
            self.residency.namespaces.append(namespace)
            self.prefill.append(PrefillCost(prior))
            self.hop_s_per_byte.append(1.0 / self.settings.hop_bytes_per_s)
        else:
            number = event.instead_of
            idle = self.residency.namespaces[number]
            assert not idle.root.children, "an idle namespace has blocks"
            del self._by_digest[idle.digest]
            self.record.forget(number)
            self.memory.forget(number)
            self.estimates.loads.pop(number, None)
            self._clearings.pop(number, None)
            self.residency.namespaces[number] = self._new_namespace(event, number, idle.root)
            self.prefill[number] = PrefillCost(prior)
            self.hop_s_per_byte[number] = 1.0 / self.settings.hop_bytes_per_s
        self._by_digest[event.digest] = number
        with suppress(ValueError):  # a damaged snapshot: start without it
            self.memory.opened(number)
        return number

    def _new_namespace(self, event: p.OpenNamespace, number: int, root: Node) -> Namespace:
        sizes = self._slot_sizes(event.block_bytes, event.slot_bytes)
        step = 4 * event.block_tokens
        return Namespace(
            number, event.digest, event.block_tokens, event.block_bytes, sizes, root, step
        )

    def _slot_sizes(self, block_bytes: int, stored: Sequence[int]) -> tuple[int, ...]:
        """A block's slot size in each tier: `stored`, or by default its length in whole pages."""
        num_tiers = len(self.residency.tiers)
        sizes = tuple(stored) or (slot_bytes_for(block_bytes),) * num_tiers
        assert len(sizes) == num_tiers, "one slot size for each tier"
        return sizes

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
            promote(residency, self.evictor, self.links, namespace, ids, limit)
        residency.unpark()
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

    def _loading(self, event: p.Loading) -> None:
        lease = self.residency.leases.leases.get(event.lease)
        if lease is not None:
            lease.not_loaded.add(event.first)

    def _loaded(self, event: p.Loaded) -> None:
        lease = self.residency.leases.leases.get(event.lease)
        if lease is None:
            return
        for run in event.runs:
            lease.not_loaded.difference_update(range(run.first, run.first + len(run.slots)))
        lease.took_s = event.now_s - lease.started_s  # until the client reports its measurement
        block_bytes = self.residency.namespaces[lease.namespace].block_bytes
        bytes_from: dict[int, float] = {}
        for run in event.runs:
            tier = self.residency.number_of(run.tier)
            bytes_from[tier] = bytes_from.get(tier, 0.0) + len(run.slots) * block_bytes
        load = self.estimates.load(lease.namespace, self.residency)
        load.measured(bytes_from, event.seconds)

    def _cut_short(self, event: p.CutShort) -> None:
        lease = self.residency.leases.leases.get(event.lease)
        if lease is not None:
            lease.failed_at = min(lease.failed_at, event.num_blocks)

    def _hint(self, event: p.Hint) -> None:
        self.hints.take(event)
        self._make_progress()

    def _observe(self, event: p.Observe) -> None:
        self.record.prefilled(event)
        self.prefill[event.namespace].observe(
            event.num_requests, event.sum_n, event.sum_nc, event.seconds, event.decode_tokens
        )

    def _observe_reload(self, event: p.ObserveReload) -> None:
        lease = self.residency.leases.leases.get(event.lease)
        if lease is None:
            return
        self.hop_s_per_byte[lease.namespace] = learn_hop(
            self.hop_s_per_byte[lease.namespace], event.hop_bytes, event.hop_seconds
        )
        if is_measurable(event.total_seconds):
            lease.took_s = event.total_seconds

    def _warm(self, event: p.Warm) -> p.WarmStarted:
        lease = self.warming.begin(event)
        self._make_progress()
        return self.warming.answer(lease)

    def _pin(self, event: p.PinPrompt) -> p.PinPlaced:
        pinned = self.pinning.pin(event)
        self._make_progress()
        return pinned

    def _unpin(self, event: p.Unpin) -> bool:
        is_known = self.pinning.unpin(event.pin)
        self._make_progress()
        return is_known

    def _clear(self, event: p.Clear) -> p.Cleared:
        residency = self.residency
        namespace = residency.namespaces[event.namespace]
        if event.begins:
            self._clearings[event.namespace] = Clearing(residency, namespace)
        clearing = self._clearings.get(event.namespace)
        if clearing is None:
            return p.Cleared(0, is_over=True, is_waiting=False, is_complete=True)
        for restoration in self._restorations.values():
            restoration.cleared.add(namespace.digest)
            clearing.misses_records = True
        for tier, spec in enumerate(residency.tiers):
            if spec.persistent and not residency.is_up(tier):
                self._cleared_unseen[tier].add(namespace.digest)
                clearing.misses_records = True
        cleared = clearing.step(event.most_blocks)
        if cleared.is_over:
            del self._clearings[event.namespace]
        self._make_progress()
        return cleared

    def _put(self, event: p.Put) -> p.Placed:
        self.gate.pass_time(event.now_s)
        placed = self.storing.put(event)
        self._make_progress()
        return placed

    def _commit(self, event: p.Commit) -> int:
        done = self.storing.commit(event)
        self._make_progress()
        return done

    def _abort(self, event: p.Abort) -> int:
        given_up = self.storing.abort(event)
        self._make_progress()
        return given_up

    # --- outcomes, tiers, time ------------------------------------------------------------------

    def _moves_done(self, event: p.MovesDone) -> p.Arrivals:
        told, came, num_changed = self._apply(event.outcomes, event.now_s)
        self._make_progress()
        arrivals = self._arrivals(told, came, num_changed > 0)
        for number in arrivals.finished:
            lease = self.residency.leases.leases.get(number)
            if lease is not None:  # until the client reports its measurement
                lease.took_s = event.now_s - lease.started_s
        return arrivals

    def _apply(
        self, outcomes: Iterable[p.Outcome], now_s: float
    ) -> tuple[dict[int, Lease], dict[int, list[int]], int]:
        """Apply outcomes. Returns the leases to report, the blocks that came for each, and the
        number of blocks changed."""
        residency = self.residency
        arrived: dict[int, list[int]] = {}
        finished = [(residency.finish(outcome, now_s, arrived), outcome) for outcome in outcomes]
        residency.arrive(arrived)
        changed: list[int] = []
        told: dict[int, Lease] = {}
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
        residency.unpark()
        return told, came, len(ids)

    def _arrivals(
        self, told: dict[int, Lease], came: dict[int, list[int]], freed: bool
    ) -> p.Arrivals:
        arrived = {}
        for lease_id, blocks in came.items():
            lease = told[lease_id]
            positions = np.flatnonzero(np.isin(lease.ids, np.array(blocks, np.int32)))
            arrived[lease_id] = self._runs_at(lease, positions)
        finished = [lease.id for lease in told.values() if self.fetching.is_finished(lease)]
        finished += self.fetching.take_ended()
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

    def _link_measured(self, event: p.LinkMeasured) -> None:
        link = (self.residency.number_of(event.src), self.residency.number_of(event.dst))
        if link in self.links:
            self.links[link].measured(event.num_bytes, event.seconds)

    def _restore(self, event: p.Restore) -> list[bytes]:
        tier = self.residency.number_of(event.tier)
        namespace = self.residency.namespaces[event.namespace]
        restoration = self._restorations.get(tier) or self._begin_restoring(tier)
        homeless = restoration.add(namespace, event.rows, event.now_s, event.zero_s)
        self._make_progress()
        return homeless

    def _spoiled(self, event: p.Spoiled) -> p.Arrivals:
        """Remove the copy, as after a corrupt read. A read in flight will find it corrupt
        itself."""
        residency = self.residency
        tier = residency.number_of(event.tier)
        namespace = residency.namespaces[self._by_digest[event.digest]]
        path = residency.index.match(namespace.root, event.tokens, namespace.step)
        told: dict[int, Lease] = {}
        if path.num_blocks * namespace.step == len(event.tokens):
            ids = path.ids()[-1:]
            block = int(ids[0])
            is_stored = residency.blocks.state[tier][block] == CopyState.READY
            if is_stored and not residency.is_read(block, tier):
                residency.vacate(ids, tier)
                residency.corrupt[tier] += 1
                told = self._lose(ids)
                residency.settle(ids)
        self._make_progress()
        return self._arrivals(told, {}, True)

    def _lose(self, ids: Ids) -> dict[int, Lease]:
        """Copies were lost. Returns the leases, of those being fetched, that lose readable
        blocks."""
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

    def _restored(self, event: p.Restored) -> None:
        tier = self.residency.number_of(event.tier)
        self._restorations.pop(tier, None)
        self.residency.restoring &= ~(1 << tier)
        self._make_progress()

    def _tier_down(self, event: p.TierDown) -> p.Arrivals:
        """Fail its moves (later outcomes are ignored), and remove its copies: the next worker of a
        persistent tier restores them row by row."""
        residency = self.residency
        tier = residency.number_of(event.tier)
        residency.up &= ~(1 << tier)
        residency.restoring &= ~(1 << tier)
        self._restorations.pop(tier, None)
        if residency.tiers[tier].persistent:
            for clearing in self._clearings.values():  # records not deleted yet will be restored
                self._cleared_unseen[tier].add(clearing.namespace.digest)
                clearing.misses_records = True
        mine = [m.id for m in residency.moves.values() if event.tier in (m.src, m.dst)]
        failed = [p.Outcome(move, False, error="tier down") for move in mine]
        told, _, _ = self._apply(failed, event.now_s)
        ids = residency.blocks.live_ids()
        held = ids[residency.blocks.tags[ids] >> tier & 1 == 1]
        for namespace in residency.namespaces:
            nodes = [n for n in residency.index.subtree(namespace.root) if n.tiers >> tier & 1]
            if nodes:
                residency.vacate(np.concatenate([node.block_ids() for node in nodes]), tier)
        residency.settle(held)
        for lease in residency.leases.leases.values():
            gone = np.flatnonzero(residency.blocks.tags[lease.ids] == 0)
            if len(gone):
                lease.failed_at = min(lease.failed_at, int(gone[0]))
                if lease.fetching:
                    told[lease.id] = lease
        residency.unpark()
        self._make_progress()
        return self._arrivals(told, {}, True)

    def _tier_up(self, event: p.TierUp) -> None:
        tier = self.residency.number_of(event.tier)
        self.residency.up |= 1 << tier
        self._restorations.pop(tier, None)
        if event.is_restoring:
            self.residency.restoring |= 1 << tier
            self._begin_restoring(tier)
        self.residency.backoff.took(tier)

    def _begin_restoring(self, tier: int) -> Restoration:
        restoration = self._restorations[tier] = Restoration(self.residency, tier)
        restoration.cleared |= self._cleared_unseen.pop(tier, set())
        return restoration

    def _tick(self, event: p.Tick) -> p.Arrivals:
        self.residency.backoff.tick(event.now_s)
        self.gate.pass_time(event.now_s)
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
        finished = leases + self.fetching.take_ended()
        durable, warmed = self.storing.durable_now(), self.warming.take_ended()
        return p.Arrivals({}, finished, durable, bool(leases or tickets), warmed)

    def _set_aside(self, event: p.SetAside) -> int:
        return set_aside(self.residency, event)

    def _shed(self, event: p.Shed) -> list[int]:
        given = shed(self.residency, self.evictor, event)
        self._make_progress()
        return given

    def _regain(self, event: p.Regain) -> None:
        self.residency.pools[self.residency.number_of(event.tier)].restore(event.first_page)
        self._make_progress()

    def _end_warmings(self, _: p.EndWarmings) -> None:
        self.warming.end_all()
        self._make_progress()

    def _flush(self, event: p.Flush) -> int:
        self.warming.end_all()
        self.writedown.flush()
        self._make_progress()
        residency = self.residency
        durable = {tier.name for tier in residency.tiers if tier.persistent}
        reads = sum([m.src in durable and m.dst is not None for m in residency.moves.values()])
        return len(self.writedown.pending) + len(residency.moves) - reads

    # --- after every event ----------------------------------------------------------------------

    def _make_progress(self) -> None:
        """There may be new room or new copies: start what waited for them."""
        residency = self.residency
        if self.fetching.unplaced:
            leases = residency.leases.leases
            self.fetching.place_more([leases[i] for i in list(self.fetching.unplaced)])
        self.writedown.advance()
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
        sizes = self._slot_sizes(block_bytes, slot_bytes)
        rooms = zip(self.residency.tiers, self.residency.pools, sizes, strict=True)
        return [tier for tier, pool, size in rooms if not pool.can_hold(size)]

    def is_still_at(self, lease_id: int, run: p.ReadyRun) -> bool:
        """Whether a run that was reported as readable still is: the lease may have ended since, or
        the tier may be down."""
        residency = self.residency
        lease = residency.leases.leases.get(lease_id)
        if lease is None:
            return False
        tier = residency.number_of(run.tier)
        ids = lease.ids[run.first : run.first + len(run.slots)]
        is_readable = bool((residency.blocks.tags[ids] >> tier & 1).all())
        return is_readable and np.array_equal(residency.blocks.slot[tier][ids], run.slots)

    def readable_now(self, lease_id: int, first: int, last: int) -> list[p.ReadyRun]:
        """The readable runs of blocks `first … last-1` of a lease, up to the first block that is
        not readable. Raises UnknownLease."""
        lease = self._lease(lease_id)
        ids = lease.ids[first:last]
        tiers = self.fetching.readable_tier(lease, ids)
        gaps = np.flatnonzero(tiers == NO_TIER)
        end = int(gaps[0]) if len(gaps) else len(ids)
        runs = self.fetching.ready_runs(ids[:end], tiers[:end])
        return [p.ReadyRun(run.first + first, run.tier, run.slots) for run in runs]

    def score(self, event: p.MatchPrompt) -> p.Scored:
        """What this match would find, and its expected time. A query: it changes nothing."""
        return self.matching.score(event)

    def knows(self, digest: bytes) -> bool:
        """Whether this namespace has a number."""
        return digest in self._by_digest

    def number_of(self, digest: bytes) -> int | None:
        """The number of a namespace, None where it is not known."""
        return self._by_digest.get(digest)

    def idle_namespace(self, used: Container[int]) -> int | None:
        """A namespace not in `used` without any block, move, lease or ticket; None if there is
        none."""
        book = self.residency.leases
        held = {lease.namespace for lease in book.leases.values()}
        held |= {ticket.namespace for ticket in book.tickets.values()}
        held |= {pin.namespace for pin in book.pins.values()}
        for namespace in self.residency.namespaces:
            number = namespace.number
            if not namespace.root.children and number not in held and number not in used:
                return number
        return None

    def story(self, block: int) -> str:
        """A block's state in words, for error messages."""
        return self.residency.blocks.story(block)

    def validate(self) -> None:
        """Recompute every counter. Raises AssertionError where one differs."""
        self.matching.settle()
        self.residency.validate()
        self.evictor.evacuations.validate()

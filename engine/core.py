"""The cache engine: index + residency + policy + planner. (Never the inference engine, its client.)

Turns events into plans and touches no byte: time comes with each event, randomness with the
constructor, and an outcome comes back as another event. So policies and races are tested as tables
with a fake clock. Everything here belongs to the daemon's one loop.

    event ──▶ handle ──▶ Plan(answer, moves to start, moves to cancel)
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, cast

import numpy as np

from hicache.engine import plan as p
from hicache.engine.blocks import State
from hicache.engine.cost import LinkCost, PrefillCost, PrefillPrior
from hicache.engine.evictor import Evictor
from hicache.engine.fetching import Fetching, Positions
from hicache.engine.identity import Identities
from hicache.engine.index import Path
from hicache.engine.lease import Lease, Quarantined, Ticket
from hicache.engine.ledger import Ledger, TierCounts
from hicache.engine.planner import Hit, Planner, PlannerSettings
from hicache.engine.policies.base import EvictionPolicy
from hicache.engine.policies.lru import Lru
from hicache.engine.residency import NO_TIER, Namespace, Residency
from hicache.engine.restore import restore
from hicache.engine.settings import EngineSettings
from hicache.engine.writedown import WriteDown
from hicache.tiers.block import Ids, SlotPool, TierSpec, slot_bytes_for

_NO_IDS: Final = np.empty(0, np.int32)


class CacheEngine:
    """Which blocks, from where to where, at whose expense?

    `tiers` fastest first; `links` are the (from, to) pairs of tier numbers that can copy;
    `rng()` gives a float in [0, 1). Tiers start down: `TierUp` brings them into service.
    """

    def __init__(
        self,
        tiers: Sequence[TierSpec],
        pools: Sequence[SlotPool],
        links: Sequence[tuple[int, int]],
        settings: EngineSettings,
        rng: Callable[[], float],
        new_policy: Callable[[int], EvictionPolicy] = Lru,
    ) -> None:
        self.settings = settings
        self.residency = Residency(tiers, pools, links, new_policy)
        self.links = {link: LinkCost() for link in links}
        self.prefill: list[PrefillCost] = []
        self.hop_s_per_byte: list[float] = []
        self.planner = Planner(settings.planner, rng)
        self.evictor = Evictor(self.residency, settings.max_moving_bytes)
        self.writedown = WriteDown(self.residency, self.evictor)
        self.evictor.durable = self.writedown
        self.fetching = Fetching(self.residency, self.evictor, self.links)
        self.identities = Identities(self.residency)
        self.ledger = Ledger({tier.name: TierCounts() for tier in tiers})
        self._by_digest: dict[bytes, int] = {}
        self._durable_waits: OrderedDict[int, Ids] = OrderedDict()
        self._cancel: list[int] = []
        self._handlers: dict[type, Callable[[Any], Any]] = {
            p.OpenNamespace: self._open_namespace,
            p.Match: self._match,
            p.Fetch: self._fetch,
            p.Release: self._release,
            p.Put: self._put,
            p.Commit: self._commit,
            p.Abort: self._abort,
            p.WriterGone: self._writer_gone,
            p.Observe: self._observe,
            p.ObserveReload: self._observe_reload,
            p.Clear: self._clear,
            p.MovesDone: self._moves_done,
            p.LinkMeasured: self._link_measured,
            p.Restore: self._restore,
            p.TierDown: self._tier_down,
            p.TierUp: self._tier_up,
            p.Tick: self._tick,
            p.Flush: self._flush,
        }

    def handle(self, event: p.Event[p.Answer]) -> p.Plan[p.Answer]:
        """Apply one event. Raises UnknownLease or UnknownTicket, having changed nothing."""
        answer = self._handlers[type(event)](event)
        moves, self.residency.outbox = self.residency.outbox, []
        cancel, self._cancel = self._cancel, []
        return p.Plan(cast(p.Answer, answer), moves, cancel)

    def identify(self, moves: Iterable[p.Move]) -> None:
        """Fill in `identity` of moves that touch a durable tier, just before they leave."""
        self.identities.fill(moves)

    def configure(self, settings: EngineSettings, tiers: Sequence[TierSpec]) -> None:
        """Apply what can change while serving: settings, and the tiers' watermarks."""
        self.settings = settings
        self.residency.tiers = tuple(tiers)
        self.planner.settings = settings.planner
        self.evictor.max_moving_bytes = settings.max_moving_bytes

    # --- what an inference engine asks ----------------------------------------------------------

    def _open_namespace(self, event: p.OpenNamespace) -> int:
        number = self._by_digest.get(event.digest)
        if number is not None:
            return number
        number = len(self.residency.namespaces)
        root = self.residency.index.add_root(number)
        self.residency.namespaces.append(
            Namespace(
                number,
                event.digest,
                event.block_tokens,
                event.block_bytes,
                slot_bytes_for(event.block_bytes),
                root,
            )
        )
        self.prefill.append(PrefillCost(self.settings.prior))
        self.hop_s_per_byte.append(1.0 / self.settings.hop_bytes_per_s)
        self._by_digest[event.digest] = number
        return number

    def _match(self, event: p.Match) -> p.Matched:
        house = self.residency
        namespace = house.namespaces[event.namespace]
        num_tokens = len(event.tokens) // 4
        path = house.index.match(namespace.root, event.tokens, namespace.step)
        if path.num_blocks and self._touch(path, namespace, event.now_s):
            path = house.index.match(namespace.root, event.tokens, namespace.step)
        runs, hit_blocks = self._runs(path)
        loadable = max(0, (num_tokens - 1) // namespace.block_tokens)
        kept = _slice_runs(runs, event.skip_blocks, min(hit_blocks, loadable))
        hop = event.hop_bytes_per_s
        hop_s = 1.0 / hop if hop else self.hop_s_per_byte[event.namespace]
        decision = self.planner.decide(
            Hit(
                num_tokens,
                namespace.block_tokens,
                min(event.skip_blocks * namespace.block_tokens, num_tokens),
                kept,
                self._reload_seconds(namespace, kept, hop_s),
                self.prefill[event.namespace].seconds,
            )
        )
        self.ledger.decided(decision.name, decision.reason)
        lease_id = 0
        if decision.reload_blocks:
            ids = path.ids()[event.skip_blocks : event.skip_blocks + decision.reload_blocks]
            lease_id = house.leases.next_id()
            expires_s = event.now_s + event.ttl_s
            lease = Lease(
                lease_id, event.owner, event.namespace, ids, expires_s, tuple(kept), decision
            )
            lease.failed_at = len(ids)
            house.leases.open(lease)
        return p.Matched(lease_id, tuple(runs), hit_blocks, decision)

    def _touch(self, path: Path, namespace: Namespace, now_s: float) -> bool:
        """The path is used: youngest, one hit more, written down if that makes it worth it.

        Returns whether the tree's nodes may have changed under the path."""
        house = self.residency
        house.index.cut(path, namespace.step)
        hits = house.blocks.hits
        hits[path.ids()] += 1
        last = path.nodes[-1]
        is_stale = house.touch(path, now_s)
        durable = self.writedown.tier
        if self.settings.write_policy == "write_through_selective" and durable is not None:
            wanted = last.tiers and not last.tiers >> durable & 1
            if wanted and hits[int(last.block_ids()[0])] >= self.settings.selective_hits:
                self.writedown.want(last)
                self.writedown.advance()
                return True
        return is_stale

    def _runs(self, path: Path) -> tuple[list[p.TierRun], int]:
        """The readable prefix of a path, grouped by each block's fastest tier."""
        house = self.residency
        runs: list[tuple[int, int]] = []
        total = 0
        for node in path.nodes:
            tier = house.fastest(node.staying)
            if tier == NO_TIER:
                break
            count = len(node)
            total += count
            if runs and runs[-1][0] == tier:
                runs[-1] = (tier, runs[-1][1] + count)
            else:
                runs.append((tier, count))
        return [p.TierRun(house.tiers[tier].name, count) for tier, count in runs], total

    def _reload_seconds(
        self, namespace: Namespace, runs: Sequence[p.TierRun], hop_s_per_byte: float
    ) -> list[float]:
        """Per run, expected seconds until it and those before it are in the engine.

        Links work side by side; the last hop takes every byte one after another."""
        house = self.residency
        loaded: dict[tuple[int, int], float] = {}
        seconds = []
        total = 0.0
        for run in runs:
            num_bytes = run.num_blocks * namespace.block_bytes
            total += num_bytes
            src = house.number_of(run.tier)
            if not house.tiers[src].mapped:
                for link in self.links:
                    if link[0] == src and house.tiers[link[1]].mapped:
                        loaded[link] = loaded.get(link, 0.0) + num_bytes
                        break
            links_s = [
                self.links[link].seconds(size, house.bytes_moving(link, p.Priority.DEMAND))
                for link, size in loaded.items()
            ]
            seconds.append(max(links_s, default=0.0) + total * hop_s_per_byte)
        return seconds

    def _fetch(self, event: p.Fetch) -> p.Fetched:
        lease = self._lease(event.lease)
        lease.started_s = event.now_s
        ready, expected_s = self.fetching.fetch(lease, event.deadline_s)
        unplaced = len(lease.ids) - lease.unplaced if lease.id in self.fetching.unplaced else 0
        self._make_progress()
        return p.Fetched(tuple(ready), len(lease.awaited), unplaced, expected_s)

    def _release(self, event: p.Release) -> bool:
        house = self.residency
        lease = house.leases.close(event.lease)
        if lease is None:
            return False
        for move in self.fetching.forget(lease):
            block = house.moves[move].block
            dst = house.number_of(cast(str, house.moves[move].dst))
            if house.blocks.state[dst][block] == State.FILLING:
                house.blocks.change(dst, np.array([block], np.int32), State.CANCELLED)
                self._cancel.append(move)
        namespace = house.namespaces[lease.namespace]
        if lease.fetching:
            came = min(lease.failed_at, len(lease.ids))
            self.ledger.served(lease, came, namespace.block_tokens, namespace.block_bytes)
            self._promote(namespace, lease.ids[:came])
        lost = lease.ids[house.blocks.tags[lease.ids] == 0]
        if len(lost):
            house.settle(lost)
        house.unpark()
        self._make_progress()
        return True

    def _promote(self, namespace: Namespace, ids: Ids) -> None:
        """Blocks that were just used move up into the room that the fastest tier keeps free."""
        house = self.residency
        for dst in range(len(house.tiers)):
            sources = [src for src, to in self.links if to == dst and src > dst]
            if not sources or not house.is_up(dst) or not house.is_up(sources[0]):
                continue
            src = sources[0]
            if not house.tiers[src].mapped:  # demand brings those up
                continue
            readable = house.blocks.tags[ids] >> src & 1
            absent = house.blocks.state[dst][ids] == State.ABSENT
            wanted = ids[(readable == 1) & absent]
            if len(wanted) == 0:
                continue
            budget = self.settings.max_moving_bytes - house.bytes_moving(
                (src, dst), p.Priority.DEMOTION
            )
            count = min(len(wanted), max(0, budget // namespace.block_bytes))
            slots = house.pools[dst].allocate(namespace.slot_bytes, count)
            if len(slots):
                house.start(namespace, wanted[: len(slots)], src, dst, slots, p.Priority.PREFETCH)

    def _put(self, event: p.Put) -> p.Placed:
        house = self.residency
        namespace = house.namespaces[event.namespace]
        step = namespace.step
        path = house.index.match(namespace.root, event.tokens[: event.last * step], step)
        known = path.num_blocks
        asked = event.last - event.first
        if event.first > known:  # blocks without their parents would be unreachable
            return p.Placed(0, "", _NO_IDS, _NO_IDS, 0, 0, asked, False)
        ids = path.ids()[event.first :]
        held = house.blocks.tags[ids] != 0
        filling = np.zeros(len(ids), bool)
        for state in house.blocks.state:
            filling |= (state[ids] == State.FILLING) | (state[ids] == State.CANCELLED)
        lacking = np.flatnonzero(~held & ~filling)
        present, busy = int(held.sum()), int((filling & ~held).sum())
        new = event.last - known
        wanted = len(lacking) + new
        if wanted == 0:
            return p.Placed(0, "", _NO_IDS, _NO_IDS, present, busy, 0, False)
        pinned = path.ids()  # the path itself must not be given up to make room for its end
        house.blocks.leases[pinned] += 1
        tier, slots = self._place(namespace, wanted)
        house.blocks.leases[pinned] -= 1
        house.unpark()
        refused = wanted - len(slots)
        if len(slots) == 0:
            coming = any(map(self.evictor.room_is_coming, range(len(house.tiers))))
            self._make_progress()
            return p.Placed(0, "", _NO_IDS, _NO_IDS, present, busy, refused, coming)
        fill_ids: Ids = ids[lacking[: len(slots)]]
        indices = (lacking[: len(slots)] + event.first).astype(np.int32)
        num_new = len(slots) - len(fill_ids)
        if num_new:  # making room may have split and merged nodes along the path
            path = house.index.match(namespace.root, event.tokens[: event.last * step], step)
            assert path.num_blocks == known
            node = house.index.extend(namespace.root, path, event.tokens, step, num_new)
            node.touched_s = event.now_s
            fill_ids = np.concatenate([fill_ids, node.block_ids()])
            indices = np.concatenate([indices, np.arange(known, known + num_new, dtype=np.int32)])
        house.blocks.fill(tier, fill_ids, slots)
        ticket = Ticket(
            house.leases.next_id(),
            event.owner,
            event.namespace,
            tier,
            fill_ids,
            indices,
            event.now_s + event.ttl_s,
        )
        house.leases.tickets[ticket.id] = ticket
        self._make_progress()
        name = house.tiers[tier].name
        return p.Placed(ticket.id, name, indices, slots, present, busy, refused, refused > 0)

    def _place(self, namespace: Namespace, count: int) -> tuple[int, Ids]:
        """Slots for new blocks: the fastest mapped tier that has room, or can make some at once."""
        house = self.residency
        mapped = [n for n, tier in enumerate(house.tiers) if tier.mapped and house.is_up(n)]
        for tier in mapped:
            if house.pools[tier].available(namespace.slot_bytes) >= count:
                return tier, house.pools[tier].allocate(namespace.slot_bytes, count)
        for tier in mapped:
            if self.evictor.make_room(tier, namespace.slot_bytes, count):
                return tier, house.pools[tier].allocate(namespace.slot_bytes, count)
        return 0, _NO_IDS

    def _commit(self, event: p.Commit) -> int:
        house = self.residency
        ticket = house.leases.tickets.get(event.ticket)
        if ticket is None:
            raise p.UnknownTicket(event.ticket)
        written = np.isin(ticket.indices, event.indices)
        del house.leases.tickets[ticket.id]
        done, undone = ticket.ids[written], ticket.ids[~written]
        namespace = house.namespaces[ticket.namespace]
        house.blocks.change(ticket.tier, done, State.READY)
        house.blocks.vacate(ticket.tier, undone, namespace.slot_bytes)
        house.settle(ticket.ids)
        if len(done):
            if event.durable or self.settings.write_policy == "write_through":
                self.writedown.want(house.index.node_of(int(done[-1])))
            if event.durable:
                self._durable_waits[ticket.id] = done
        self._make_progress()
        return len(done)

    def _abort(self, event: p.Abort) -> int:
        house = self.residency
        ticket = house.leases.tickets.pop(event.ticket, None)
        if ticket is None:  # an expired ticket's writer acknowledges
            return self._end_quarantine(event.ticket)
        namespace = house.namespaces[ticket.namespace]
        if event.writer_gone:
            house.blocks.vacate(ticket.tier, ticket.ids, namespace.slot_bytes)
        else:
            slots = house.blocks.slot[ticket.tier][ticket.ids]
            house.blocks.change(ticket.tier, ticket.ids, State.ABSENT)
            house.pools[ticket.tier].quarantine(namespace.slot_bytes, slots)
            house.leases.quarantine[ticket.id] = Quarantined(
                ticket.owner, ticket.tier, namespace.slot_bytes, slots
            )
        house.settle(ticket.ids)
        self._make_progress()
        return len(ticket.ids)

    def _end_quarantine(self, ticket: int) -> int:
        held = self.residency.leases.quarantine.pop(ticket, None)
        if held is None:
            return 0
        self.residency.pools[held.tier].end_quarantine(held.slot_bytes, held.slots)
        return len(held.slots)

    def _writer_gone(self, event: p.WriterGone) -> int:
        book = self.residency.leases
        freed = 0
        for ticket in [t.id for t in book.tickets.values() if t.owner == event.owner]:
            freed += self._abort(p.Abort(ticket, event.now_s, writer_gone=True))
        for ticket in [t for t, held in book.quarantine.items() if held.owner == event.owner]:
            freed += self._end_quarantine(ticket)
        for lease in [item.id for item in book.leases.values() if item.owner == event.owner]:
            self._release(p.Release(lease, event.now_s))
        return freed

    def _observe(self, event: p.Observe) -> None:
        self.prefill[event.namespace].observe(
            event.num_requests, event.sum_n, event.sum_nc, event.seconds
        )

    def _observe_reload(self, event: p.ObserveReload) -> None:
        lease = self.residency.leases.leases.get(event.lease)
        if lease is None:
            return
        if event.hop_bytes > 0 and event.hop_seconds > 0:
            known = self.hop_s_per_byte[lease.namespace]
            seen = event.hop_seconds / event.hop_bytes
            self.hop_s_per_byte[lease.namespace] = 0.75 * known + 0.25 * seen
        if event.total_seconds > 0:
            self.ledger.judged(lease.decision.reload_s, event.total_seconds)

    def _clear(self, event: p.Clear) -> int:
        """Forget what nobody holds: leaves first, as far as leases and moves let it."""
        house = self.residency
        namespace = house.namespaces[event.namespace]
        nodes = list(house.index.subtree(namespace.root))
        forgotten = 0
        for node in reversed(nodes):
            if node.is_root or node.children or node.parent is None:
                continue
            ids = node.block_ids()
            held = house.blocks.leases[ids].any() or any(b in house.moves_of for b in ids.tolist())
            if held or not node.tiers:
                continue
            forgotten += len(ids)
            for tier in range(len(house.tiers)):
                if not node.tiers >> tier & 1:
                    continue
                if house.tiers[tier].durable and house.is_up(tier):
                    house.start_giving_up(namespace, ids, tier)
                else:
                    house.vacate(ids, tier)
            house.settle(ids)
        return forgotten

    # --- what became of things ------------------------------------------------------------------

    def _moves_done(self, event: p.MovesDone) -> p.Arrivals:
        told, came, num_changed = self._apply(event.outcomes)
        self._make_progress()
        return self._arrivals(told, came, num_changed > 0)

    def _apply(
        self, outcomes: Iterable[p.Outcome]
    ) -> tuple[dict[int, Lease], dict[int, list[int]], int]:
        """Apply outcomes. Returns the leases to tell, what came for each, and blocks changed."""
        house = self.residency
        changed: list[int] = []
        told: dict[int, Lease] = {}
        came: dict[int, list[int]] = {}
        for outcome in outcomes:
            move = house.finish(outcome)
            if move is None:
                continue
            changed.append(move.block)
            if move.dst is None or not house.tiers[house.number_of(move.dst)].mapped:
                continue
            for lease in self.fetching.came(move, outcome.ok, house.leases.leases):
                told[lease.id] = lease
                if outcome.ok:
                    came.setdefault(lease.id, []).append(move.block)
        ids = np.unique(np.array(changed, np.int32))
        house.free_drained(ids)
        house.settle(ids)
        house.unpark()
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
        return p.Arrivals(arrived, finished, self._durable_now(), freed)

    def _runs_at(self, lease: Lease, positions: Positions) -> list[p.ReadyRun]:
        """Ready runs at these positions of a lease, split where positions are not consecutive."""
        runs: list[p.ReadyRun] = []
        mapped = self.fetching.mapped_tier(lease.ids[positions])
        gaps = np.flatnonzero(np.diff(positions) != 1) + 1
        bounds = [0, *gaps.tolist(), len(positions)]
        for first, last in itertools.pairwise(bounds):
            offset = int(positions[first])
            part = self.fetching.ready_runs(lease.ids[positions[first:last]], mapped[first:last])
            runs.extend(p.ReadyRun(run.first + offset, run.tier, run.slots) for run in part)
        return runs

    def _durable_now(self) -> list[int]:
        """Tickets whose blocks have all reached the durable tier."""
        tier = self.writedown.tier
        if tier is None:
            return []
        readable = [
            ticket
            for ticket, ids in self._durable_waits.items()
            if (self.residency.blocks.tags[ids] >> tier & 1).all()
        ]
        for ticket in readable:
            del self._durable_waits[ticket]
        while len(self._durable_waits) > 1024:  # waits whose blocks never got there
            self._durable_waits.popitem(last=False)
        return readable

    def _link_measured(self, event: p.LinkMeasured) -> None:
        link = (self.residency.number_of(event.src), self.residency.number_of(event.dst))
        if link in self.links:
            self.links[link].measured(event.num_bytes, event.seconds)

    def _restore(self, event: p.Restore) -> list[bytes]:
        tier = self.residency.number_of(event.tier)
        namespace = self.residency.namespaces[event.namespace]
        homeless = restore(self.residency, namespace, tier, event.rows, event.now_s)
        self._make_progress()
        return homeless

    def _tier_down(self, event: p.TierDown) -> p.Arrivals:
        """Its moves have failed (their outcomes, if any still come, are ignored), and what it held
        is gone for now: a worker that comes back with a durable tier restores it row by row."""
        house = self.residency
        tier = house.number_of(event.tier)
        house.up &= ~(1 << tier)
        mine = [m.id for m in house.moves.values() if event.tier in (m.src, m.dst)]
        told, _, _ = self._apply(p.Outcome(move, False, error="tier down") for move in mine)
        ids = house.blocks.live_ids()
        held = ids[house.blocks.tags[ids] >> tier & 1 == 1]
        for namespace in house.namespaces:
            nodes = [n for n in house.index.subtree(namespace.root) if n.tiers >> tier & 1]
            for node in nodes:
                house.vacate(node.block_ids(), tier)
        house.settle(held)
        for lease in house.leases.leases.values():
            gone = np.flatnonzero(house.blocks.tags[lease.ids] == 0)
            if len(gone):
                lease.failed_at = min(lease.failed_at, int(gone[0]))
                if lease.fetching:
                    told[lease.id] = lease
        house.unpark()
        self._make_progress()
        return self._arrivals(told, {}, True)

    def _tier_up(self, event: p.TierUp) -> None:
        self.residency.up |= 1 << self.residency.number_of(event.tier)

    def _tick(self, event: p.Tick) -> p.Arrivals:
        leases, tickets = self.residency.leases.expired(event.now_s)
        for ticket in tickets:
            self._abort(p.Abort(ticket, event.now_s, writer_gone=False))
        for lease in leases:
            self._release(p.Release(lease, event.now_s))
        self._make_progress()
        return p.Arrivals({}, leases, self._durable_now(), bool(leases or tickets))

    def _flush(self, event: p.Flush) -> int:
        if not self.writedown.pending and not self.residency.moves:
            self.writedown.want_all()
        self._make_progress()
        return len(self.writedown.pending) + len(self.residency.moves)

    # --- after every event ----------------------------------------------------------------------

    def _make_progress(self) -> None:
        """Room may have been made, copies may have come: hand on what waited for that."""
        house = self.residency
        if self.fetching.unplaced:
            leases = house.leases.leases
            self.fetching.place_more([leases[i] for i in list(self.fetching.unplaced)])
        self.writedown.advance()
        self.evictor.keep_watermarks()

    def _lease(self, lease_id: int) -> Lease:
        lease = self.residency.leases.leases.get(lease_id)
        if lease is None:
            raise p.UnknownLease(lease_id)
        return lease

    def story(self, block: int) -> str:
        """One block in words."""
        return self.residency.blocks.story(block)

    def validate(self) -> None:
        """Recompute every counter from the ground. AssertionError tells what differs."""
        self.residency.validate()


def _slice_runs(runs: Sequence[p.TierRun], first: int, last: int) -> list[p.TierRun]:
    """The part of the runs that covers blocks first … last-1."""
    kept = []
    position = 0
    for run in runs:
        begin, end = max(first, position), min(last, position + run.num_blocks)
        if begin < end:
            kept.append(p.TierRun(run.tier, end - begin))
        position += run.num_blocks
    return kept


__all__ = ["CacheEngine", "EngineSettings", "PlannerSettings", "PrefillPrior"]

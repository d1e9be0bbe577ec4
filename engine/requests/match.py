"""Match: finds a prompt's held blocks, decides how many to reload, and leases these.

Matching itself changes nothing. The use does: the path becomes the most recently used, its draining
copies are rescued, and the blocks to be reloaded are leased before any other event can evict them.
Owned by the daemon's one loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from hicache.engine import plan as p
from hicache.engine.index.radix import Path
from hicache.engine.placement.write_back import WriteBack
from hicache.engine.planner.cost import LinkCost, LoadCost, PrefillCost, plausible_hop
from hicache.engine.planner.counters import Ledger
from hicache.engine.planner.decision_log import DecisionLog
from hicache.engine.planner.planner import Hit, Planner
from hicache.engine.planner.reload_time import ClientCopy, LastCopy, QueuedLink, Route, reload_over
from hicache.engine.policies.hazard.history import History, symbols_of
from hicache.engine.requests.sources import Order, Sources
from hicache.engine.residency.block_ids import Span, ids_along, in_few
from hicache.engine.residency.blocks import LEAVING_SHIFT, CopyState
from hicache.engine.residency.copies import NO_TIER, Namespace, Residency
from hicache.engine.residency.leases import Lease
from hicache.engine.settings import EngineSettings


@dataclass(slots=True)
class Estimates:
    """The estimates of speeds: links by (from, to); by namespace: prefill, and the last copy by the
    client and, where it is used, by the GPU's worker."""

    links: dict[tuple[int, int], LinkCost]
    prefill: list[PrefillCost] = field(default_factory=list)
    hop_s_per_byte: list[float] = field(default_factory=list)
    loads: dict[int, LoadCost] = field(default_factory=dict)

    def load(self, namespace: int, residency: Residency) -> LoadCost:
        """The worker's last copy for a namespace; created and kept if there is none."""
        return self.loads.setdefault(namespace, self.expected_load(namespace, residency))

    def expected_load(self, namespace: int, residency: Residency) -> LoadCost:
        """As `load`, without keeping it."""
        cost = self.loads.get(namespace)
        if cost is None:
            tiers = range(len(residency.tiers))
            memory = [n for n in tiers if residency.is_readable(n, by_worker=True)]
            to_gpu = (
                link
                for (src, dst), link in self.links.items()
                if residency.tiers[src].mapped and dst in memory and not residency.tiers[dst].mapped
            )
            cost = LoadCost(memory, next(to_gpu, LinkCost()))
        return cost


class _Unsettled(msgspec.Struct, frozen=True):
    """An answered match whose bookkeeping is not done yet."""

    event: p.MatchPrompt
    path: Path
    lease_id: int
    hit: Hit
    decision: p.ReloadDecision


class Matching:
    """Answers Match. The answer is sent first: `settle` then opens its lease and records the use of
    its path, before any other call."""

    def __init__(
        self,
        residency: Residency,
        estimates: Estimates,
        planner: Planner,
        sources: Sources,
        write_back: WriteBack,
        ledger: Ledger,
        settings: EngineSettings,
        history: History | None = None,
    ) -> None:
        self.residency = residency
        self.estimates = estimates
        self.planner = planner
        self.sources = sources
        self.write_back = write_back
        self.ledger = ledger
        self.settings = settings
        self.history = history
        self.record = DecisionLog(estimates.prefill, self._reload_again)
        self._in_place = frozenset(tier.name for tier in residency.tiers if tier.mapped)
        self._unsettled: _Unsettled | None = None

    def match(self, event: p.MatchPrompt) -> p.Matched:
        residency = self.residency
        namespace = residency.namespaces[event.namespace]
        path = residency.index.match(namespace.root, event.tokens, namespace.step)
        for node in path.nodes:
            if node.leaving:  # draining copies may be needed: rescue them
                residency.index.cut(path, namespace.step)
                residency.touch(path, event.now_s)
                path = residency.index.match(namespace.root, event.tokens, namespace.step)
                break
        runs, hit_blocks = self.runs(path, event.now_s)
        hit = self._hit(event, namespace, path, runs, hit_blocks)
        decision = self.planner.decide(hit)
        if hit.reload_doubt_s:
            self._note_decision(hit)
        lease_id = residency.leases.next_id() if decision.reload_blocks else 0
        if path.num_blocks or self.history is not None:
            self._unsettled = _Unsettled(event, path, lease_id, hit, decision)
        else:
            self.ledger.decided(decision.name, decision.reason)
        return p.Matched(lease_id, tuple(runs), hit_blocks, decision)

    def take_up(self, namespace: Namespace, tokens: bytes, now_s: float) -> list[Span]:
        """The ids of a prompt's held blocks, front to back. Counts as a use: the path becomes the
        most recently used, and draining copies are rescued."""
        residency = self.residency
        path = residency.index.match(namespace.root, tokens, namespace.step)
        if path.num_blocks:
            residency.index.cut(path, namespace.step)
            residency.touch(path, now_s)
            path = residency.index.match(namespace.root, tokens, namespace.step)
        _, held = self.runs(path, now_s)
        return in_few(path.spans(0, held))

    def score(self, event: p.MatchPrompt) -> p.Scored:
        """What this match would find, and its expected time. Changes nothing."""
        residency = self.residency
        namespace = residency.namespaces[event.namespace]
        path = residency.index.match(namespace.root, event.tokens, namespace.step)
        if any(node.leaving for node in path.nodes):
            pieces = list(self._staying_if_asked(path))
            runs, hit_blocks = self._in_runs(pieces, self._order(path, pieces, event.now_s))
        else:
            runs, hit_blocks = self.runs(path, event.now_s)
        hit = self._hit(event, namespace, path, runs, hit_blocks)
        return p.Scored(tuple(runs), hit_blocks, self.planner.forecast(hit))

    def _staying_if_asked(self, path: Path) -> Iterator[tuple[int, int]]:
        """(tiers, number of blocks) along a path with draining copies, as if they were rescued,
        which a match does first."""
        residency = self.residency
        ids = path.ids()
        tags = residency.blocks.tags[ids]
        held, leaving = tags & 0xFF, tags >> LEAVING_SHIFT
        for tier, spec in enumerate(residency.tiers):
            if spec.traits.deletion_is_io:  # a deletion in flight cannot be cancelled
                for place in np.flatnonzero(leaving >> tier & 1).tolist():
                    if residency.moves.is_deleted(int(ids[place]), tier):
                        held[place] ^= 1 << tier
        ends = [*(np.flatnonzero(held[1:] != held[:-1]) + 1).tolist(), len(held)]
        start = 0
        for end in ends:
            yield int(held[start]), end - start
            start = end

    def _hit(
        self,
        event: p.MatchPrompt,
        namespace: Namespace,
        path: Path,
        runs: list[p.TierRun],
        hit_blocks: int,
    ) -> Hit:
        """The input of the planner's decision."""
        num_tokens = len(event.tokens) // 4
        skipped = event.skip_blocks
        loadable = (num_tokens - 1) // namespace.block_tokens if num_tokens else 0
        last = hit_blocks if hit_blocks < loadable else loadable
        kept = runs if not skipped and last == hit_blocks else _slice_runs(runs, skipped, last)
        prefill = self.estimates.prefill[event.namespace]
        hit = Hit(
            prompt_tokens=num_tokens,
            block_tokens=namespace.block_tokens,
            skipped_tokens=min(skipped * namespace.block_tokens, num_tokens) if skipped else 0,
            runs=kept,
            reload_s=(),
            prefill_s=prefill.seconds,
            is_measured=prefill.is_known,
            reload_doubt_s=(),
            prefill_doubt_s=prefill.doubt_s,
            start_s=0.0,
            namespace=event.namespace,
            by_worker=event.by_worker,
        )
        if kept:
            self._estimate_reload(hit, namespace, path, event)
        return hit

    def settle(self) -> None:
        """Open the last answer's lease, and record the use of its path."""
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is None:
            return
        event, path, decision = unsettled.event, unsettled.path, unsettled.decision
        self.ledger.decided(decision.name, decision.reason)
        residency = self.residency
        namespace = residency.namespaces[event.namespace]
        residency.index.cut(path, namespace.step)
        used = in_few(path.spans(0, path.num_blocks))
        for span in used:
            residency.blocks.hits[span] += 1
        if unsettled.lease_id:
            first, last = event.skip_blocks, event.skip_blocks + decision.reload_blocks
            is_all = first == 0 and last == path.num_blocks
            leased = used if is_all else in_few(path.spans(first, last))
            lease = Lease(
                unsettled.lease_id,
                event.owner,
                event.namespace,
                ids_along(leased),
                leased,
                event.now_s + event.ttl_s,
                tuple(unsettled.hit.runs),
                decision,
            )
            lease.failed_at = len(lease.ids)
            residency.leases.open(lease)
        if unsettled.hit.runs:
            self.record.decided(unsettled.hit, decision, unsettled.lease_id, event.now_s)
        if self.history is not None:
            symbols = symbols_of(event.tokens, namespace.step)
            ghosts = self.history.used(event.namespace, symbols, event.now_s, event.is_partial)
            marks = list(self.history.marks(ghosts))
            if residency.index.mark(path.nodes, marks, namespace.step):
                path = residency.index.match(namespace.root, event.tokens, namespace.step)
        if path.num_blocks:
            self._touch(path, namespace, event.now_s)

    def _touch(self, path: Path, namespace: Namespace, now_s: float) -> None:
        """Record a use of the path, and write it if its hits now suffice for the write policy."""
        residency = self.residency
        last = path.nodes[-1]
        residency.touch(path, now_s)
        if self.history is not None and last.parent is not None:
            residency.candidates.queue(last)  # its kind may have changed
        is_selective = self.settings.write_policy == "write_through_selective"
        if is_selective and last.tiers and self.write_back.write_through(last):
            self.write_back.advance()

    def runs(self, path: Path, now_s: float) -> tuple[list[p.TierRun], int]:
        """The readable prefix of a path, grouped by the tier that each block is read from."""
        residency = self.residency
        bits = [node.staying for node in path.nodes]
        if not bits:
            return [], 0
        if bits.count(bits[0]) == len(bits):  # by far the most frequent, and the longest
            tier = residency.fastest(bits[0])
            if self.sources.has_choice and tier != NO_TIER:
                order = self._order(path, [(bits[0], path.num_blocks)], now_s)
                tier = self.sources.cheapest(bits[0], order)
            if tier == NO_TIER:
                return [], 0
            return [p.TierRun(residency.tiers[tier].name, path.num_blocks)], path.num_blocks
        counts = [node.num_blocks for node in path.nodes]
        if path.partial:
            counts[-1] = path.partial
        pieces = list(zip(bits, counts, strict=True))
        return self._in_runs(pieces, self._order(path, pieces, now_s))

    def _order(self, path: Path, pieces: Iterable[tuple[int, int]], now_s: float) -> Order:
        """Where to read what memory does not hold, by what that is expected to take."""
        if not self.sources.has_choice:
            return ()
        memory = ~self.residency.persistent
        num_blocks = sum([count for bits, count in pieces if not bits & memory])
        if not num_blocks:
            return ()
        namespace = self.residency.namespace_of(path.nodes[0])
        return self.sources.order(num_blocks * namespace.block_bytes, now_s)

    def _in_runs(
        self, pieces: Iterable[tuple[int, int]], order: Order
    ) -> tuple[list[p.TierRun], int]:
        """The readable front of (tiers, number of blocks), by the fastest tier of each."""
        residency = self.residency
        runs: list[p.TierRun] = []
        total, before = 0, 0
        for bits, count in pieces:
            if bits != before or not runs:
                tier = self.sources.cheapest(bits, order) if order else residency.fastest(bits)
                if tier == NO_TIER:
                    break
                before = bits
                name = residency.tiers[tier].name
                if not runs or runs[-1].tier != name:
                    runs.append(p.TierRun(name, 0))
            runs[-1].num_blocks += count
            total += count
        return runs, total

    def _estimate_reload(
        self, hit: Hit, namespace: Namespace, path: Path, event: p.MatchPrompt
    ) -> None:
        """Set the expected times of reloading the hit's runs."""
        hop = event.hop_bytes_per_s and plausible_hop(event.hop_bytes_per_s)
        own_s_per_byte = 1.0 / hop if hop else self.estimates.hop_s_per_byte[hit.namespace]
        if not hit.by_worker:
            blocks, seconds = 0, []
            s_per_block = namespace.block_bytes * own_s_per_byte
            for run in hit.runs:
                if run.tier not in self._in_place:
                    break
                blocks += run.num_blocks
                seconds.append(blocks * s_per_block)
            else:  # only the client's copy takes time
                hit.reload_s = seconds
                return
        routes: dict[str, Route] = {}
        for run in hit.runs:
            if run.tier not in routes:
                link = self._link_of(run.tier, hit.by_worker)
                routes[run.tier] = Route(
                    link[1], self._queued_link(link, hit, namespace, path, event)
                )
        last_copy = self._last_copy(hit, own_s_per_byte)
        reload = reload_over(hit.runs, routes, namespace.block_bytes, last_copy)
        hit.runs, hit.reload_s, hit.reload_doubt_s = reload.runs, reload.seconds, reload.doubt_s
        hit.start_s = reload.start_s

    def _note_decision(self, hit: Hit) -> None:
        """A decision has used the estimates of its links."""
        for link in {self._link_of(run.tier, hit.by_worker) for run in hit.runs}:
            if link[0] != link[1]:
                self.estimates.links[link].note_decision()
        if hit.by_worker:
            self.estimates.load(hit.namespace, self.residency).note_decision()

    def _reload_again(self, hit: Hit, blocks: int) -> float:
        """Expected seconds to reload the first blocks of a hit by the current estimates, behind the
        queue of the time of the decision."""
        residency = self.residency
        size = residency.namespaces[hit.namespace].block_bytes
        over: dict[tuple[int, int], float] = {}
        bytes_from: dict[int, float] = {}
        left = blocks
        for run in hit.runs:
            src, dst = self._link_of(run.tier, hit.by_worker)
            num_bytes = float(min(run.num_blocks, left) * size)
            left -= min(run.num_blocks, left)
            bytes_from[dst] = bytes_from.get(dst, 0.0) + num_bytes
            if src != dst:
                over[src, dst] = over.get((src, dst), 0.0) + num_bytes
        seconds = 0.0
        for link, num_bytes in over.items():
            cost = self.estimates.links[link]
            wait_s = max(hit.start_s - cost.latency_s, 0.0)
            seconds = max(seconds, wait_s + cost.seconds(num_bytes))
        own_s_per_byte = self.estimates.hop_s_per_byte[hit.namespace]
        return seconds + self._last_copy(hit, own_s_per_byte).seconds(bytes_from)

    def _last_copy(self, hit: Hit, own_s_per_byte: float) -> LastCopy:
        """The last copy into the inference engine's memory, by the client or the GPU's worker."""
        if hit.by_worker:
            return self.estimates.expected_load(hit.namespace, self.residency)
        return ClientCopy(own_s_per_byte)

    def _link_of(self, tier: str, by_worker: bool) -> tuple[int, int]:
        """(the tier, the tier that the last copy reads its blocks from): the same, or another one
        if it cannot be read in place."""
        src = self.residency.number_of(tier)
        landing = self.residency.landing[src]
        if landing == NO_TIER or self.residency.is_readable(src, by_worker=by_worker):
            return src, src
        return src, landing

    def _queued_link(
        self,
        link: tuple[int, int],
        hit: Hit,
        namespace: Namespace,
        path: Path,
        event: p.MatchPrompt,
    ) -> QueuedLink | None:
        """The link's queue; None where blocks need not be copied. Blocks of this hit that are being
        copied already are in the queue, and are not counted twice."""
        residency, src = self.residency, link[0]
        if src == link[1]:
            return None
        queued = self.sources.queued(link, event.now_s)
        if queued.ahead_bytes:
            state = residency.blocks.state[link[1]]
            position, coming = event.skip_blocks, 0
            for run in hit.runs:
                last = position + run.num_blocks
                if residency.number_of(run.tier) == src:
                    for span in path.spans(position, last):
                        coming += int((state[span] == CopyState.FILLING).sum())
                position = last
            queued.ahead_bytes -= min(queued.ahead_bytes, coming * namespace.block_bytes)
        return queued


def _slice_runs(runs: Sequence[p.TierRun], first: int, last: int) -> list[p.TierRun]:
    """The part of the runs that covers blocks first … last-1."""
    if len(runs) == 1 and not first and last > 0:
        run = runs[0]
        return [p.TierRun(run.tier, last)] if last < run.num_blocks else [run]
    kept = []
    position = 0
    for run in runs:
        begin, end = max(first, position), min(last, position + run.num_blocks)
        if begin < end:
            kept.append(p.TierRun(run.tier, end - begin))
        position += run.num_blocks
    return kept

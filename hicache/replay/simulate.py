"""One replay: a trace's requests through the product's own CacheEngine, on the trace's clock.

Each request is served completely at its arrival: match, fetch and release the blocks that are
there, put and commit the others. Moves complete at once, so the replay measures which blocks the
policies keep, not how fast a link is. A block has the size of one page and its symbol is its hash
id; bytes are scaled to the model at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, TypeVar

from hicache.config.eviction import policy_named
from hicache.engine import plan as p
from hicache.engine.core import CacheEngine
from hicache.engine.planner.planner import PlannerSettings
from hicache.engine.policies.catalog import policies_of
from hicache.engine.policies.hazard.model import fit
from hicache.engine.settings import EngineSettings
from hicache.replay import bound
from hicache.replay import lru_stack as stack
from hicache.replay.traces import SYMBOL_BYTES, Trace, TraceRequest
from hicache.tiers.block import PAGE_BYTES, TierSpec, TierTraits
from hicache.tiers.catalog import kinds
from hicache.tiers.pool import SlotPool

A = TypeVar("A")

MINIMUM: Final = "min"
"""Not a policy: the offline bound."""
LRU_STACK: Final = "lru-stack"
"""Not a policy of the product: LRU proper over several tiers, for comparison."""

_MAPPED: Final = TierTraits(mapped=True)
_OWNER: Final = 1
_TTL_S: Final = 1e9
_TAIL: Final = b"\0\0\0\0"
"""One more token after the last block: a prompt's last token is always computed."""

Step = Callable[[int], None]


@dataclass(slots=True)
class ReplayTally:
    """Sums over the reported requests. Moves count blocks by "src-dst"; `evictions` counts evicted
    copies by tier."""

    tokens: int = 0
    hit_tokens: Counter[str] = field(default_factory=Counter)
    prefill_seconds_saved: float = 0.0
    moved_blocks: Counter[str] = field(default_factory=Counter)
    written_blocks: Counter[str] = field(default_factory=Counter)
    evictions: Counter[str] = field(default_factory=Counter)

    def count(
        self,
        request: TraceRequest,
        hits: Sequence[tuple[str, int]],
        block_tokens: int,
        saved_s: Callable[[int, int], float],
    ) -> None:
        """A request arrived and found runs of blocks, (tier, blocks) from the front."""
        self.tokens += request.input_tokens
        blocks = done = 0
        for tier, num_blocks in hits:
            blocks += num_blocks
            until = min(blocks * block_tokens, request.input_tokens)
            self.hit_tokens[tier] += until - done
            done = until
        self.prefill_seconds_saved += saved_s(request.input_tokens, done)


def replay(
    trace: Trace,
    blocks_of: Mapping[str, int],
    policy: str | Mapping[str, str],
    *,
    warm: float = 0.0,
    hints: bool = True,
    min_return: float = 0.0,
    saved_s: Callable[[int, int], float] = lambda tokens, hit: 0.0,
    step: Step = lambda done: None,
) -> ReplayTally:
    """Replay a trace with tiers of these sizes in blocks; a tier of size 0 is absent.

    `policy` is one for all tiers, or each tier's. Reports on the requests after the first `warm`
    share. Without `hints` the trace's `session` and `stop` are ignored; answer lengths are used
    either way. `saved_s(tokens, hit tokens)` gives the seconds of prefill that a hit saves; `step`
    gets the number of requests done."""
    first = int(len(trace.requests) * warm)
    tiers = {row.name: blocks_of[row.name] for row in kinds() if blocks_of.get(row.name, 0) > 0}
    if not tiers:
        return ReplayTally(tokens=sum(request.input_tokens for request in trace.requests[first:]))
    if policy == MINIMUM:
        return _bound(trace, tiers, first, saved_s, step)
    if policy == LRU_STACK:
        return _stack(trace, tiers, first, saved_s, step)
    tally = ReplayTally()
    policies = [policy if isinstance(policy, str) else policy[name] for name in tiers]
    replayed = ReplayedEngine(tiers, policies, trace.block_tokens, min_return)
    evicted_before = replayed.evictions()
    for number, request in enumerate(trace.requests):
        if number == first:
            replayed.tally = tally
            evicted_before = replayed.evictions()
        hits = replayed.serve(request, hints)
        if number >= first:
            tally.count(request, hits, trace.block_tokens, saved_s)
        step(number)
    tally.evictions = replayed.evictions()
    tally.evictions.subtract(evicted_before)
    return tally


class ReplayedEngine:
    """A cache engine over empty tiers, whose moves complete at once."""

    def __init__(
        self,
        tiers: Mapping[str, int],
        policies: Sequence[str],
        block_tokens: int,
        min_return: float = 0.0,
    ) -> None:
        rows = [row for row in kinds() if row.name in tiers]
        # Requests need a tier that they can be written to: the fastest one.
        traits = [row.traits if row.traits.persistent else _MAPPED for row in rows]
        traits[0] = _MAPPED
        specs = [
            TierSpec(row.name, tiers[row.name] * PAGE_BYTES, each, min_return=min_return)
            for row, each in zip(rows, traits, strict=True)
        ]
        near = next((number for number, row in enumerate(rows) if row.is_near), 0)
        links = [(near, n) for n in range(len(rows)) if n != near]
        links += [(there, here) for here, there in links]
        pools = [SlotPool(spec.capacity_bytes, spec.capacity_bytes) for spec in specs]
        settings = EngineSettings(planner=PlannerSettings(mode="always_reload"))
        chosen = [policy_named(name) for name in policies]
        new_policy, history = policies_of(chosen, wants_model=min_return > 0)
        self.engine = CacheEngine(specs, pools, links, settings, lambda: 1.0, new_policy, history)
        self.block_tokens = block_tokens
        self.tally = ReplayTally()
        self.now_s = 0.0
        tokens_per_symbol = SYMBOL_BYTES // 4
        self.namespace = self.do(p.OpenNamespace(b"replay", tokens_per_symbol, PAGE_BYTES))
        for spec in specs:
            self.do(p.TierUp(spec.name, 0.0))

    def serve(self, request: TraceRequest, hints: bool) -> list[tuple[str, int]]:
        """One request from its arrival to its release. Returns the runs it found."""
        self.now_s = now_s = request.time_s
        tokens = request.symbols + _TAIL
        is_partial = request.num_blocks * self.block_tokens > request.input_tokens
        matched = self.do(
            p.MatchPrompt(self.namespace, tokens, _OWNER, now_s, _TTL_S, is_partial=is_partial)
        )
        if matched.lease:
            self.do(p.Fetch(matched.lease, now_s, now_s + _TTL_S))
            self.do(p.Release(matched.lease, now_s))
        self._put(tokens, matched.hit_blocks, request.num_blocks)
        stop = request.stop if hints else ""
        if stop or request.output_tokens:
            self.do(
                p.Hint(
                    self.namespace,
                    tokens,
                    now_s,
                    finish_reason=stop,
                    answer_tokens=request.output_tokens,
                )
            )
        self._learn()
        return [(run.tier, run.num_blocks) for run in matched.runs]

    def _put(self, tokens: bytes, held: int, num_blocks: int) -> None:
        """Store the missing blocks, in several puts if they do not fit into one tier."""
        while held < num_blocks:
            put = p.Put(self.namespace, tokens, 0, num_blocks, _OWNER, self.now_s, _TTL_S)
            placed = self.do(put)
            if not placed.ticket:
                return
            self.do(p.Commit(placed.ticket, placed.indices, self.now_s))
            self.tally.written_blocks[placed.tier] += len(placed.indices)
            held = placed.present + len(placed.indices)

    def _learn(self) -> None:
        history = self.engine.history
        if history is not None and history.is_fit_due():
            history.adopt(fit(history.snapshot()))

    def do(self, event: p.Event[A]) -> A:
        """Handle an event and complete all moves that follow from it."""
        plan = self.engine.handle(event)
        moves = plan.moves
        if (later := self.engine.catch_up()) is not None:
            moves += later.moves
        while moves:
            for move in moves:
                if move.dst is not None:
                    self.tally.moved_blocks[f"{move.src}-{move.dst}"] += 1
                    self.tally.written_blocks[move.dst] += 1
            outcomes = [p.Outcome(move.id, True) for move in moves]
            moves = self.engine.handle(p.MovesDone(outcomes, self.now_s)).moves
        return plan.answer

    def evictions(self) -> Counter[str]:
        """Copies evicted so far, by tier."""
        rows = self.engine.queries.tier_counters()
        return Counter({tier: row["evictions"] for tier, row in rows.items()})


def _bound(
    trace: Trace,
    tiers: Mapping[str, int],
    first: int,
    saved_s: Callable[[int, int], float],
    step: Step,
) -> ReplayTally:
    hits_up_to = [bound.hit_blocks(trace, size, step) for size in accumulate(tiers.values())]
    return _nested(trace, tiers, hits_up_to, first, saved_s)


def _stack(
    trace: Trace,
    tiers: Mapping[str, int],
    first: int,
    saved_s: Callable[[int, int], float],
    step: Step,
) -> ReplayTally:
    levels = [stack.hits_and_pushed(trace, size, step) for size in accumulate(tiers.values())]
    tally = _nested(trace, tiers, [hits for hits, _ in levels], first, saved_s)
    requested = sum(request.num_blocks for request in trace.requests[first:])
    found = [sum(hits[first:]) for hits, _ in levels]
    pushed = [sum(pushed[first:]) for _, pushed in levels]
    fastest, *slower = tiers
    tally.written_blocks[fastest] = requested - found[0]
    for number, (tier, above) in enumerate(zip(slower, tiers, strict=False)):
        tally.moved_blocks[f"{tier}-{fastest}"] += found[number + 1] - found[number]
        tally.moved_blocks[f"{above}-{tier}"] += pushed[number]
        tally.written_blocks[tier] = pushed[number]
    tally.evictions.update(dict(zip(tiers, pushed, strict=True)))
    return tally


def _nested(
    trace: Trace,
    tiers: Mapping[str, int],
    hits_up_to: Sequence[Sequence[int]],
    first: int,
    saved_s: Callable[[int, int], float],
) -> ReplayTally:
    """What each tier adds to the hits of those above it. `hits_up_to`: of each tier with those
    above it, the blocks that each request finds."""
    tally = ReplayTally()
    for request, *hits in list(zip(trace.requests, *hits_up_to, strict=True))[first:]:
        runs = [(tier, b - a) for tier, a, b in zip(tiers, [0, *hits], hits, strict=False)]
        tally.count(request, runs, trace.block_tokens, saved_s)
    return tally

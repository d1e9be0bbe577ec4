"""What to load and what to store: the scheduler's side, called from vLLM's scheduling loop.

Nothing here waits for the daemon. The steps of a request, in the order in which vLLM calls them:

    arrived ──▶ matched ──▶ allocated ──▶ orders ──▶ [loaded] ──▶ orders … ──▶ finished
                 │  ▲ later     │             │                     │
                 └──┘           load          store of the blocks   store of the rest
                                              that this step fills

- `matched` answers "later" until the daemon's answer is there, for at most `lookup_s` in all.
- Each request and prefix has one question and one lease. The lease is released when the request
  ends.
- After a load every block counts as loaded; vLLM computes the blocks that failed (`recompute`).
  After that no second load is tried, so a block that always fails costs one try.
- Blocks of a store under way keep one reference each in vLLM's pool until all ranks have reported,
  so the pages of a preempted or ended request are not overwritten too early. At most a share of
  all blocks is held this way; blocks beyond it are offered again with the next block.
- Pages in doubt (the GPU worker may still write them although the load was abandoned) are held as
  well, with one reference for each rank that reports them. Their request starts again on other
  pages.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from hicache.connectors.vllm.background import Trouble
from hicache.connectors.vllm.lookup import FinishedAnswer, PromptLookup, Question, salted
from hicache.connectors.vllm.published_hashes import PublishedHashes
from hicache.connectors.vllm.step_messages import (
    Load,
    NamespaceIdentity,
    Orders,
    StepOrders,
    Store,
    WorkerReport,
)
from hicache.connectors.vllm.tracked_request import (
    TrackedRequest,
    VllmRequest,
    is_identified_by_tokens,
)

IDLE_WAIT_S: Final = 0.001
MAX_ASKED_EARLY: Final = 4
"""Requests that are looked up on arrival. The rest of a longer queue is looked up when vLLM
schedules it: a request that waits for minutes should hold no lease."""
MAX_LOADING: Final = 8
"""Requests between the begin of their load and their first step. Each holds a lease, and the leases
of a whole queue could fill the daemon's memory, with no room left for blocks from disk."""
FRESH_S: Final = 5.0
"""A prompt is looked up again when its answer was read, could not be used, and is older than this:
the leased blocks may expire."""
LEASE_SHARE: Final = 0.8
"""An answer that was not read yet is valid for this share of its lease. FRESH_S would be too short
for it: where a step takes longer, every answer is older when the scheduler reads it."""
PATIENT_S: Final = 0.05
"""vLLM waits this long for a store under way before it preempts a request."""


class Pool(Protocol):
    """vLLM's block pool: blocks with a reference are not allocated again."""

    @property
    def blocks(self) -> Sequence[Any]: ...
    def touch(self, blocks: Sequence[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None: ...


class SettlingWorker(Protocol):
    """The part of `WorkerSide` that is used here."""

    def settle(self, orders: Orders, patience_s: float) -> WorkerReport | None: ...


PagesOf = Callable[[str], Sequence[int]]


@dataclass(slots=True)
class _Held:
    """A store under way. `blocks`: in the pool. `ranks_left`: ranks that have not reported.
    `fresh`: how many of the last blocks the daemon did not have before."""

    request: str
    first: int
    blocks: Sequence[Any]
    ranks_left: int
    since_s: float
    hashes: Sequence[Any] = ()
    fresh: int = 0


@dataclass(slots=True)
class Counters:
    """Counted since vLLM's metrics last took them."""

    lookups: int = 0
    lookups_unanswered: int = 0
    loads: int = 0
    load_tokens: int = 0
    stores: int = 0
    store_tokens: int = 0
    stores_refused: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """The shape of vLLM's cache, the operator's limits, and what this instance may do."""

    block_tokens: int
    num_blocks: int
    num_ranks: int
    lookup_s: float
    store_share: float
    may_load: bool = True
    may_store: bool = True


class SchedulerSide:
    """`lookup` is None while no rank can store blocks; then no request is looked up."""

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        published: PublishedHashes | None = None,
        trouble: Trouble | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lookup: PromptLookup | None = None
        self.pool: Pool | None = None
        self.counters = Counters()
        self.published = published
        self._trouble = trouble or Trouble()
        self._settings = settings
        self._block_tokens = settings.block_tokens
        self._max_held = max(1, int(settings.num_blocks * settings.store_share))
        self._clock = clock
        self._requests: dict[str, TrackedRequest] = {}
        self._asked: set[str] = set()
        self._loading: set[str] = set()
        self._loads: list[Load] = []
        self._stores: list[Store] = []
        self._held: dict[int, _Held] = {}
        self._num_held = 0
        self._num_doubted = 0
        self._serial = 0
        self._version = 0

    # --- the life of a request ------------------------------------------------------------------

    def arrived(self, request: VllmRequest) -> None:
        """vLLM has a new request. It is looked up at once, so that the answer is there in time."""
        tracked = self._tracked(request)
        if self._can_load(tracked, 0) and len(self._asked) < MAX_ASKED_EARLY:
            self._ask(tracked, 0)

    def matched(self, request: VllmRequest, num_computed: int) -> tuple[int | None, bool]:
        """Returns how many tokens to load after the computed ones, and whether vLLM should load
        them while it goes on. None: not known yet. Whole blocks, and at least one token is left to
        compute.
        """
        tracked = self._tracked(request)
        skip = num_computed // self._block_tokens
        if num_computed % self._block_tokens or not self._can_load(tracked, skip):
            self._drop_question(tracked)
            return 0, False
        if len(self._loading) >= MAX_LOADING:  # each ends by its deadline
            return None, False
        question = tracked.question
        if question is None or not self._is_current(question, tracked, skip):
            if not self._ask(tracked, skip):
                return self._later(tracked)
            question = tracked.question
        assert question is not None
        answer = question.answer
        if answer is None:
            return self._later(tracked)
        question.is_seen = True
        tracked.waited_since_s = 0.0
        if not answer.is_answered:
            self.counters.lookups_unanswered += 1
            tracked.is_abandoned = True
        elif self.published is not None and not question.is_published:
            question.is_published = True
            self.published.seen(request.block_hashes, answer.runs)
        if question.skip_blocks != skip:  # vLLM has more blocks itself than the daemon
            return 0, False
        blocks = min(answer.blocks, self._loadable(tracked) - skip)
        if blocks < 1:
            return 0, False
        return blocks * self._block_tokens, True

    def allocated(self, request: VllmRequest, pages: Sequence[int], num_external: int) -> None:
        """vLLM has allocated pages for these tokens, or (0) loads nothing. Called again after a
        load."""
        tracked = self._tracked(request)
        if num_external == 0:
            self._drop_question(tracked)
            return
        question, tracked.question = tracked.question, None
        self._asked.discard(request.request_id)
        skip = question.skip_blocks if question else 0
        count = num_external // self._block_tokens
        leases = question.answer.leases if question and question.answer else ()
        identity = question.identity if question else NamespaceIdentity()
        wanted = tuple(pages[skip : skip + count])
        self._loads.append(Load(request.request_id, identity, leases, wanted))
        if question and question.answer:
            tracked.sources = self._by_tier(question.answer.runs, skip, count)
        tracked.is_loading = True
        self._loading.add(request.request_id)
        tracked.tries += 1
        self.counters.loads += 1
        self.counters.load_tokens += num_external

    def sources(self, request: VllmRequest, num_external: int) -> dict[str, int]:
        """The tokens of the load just allocated, by their tier when the load was decided."""
        sources = self._tracked(request).sources
        return sources if sum(sources.values()) == num_external else {}

    def finished(
        self, request: VllmRequest, pages: Sequence[int], *, reason: str, is_good: bool
    ) -> None:
        """The request ends for this reason. Its pages are not reused yet; their content is stored
        only if it `is_good`."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return
        self._drop_question(tracked)
        self._loading.discard(request.request_id)
        if is_good and not tracked.is_loading:
            known = min(request.num_computed_tokens, request.num_tokens)
            self._store(tracked, known // self._block_tokens, pages)
        identity = self._identity(tracked) if tracked.is_cached and self.lookup else None
        if identity is not None and self.lookup is not None:
            tokens, conversation = tracked.encoded(request.num_tokens), request.session_id or ""
            ending = FinishedAnswer(tokens, conversation, reason, request.num_output_tokens)
            self.lookup.ended(identity, ending)

    # --- a step ---------------------------------------------------------------------------------

    def orders(self, scheduled: Mapping[str, int], pages_of: PagesOf) -> Orders:
        """For the step that computes `scheduled` tokens of each request."""
        if not scheduled and self.lookup is not None:
            self.lookup.wait_for_answer(IDLE_WAIT_S)
        orders = Orders(self._loads, is_idle=not scheduled)
        self._loads = []
        with self._trouble.harmless("a step's stores"):
            orders.step = self._step(scheduled)
            self._store_filled(scheduled, pages_of)
        orders.stores, self._stores = self._stores, []
        return orders

    def _store_filled(self, scheduled: Mapping[str, int], pages_of: PagesOf) -> None:
        for name, num_new in scheduled.items():
            tracked = self._requests.get(name)
            if tracked is None:
                continue
            tracked.is_loading = False
            self._loading.discard(name)
            request = tracked.request
            if request.num_computed_tokens < tracked.stored * self._block_tokens:
                tracked.stored = 0  # computed again after a preemption or a failed load
            # `num_tokens` leaves out speculative tokens and those not sampled yet.
            known = min(request.num_computed_tokens + num_new, request.num_tokens)
            full = known // self._block_tokens
            if full > tracked.stored:
                self._store(tracked, full, pages_of(name))

    def reported(self, report: WorkerReport) -> None:
        """Take in the ranks' report: blocks of ended stores are released to vLLM. Pages in doubt
        are held from here on: vLLM reads a report before it frees what its step ended."""
        if self.pool is not None:
            self.pool.touch([self.pool.blocks[page] for page in report.doubted])
            self.pool.free_blocks([self.pool.blocks[page] for page in report.rested])
        self._num_doubted += len(report.doubted) - len(report.rested)
        for number, ranks in report.ended.items():
            held = self._held.get(number)
            if held is None:
                continue
            held.ranks_left -= ranks
            tracked = self._requests.get(held.request)
            held.fresh = max(held.fresh, report.fresh.get(number, 0))
            if number in report.refused:
                held.hashes = ()
                self.counters.stores_refused += 1
                if tracked is not None:  # offered again with its next block
                    tracked.stored = min(tracked.stored, held.first)
            if held.ranks_left <= 0:
                del self._held[number]
                self._num_held -= len(held.blocks)
                if self.pool is not None:
                    self.pool.free_blocks(list(reversed(held.blocks)))
                if self.published is not None:
                    self.published.stored(held.hashes, held.fresh)

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks are held that a report will release: vLLM should go on stepping."""
        return bool(self._held) or self._num_doubted > 0

    @property
    def will_free_soon(self) -> bool:
        """Whether such blocks may be released so soon that vLLM need not preempt a request."""
        return any(self._clock() - held.since_s < PATIENT_S for held in self._held.values())

    # --- everything at once ---------------------------------------------------------------------

    def start_over(self, version: int) -> None:
        """The weights may have changed: from now on blocks belong to the namespaces of this
        `version`, and blocks stored before are not used."""
        self._version = version
        for tracked in self._requests.values():
            self._drop_question(tracked)
            tracked.is_cached = False  # some of its KV is of the old weights

    def settle(self, worker: SettlingWorker, patience_s: float) -> None:
        """Finish all stores before vLLM empties its own cache, which fails while a block is held.
        The last blocks of ended requests would otherwise wait for a step that may never come.
        `worker`: that of the only rank, in this process."""
        if self.holds_blocks:
            orders, self._stores = Orders(stores=self._stores), []
            report = worker.settle(orders, patience_s)
            if report is not None:
                self.reported(report)

    def close(self, patience_s: float) -> None:
        if self.lookup is not None:
            self.lookup.close(patience_s)

    # --- looking up ------------------------------------------------------------------------------

    def _tracked(self, request: VllmRequest) -> TrackedRequest:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tracked = TrackedRequest(request, is_identified_by_tokens(request))
            self._requests[request.request_id] = tracked
        return tracked

    def _can_load(self, tracked: TrackedRequest, skip: int) -> bool:
        return (
            self._settings.may_load
            and self.lookup is not None
            and tracked.is_cached
            and not tracked.is_abandoned
            and tracked.tries <= tracked.request.num_preemptions
            and self._loadable(tracked) > skip
        )

    def _loadable(self, tracked: TrackedRequest) -> int:
        """Whole blocks; at least one token is left to compute, whose logits vLLM needs."""
        return (tracked.request.num_tokens - 1) // self._block_tokens

    def _is_current(self, question: Question, tracked: TrackedRequest, skip: int) -> bool:
        answer = question.answer
        is_old = False
        if answer is not None and answer.blocks > 0:
            good_s = FRESH_S if question.is_seen else LEASE_SHARE * answer.lease_s
            is_old = self._clock() - question.asked_s > good_s
        is_same = question.skip_blocks == skip or (
            # The daemon's blocks end before those that vLLM has itself.
            question.answer is not None and sum(count for _, count in question.answer.runs) <= skip
        )
        return is_same and not is_old and len(question.tokens) == 4 * tracked.request.num_tokens

    def _ask(self, tracked: TrackedRequest, skip: int) -> bool:
        """Returns False if the namespace is not known, yet or at all."""
        self._drop_question(tracked)
        identity = self._identity(tracked)
        if identity is None or self.lookup is None:
            return False
        request = tracked.request
        tokens = tracked.encoded(request.num_tokens)
        conversation = request.session_id or ""
        tracked.question = Question(
            request.request_id, identity, tokens, skip, self._clock(), conversation
        )
        self._asked.add(request.request_id)
        self.counters.lookups += 1
        self.lookup.ask(tracked.question)
        return True

    def _identity(self, tracked: TrackedRequest) -> NamespaceIdentity | None:
        """None while an adapter's files are being read."""
        lora, digest = tracked.request.lora_request, ""
        if lora is not None:
            assert self.lookup is not None
            known = self.lookup.adapter_digest(lora.lora_int_id, lora.lora_path)
            if not known:
                tracked.is_cached = known is None
                return None
            digest = known
        return NamespaceIdentity(digest, salted(tracked.request.cache_salt), self._version)

    def _later(self, tracked: TrackedRequest) -> tuple[int | None, bool]:
        now_s = self._clock()
        if not tracked.waited_since_s:
            tracked.waited_since_s = now_s
        if tracked.is_cached and now_s - tracked.waited_since_s < self._settings.lookup_s:
            return None, False
        tracked.is_abandoned = True
        self.counters.lookups_unanswered += 1
        self._drop_question(tracked)
        return 0, False

    def _drop_question(self, tracked: TrackedRequest) -> None:
        question, tracked.question = tracked.question, None
        self._asked.discard(tracked.request.request_id)
        if question is not None and self.lookup is not None:
            self.lookup.withdraw(question)

    # --- storing --------------------------------------------------------------------------------

    def _store(self, tracked: TrackedRequest, last: int, pages: Sequence[int]) -> None:
        """Store the blocks before `last` that were not stored, as far as `_max_held` permits."""
        if not (self._settings.may_store and tracked.is_cached and self.lookup and self.pool):
            return
        last = min(last, tracked.stored + self._max_held - self._num_held, len(pages))
        first = tracked.stored
        if last <= first:
            return
        identity = self._identity(tracked)
        if identity is None:
            return
        wanted = tuple(pages[first:last])
        blocks = [self.pool.blocks[page] for page in wanted]
        self.pool.touch(blocks)
        self._serial += 1
        tokens = tracked.encoded(last * self._block_tokens)
        self._stores.append(Store(self._serial, identity, tokens, first, wanted))
        hashes = tuple(tracked.request.block_hashes[first:last]) if self.published else ()
        name = tracked.request.request_id
        self._held[self._serial] = _Held(
            name, first, blocks, self._settings.num_ranks, self._clock(), hashes
        )
        self._num_held += len(blocks)
        tracked.stored = last
        self.counters.stores += 1
        self.counters.store_tokens += (last - first) * self._block_tokens

    def _by_tier(self, runs: Sequence[tuple[str, int]], first: int, count: int) -> dict[str, int]:
        """Tokens of blocks `first … first + count - 1`, by tier."""
        found: Counter[str] = Counter()
        start = 0
        for tier, length in runs:
            inside = min(start + length, first + count) - max(start, first)
            if inside > 0:
                found[tier] += inside * self._block_tokens
            start += length
        return dict(found)

    def _step(self, scheduled: Mapping[str, int]) -> StepOrders | None:
        """The prefill of a step; None if it has none."""
        num_requests, decoded, sum_n, sum_nc = 0, 0, 0.0, 0.0
        for name, num_new in scheduled.items():
            tracked = self._requests.get(name)
            if tracked is None:
                continue
            context = tracked.request.num_computed_tokens
            if context >= tracked.request.num_tokens - 1:
                decoded += 1
                continue
            num_requests += 1
            sum_n += num_new
            sum_nc += num_new * context + num_new * num_new / 2
        if not num_requests:
            return None
        identity = NamespaceIdentity(weights_version=self._version)
        return StepOrders(identity, num_requests, sum_n, sum_nc, decoded)

"""An inference engine that schedules as vLLM does and whose model reads its own KV cache.

The calls to the connector's two sides come in the order of vLLM 0.32's scheduler and model runner,
for one rank or several. The model is a rolling number: the KV of a token is made from the KV of the
token before it, read from the cache, and the next token from the KV of the last one. So a block
that is loaded wrong, overwritten too early or taken for another changes what comes out.

    step: [running: allocate or preempt] [waiting: local hit, matched, allocated] orders
          each rank: begin, forward, after, finished, report       then: outcomes of all ranks
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from hicache.client.gpu_pages import SharedPages
from hicache.connectors.vllm.background import Background, Trouble
from hicache.connectors.vllm.lookup import MatchClient, PromptLookup
from hicache.connectors.vllm.rank_clients import BlockClient
from hicache.connectors.vllm.scheduler_side import SchedulerSettings, SchedulerSide
from hicache.connectors.vllm.step_messages import WorkerReport
from hicache.connectors.vllm.vllm_pages import page_rows, pages_of
from hicache.connectors.vllm.worker_side import WorkerSide
from hicache.protocol.keys import LayerGroup, NamespaceSpec

BLOCK_TOKENS = 4
LAYERS = 3
PATIENCE_S = 60.0
MODULUS = (1 << 31) - 1


@dataclass(eq=False)
class Request:
    """As vLLM's, with what the connector looks at."""

    request_id: str
    prompt: list[int]
    max_tokens: int = 4
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: Sequence[Any] = ()
    prompt_embeds: Any = None
    resumable: bool = False
    pooling_params: Any = None
    session_id: str | None = None
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_cached: int = -1
    status: str = "waiting"
    pages: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt + self.output

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output)

    @property
    def block_hashes(self) -> list[bytes]:
        """Of the whole blocks, each with its prefix."""
        ids = self.all_token_ids
        lora = self.lora_request.lora_name if self.lora_request else ""
        ends = range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS)
        texts = [repr((self.cache_salt, lora, ids[:end])) for end in ends]
        return [hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts]


class Pool:
    """vLLM's block pool: references, and a queue of free blocks that keep what they hold."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [SimpleNamespace(block_id=i, ref_cnt=0) for i in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict((i, None) for i in range(1, num_blocks))
        self.page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            self._free.pop(block.block_id, None)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, f"block {block.block_id} was given back twice"
            if not block.ref_cnt:
                self._free[block.block_id] = None

    def take(self) -> int:
        page, _ = self._free.popitem(last=False)
        self.blocks[page].ref_cnt = 1
        name = self._name_of.pop(page, None)
        if name is not None:
            del self.page_of[name]
        return page

    def name(self, page: int, name: bytes) -> None:
        """The page holds a whole block: later requests find it."""
        if name not in self.page_of and page not in self._name_of:
            self.page_of[name] = page
            self._name_of[page] = name

    def forget_names(self) -> None:
        self.page_of.clear()
        self._name_of.clear()


class Device(Protocol):
    """Memory of a GPU, or what stands in for it."""

    def numbers(self, shape: tuple[int, ...]) -> torch.Tensor: ...
    def share(self, layers: Sequence[torch.Tensor]) -> SharedPages: ...


class Rank:
    """One rank's cache and model: layers of [blocks, head, token, 2] numbers."""

    def __init__(
        self, number: int, num_ranks: int, num_blocks: int, device: Device | None = None
    ) -> None:
        self.number = number
        shape = (num_blocks, 1, BLOCK_TOKENS, 2)
        make = device.numbers if device is not None else partial(torch.zeros, dtype=torch.int64)
        self.caches = [make(shape).fill_(-1) for _ in range(LAYERS)]
        self.pages = pages_of(self.caches, num_blocks)
        self.shared: SharedPages | None = None
        if device is not None:
            self.shared = device.share([page_rows(cache, num_blocks) for cache in self.caches])
        layout = f"test:{number}"
        self.spec = NamespaceSpec(
            model_digest="a rolling number",
            weights_digest="none",
            dtype="int64",
            groups=(LayerGroup(LAYERS, 1, 2, layout),),
            block_tokens=BLOCK_TOKENS,
            block_bytes=self.pages.block_bytes,
            tp_rank=number,
            tp_size=num_ranks,
        )

    def read(self, request: Request, position: int) -> int:
        """The KV of a token; every layer must tell the same."""
        page, offset = request.pages[position // BLOCK_TOKENS], position % BLOCK_TOKENS
        values = [cache[page, 0, offset].tolist() for cache in self.caches]
        number: int = values[0][0]
        expected = [[number, number ^ (7919 * layer + self.number)] for layer in range(LAYERS)]
        assert values == expected, f"WRONG BYTES at token {position} of {request.request_id}"
        return number

    def forward(self, request: Request, num_new: int, salt: int) -> int:
        """Make the KV of the next tokens, each from the one before it; the last one's number."""
        start = request.num_computed_tokens
        number = self.read(request, start - 1) if start else self.number + salt
        for position in range(start, start + num_new):
            number = (number * 48271 + request.all_token_ids[position] + 1) % MODULUS
            page, offset = request.pages[position // BLOCK_TOKENS], position % BLOCK_TOKENS
            for layer, cache in enumerate(self.caches):
                mixed = number ^ (7919 * layer + self.number)
                cache[page, 0, offset] = torch.tensor([number, mixed])
        return number


def salt_of(request: Request) -> int:
    """Other salts and adapters, other KV, though in truth a salt changes none."""
    return len(request.cache_salt or "") + (100 if request.lora_request else 0)


def expected_output(request: Request, num_ranks: int = 1) -> list[int]:
    """What the request must say, by a model without a cache."""
    ids = list(request.prompt)
    for _ in range(request.max_tokens):
        numbers = []
        for rank in range(num_ranks):
            number = rank + salt_of(request)
            for token in ids:
                number = (number * 48271 + token + 1) % MODULUS
            numbers.append(number)
        ids.append(sum(numbers) % 997)
    return ids[len(request.prompt) :]


class Engine:
    """`connect_lookup(spec)` and `connect_transfer(spec, group)` make the clients of the two sides.
    On a `device` the daemon's GPU worker may copy."""

    def __init__(
        self,
        connect_lookup: Callable[[NamespaceSpec], MatchClient],
        connect_transfer: Callable[[NamespaceSpec, bytes], BlockClient],
        *,
        num_ranks: int = 1,
        num_blocks: int = 64,
        budget: int = 64,
        lookup_s: float = 30.0,
        load_s: float = 30.0,
        store_share: float = 1.0,
        device: Device | None = None,
        **more: Any,
    ) -> None:
        self.trouble = Trouble()
        self.ranks = [Rank(number, num_ranks, num_blocks, device) for number in range(num_ranks)]
        self.pool = Pool(num_blocks)
        settings = SchedulerSettings(BLOCK_TOKENS, num_blocks, num_ranks, lookup_s, store_share)
        self.side = SchedulerSide(settings, trouble=self.trouble, **more)
        self.side.pool = self.pool
        specs = [rank.spec for rank in self.ranks]
        self.side.lookup = PromptLookup(specs, connect_lookup, Background("test-ask", self.trouble))
        self._connect_mover, self._load_s = connect_transfer, load_s
        self.workers = [self._worker(rank) for rank in self.ranks]
        self.budget = budget
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.num_loads_failed = 0
        self._received: dict[str, int] = {}
        self._failed: set[str] = set()
        self._lost: set[str] = set()

    # --- from outside ---------------------------------------------------------------------------

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.requests[request.request_id] = request
            self.waiting.append(request)
            self.side.arrived(request)

    def run(self, *requests: Request) -> list[Request]:
        """Until these have ended, and their blocks are stored."""
        self.add(*requests)
        give_up_s = time.monotonic() + PATIENCE_S
        while self.requests or self.side.holds_blocks:
            assert time.monotonic() < give_up_s, f"still there: {list(self.requests)}"
            self.step()
        self.check_quiet()
        return list(requests)

    def abort(self, request: Request) -> None:
        is_held = request.status == "loading" and request.request_id not in self._received_by_all()
        request.status = "aborted"
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self.side.finished(request, request.pages, reason="abort", is_good=True)
        if not is_held:
            self._forget(request)

    def forget_local(self) -> None:
        """As a restart of the engine would: its own prefix cache finds nothing any more."""
        self.pool.forget_names()

    def empty_local(self, patience_s: float = 10.0) -> bool:
        """As vLLM's `reset_prefix_cache`, which fails while somebody holds a block."""
        if len(self.workers) == 1:
            self.side.settle(self.workers[0], patience_s)
        if self.pool.num_free < len(self.pool.blocks) - 1:
            return False
        self.pool.forget_names()
        return True

    def replace_workers(self, patience_s: float) -> None:
        """As where vLLM registers its KV caches again."""
        before, self.workers = self.workers, [self._worker(rank) for rank in self.ranks]
        for old, new in zip(before, self.workers, strict=True):
            old.close(patience_s)
            new.take_over(old)

    def _worker(self, rank: Rank) -> WorkerSide:
        background = Background(f"test-move-{rank.number}", self.trouble)
        return WorkerSide(
            rank.spec,
            rank.number,
            rank.pages,
            self._connect_mover,
            background,
            self._load_s,
            rank.shared,
        )

    def check_quiet(self) -> None:
        assert self.pool.num_free == len(self.pool.blocks) - 1, "a block was never given back"

    def close(self) -> None:
        self.side.close(10.0)
        for worker in self.workers:
            worker.close(10.0)

    # --- one step -------------------------------------------------------------------------------

    def step(self) -> None:
        scheduled: dict[str, int] = {}
        self._schedule_running(scheduled)
        self._schedule_waiting(scheduled)
        orders = self.side.orders(scheduled, lambda name: self.requests[name].pages)
        numbers: dict[str, int] = dict.fromkeys(scheduled, 0)
        report: WorkerReport | None = None
        bad: set[int] = set()
        for rank, worker in zip(self.ranks, self.workers, strict=True):
            worker.begin(orders)
            for name, num_new in scheduled.items():
                request = self.requests[name]
                numbers[name] += rank.forward(request, num_new, salt_of(request))
            worker.after(orders)
            outcome = worker.finished(is_idle=orders.is_idle)
            assert outcome.failed <= outcome.loaded
            for name in outcome.loaded:
                self._received[name] = self._received.get(name, 0) + 1
            self._lost |= outcome.failed
            bad |= outcome.bad_pages
            mine = worker.report()
            report = mine if report is None else report.aggregate(mine) if mine else report
        self._take_lost()
        self._take_bad(bad)
        for name, num_new in scheduled.items():
            self._advance(self.requests[name], num_new, numbers[name])
        if report is not None:
            self.side.reported(report)
        for name in self._received_by_all():
            request = self.requests[name]
            if request.status == "aborted":
                del self._received[name]
                self._forget(request)

    def _schedule_running(self, scheduled: dict[str, int]) -> None:
        budget = self.budget
        for request in list(self.running):
            if request not in self.running:
                continue
            num_new = min(request.num_tokens - request.num_computed_tokens, budget)
            while not self._allocate(request, request.num_computed_tokens + num_new):
                if self.side.will_free_soon:
                    num_new = 0
                    break
                victim = self.running[-1]
                self._preempt(victim)
                scheduled.pop(victim.request_id, None)
                if victim is request:
                    num_new = 0
                    break
            if num_new:
                scheduled[request.request_id] = num_new
                budget -= num_new

    def _schedule_waiting(self, scheduled: dict[str, int]) -> None:
        budget = self.budget - sum(scheduled.values())
        # Whoever holds pages first, as vLLM has a queue of its own for those.
        for request in sorted(self.waiting, key=lambda request: not request.pages):
            if budget <= 0:
                break
            name = request.request_id
            if request.status == "loading":
                if name not in self._received_by_all():
                    continue
                self._end_load(request)
            num_external = 0
            if not request.num_computed_tokens:
                local = self._local_hit(request)
                num_local = len(local) * BLOCK_TOKENS
                found, is_async = self.side.matched(request, num_local)
                if found is None:
                    continue
                assert found % BLOCK_TOKENS == 0
                assert num_local + found < request.num_tokens
                assert is_async == bool(found)
                num_external = found
                reach = num_local + num_external
                num_new = 0 if num_external else min(request.num_tokens - reach, budget)
                self._adopt(request, local)
                is_stuck = bool(num_external) and not self._fits_whole(request)
                if is_stuck or not self._allocate(request, reach + num_new):
                    self._free(request)
                    break
                if request.num_cached < 0:
                    request.num_cached = reach
            else:
                reach = request.num_computed_tokens
                num_new = min(request.num_tokens - reach, budget)
                if not self._allocate(request, reach + num_new):
                    break
            self.side.allocated(request, request.pages, num_external)
            request.num_computed_tokens = reach
            if num_external:
                request.status = "loading"
                continue
            self.waiting.remove(request)
            self.running.append(request)
            request.status = "running"
            scheduled[name] = num_new
            budget -= num_new

    def _advance(self, request: Request, num_new: int, number: int) -> None:
        if request.status != "running":  # taken back meanwhile
            return
        request.num_computed_tokens += num_new
        self._name_blocks(request)
        if request.num_computed_tokens < request.num_tokens:
            return
        request.output.append(number % 997)
        if len(request.output) == request.max_tokens:
            request.status = "finished"
            self.running.remove(request)
            self.side.finished(request, request.pages, reason="length", is_good=True)
            self._forget(request)

    # --- loads ----------------------------------------------------------------------------------

    def _received_by_all(self) -> set[str]:
        return {name for name, ranks in self._received.items() if ranks == len(self.ranks)}

    def _take_lost(self) -> None:
        """Once every rank's load has ended: nothing counts of a request that lost it on one."""
        for name in self._lost & self._received_by_all():
            self._lost.remove(name)
            if self.requests[name].status == "loading":
                self.requests[name].num_computed_tokens = 0
                self._failed.add(name)
                self.num_loads_failed += 1

    def _take_bad(self, bad: set[int]) -> None:
        """The first page that did not come ends what its request has."""
        for request in self.waiting + [r for r in self.requests.values() if r.status == "aborted"]:
            reach = request.num_computed_tokens // BLOCK_TOKENS
            hit = [i for i, page in enumerate(request.pages[:reach]) if page in bad]
            if request.status == "loading" and hit:
                request.num_computed_tokens = hit[0] * BLOCK_TOKENS
                self._failed.add(request.request_id)
                self.num_loads_failed += 1

    def _end_load(self, request: Request) -> None:
        del self._received[request.request_id]
        request.status = "waiting"
        if request.request_id in self._failed:
            self._failed.remove(request.request_id)
            if not request.num_computed_tokens:
                self._free(request)
        self._name_blocks(request)

    # --- blocks ---------------------------------------------------------------------------------

    def _local_hit(self, request: Request) -> list[int]:
        pages = []
        for name in request.block_hashes[: (request.num_tokens - 1) // BLOCK_TOKENS]:
            page = self.pool.page_of.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def _adopt(self, request: Request, pages: list[int]) -> None:
        self.pool.touch([self.pool.blocks[page] for page in pages])
        request.pages = list(pages)

    def _allocate(self, request: Request, num_tokens: int) -> bool:
        missing = -(-num_tokens // BLOCK_TOKENS) - len(request.pages)
        if missing > self.pool.num_free:
            return False
        request.pages += [self.pool.take() for _ in range(missing)]
        return True

    def _fits_whole(self, request: Request) -> bool:
        """A load is begun only if its request, and all others that hold pages and do not run, can
        have all they need: else they would wait for each other for ever."""
        waiting = [other for other in self.waiting if other.pages and other is not request]
        missing = sum(-(-r.num_tokens // BLOCK_TOKENS) - len(r.pages) for r in [request, *waiting])
        return missing <= self.pool.num_free

    def _name_blocks(self, request: Request) -> None:
        whole = min(request.num_computed_tokens, request.num_tokens) // BLOCK_TOKENS
        for page, name in zip(request.pages[:whole], request.block_hashes, strict=False):
            self.pool.name(page, name)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._free(request)
        request.status = "preempted"
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)

    def _free(self, request: Request) -> None:
        self.pool.free_blocks([self.pool.blocks[page] for page in reversed(request.pages)])
        request.pages = []

    def _forget(self, request: Request) -> None:
        self._free(request)
        del self.requests[request.request_id]

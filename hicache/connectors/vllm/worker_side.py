"""Loads and stores of one rank: the worker's side, around vLLM's steps.

    begin ──▶ [forward] ──▶ after ──▶ finished
                              │ a load is a task, side by side with others
                              └ stores are one queue: a prefix before what follows it

- A load ends after at most `load_s` and is reported then, with the pages that did not get their
  bytes: vLLM itself waits for it without a limit.
- A page is bad until its bytes were copied *and* the daemon's generation was found unchanged.
- Where the daemon's GPU worker copies, a load without an answer leaves pages in doubt: the worker
  may still write them, so they must not be reused. The whole load has failed then: vLLM frees the
  request's pages, and the scheduler's side holds those in doubt until they are reported at rest.
  Until then this process copies.
- Stores read the pages after the step that fills them and while the scheduler's side holds them.
  Each takes at most `store_s` and the time of one copy, and is reported.
- The daemon's planner is sent the time of every step with prefill, and of every load.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from hicache.client.aio import in_thread
from hicache.client.gpu_pages import PageShare, PageTable, SharedPages, reach
from hicache.client.results import FetchedRun, Match, PutResult
from hicache.connectors.vllm.background import Background, log
from hicache.connectors.vllm.rank_clients import BlockClient, Connect, PagedClient, RankClients
from hicache.connectors.vllm.step_messages import Load, Orders, StepOrders, Store, WorkerReport
from hicache.connectors.vllm.vllm_pages import Pages
from hicache.protocol.keys import NamespaceSpec

IDLE_WAIT_S: Final = 0.001
IDLE_DOUBT_WAIT_S: Final = 0.01
"""The same where only pages in doubt are left, which may take long."""
REST_S: Final = 0.05
"""Between two calls that ask whether the daemon's GPU worker has released pages in doubt."""
COPY_BLOCKS: Final = 64
"""At most this many blocks are copied between two checks of the deadline."""


def share_patience_s(load_s: float) -> float:
    """How long a load of at most `load_s` waits for its pages to be shared: if the GPU worker
    hangs, there must be time left for a copy by this process."""
    return min(1.0, load_s / 4)


@dataclass(slots=True)
class TransferOutcome:
    """What has ended since the last call. `loaded`: requests whose load has ended. `failed`: those
    of them that must start again on other pages. `bad_pages`: pages of the others that did not get
    their bytes."""

    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    bad_pages: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Loading:
    """A load under way. `good`: how many blocks from the first on are complete, also when the load
    is cut short. `paged`, `share`: what it comes through; without a share this process copies."""

    load: Load
    started_s: float = 0.0
    good: int = 0
    paged: PagedClient | None = None
    share: PageShare | None = None

    @property
    def bad_pages(self) -> Sequence[int]:
        return self.load.pages[self.good :]

    @property
    def doubted_pages(self) -> list[int]:
        """Bad pages that the GPU worker may still write."""
        if self.share is None or not self.bad_pages:
            return []
        return sorted(self.share.pages_in_doubt.intersection(self.bad_pages))


class WorkerSide:
    """`rank` is the position of this worker's lease in a load. `shared`: the pages for the daemon's
    GPU worker, None where they cannot be shared. Called from the worker's thread."""

    def __init__(
        self,
        spec: NamespaceSpec,
        rank: int,
        pages: Pages,
        connect: Connect,
        background: Background,
        load_s: float,
        shared: SharedPages | None = None,
    ) -> None:
        self.background = background
        self._spec = spec
        self._rank = rank
        self._pages = pages
        self._load_s = load_s
        self._clients = RankClients(spec, connect, background, shared)
        self._sharing: set[asyncio.Task[PageShare | None]] = set()
        self._how = ""
        self._stores: asyncio.Queue[tuple[Store, Any]] | None = None
        self._changed = threading.Condition()
        self._loading: dict[str, Load] = {}
        self._storing: set[int] = set()
        self._doubted: set[int] = set()
        self._outcome = TransferOutcome()
        self._report = WorkerReport()
        self._begun: tuple[float, Any] = (0.0, None)

    @property
    def is_alone(self) -> bool:
        """Whether this is the inference engine's only rank."""
        return self._spec.tp_size == 1

    # --- around a step --------------------------------------------------------------------------

    def begin(self, orders: Orders) -> None:
        """Before the forward pass. Starts the loads: no other request has their pages, and a long
        step hides them."""
        mark = self._pages.mark()
        self._begun = time.perf_counter(), mark
        with self._changed:
            self._loading.update((load.request, load) for load in orders.loads)
        for load in orders.loads:
            self._submit(self._load, load, mark)

    def after(self, orders: Orders) -> None:
        """The forward pass has been started (on a GPU) or is over."""
        mark = self._pages.mark()
        if orders.stores:
            with self._changed:
                self._storing.update(store.number for store in orders.stores)
            self._submit(self._enqueue, orders.stores, mark)
        if orders.step is not None:
            started_s, begun = self._begun
            seconds = time.perf_counter() - started_s
            self._submit(self._observe, orders.step, seconds, begun, mark)

    def finished(self, *, is_idle: bool) -> TransferOutcome:
        """Returns the loads that have ended since the last call.

        If the step computes nothing (`is_idle`), waits a little for the next one: an inference
        engine in this process that steps on at once would keep the GIL from the loading thread."""
        with self._changed:
            if is_idle and not self._outcome.loaded:
                if self._loading or self._storing:
                    self._changed.wait(IDLE_WAIT_S)
                elif self._doubted:
                    self._changed.wait(IDLE_DOUBT_WAIT_S)
            outcome, self._outcome = self._outcome, TransferOutcome()
        return outcome

    def report(self) -> WorkerReport | None:
        """Returns what has happened to stores and pages in doubt since the last call."""
        with self._changed:
            report, self._report = self._report, WorkerReport()
        return report or None

    def settle(self, orders: Orders, patience_s: float) -> WorkerReport | None:
        """Do the stores of these orders, then wait at most `patience_s` until no store is under way
        and no page is in doubt. Returns the report."""
        self.after(orders)
        with self._changed:
            self._changed.wait_for(lambda: not self._is_awaited, patience_s)
        return self.report()

    @property
    def _is_awaited(self) -> bool:
        """Whether the scheduler's side holds pages until a report."""
        return bool(self._storing or self._doubted)

    def close(self, patience_s: float) -> None:
        """Finishes stores under way, within `patience_s`."""
        self.background.close(self._close, patience_s)

    def take_over(self, before: WorkerSide) -> None:
        """Report what another side, closed by now, has not reported: its tensors were replaced.
        Loads that have not ended brought nothing, stores that have not started are refused, and
        pages in doubt are at rest."""
        with before._changed:
            self._outcome, before._outcome = before._outcome, TransferOutcome()
            self._report, before._report = before._report, WorkerReport()
            self._outcome.loaded |= before._loading.keys()
            for load in before._loading.values():
                self._outcome.bad_pages.update(load.pages)
            self._report.ended.update(dict.fromkeys(before._storing, 1))
            self._report.refused |= before._storing
            self._report.rested += before._doubted

    # --- loads ----------------------------------------------------------------------------------

    async def _load(self, load: Load, mark: Any) -> None:
        loading = _Loading(load)
        try:
            with self.background.trouble.harmless("a load"):
                async with asyncio.timeout(self._load_s):
                    await self._reached(mark)
                    await self._fetch(loading)
        finally:
            bad, doubted = loading.bad_pages, loading.doubted_pages
            if bad:
                self.background.trouble.note(f"{len(bad)} blocks of {load.request} did not come")
            with self._changed:
                self._loading.pop(load.request, None)
                self._outcome.loaded.add(load.request)
                if doubted:
                    self._outcome.failed.add(load.request)
                    self._report.doubted += doubted
                    self._doubted.update(doubted)
                else:
                    self._outcome.bad_pages.update(bad)
                self._changed.notify_all()
            if doubted:
                self._submit(self._rest, loading.paged, loading.share, doubted)

    async def _fetch(self, loading: _Loading) -> None:
        load, loading.started_s = loading.load, time.perf_counter()
        if self._rank >= len(load.leases):
            return
        lease = load.leases[self._rank]
        paged = self._clients.loader(load.identity, lease)
        client = paged.client
        match = await client.adopt(lease.number, len(load.pages), lease.group, lease.epoch)
        if not match.lease:
            self.background.trouble.note(client.last_error or match.decision.sentence)
            return
        loading.paged, loading.share = paged, await self._share_of(paged)
        if loading.share is not None:
            await self._load_pages(loading, client, loading.share, match)
        else:
            await self._load_blocks(loading, client, match)

    async def _load_pages(
        self, loading: _Loading, client: BlockClient, share: PageShare, match: Match
    ) -> None:
        """The daemon's GPU worker copies."""
        table = _table(loading.load.pages)
        came: dict[int, int] = {}
        parts = client.load_pages_by_part(match, share, table, planes_per_part=0)
        try:
            async with aclosing(parts):
                async for part in parts:
                    came[part.first] = part.blocks
                    loading.good = reach(came, loading.good)
            if loading.bad_pages and client.last_error:
                self.background.trouble.note(client.last_error)
        finally:
            # Not awaited: the request goes on meanwhile.
            spent_s = time.perf_counter() - loading.started_s
            self._submit(partial(client.release, match, total_s=spent_s))

    async def _load_blocks(self, loading: _Loading, client: BlockClient, match: Match) -> None:
        """This process copies."""
        arrived: set[int] = set()
        hop_s = 0.0
        runs = client.fetch_runs(match)
        try:
            async for run in runs:
                copied_s = time.perf_counter()
                arrived |= await self._copy_in(run, loading.load.pages)
                hop_s += time.perf_counter() - copied_s
                while loading.good in arrived:
                    loading.good += 1
                if not loading.bad_pages:
                    break
            else:
                if client.last_error:
                    self.background.trouble.note(client.last_error)
        finally:
            hop_bytes = float(len(arrived) * self._spec.block_bytes)
            spent_s = time.perf_counter() - loading.started_s
            self._submit(self._end, runs, client, match, hop_bytes, hop_s, spent_s)

    async def _rest(self, paged: PagedClient, share: PageShare, doubted: Sequence[int]) -> None:
        """Wait until the GPU worker has released these pages, or has ended."""
        if paged.sharing is not None:
            paged.sharing.leave(share)
        while not share.is_over:
            with self.background.trouble.harmless("pages in doubt"):
                await paged.client.unshare_pages(share)
            await asyncio.sleep(0 if share.is_over else REST_S)
        with self._changed:
            self._report.rested += doubted
            self._doubted.difference_update(doubted)
            self._changed.notify_all()

    async def _end(
        self,
        runs: AsyncGenerator[FetchedRun, None],
        client: BlockClient,
        match: Match,
        hop_bytes: float,
        hop_s: float,
        total_s: float,
    ) -> None:
        await runs.aclose()
        await client.release(match, hop_bytes=hop_bytes, hop_s=hop_s, total_s=total_s)

    async def _copy_in(self, run: FetchedRun, pages: Sequence[int]) -> set[int]:
        """Copy the run's blocks into their pages. Returns the blocks that are complete."""
        last = min(run.first + run.num_blocks, len(pages))
        views = run.views
        for start in range(run.first, last, COPY_BLOCKS):
            part = slice(start, min(start + COPY_BLOCKS, last))
            mine = views[part.start - run.first : part.stop - run.first]
            await in_thread(partial(self._pages.write, pages[part], mine))
        return set(range(run.first, last)) if run.verify() else set()

    # --- stores ---------------------------------------------------------------------------------

    async def _enqueue(self, stores: Sequence[Store], mark: Any) -> None:
        if self._stores is None:
            self._stores = asyncio.Queue()
            queue = self._stores
            self._submit(self._store_all, queue)
        for store in stores:
            self._stores.put_nowait((store, mark))

    async def _store_all(self, queue: asyncio.Queue[tuple[Store, Any]]) -> None:
        while True:
            store, mark = await queue.get()
            result = PutResult(refused=len(store.pages))
            try:
                with self.background.trouble.harmless("a store"):
                    await self._clients.forget_storers()
                    result = await self._store(store, mark)
            finally:
                with self._changed:
                    self._storing.discard(store.number)
                    self._report.ended[store.number] = 1
                    self._report.fresh[store.number] = result.stored
                    if result.refused:
                        self._report.refused.add(store.number)
                    self._changed.notify_all()
                queue.task_done()

    async def _store(self, store: Store, mark: Any) -> PutResult:
        await self._reached(mark)
        paged = self._clients.storer(store.identity)
        share = await self._share_of(paged)
        if share is not None:
            return await self._save_pages(paged, share, store)
        read = self._pages.reader(store.pages)
        return await paged.client.put(
            store.tokens,
            lambda block, view: read(block - store.first, view),
            first=store.first,
            last=store.first + len(store.pages),
        )

    async def _save_pages(self, paged: PagedClient, share: PageShare, store: Store) -> PutResult:
        """The daemon's GPU worker copies. Without its answer nothing was stored; it may still read
        the pages, which does no harm when they are reused."""
        table = _table(store.pages)
        result = await paged.client.save_pages(store.tokens, share, table, first=store.first)
        if share.is_in_doubt:
            self._submit(self._rest, paged, share, ())
        return result

    async def _observe(self, step: StepOrders, seconds: float, begun: Any, ended: Any) -> None:
        if begun is not None:  # on a GPU the forward pass was only started when `after` was called
            await self._reached(ended)
            seconds = begun.elapsed_time(ended) / 1e3
        await self._clients.storer(step.identity).client.observe(
            num_requests=step.num_requests,
            sum_n=step.sum_n,
            sum_nc=step.sum_nc,
            seconds=seconds,
            decode_tokens=step.decode_tokens,
        )

    # --- both -----------------------------------------------------------------------------------

    async def _share_of(self, paged: PagedClient) -> PageShare | None:
        """Returns None where this process has to copy."""
        if paged.sharing is None or self._doubted:
            return None
        # The registration goes on after the timeout, so its task is kept.
        sharing = asyncio.ensure_future(paged.sharing.usable())
        self._sharing.add(sharing)
        sharing.add_done_callback(self._sharing.discard)
        await asyncio.wait([sharing], timeout=share_patience_s(self._load_s))
        if not sharing.done():
            return None
        if paged.sharing.how not in ("", self._how):
            self._how = paged.sharing.how
            log.info("hicache: blocks are %s", self._how)
        return sharing.result()

    async def _reached(self, mark: Any) -> None:
        """Wait for the work that was started before this mark; None waits for nothing."""
        if mark is not None:
            await asyncio.to_thread(self._pages.wait, mark)

    def _submit(self, task: Callable[..., Coroutine[Any, Any, None]], *values: Any) -> None:
        self.background.submit(partial(task, *values))

    async def _close(self) -> None:
        if self._stores is not None:
            await self._stores.join()
        await self._clients.close()


def _table(pages: Sequence[int]) -> PageTable:
    """As a table of one page per block."""
    return np.array(pages, np.int32).reshape(-1, 1)

"""Loads and stores of one rank: the worker's side, around vLLM's steps.

    begin ──▶ [forward] ──▶ after ──▶ finished
                              │ a load is a task, side by side with others
                              └ stores are one queue: a prefix before what follows it

- A load ends by `load_s` whatever happens, and is reported then, with the pages that did not get
  their bytes: vLLM waits for it without a limit of its own.
- A page is bad until its bytes were copied *and* the daemon's generation was found unchanged.
- Stores read the pages after the step that fills them and while the scheduler's side holds them;
  each ends by `store_s` and a copy, and is reported.
- How long a step with prefill took goes to the daemon's planner, and what a load cost.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, Protocol

from hicache.answers import FetchedRun, Greeting, Match, PutResult
from hicache.connectors.vllm.asking import MAX_IDENTITIES, keep_alive, spec_of
from hicache.connectors.vllm.background import Background, in_thread
from hicache.connectors.vllm.orders import Identity, Lease, Load, Orders, Report, Step, Store
from hicache.connectors.vllm.pages import Bytes, Pages
from hicache.keys import NamespaceSpec

IDLE_WAIT_S: Final = 0.001
COPY_BLOCKS: Final = 64
"""At most so many blocks are copied between two looks at the deadline."""


class BlockClient(Protocol):
    """What is asked of `hicache.aio.AsyncClient`."""

    @property
    def greeting(self) -> Greeting | None: ...
    @property
    def last_error(self) -> str: ...
    async def adopt(self, lease: int, blocks: int, group: bytes, epoch: str) -> Match: ...
    def fetch_runs(self, match: Match) -> AsyncGenerator[FetchedRun, None]: ...
    async def release(
        self, match: Match, *, hop_bytes: float = 0.0, hop_s: float = 0.0, total_s: float = 0.0
    ) -> None: ...
    async def put(
        self, tokens: bytes, blocks: Callable[[int, Bytes], object], *, first: int, last: int
    ) -> PutResult: ...
    async def observe(
        self,
        *,
        num_requests: int,
        sum_n: float,
        sum_nc: float,
        seconds: float,
        decode_tokens: int,
    ) -> None: ...
    async def heartbeat(self) -> bool: ...
    async def close(self) -> None: ...


Connect = Callable[[NamespaceSpec, bytes], BlockClient]
"""A client for a namespace, of the group with this token (empty: of its own)."""


class WorkerSide:
    """`rank` picks this worker's lease among all. Called from the worker's thread."""

    def __init__(
        self,
        spec: NamespaceSpec,
        rank: int,
        pages: Pages,
        connect: Connect,
        background: Background,
        load_s: float,
    ) -> None:
        self.background = background
        self._spec = spec
        self._rank = rank
        self._pages = pages
        self._connect = connect
        self._load_s = load_s
        self._loaders: OrderedDict[Identity, tuple[bytes, BlockClient]] = OrderedDict()
        self._storers: OrderedDict[Identity, BlockClient] = OrderedDict()
        self._stores: asyncio.Queue[tuple[Store, Any]] | None = None
        self._news = threading.Condition()
        self._num_loading = 0
        self._num_storing = 0
        self._loaded: set[str] = set()
        self._bad_pages: set[int] = set()
        self._report = Report()
        self._begun: tuple[float, Any] = (0.0, None)

    @property
    def is_alone(self) -> bool:
        """Whether this is the engine's only rank."""
        return self._spec.tp_size == 1

    # --- around a step --------------------------------------------------------------------------

    def begin(self, orders: Orders) -> None:
        """Before the forward pass. Loads begin: their pages are nobody else's, and where a step
        takes long they are there when it is over."""
        mark = self._pages.mark()
        self._begun = time.perf_counter(), mark
        with self._news:
            self._num_loading += len(orders.loads)
        for load in orders.loads:
            self._submit(self._load, load, mark)

    def after(self, orders: Orders) -> None:
        """The forward pass has been started (on a GPU) or is over."""
        mark = self._pages.mark()
        if orders.stores:
            with self._news:
                self._num_storing += len(orders.stores)
            self._submit(self._enqueue, orders.stores, mark)
        if orders.step is not None:
            started_s, begun = self._begun
            seconds = time.perf_counter() - started_s
            self._submit(self._observe, orders.step, seconds, begun, mark)

    def finished(self, *, is_idle: bool) -> tuple[set[str], set[int]]:
        """Requests whose loads have ended, and pages that did not get their bytes.

        Where a step computes nothing (`is_idle`), waits a little for the next of them: an engine
        that steps on at once in this very process would keep the GIL from who loads."""
        with self._news:
            if is_idle and not self._loaded and (self._num_loading or self._num_storing):
                self._news.wait(IDLE_WAIT_S)
            loaded, self._loaded = self._loaded, set()
            bad, self._bad_pages = self._bad_pages, set()
        return loaded, bad

    def report(self) -> Report | None:
        """What has become of stores since the last time."""
        with self._news:
            report, self._report = self._report, Report()
        return report if report.ended else None

    def settle(self, orders: Orders, patience_s: float) -> Report | None:
        """Store what no step has brought, and wait until nothing is being stored any more, at most
        so long; what has become of stores."""
        self.after(orders)
        with self._news:
            self._news.wait_for(lambda: not self._num_storing, patience_s)
        return self.report()

    def close(self, patience_s: float) -> None:
        """What is being stored is stored, as far as patience goes."""
        self.background.close(self._close, patience_s)

    # --- loads ----------------------------------------------------------------------------------

    async def _load(self, load: Load, mark: Any) -> None:
        good = [0]
        try:
            with self.background.trouble.harmless("a load"):
                async with asyncio.timeout(self._load_s):
                    await self._reached(mark)
                    await self._fetch(load, good)
        finally:
            bad = load.pages[good[0] :]
            if bad:
                self.background.trouble.note(f"{len(bad)} blocks of {load.request} did not come")
            with self._news:
                self._num_loading -= 1
                self._loaded.add(load.request)
                self._bad_pages.update(bad)
                self._news.notify_all()

    async def _fetch(self, load: Load, good: list[int]) -> None:
        """`good[0]` counts the whole prefix that is there, also when this is cut short."""
        started_s = time.perf_counter()
        if self._rank >= len(load.leases):
            return
        lease = load.leases[self._rank]
        client = self._loader(load.identity, lease)
        match = await client.adopt(lease.number, len(load.pages), lease.group, lease.epoch)
        if not match.lease:
            self.background.trouble.note(client.last_error or match.decision.sentence)
            return
        arrived: set[int] = set()
        hop_s = 0.0
        runs = client.fetch_runs(match)
        try:
            async for run in runs:
                copied_s = time.perf_counter()
                arrived |= await self._copy_in(run, load.pages)
                hop_s += time.perf_counter() - copied_s
                while good[0] in arrived:
                    good[0] += 1
                if good[0] == len(load.pages):
                    break
            else:
                if client.last_error:
                    self.background.trouble.note(client.last_error)
        finally:
            # Not waited for: the request goes on while the daemon hears of it.
            hop_bytes = float(len(arrived) * self._spec.block_bytes)
            spent_s = time.perf_counter() - started_s
            self._submit(self._end, runs, client, match, hop_bytes, hop_s, spent_s)

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
        """The run's blocks into their pages; which of them hold the block's bytes now."""
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
                    await self._forget_storers()
                    result = await self._store(store, mark)
            finally:
                with self._news:
                    self._num_storing -= 1
                    self._report.ended[store.number] = 1
                    self._report.fresh[store.number] = result.stored
                    if result.refused:
                        self._report.refused.add(store.number)
                    self._news.notify_all()
                queue.task_done()

    async def _store(self, store: Store, mark: Any) -> PutResult:
        await self._reached(mark)
        client = self._storer(store.identity)
        read = self._pages.reader(store.pages)
        return await client.put(
            store.tokens,
            lambda block, view: read(block - store.first, view),
            first=store.first,
            last=store.first + len(store.pages),
        )

    async def _observe(self, step: Step, seconds: float, begun: Any, ended: Any) -> None:
        if begun is not None:  # on a GPU the forward pass was only started when `after` was called
            await self._reached(ended)
            seconds = begun.elapsed_time(ended) / 1e3
        await self._storer(step.identity).observe(
            num_requests=step.num_requests,
            sum_n=step.sum_n,
            sum_nc=step.sum_nc,
            seconds=seconds,
            decode_tokens=step.decode_tokens,
        )

    # --- clients --------------------------------------------------------------------------------
    # Loads use the leases of the scheduler's side, so their client is of its group, and is replaced
    # with it when the daemon was started anew. Stores have clients of their own, which are closed
    # between two stores only: a goodbye says that nobody writes any more.

    def _loader(self, identity: Identity, lease: Lease) -> BlockClient:
        known = self._loaders.get(identity)
        if known is None or known[0] != lease.group:
            if known is not None:
                self._submit(known[1].close)
            client = self._connected(identity, lease.group)
            known = self._loaders[identity] = (lease.group, client)
            if len(self._loaders) > MAX_IDENTITIES:
                _, forgotten = self._loaders.popitem(last=False)
                self._submit(forgotten[1].close)
        self._loaders.move_to_end(identity)
        return known[1]

    def _storer(self, identity: Identity) -> BlockClient:
        client = self._storers.get(identity)
        if client is None:
            client = self._storers[identity] = self._connected(identity, b"")
        self._storers.move_to_end(identity)
        return client

    async def _forget_storers(self) -> None:
        """Called between two stores, by the one task that stores."""
        while len(self._storers) > MAX_IDENTITIES:
            _, forgotten = self._storers.popitem(last=False)
            await forgotten.close()

    def _connected(self, identity: Identity, group: bytes) -> BlockClient:
        if not self._loaders and not self._storers:
            self._submit(keep_alive, self._all_clients)
        return self._connect(spec_of(self._spec, identity), group)

    def _all_clients(self) -> list[BlockClient]:
        return [*(client for _, client in self._loaders.values()), *self._storers.values()]

    async def _reached(self, mark: Any) -> None:
        """The work that was begun before this mark is done; at once where there are no marks."""
        if mark is not None:
            await asyncio.to_thread(self._pages.wait, mark)

    def _submit(self, task: Callable[..., Coroutine[Any, Any, None]], *values: Any) -> None:
        self.background.submit(partial(task, *values))

    async def _close(self) -> None:
        if self._stores is not None:
            await self._stores.join()
        for client in self._all_clients():
            await client.close()

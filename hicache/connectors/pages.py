"""An inference engine's paged KV and the cache, whoever copies.

    by the daemon's GPU worker     the pages are shared by CUDA IPC; no byte passes through here
    by this process itself         pages ⇄ pinned memory by kernels of ours (transfer/pages.py),
                                   pinned memory ⇄ mapped arena by the processor

The first where it can be; else `how` says in one sentence why not, and the second serves. Before
`save`, what the caller's kernels still write has to be over, and before `load`, what they still
read; when either returns, nothing is on its way, unless `load` says so.

The arena itself is not registered with CUDA here: a daemon that restarts brings another one, and
memory that is unmapped under its registration can take the inference engine's CUDA context with it.

`Sharing` is the first alone, for a connector that has a way to copy of its own.

For connectors, in the inference engine's own process. Not thread-safe, like its client. CuPy is
passed in, or what stands in for it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from hicache.answers import FetchedRun, Greeting, Match, PutResult
from hicache.channel import run_now
from hicache.client import Client, LoadedPages, PageShare, SharedPages
from hicache.keys import Tokens
from hicache.paged import PageTable
from hicache.storing import Fill
from hicache.transfer.ipc import NotShareable, share
from hicache.transfer.pages import PageCopier, PageLayout, Runner

STAGING_BYTES: Final = 64 << 20
RETRY_S: Final = 10.0
"""Until the daemon is asked again to copy, where it would not or could not."""
GRID: Final = 32
"""Thread blocks of our kernels: 0.93 of a PCIe link's peak on an H200, and few of its SMs."""


def shared_pages(cupy: Any, layout: PageLayout, library: str = "libcuda.so.1") -> SharedPages:
    """This layout's tensors, of the current GPU, for another process. Raises NotShareable."""
    runtime = cupy.cuda.runtime
    handles: dict[bytes, int] = {}
    rows = []
    for plane in layout.planes:
        num_bytes = (plane.num_pages - 1) * plane.stride_bytes + layout.page_bytes
        found = share(cupy, plane.base, num_bytes, library)
        which = handles.setdefault(found.handle, len(handles))
        rows.append((which, found.offset, plane.stride_bytes, plane.num_pages))
    bus_id = str(runtime.deviceGetPCIBusId(runtime.getDevice())).lower()
    planes = np.array(rows, np.uint64)
    per_block = layout.pages_per_block
    return SharedPages(bus_id, tuple(handles), planes, layout.page_bytes, per_block)


class Sharer(Protocol):
    """What is asked of `hicache.aio.AsyncClient`."""

    @property
    def greeting(self) -> Greeting | None: ...
    @property
    def last_error(self) -> str: ...
    async def share_pages(self, pages: SharedPages) -> PageShare | None: ...
    async def unshare_pages(self, share: PageShare) -> bool: ...


class Sharing:
    """Pages shared with the daemon's GPU worker by one client: anew where the daemon or the worker
    is another by now, and after a while where it was refused. `how` says who copies, and why if it
    is not the worker.

    A share that is left is used no more, and no other takes its place before the worker has let go
    of it: so no more than what one share had under way is ever in doubt.
    """

    def __init__(self, client: Sharer, pages: SharedPages) -> None:
        self.how = ""
        self._client, self._pages = client, pages
        self._share: PageShare | None = None
        self._left: PageShare | None = None
        self._retry_s = 0.0
        self._asking = asyncio.Lock()

    async def usable(self) -> PageShare | None:
        """None: copy yourself."""
        async with self._asking:
            if self._left is not None and not self._left.is_over:
                return None
            share, greeting = self._share, self._client.greeting
            if share is not None and not share.is_in_doubt:
                is_of_before = greeting is not None and greeting.session != share.session
                if is_of_before or share.is_over:
                    await self._client.unshare_pages(share)
                    self._share, self._retry_s = None, 0.0
            if self._share is None and time.monotonic() >= self._retry_s:
                await self._share_again()
            return self._share

    @property
    def is_in_doubt(self) -> bool:
        """Whether something is, or may be, on its way."""
        return any(share is not None and share.is_in_doubt for share in (self._share, self._left))

    def leave(self, share: PageShare) -> None:
        """Use it no more, since something of it was not answered."""
        if self._share is share:
            self._share, self._left, self._retry_s = None, share, 0.0

    async def close(self) -> bool:
        """Leave it; whether the worker has let go, so that the tensors may be freed. False: ask
        again."""
        if self._share is not None:
            self.leave(self._share)
        left = self._left
        return left is None or left.is_over or await self._client.unshare_pages(left)

    async def _share_again(self) -> None:
        self._retry_s = time.monotonic() + RETRY_S
        self._share = await self._client.share_pages(self._pages)
        if self._share is None:
            self.how = f"copied by this process itself: {self._client.last_error}"
        else:
            self.how = "copied by the daemon's GPU worker"


class _Blocking:
    """A blocking client as a sharer: its coroutines never wait."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def greeting(self) -> Greeting | None:
        return self._client.greeting

    @property
    def last_error(self) -> str:
        return self._client.last_error

    async def share_pages(self, pages: SharedPages) -> PageShare | None:
        return self._client.share_pages(pages)

    async def unshare_pages(self, share: PageShare) -> bool:
        return self._client.unshare_pages(share)


class PagedCache:
    """`runner` runs our kernels where this process copies itself. `how` says who copies, and why
    if it is this process."""

    def __init__(
        self,
        client: Client,
        layout: PageLayout,
        cupy: Any,
        runner: Runner,
        library: str = "libcuda.so.1",
    ) -> None:
        self._client, self._layout, self._cupy = client, layout, cupy
        self._copier = PageCopier(layout, runner)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._step = max(1, STAGING_BYTES // layout.block_bytes)
        self._pinned: Any = None
        self._sharing: Sharing | None = None
        try:
            self._sharing = Sharing(_Blocking(client), shared_pages(cupy, layout, library))
        except NotShareable as reason:
            self._why = f"copied by this process itself: {reason}"
        self._usable()

    @property
    def how(self) -> str:
        return self._why if self._sharing is None else self._sharing.how

    def load(self, match: Match, pages: PageTable) -> LoadedPages:
        """The blocks worth reloading into `pages`: int32 [blocks, pages per block]. Where it is not
        `is_at_rest`, none of these pages may be used before `is_at_rest` of this says so."""
        if (shared := self._usable()) is not None:
            return self._client.load_pages(match, shared, pages)
        started_s = time.monotonic()
        wanted = min(match.decision.reload_blocks, len(pages))
        came = np.zeros(wanted, bool)
        for run in self._client.fetch_runs(match):
            rows = pages[run.first : min(run.first + run.num_blocks, wanted)]
            came[run.first : run.first + self._load(run, rows)] = True
        blocks = wanted if came.all() else int(came.argmin())
        return LoadedPages(blocks, time.monotonic() - started_s)

    def save(
        self, tokens: Tokens, pages: PageTable, *, first: int = 0, durable: bool = False
    ) -> PutResult:
        """Store blocks `first …` of this prompt from `pages`."""
        if (shared := self._usable()) is not None:
            return self._client.save_pages(tokens, shared, pages, first=first, durable=durable)

        fill, last = self._fill(pages), first + len(pages)
        return self._client.put(
            tokens, lambda n, view: fill(n - first, view), first=first, last=last, durable=durable
        )

    @property
    def is_at_rest(self) -> bool:
        """Whether pages that were in doubt may be used again. Asks the daemon while they are."""
        if self._sharing is None or not self._sharing.is_in_doubt:
            return True
        return run_now(self._sharing.close())

    def close(self) -> bool:
        """Before the client is closed. Whether the tensors may be freed now; False: ask again."""
        self._stream.synchronize()
        self._pinned = None
        return self._sharing is None or run_now(self._sharing.close())

    def _usable(self) -> PageShare | None:
        return None if self._sharing is None else run_now(self._sharing.usable())

    # --- copying here ---------------------------------------------------------------------------

    def _load(self, run: FetchedRun, rows: PageTable) -> int:
        """A run's first blocks into pages; how many, fewer where slots were given away."""
        for first in range(0, len(rows), self._step):
            part = rows[first : first + self._step]
            staging = self._staging()[: len(part)]
            for block, view in zip(staging, run.views[first : first + len(part)], strict=True):
                block[:] = view
            if not run.verify():
                return first
            self._run(staging, part, to_blocks=False)
        return len(rows)

    def _fill(self, pages: PageTable) -> Fill:
        """Writes block n of `pages`; they are gathered many at a time."""
        staged = range(0)

        def fill(index: int, view: npt.NDArray[np.uint8]) -> None:
            nonlocal staged
            if index not in staged:
                staged = range(index, min(index + self._step, len(pages)))
                part = pages[staged.start : staged.stop]
                self._run(self._staging()[: len(part)], part, to_blocks=True)
            view[:] = self._staging()[index - staged.start]

        return fill

    def _run(self, staging: npt.NDArray[np.uint8], rows: PageTable, *, to_blocks: bool) -> None:
        start = int(staging.ctypes.data)
        blocks = start + self._layout.block_bytes * np.arange(len(rows), dtype=np.uint64)
        table = np.ascontiguousarray(rows)
        more = {"grid": GRID, "stream": self._stream}
        self._copier.start(blocks.astype(np.uint64), table, to_blocks=to_blocks, **more)
        self._stream.synchronize()

    def _staging(self) -> npt.NDArray[np.uint8]:
        """Pinned memory for so many blocks, made when it is first needed."""
        size = self._step * self._layout.block_bytes
        if self._pinned is None:
            self._pinned = self._cupy.cuda.alloc_pinned_memory(size)
        return np.frombuffer(self._pinned, np.uint8, size).reshape(self._step, -1)

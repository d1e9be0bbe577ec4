"""An inference engine's paged KV and the cache, whoever copies.

    by the daemon's GPU worker     the pages are shared by CUDA IPC; no byte passes through here
    by this process itself         pages ⇄ pinned memory by kernels of ours (transfer/pages.py),
                                   pinned memory ⇄ mapped arena by the processor

The first where it can be; else `how` says in one sentence why not, and the second serves. Before
`save`, what the caller's kernels still write has to be over, and before `load`, what they still
read; when either returns, nothing is on its way, unless `load` says so.

The arena itself is not registered with CUDA here: a daemon that restarts brings another one, and
memory that is unmapped under its registration can take the inference engine's CUDA context with it.

For connectors, in the inference engine's own process. Not thread-safe, like its client. CuPy is
passed in, or what stands in for it.
"""

from __future__ import annotations

import time
from math import inf
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hicache.answers import FetchedRun, Match, PutResult
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
        self._library = library
        self._copier = PageCopier(layout, runner)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._step = max(1, STAGING_BYTES // layout.block_bytes)
        self._pinned: Any = None
        self._share: PageShare | None = None
        self._retry_s = 0.0
        self._usable()

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
        if self._share is None or not self._share.is_in_doubt:
            return True
        if not self._client.unshare_pages(self._share):
            return False
        self._share, self._retry_s = None, 0.0
        return True

    def close(self) -> bool:
        """Before the client is closed. Whether the tensors may be freed now; False: ask again."""
        self._stream.synchronize()
        self._pinned = None
        return self._share is None or self._client.unshare_pages(self._share)

    def _usable(self) -> PageShare | None:
        """The share, made anew where the daemon or its worker is another by now, or after a while
        where it was refused. None: copy here. While pages are in doubt it is not touched."""
        share, greeting = self._share, self._client.greeting
        if share is not None and not share.is_in_doubt:
            is_of_before = greeting is not None and greeting.session != share.session
            if is_of_before or share.is_over:
                self._client.unshare_pages(share)
                self._share, self._retry_s = None, 0.0
        if self._share is None and time.monotonic() >= self._retry_s:
            self._share_again()
        return self._share

    def _share_again(self) -> None:
        """Have the worker copy, if that can be."""
        try:
            pages = shared_pages(self._cupy, self._layout, self._library)
        except NotShareable as reason:  # of this memory, for good
            self.how, self._retry_s = f"copied by this process itself: {reason}", inf
            return
        self._share = self._client.share_pages(pages)
        self._retry_s = time.monotonic() + RETRY_S
        if self._share is None:
            self.how = f"copied by this process itself: {self._client.last_error}"
        else:
            self.how = "copied by the daemon's GPU worker"

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

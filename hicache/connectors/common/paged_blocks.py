"""Copies between an inference engine's paged KV and the cache, in one of two ways:

    by the daemon's GPU worker     the pages are shared by CUDA IPC; no byte passes through here
    by this process                pages ⇄ pinned memory by our kernels, pinned memory ⇄ mapped
                                   arena by the processor (staging.py)

The first is used where possible; otherwise `how` gives the reason in one sentence. Before `save`,
the caller's kernels must have finished writing the pages, and before `load`, reading them. When
either returns, no copy is under way, unless the result of `load` says so. `load_by_part` is a
`load` that is awaited layer by layer (page_load.py), in both ways alike.

The arena itself is not registered with CUDA here: a daemon that restarts brings a new one, and
unmapping registered memory can destroy the inference engine's CUDA context.

For connectors, in the inference engine's own process. Not thread-safe, like its client. CuPy, or a
stand-in, is passed in.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from contextlib import closing
from typing import Any, Final, TypeVar

import numpy as np

from hicache.client import Client, LoadedPages, LoadedPart, PageShare, SharedPages
from hicache.client.gpu_pages import PageTable
from hicache.client.results import Greeting, Match, PutResult
from hicache.connectors.common.page_load import PageLoad
from hicache.connectors.common.page_sharing import PageSharing
from hicache.connectors.common.staging import Staging
from hicache.protocol.messages import Tokens
from hicache.transfer.gpu_pages.cuda_ipc import NotShareable, share
from hicache.transfer.gpu_pages.page_kernels import PageLayout, Runner

T = TypeVar("T")

STAGING_BYTES: Final = 64 << 20


def shared_pages(cupy: Any, layout: PageLayout, library: str = "libcuda.so.1") -> SharedPages:
    """This layout's tensors on the current GPU, for another process. Raises NotShareable."""
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


class _BlockingSharer:
    """A blocking client in the form of a `Sharer`; its coroutines never wait."""

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
    """`runner` runs our kernels where this process copies. `how` says which process copies, and the
    reason if it is this one."""

    def __init__(
        self,
        client: Client,
        layout: PageLayout,
        cupy: Any,
        runner: Runner,
        library: str = "libcuda.so.1",
    ) -> None:
        self._client, self._layout = client, layout
        self._staging = Staging(cupy, layout, runner, STAGING_BYTES)
        self._sharing: PageSharing | None = None
        try:
            self._sharing = PageSharing(
                _BlockingSharer(client), shared_pages(cupy, layout, library)
            )
        except NotShareable as reason:  # never shareable
            self._why = f"copied by this process itself: {reason}"
        self._usable()

    @property
    def how(self) -> str:
        return self._why if self._sharing is None else self._sharing.how

    def load(self, match: Match, pages: PageTable) -> LoadedPages:
        """Load the blocks worth reloading into `pages`: int32 [blocks, pages per block]. If the
        result is not `is_at_rest`, none of these pages may be used until `self.is_at_rest`."""
        return self.load_by_part(match, pages, planes_per_part=0).end()

    def load_by_part(self, match: Match, pages: PageTable, *, planes_per_part: int) -> PageLoad:
        """The same, in parts of `planes_per_part` planes (0: all): attention of a layer may start
        while the next layers load. Other loads and saves may be made in between."""
        rows = pages[: match.decision.reload_blocks]
        num_planes = len(self._layout.planes)
        if (shared := self._usable()) is not None:
            parts = self._client.load_pages_by_part(
                match, shared, rows, planes_per_part=planes_per_part
            )
            return PageLoad(parts, len(rows), num_planes, lambda: not shared.is_in_doubt)
        self._layout.check(len(rows), rows, to_blocks=False)
        parts = self._parts(match, rows, planes_per_part)
        return PageLoad(parts, len(rows), num_planes, lambda: True)

    def save(
        self, tokens: Tokens, pages: PageTable, *, first: int = 0, durable: bool = False
    ) -> PutResult:
        """Store blocks `first …` of this prompt from `pages`."""
        if (shared := self._usable()) is not None:
            return self._client.save_pages(tokens, shared, pages, first=first, durable=durable)

        fill, last = self._staging.fill(pages), first + len(pages)
        return self._client.put(
            tokens, lambda n, view: fill(n - first, view), first=first, last=last, durable=durable
        )

    @property
    def is_at_rest(self) -> bool:
        """Whether pages that were in doubt may be used again. Asks the daemon while they are in
        doubt; loads by part that are under way end first."""
        if self._sharing is None or not self._sharing.is_in_doubt:
            return True
        return run_now(self._sharing.close())

    def close(self) -> bool:
        """Called before the client is closed. Returns whether the tensors may be freed; if not,
        call again."""
        self._staging.close()
        return self._sharing is None or run_now(self._sharing.close())

    def _usable(self) -> PageShare | None:
        return None if self._sharing is None else run_now(self._sharing.usable())

    def _parts(
        self, match: Match, rows: PageTable, planes_per_part: int
    ) -> Generator[LoadedPart, None, None]:
        """Copied by this process, each run as it becomes readable."""
        with closing(self._client.fetch_runs(match)) as runs:
            for run in runs:
                part = rows[run.first : run.first + run.num_blocks]
                yield from self._staging.load(run, part, planes_per_part)


def run_now(steps: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, because what it awaits is a blocking client's call."""
    try:
        steps.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    steps.close()
    raise RuntimeError("a blocking client's call suspended")

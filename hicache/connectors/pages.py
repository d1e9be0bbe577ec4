"""An inference engine's paged KV and the cache, whoever copies.

    by the daemon's GPU worker     the pages are shared by CUDA IPC; no byte passes through here
    by this process itself         pages ⇄ pinned memory by kernels of ours, pinned memory ⇄ mapped
                                   arena by the processor (staging.py)

The first where it can be; else `how` says in one sentence why not, and the second serves. Before
`save`, what the caller's kernels still write has to be over, and before `load`, what they still
read; when either returns, nothing is on its way, unless `load` says so. `load_by_part` is a `load`
that is awaited layer by layer (page_load.py), the same whoever copies.

The arena itself is not registered with CUDA here: a daemon that restarts brings another one, and
memory that is unmapped under its registration can take the inference engine's CUDA context with it.

For connectors, in the inference engine's own process. Not thread-safe, like its client. CuPy is
passed in, or what stands in for it.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from math import inf
from typing import Any, Final

import numpy as np

from hicache.answers import Match, PutResult
from hicache.client import Client, LoadedPages, LoadedPart, PageShare, SharedPages
from hicache.connectors.page_load import PageLoad
from hicache.connectors.staging import Staging
from hicache.keys import Tokens
from hicache.paged import PageTable
from hicache.transfer.ipc import NotShareable, share
from hicache.transfer.pages import PageLayout, Runner

STAGING_BYTES: Final = 64 << 20
RETRY_S: Final = 10.0
"""Until the daemon is asked again to copy, where it would not or could not."""


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
        self._staging = Staging(cupy, layout, runner, STAGING_BYTES)
        self._share: PageShare | None = None
        self._retry_s = 0.0
        self._usable()

    def load(self, match: Match, pages: PageTable) -> LoadedPages:
        """The blocks worth reloading into `pages`: int32 [blocks, pages per block]. Where it is not
        `is_at_rest`, none of these pages may be used before `is_at_rest` of this says so."""
        if (shared := self._usable()) is not None:
            return self._client.load_pages(match, shared, pages)
        return self.load_by_part(match, pages, planes_per_part=0).end()

    def load_by_part(self, match: Match, pages: PageTable, *, planes_per_part: int) -> PageLoad:
        """The same, to be awaited after every so many planes (0: all of them): attention of a layer
        may start while the next ones load. Other loads and saves may be made in between."""
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
        """Whether pages that were in doubt may be used again. Asks the daemon while they are, and
        what is loaded by part meanwhile comes to its end first."""
        if self._share is None or not self._share.is_in_doubt:
            return True
        if not self._client.unshare_pages(self._share):
            return False
        self._share, self._retry_s = None, 0.0
        return True

    def close(self) -> bool:
        """Before the client is closed. Whether the tensors may be freed now; False: ask again."""
        self._staging.close()
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

    def _parts(
        self, match: Match, rows: PageTable, planes_per_part: int
    ) -> Generator[LoadedPart, None, None]:
        """Copied here, each run as it becomes readable."""
        with closing(self._client.fetch_runs(match)) as runs:
            for run in runs:
                part = rows[run.first : run.first + run.num_blocks]
                yield from self._staging.load(run, part, planes_per_part)

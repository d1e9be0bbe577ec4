"""Copies blocks between an inference engine's pages and memory that is not registered with CUDA.

The processor copies between that memory (the mapped arena, message parts) and pinned memory, our
kernels (gpu_pages/page_kernels.py) between pinned memory and pages. Each uses one half of it:

    processor   [ layer 0 → A ][ layer 1 → B ][ layer 2 → A ]
    kernels                    [ A → pages   ][ B → pages   ][ A → pages   ]
    reported                         layer 0 ┘      layer 1 ┘      layer 2 ┘

A half is filled again when the event behind the kernel that reads it has completed, and pages are
reported when the event behind the kernel that writes them has. Several loads may take turns.

For `PagedCache`. Not thread-safe; CuPy, or a stand-in, is passed in.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.client.gpu_pages import LoadedPart, PageTable
from hicache.client.put import Fill
from hicache.client.results import FetchedRun
from hicache.transfer.gpu_pages.page_kernels import GRID_PINNED, PageCopier, PageLayout, Runner

Bytes = npt.NDArray[np.uint8]


class Staging:
    """`num_bytes` of pinned memory, allocated at first use; more if a half could not hold one
    block."""

    def __init__(self, cupy: Any, layout: PageLayout, runner: Runner, num_bytes: int) -> None:
        self._cupy, self._layout, self._runner = cupy, layout, runner
        self._half_bytes = max(num_bytes // 2, layout.block_bytes)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._copiers: dict[range, PageCopier] = {}
        self._halves: list[tuple[Bytes, Any]] = []  # memory, the event behind its last kernel
        self._num_given = 0

    def load(
        self, run: FetchedRun, rows: PageTable, planes_per_part: int
    ) -> Generator[LoadedPart, None, None]:
        """Load the first blocks of a run into `rows` of pages, `planes_per_part` planes at a time
        (0: all). Yields what has arrived; ends early if the run's slots were reused. When it has
        ended, no copy is under way."""
        views = run.views[: len(rows)]
        last: tuple[LoadedPart, Any] | None = None
        try:
            for planes in self._layout.parts(planes_per_part):
                for blocks in _chunks(len(rows), self._room(planes)):
                    staged = self._free_half(len(blocks), planes)
                    span = self._layout.span(planes)
                    for row, view in zip(staged, views[blocks.start : blocks.stop], strict=True):
                        row[:] = view[span]
                    if not run.verify():
                        return
                    event = self._copy(
                        staged, rows[blocks.start : blocks.stop], planes, to_blocks=False
                    )
                    if last is not None:
                        last[1].synchronize()
                        yield last[0]
                    part = LoadedPart(run.first + blocks.start, len(blocks), planes.stop)
                    last = part, event
            if last is not None:
                last[1].synchronize()
                yield last[0]
        finally:
            self.settle()

    def fill(self, pages: PageTable) -> Fill:
        """Returns a function that writes block n of `pages` into a view. Blocks are gathered many
        at a time, and again if another call has reused their half."""
        planes = range(len(self._layout.planes))
        gathered, first, given = np.empty((0, 0), np.uint8), 0, 0

        def fill(index: int, view: Bytes) -> None:
            nonlocal gathered, first, given
            is_overwritten = self._num_given - given >= 2
            if is_overwritten or not first <= index < first + len(gathered):
                first, part = index, pages[index : index + self._room(planes)]
                gathered = self._free_half(len(part), planes)
                given = self._num_given
                self._copy(gathered, part, planes, to_blocks=True).synchronize()
            view[:] = gathered[index - first]

        return fill

    def settle(self) -> None:
        """Wait until no copy is under way."""
        self._stream.synchronize()

    def close(self) -> None:
        """Wait for the copies, and free the pinned memory."""
        self.settle()
        self._halves.clear()

    def _room(self, planes: range) -> int:
        """How many blocks of these planes fit into a half."""
        return self._half_bytes // (len(planes) * self._layout.plane_bytes)

    def _free_half(self, num_blocks: int, planes: range) -> Bytes:
        """The half that was used longer ago, as uint8 [blocks, bytes of these planes]; waits until
        no kernel uses it. The next `_copy` must be from or to it."""
        if not self._halves:
            for _ in range(2):
                pinned = self._cupy.cuda.alloc_pinned_memory(self._half_bytes)
                self._halves.append((np.frombuffer(pinned, np.uint8, self._half_bytes), None))
        memory, event = self._halves[0]
        if event is not None:
            event.synchronize()
        self._num_given += 1
        size = len(planes) * self._layout.plane_bytes
        return memory[: num_blocks * size].reshape(num_blocks, size)

    def _copy(self, half: Bytes, rows: PageTable, planes: range, *, to_blocks: bool) -> Any:
        """Enqueue the copy. Returns the event behind it."""
        start, size = int(half.ctypes.data), half.shape[1]
        blocks = np.arange(start, start + len(half) * size, size, dtype=np.uint64)
        copier = self._copiers.get(planes)
        if copier is None:
            copier = PageCopier(self._layout.only(planes), self._runner)
            self._copiers[planes] = copier
        more = {"grid": GRID_PINNED, "stream": self._stream}
        copier.start(blocks, np.ascontiguousarray(rows), to_blocks=to_blocks, **more)
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(self._stream)
        memory, _ = self._halves.pop(0)
        self._halves.append((memory, event))
        return event


def _chunks(num_blocks: int, step: int) -> Iterator[range]:
    for first in range(0, num_blocks, step):
        yield range(first, min(first + step, num_blocks))

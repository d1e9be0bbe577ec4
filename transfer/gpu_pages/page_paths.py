"""Three ways to enqueue a copy between an inference engine's pages and slots.

    ByCopyEngines   a copy per page, adjacent pages in one: does not slow the inference engine's
                    kernels down; about 3 µs in the driver for each copy
    ByKernel        one launch for all pages (kernels.cu): uses SMs while it runs
    Fastest         the faster one of these, as measured (page_choice.py), by memory and page size

All only enqueue on the given stream; engine_pages.py defines when pages and slots may be used
again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from hicache.transfer.gpu_pages.page_kernels import (
    Addresses,
    PageCopier,
    PageLayout,
    PageNumbers,
    Runner,
)
from hicache.transfer.media.cuda_copy import CopyPath, Steps
from hicache.transfer.media.pinned_memory import PinnedArena

Memory = Literal["gpu", "pinned", "pageable"]
"""Of slots: the pool; the part of the arena that is registered with CUDA; the part that is not. A
kernel that accessed the last would destroy the CUDA context."""

REFUSALS: Final = (RuntimeError, MemoryError)
"""What CuPy raises where a launch was not enqueued; CuPy's own errors are RuntimeErrors."""


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Blocks of a copy in one kind of memory: their addresses, and their pages [blocks, pages per
    block]."""

    memory: Memory
    blocks: Addresses
    pages: PageNumbers


class PagePath(Protocol):
    """`enqueue` copies some planes of a group's blocks, whose table was checked, and returns before
    the copies have finished. If it raises, some of them may be running. `trouble`: a sentence for
    the operator about a problem since the start, or ""."""

    @property
    def name(self) -> str: ...

    @property
    def trouble(self) -> str: ...

    def enqueue(
        self, layout: PageLayout, planes: range, group: PageGroup, stream: Any, *, to_blocks: bool
    ) -> None: ...


class ByCopyEngines:
    """By the copy engines. Raises what `copies` raises."""

    name = "copy engines"
    trouble = ""

    def __init__(self, copies: CopyPath, pinned: PinnedArena) -> None:
        self._copies, self._pinned = copies, pinned

    def enqueue(
        self, layout: PageLayout, planes: range, group: PageGroup, stream: Any, *, to_blocks: bool
    ) -> None:
        pieces = layout.pieces(group.blocks, group.pages, planes, to_blocks=to_blocks)
        to_device = None
        if group.memory != "gpu":
            to_device = not to_blocks
            pieces = self._cut(pieces, host=0 if to_blocks else 1)
        self._copies.enqueue(pieces, stream.ptr, to_device=to_device)

    def _cut(self, pieces: npt.NDArray[np.uint64], host: int) -> npt.NDArray[np.uint64]:
        """Cut the pieces where two chunks of pinned memory meet: CUDA refuses a copy across."""
        is_whole = self._pinned.is_in_one_chunk(pieces[:, host], pieces[:, 2])
        if is_whole.all():
            return pieces
        cut = [
            (to + at, source + at, num_bytes)
            for to, source, length in pieces[~is_whole].tolist()
            for at, num_bytes in self._pinned.cut((to, source)[host], length)
        ]
        return np.concatenate([pieces[is_whole], np.array(cut, np.uint64)])


class ByKernel:
    """By the kernel. `runners`: by `to_blocks`, since loads and saves have a thread each and a
    runner belongs to one thread. `grids`: thread blocks, by memory. Raises what its runner raises,
    and has then enqueued nothing that accesses a page or a slot."""

    name = "kernels"
    trouble = ""

    def __init__(self, runners: Mapping[bool, Runner], grids: Mapping[Memory, int]) -> None:
        self._runners, self._grids = runners, grids

    def enqueue(
        self, layout: PageLayout, planes: range, group: PageGroup, stream: Any, *, to_blocks: bool
    ) -> None:
        copier = PageCopier(layout.only(planes), self._runners[to_blocks])
        blocks = group.blocks + np.uint64(layout.span(planes).start)
        grid = self._grids[group.memory]
        copier.start(blocks, group.pages, to_blocks=to_blocks, grid=grid, stream=stream)


class Fastest:
    """By the path that `steps` gives for the group's memory and the bytes of a page. By the copy
    engines where it gives none, and always once a kernel was refused."""

    name = "the faster one of copy engines and kernels"

    def __init__(self, engines: ByCopyEngines, steps: Mapping[Memory, Steps[PagePath]]) -> None:
        self._engines, self._steps = engines, steps
        self.trouble = ""

    def enqueue(
        self, layout: PageLayout, planes: range, group: PageGroup, stream: Any, *, to_blocks: bool
    ) -> None:
        path: PagePath = self._engines
        if group.memory in self._steps and not self.trouble:
            path = self._steps[group.memory].at(layout.page_bytes)
        try:
            path.enqueue(layout, planes, group, stream, to_blocks=to_blocks)
        except REFUSALS as error:
            if path is self._engines:
                raise
            self.trouble = f"a page kernel was refused ({error}): now using the copy engines"
            self._engines.enqueue(layout, planes, group, stream, to_blocks=to_blocks)

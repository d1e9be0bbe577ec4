"""How a copy between an inference engine's pages and slots is enqueued.

    ByCopyEngines   a piece a page, neighbours in one: takes nothing from the inference engine's
                    kernels, and the driver some 3 µs for each piece
    ByKernel        one launch for all pages (kernels.cu): takes SMs while it runs
    Fastest         the one of them that was faster here (page_choice.py), by memory and page size

All only enqueue, on the stream they are given: when pages and slots may be used again is said in
engine_pages.py, whoever copies.
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
"""Of slots: the pool; the arena where CUDA knows it; the arena where it does not. A kernel that
touched the last would take the CUDA context with it."""

REFUSALS: Final = (RuntimeError, MemoryError)
"""What CuPy raises where something was not enqueued: its own errors are RuntimeErrors."""


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Blocks of a copy whose slots lie in one kind of memory: their addresses, and their pages
    [blocks, pages per block]."""

    memory: Memory
    blocks: Addresses
    pages: PageNumbers


class PagePath(Protocol):
    """`enqueue` takes some planes of a group's blocks, whose table was checked, and returns before
    the bytes have arrived. Whatever it raises, some of them may be on their way. `trouble`: what
    the operator should know of that has happened since, or empty."""

    @property
    def name(self) -> str: ...

    @property
    def trouble(self) -> str: ...

    def enqueue(
        self, layout: PageLayout, planes: range, group: PageGroup, stream: Any, *, to_blocks: bool
    ) -> None: ...


class ByCopyEngines:
    """Raises what `copies` raises."""

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
        """No piece of the arena lies in two chunks of pinned memory: CUDA refuses such a copy."""
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
    """`runners` by `to_blocks`: loads and saves have a thread each, and a runner belongs to one.
    `grids`: so many thread blocks, by memory. Raises what its runner raises, and then has enqueued
    nothing that touches a page or a slot."""

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
    """By `steps` of the group's memory and the bytes of a page; by the copy engines where there are
    none, and for good once a kernel was refused."""

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
            self.trouble = f"a page kernel was refused ({error}): pages by the copy engines"
            self._engines.enqueue(layout, planes, group, stream, to_blocks=to_blocks)

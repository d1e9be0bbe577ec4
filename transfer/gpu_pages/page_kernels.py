"""Copies between an inference engine's pages in GPU memory and blocks, by a kernel (kernels.cu).

For connectors, in the inference engine's process, and for the GPU worker where it may run kernels.
The caller imports CuPy; a `PageCopier` may be used by one thread at a time.

A layout is a list of planes: one per layer where a page holds K and V together, two where it does
not. In every known layout of an inference engine each page is contiguous:

    [pages, tokens, heads, 2·dim]       vLLM, K and V side by side      one plane a layer
    [pages, 2, tokens, heads, dim]      vLLM, K and V in one page       one plane a layer
    [2, pages, tokens, heads, dim]      vLLM, split                     two planes a layer
    [tokens, heads, dim] for K and V    SGLang, a page of 1 … n tokens  two planes a layer
    [pages, tokens, latent]             MLA                             one plane a layer

A block is its planes in order, each the block's pages in order, so a layer is contiguous in it.
Blocks may be in GPU memory or in pinned host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

SOURCE: Final = Path(__file__).with_name("kernels.cu")
THREADS: Final = 512
GRID_PINNED: Final = 32
"""Thread blocks for copies with pinned memory: they reach 0.93 of a PCIe link's peak on an H200
(with 4: 0.92), and use few of its SMs."""
UNITS: Final = (16, 4, 1)
_TILE_UNITS: Final = 32 * 8  # LANES · DEPTH of kernels.cu
_MAX_TILES: Final = 1 << 31

Addresses = npt.NDArray[np.uint64]
PageNumbers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Plane:
    """Pages of one kind in one layer: the address of page 0, and the bytes between pages."""

    base: int
    stride_bytes: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class PageLayout:
    """An inference engine's pages. Raises ValueError on pages that overlap or have no bytes."""

    planes: tuple[Plane, ...]
    page_bytes: int
    pages_per_block: int

    def __post_init__(self) -> None:
        if not self.planes or self.page_bytes <= 0 or self.pages_per_block <= 0:
            raise ValueError("a layout needs planes, and pages of at least one byte")
        if any(plane.stride_bytes < self.page_bytes for plane in self.planes):
            raise ValueError("pages overlap: their stride is less than their bytes")

    @property
    def block_bytes(self) -> int:
        return len(self.planes) * self.plane_bytes

    @property
    def plane_bytes(self) -> int:
        """The bytes of one plane of one block."""
        return self.pages_per_block * self.page_bytes

    def span(self, planes: range) -> slice:
        """The bytes of a block that these planes take."""
        return slice(planes.start * self.plane_bytes, planes.stop * self.plane_bytes)

    def only(self, planes: range) -> PageLayout:
        """The layout of blocks with only these planes."""
        kept = self.planes[planes.start : planes.stop]
        return PageLayout(kept, self.page_bytes, self.pages_per_block)

    def parts(self, planes_per_part: int) -> Iterator[range]:
        """The planes in order, `planes_per_part` at a time (0: all)."""
        num_planes = len(self.planes)
        step = planes_per_part or num_planes
        for first in range(0, num_planes, step):
            yield range(first, min(first + step, num_planes))

    def check(self, num_blocks: int, pages: PageNumbers, *, to_blocks: bool) -> None:
        """Raises ValueError on a table [blocks, pages per block] of another shape, on a page number
        out of range, and on a page that would be written twice."""
        if pages.shape != (num_blocks, self.pages_per_block):
            raise ValueError(f"{pages.shape} pages for {num_blocks} blocks of this layout")
        num_pages = min(plane.num_pages for plane in self.planes)
        if pages.size and (pages.min() < 0 or pages.max() >= num_pages):
            raise ValueError(f"a page number is out of range: there are {num_pages} pages")
        if pages.size and not to_blocks and np.bincount(pages.reshape(-1)).max() > 1:
            raise ValueError("a page would be written twice")

    def pieces(
        self, blocks: Addresses, pages: PageNumbers, planes: range, *, to_blocks: bool
    ) -> npt.NDArray[np.uint64]:
        """The copies of some planes as rows of (destination, source, bytes), for the copy engines:
        by plane, block and page, with adjacent pages in one row."""
        size = self.page_bytes
        bases = np.array([self.planes[n].base for n in planes], np.uint64)[:, None, None]
        strides = np.array([self.planes[n].stride_bytes for n in planes], np.uint64)[:, None, None]
        here = (bases + strides * pages.astype(np.uint64)).reshape(-1)
        order = np.arange(planes.start, planes.stop, dtype=np.uint64)[:, None, None]
        within = order * self.pages_per_block + np.arange(self.pages_per_block, dtype=np.uint64)
        there = (blocks[None, :, None] + within * np.uint64(size)).reshape(-1)
        step = np.uint64(size)
        is_first = np.ones(len(here), bool)  # of a piece
        is_first[1:] = (here[1:] != here[:-1] + step) | (there[1:] != there[:-1] + step)
        starts = np.flatnonzero(is_first)
        sizes = np.diff(starts, append=len(here)) * size
        to, source = (there, here) if to_blocks else (here, there)
        return np.stack([to[starts], source[starts], sizes.astype(np.uint64)], axis=1)


def whole_pages(
    tensors: Iterable[int], num_pages: int, page_bytes: int, pages_per_block: int
) -> PageLayout:
    """The layout with one plane per tensor, page after page: vLLM's `[pages, …]`, and MLA."""
    planes = tuple(Plane(base, page_bytes, num_pages) for base in tensors)
    return PageLayout(planes, page_bytes, pages_per_block)


def split_pages(
    tensors: Iterable[int], num_pages: int, page_bytes: int, pages_per_block: int
) -> PageLayout:
    """The layout with two planes per tensor, all pages of K before all of V: vLLM's `[2, pages,
    …]`. `page_bytes`: of K or of V alone."""
    half = num_pages * page_bytes
    bases = [base + at for base in tensors for at in (0, half)]
    return whole_pages(bases, num_pages, page_bytes, pages_per_block)


def token_pages(
    keys: Sequence[int],
    values: Sequence[int],
    num_pages: int,
    page_bytes: int,
    pages_per_block: int,
) -> PageLayout:
    """The layout with a tensor of K and one of V per layer, `[tokens, heads, dim]`: SGLang. A page
    is a run of at least one token."""
    bases = [base for both in zip(keys, values, strict=True) for base in both]
    return whole_pages(bases, num_pages, page_bytes, pages_per_block)


@dataclass(frozen=True, slots=True)
class Launch:
    """The arguments of one launch of the kernel."""

    kernel: str
    plane_bases: Addresses
    plane_strides: Addresses
    block_bases: Addresses
    pages: PageNumbers
    numbers: tuple[int, int, int, int, int]
    """Planes, pages per block, blocks, bytes per page, 1 for pages → blocks or 0."""


class Runner(Protocol):
    """Enqueues a launch. The caller may change the arrays once `run` has returned."""

    def run(self, launch: Launch, grid: int, stream: Any) -> None: ...


class PageCopier:
    """Copies whole blocks from and to the pages of one layout.

    `start` enqueues on a stream and returns. The caller records an event after it, and may reuse
    pages and blocks once that has completed.
    """

    def __init__(self, layout: PageLayout, runner: Runner) -> None:
        self.layout = layout
        self._runner = runner
        self._bases = np.array([plane.base for plane in layout.planes], np.uint64)
        self._strides = np.array([plane.stride_bytes for plane in layout.planes], np.uint64)
        self._bits = int(np.bitwise_or.reduce(self._bases | self._strides)) | layout.page_bytes

    def start(
        self,
        blocks: Addresses,
        pages: PageNumbers,
        *,
        to_blocks: bool,
        grid: int,
        stream: Any = None,
    ) -> None:
        """Copy block n, at address blocks[n], from or to pages[n, :] of every plane, with `grid`
        thread blocks. Raises ValueError as `PageLayout.check`, and enqueues nothing."""
        layout = self.layout
        layout.check(len(blocks), pages, to_blocks=to_blocks)
        if len(blocks) == 0:
            return
        bits = self._bits | int(np.bitwise_or.reduce(blocks))
        unit = next(unit for unit in UNITS if bits % unit == 0)
        tiles = -(-layout.page_bytes // (unit * _TILE_UNITS)) * pages.size * len(layout.planes)
        if tiles >= _MAX_TILES:
            raise ValueError("too many blocks for one launch")
        numbers = (
            len(layout.planes),
            layout.pages_per_block,
            len(blocks),
            layout.page_bytes,
            int(to_blocks),
        )
        table = (np.ascontiguousarray(blocks, np.uint64), np.ascontiguousarray(pages, np.int32))
        launch = Launch(f"copy_pages_{unit}", self._bases, self._strides, *table, numbers)
        self._runner.run(launch, grid, stream)


class CupyRunner:
    """Runs the kernel on the current GPU. NVRTC compiles it at first use (1 s; CuPy caches it).

    The tables of a launch are copied to the GPU on its stream, from pinned memory that is reused
    once that copy has completed.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        module = cupy.RawModule(code=SOURCE.read_text(), options=("--std=c++14",))
        self._kernels = {f"copy_pages_{n}": module.get_function(f"copy_pages_{n}") for n in UNITS}
        self._used: list[tuple[Any, Any, Any]] = []  # (event, pinned, on the GPU)

    def run(self, launch: Launch, grid: int, stream: Any) -> None:
        cupy, runtime = self._cupy, self._cupy.cuda.runtime
        tables = (launch.plane_bases, launch.plane_strides, launch.block_bases, launch.pages)
        arrays = [table.reshape(-1).view(np.uint8) for table in tables]
        offsets = [0, *np.cumsum([array.nbytes for array in arrays]).tolist()]
        pinned, table = self._room(offsets[-1])
        flat = np.frombuffer(pinned, np.uint8, offsets[-1])
        for (start, end), array in zip(pairwise(offsets), arrays, strict=True):
            flat[start:end] = array
        runtime.memcpyAsync(int(table.ptr), int(pinned.ptr), offsets[-1], 1, stream.ptr)
        places = [np.uint64(int(table.ptr) + at) for at in offsets[:-1]]
        counts = [np.uint32(number) for number in launch.numbers[:-1]]
        arguments = (*places, *counts, np.int32(launch.numbers[-1]))
        event = cupy.cuda.Event(disable_timing=True)
        try:
            with stream:
                self._kernels[launch.kernel]((grid,), (THREADS,), arguments)
        finally:  # even if the launch was refused, its tables are being copied
            event.record(stream)
            self._used.append((event, pinned, table))

    def _room(self, num_bytes: int) -> tuple[Any, Any]:
        """(pinned memory, GPU memory) that no running launch uses."""
        for place, (event, pinned, table) in enumerate(self._used):
            if table.size >= num_bytes and event.done:
                del self._used[place]
                return pinned, table
        size = max(1 << 16, 1 << (num_bytes - 1).bit_length())
        return self._cupy.cuda.alloc_pinned_memory(size), self._cupy.cuda.Memory(size)

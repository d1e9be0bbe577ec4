"""Chooses at the GPU worker's start between copy engines and page kernels.

Kernels of two processes take turns on a GPU, unless the processes share it by MPS: while the
worker's run, the inference engine's stand still. So the worker uses kernels only under MPS, or
where configured (`tiers.hbm.page_kernels`). Where it may, it measures both on memory that is not in
use yet, and then uses the faster one, by kind of memory and by the bytes of a page.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from hicache.tiers.block import PAGE_BYTES
from hicache.tiers.hbm import CudaPool
from hicache.transfer.gpu_pages.page_kernels import GRID_PINNED, CupyRunner, PageLayout, whole_pages
from hicache.transfer.gpu_pages.page_paths import (
    REFUSALS,
    ByCopyEngines,
    ByKernel,
    Fastest,
    Memory,
    PageGroup,
    PagePath,
)
from hicache.transfer.media.cuda_copy import CopyPath, CopyRefused, fastest_by_size
from hicache.transfer.media.pinned_memory import PinnedArena

MPS_PIPES: Final = Path("/tmp/nvidia-mps")
"""The default directory of MPS's control daemon (CUDA_MPS_PIPE_DIRECTORY)."""
_BLOCKS_PER_SM: Final = 2
"""For copies within GPU memory. 512 threads with 128 bytes each in flight: 17 MB on an H200, whose
memory transfers about 5 MB in the time of one access."""
_MPS_ENABLED, _SAME_POINTER = 133, 91
# cudaDevAttrMpsEnabled, "contexts created on this device will be shared via MPS";
# cudaDevAttrCanUseHostPointerForRegisteredMem, or a kernel would need another address.
_SIZES: Final = (2 << 10, 16 << 10, 64 << 10, 512 << 10)
_PAGES: Final = 256
_BYTES: Final = 32 << 20
_ROUNDS: Final = 3
_LIMIT_S: Final = 1.0
"""No further size is measured after this time: an inference engine may be using the GPU."""

_PLACES: Final[dict[Memory, str]] = {"gpu": "GPU memory", "pinned": "pinned memory"}

_Times = dict[int, dict[PagePath, float]]


def choose_page_path(
    pool: CudaPool,
    pinned: PinnedArena,
    copies: CopyPath,
    wanted: str,
    mps_pipes: Path = MPS_PIPES,
) -> tuple[PagePath, str]:
    """Choose by `wanted` (auto, always, never). Returns the path, and a sentence with the reason or
    the figures. Overwrites the pool's first bytes."""
    pool.use()
    engines = ByCopyEngines(copies, pinned)
    why_not, times = _why_not(pool, wanted, mps_pipes), {}
    if not why_not:
        try:
            times = _measured(pool, engines, _kernel(pool), with_host=_reaches_host(pool, pinned))
        except (CopyRefused, OSError, *REFUSALS, _compile_error(pool)) as error:
            lines = str(error).strip().splitlines() or [repr(error)]
            why_not = f"kernels could not be measured: {lines[0]}"
    if not times:
        return engines, f"pages by the copy engines ({why_not or 'the pool is too small to try'})"
    steps = {memory: fastest_by_size(found) for memory, found in times.items()}
    said = [
        f"of slots in {_PLACES[memory]} by {steps[memory].name} ({_figures(found)})"
        for memory, found in times.items()
    ]
    return Fastest(engines, steps), f"pages {', '.join(said)}"


def shares_gpu(runtime: Any, index: int, mps_pipes: Path) -> bool:
    """Whether this process's kernels run in parallel with those of others, by MPS. A driver before
    CUDA 12.3 cannot tell: then, whether MPS's control daemon has a socket."""
    try:
        return bool(runtime.deviceGetAttribute(_MPS_ENABLED, index))
    except runtime.CUDARuntimeError:
        return os.path.exists(mps_pipes / "control")  # False, too, without permission to look


def _why_not(pool: CudaPool, wanted: str, mps_pipes: Path) -> str:
    if wanted == "never":
        return "as configured"
    if wanted == "always" or shares_gpu(pool.cupy.cuda.runtime, pool.index, mps_pipes):
        return ""
    return "no MPS here, and kernels of two processes take turns"


def _compile_error(pool: CudaPool) -> type[Exception]:
    """NVRTC's error for a failed compilation. A missing NVRTC is a RuntimeError, no room for its
    output an OSError."""
    error: type[Exception] = pool.cupy.cuda.compiler.CompileException
    return error


def _kernel(pool: CudaPool) -> ByKernel:
    properties = pool.cupy.cuda.runtime.getDeviceProperties(pool.index)
    within = _BLOCKS_PER_SM * int(properties["multiProcessorCount"])
    runners = {to_blocks: CupyRunner(pool.cupy) for to_blocks in (True, False)}
    return ByKernel(runners, {"gpu": within, "pinned": GRID_PINNED})


def _reaches_host(pool: CudaPool, pinned: PinnedArena) -> bool:
    """Whether there is pinned memory, and kernels may access it by its host addresses."""
    runtime = pool.cupy.cuda.runtime
    return bool(pinned.pinned_bytes and runtime.deviceGetAttribute(_SAME_POINTER, pool.index))


def _measured(
    pool: CudaPool, engines: ByCopyEngines, kernel: ByKernel, *, with_host: bool
) -> dict[Memory, _Times]:
    """Seconds per byte of each path, by memory and page size, averaged over both directions:
    between pages of the pool's first half, in random order, and blocks of one page each."""
    times: dict[Memory, _Times] = {}
    ends_s = time.perf_counter() + _LIMIT_S
    room = min(_BYTES, pool.capacity_bytes // 2) // PAGE_BYTES * PAGE_BYTES
    with _bases(pool, room, with_host=with_host) as bases:
        stream = pool.cupy.cuda.Stream(non_blocking=True)
        for size in _SIZES:
            num_pages = min(_PAGES, room // size)
            if not num_pages:
                break
            layout = whole_pages([pool.address(0, room)], num_pages, size, 1)
            order = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
            for memory, base in bases.items():
                blocks = np.arange(base, base + num_pages * size, size, dtype=np.uint64)
                group = PageGroup(memory, blocks, order[:, None])
                paths: tuple[PagePath, ...] = (engines, kernel)  # the first, where they tie
                took = {path: _seconds(path, layout, group, stream) for path in paths}
                times.setdefault(memory, {})[size] = took
            if time.perf_counter() > ends_s:
                break
    return times


def _seconds(path: PagePath, layout: PageLayout, group: PageGroup, stream: Any) -> float:
    """Seconds per byte in the best round; the first one warms up."""
    spent = []
    for _ in range(_ROUNDS):
        start_s = time.perf_counter()
        for to_blocks in (True, False):
            path.enqueue(layout, range(1), group, stream, to_blocks=to_blocks)
            stream.synchronize()
        spent.append(time.perf_counter() - start_s)
    return min(spent) / (2 * len(group.blocks) * layout.block_bytes)


@contextmanager
def _bases(pool: CudaPool, room: int, *, with_host: bool) -> Iterator[dict[Memory, int]]:
    """The addresses of `room` bytes of each memory for blocks. Host memory is allocated here, since
    the arena may be in use."""
    runtime = pool.cupy.cuda.runtime
    bases: dict[Memory, int] = {"gpu": pool.address(room // PAGE_BYTES, room)}
    if with_host:
        bases["pinned"] = runtime.hostAlloc(room, 0)
    try:
        yield bases
    finally:
        runtime.deviceSynchronize()
        if with_host:
            runtime.freeHost(bases["pinned"])


def _figures(times: _Times) -> str:
    """The figures, for people."""
    said = []
    for size, took in times.items():
        rates = "/".join(f"{1e-9 / s_per_byte:.1f}" for s_per_byte in took.values())
        said.append(f"{size >> 10} KiB {rates}")
    return f"copy engines/kernels in GB/s: {', '.join(said)}"

"""The `hbm` tier's medium on a GPU: copies between the arena and GPU memory.

Two threads per direction and priority (copy_thread.py): one starts batches on the link's
non-blocking stream, the other waits for them in order. Streams are independent of each other. When
a slot may be reused:

    start   every piece of the batch is enqueued, and an event recorded after the last one
    wait    the event has completed: only now are the batch's outcomes reported, good or bad, and
            the daemon may use its slots for other blocks

1. A move names a slot outside its tier: it fails, and the others of its batch are copied.
2. CUDA refuses a batch after accepting a part of it. That part is waited for; then every move of
   the batch fails, with no copy still running.
3. Waiting fails: the CUDA context is lost until this process ends, and with it all of GPU memory.
   `TierDamaged`: the worker ends, and the kernel stops its copies before the daemon sees its end.

The process must be a fresh one (transfer/worker_process.py), not a fork of one that has used CUDA.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from hicache.engine.plan import Move, Outcome, Priority
from hicache.tiers.arena import Arena
from hicache.tiers.errors import TierDamaged
from hicache.tiers.hbm import CudaPool, GpuOptions
from hicache.tiers.numa import bytes_by_node, describe, node_of, num_nodes
from hicache.transfer.gpu_pages.engine_pages import EnginePages
from hicache.transfer.gpu_pages.page_choice import MPS_PIPES, choose_page_path
from hicache.transfer.media.cuda_copy import (
    BatchCopy,
    BySize,
    CopyPath,
    CopyRefused,
    EachCopy,
    Piece,
    Pieces,
    fastest_by_size,
    rows_of,
)
from hicache.transfer.media.medium import Forgetful, Link, Measured, Progress, failed, options_of
from hicache.transfer.media.pinned_memory import CHUNK_BYTES, PinnedArena
from hicache.transfer.worker_messages import WorkerConfig

_TRIAL_BLOCKS: Final = 32
_TRIAL_SIZES: Final = (16 << 10, 64 << 10, 256 << 10, 2 << 20)
_TRIAL_ROUNDS: Final = 5


class Started:
    """A batch being copied. Its slots are in use until `wait` has returned or raised."""

    def __init__(
        self, link: CudaLink, batch: Sequence[Move], refused: dict[int, Exception], event: Any
    ) -> None:
        self._link, self._batch, self._refused, self._event = link, batch, refused, event

    def wait(self) -> list[Outcome]:
        """An outcome for every move, in the batch's order. Raises TierDamaged."""
        if self._event is not None:
            self._link.settle(self._event)
        return [
            failed(move, self._refused[place])
            if place in self._refused
            else Outcome(move.id, ok=True)
            for place, move in enumerate(self._batch)
        ]


class CudaLink:
    """Copies between slots of the arena and slots of the pool, in one direction.

    `start` may be called again before an earlier batch was waited for; batches of one link finish
    in the order in which they were started.
    """

    def __init__(
        self,
        src: str,
        dst: str,
        arena: PinnedArena,
        pool: CudaPool,
        copies: CopyPath,
        *,
        to_device: bool,
    ) -> None:
        self.src, self.dst = src, dst
        self._arena, self._pool, self._copies = arena, pool, copies
        self._to_device = to_device
        pool.use()
        self._stream = pool.cupy.cuda.Stream(non_blocking=True)

    def copy(self, batch: Sequence[Move]) -> list[Outcome]:
        return self.start(batch).wait()

    def start(self, batch: Sequence[Move]) -> Started:
        """Enqueue the copies. Raises TierDamaged."""
        pieces: list[Piece] = []
        refused: dict[int, Exception] = {}
        for place, move in enumerate(batch):
            try:
                pieces += self._pieces(move)
            except ValueError as error:
                refused[place] = error
        if not pieces:
            return Started(self, batch, refused, None)
        with _or_damaged(self._pool):
            self._pool.use()
            # Created before anything is enqueued: if it failed for lack of memory afterwards, the
            # copies of a failed batch would be running. Blocking: the waiting thread sleeps, and
            # leaves its core to the inference engine.
            event = self._pool.cupy.cuda.Event(block=True, disable_timing=True)
            try:
                with ExitStack() as undo:
                    undo.callback(self.settle, self._stream)  # parts of it may be running
                    rows = rows_of(pieces)
                    self._copies.enqueue(rows, self._stream.ptr, to_device=self._to_device)
                    undo.pop_all()
            except (CopyRefused, self._pool.cupy.cuda.runtime.CUDARuntimeError) as error:
                return Started(self, batch, dict.fromkeys(range(len(batch)), error), None)
            event.record(self._stream)
        return Started(self, batch, refused, event)

    def settle(self, awaited: Any) -> None:
        """Wait until this event, or this whole stream, has completed. Raises TierDamaged."""
        with _or_damaged(self._pool):
            self._pool.use()
            awaited.synchronize()

    def close(self) -> None:
        """Wait for all copies."""
        self.settle(self._stream)

    def _pieces(self, move: Move) -> list[Piece]:
        """A move's copy, cut where two chunks of pinned memory meet. Raises ValueError for a slot
        outside its tier."""
        num_bytes = move.block_bytes
        if self._to_device:
            host = self._arena.address(move.src_slot, num_bytes)
            gpu = self._pool.address(move.dst_slot, num_bytes)
            return [(gpu + at, host + at, n) for at, n in self._arena.cut(host, num_bytes)]
        host = self._arena.address(move.dst_slot, num_bytes)
        gpu = self._pool.address(move.src_slot, num_bytes)
        return [(host + at, gpu + at, n) for at, n in self._arena.cut(host, num_bytes)]


@contextmanager
def _or_damaged(pool: CudaPool) -> Iterator[None]:
    """Raises CUDA's errors as TierDamaged: after them the context is lost."""
    try:
        yield
    except pool.cupy.cuda.runtime.CUDARuntimeError as error:
        raise TierDamaged(f"GPU {pool.index}: {error}") from error


class CudaMedium(Forgetful):
    """The pool in GPU memory, which is lost when its worker ends. A stream for each direction and
    priority, so that demands do not wait for demotions. Its options: GpuOptions."""

    by_priority = True

    def __init__(
        self,
        config: WorkerConfig,
        near: Arena,
        progress: Progress = lambda unit, done, total: None,
        cupy: Any = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        options = options_of(GpuOptions, config)
        mps_pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", MPS_PIPES))
        self._pool = pool = CudaPool(options.gpu, config.spec.capacity_bytes, cupy)
        self._names = near_name, far_name = config.near, config.far
        with _or_damaged(pool):
            self._pinned = PinnedArena(
                pool.cupy.cuda.runtime, near, partial(progress, "bytes"), chunk_bytes
            )
            self._copies, why = choose_path(pool, self._pinned)
            more = (self._pinned, pool, self._copies)
            self._ups = [CudaLink(far_name, near_name, *more, to_device=False) for _ in Priority]
            self._downs = [CudaLink(near_name, far_name, *more, to_device=True) for _ in Priority]
            choice = (options.page_kernels, mps_pipes)
            path, pages_why = choose_page_path(pool, self._pinned, self._copies, *choice)
            self.pages = EnginePages(near_name, far_name, self._pinned, pool, path)
        self.detail = f"memory of GPU {options.gpu}"
        self.notes = [f"{self._pinned.summary()}; {why}; {pages_why}", *_surroundings(pool, near)]
        self.readers: Sequence[Link] = self._ups
        self.writers: Sequence[Link] = self._downs

    def probe(self, num_bytes: int, block_bytes: int) -> list[Measured]:
        """Measure with real copies. Overwrites the pool's first bytes, which are not in use yet."""
        near, far = self._names
        num_blocks = max(1, min(num_bytes, self._pool.capacity_bytes) // block_bytes)
        with _or_damaged(self._pool), _trial(self._pool, num_blocks, block_bytes) as trial:
            down, up = trial.seconds(self._copies)
        copied = num_blocks * block_bytes
        return [Measured(near, far, copied, down), Measured(far, near, copied, up)]

    def close(self) -> None:
        for link in (*self._ups, *self._downs):
            link.close()
        if self.pages is not None:
            self.pages.close()
        self._pinned.close()
        self._pool.close()


def _surroundings(pool: CudaPool, near: Arena) -> Iterator[str]:
    """More for the operator. By now every page of pinned memory is mapped."""
    if pool.context_bytes:
        yield f"; CUDA's context takes {pool.context_bytes >> 20} MiB of the GPU besides the pool"
    if num_nodes() > 1 and (where := describe(bytes_by_node(near.path), node_of(pool.bus_id))):
        yield f"; of the host memory {where}"


def choose_path(pool: CudaPool, pinned: PinnedArena) -> tuple[CopyPath, str]:
    """The faster path on this machine, by size, and a sentence with the figures. Overwrites the
    pool's first bytes."""
    each = EachCopy(pool.cupy.cuda.runtime)
    if not pinned.is_whole:
        return each, f"copied by {each.name}"
    times: dict[int, dict[CopyPath, float]] = {}
    said = []
    try:
        batch = BatchCopy()
        for size in [n for n in _TRIAL_SIZES if n <= pool.capacity_bytes]:
            num_blocks = min(_TRIAL_BLOCKS, pool.capacity_bytes // size)
            with _trial(pool, num_blocks, size) as trial:
                times[size] = {path: sum(trial.seconds(path)) for path in (each, batch)}
            moved = 2 * num_blocks * size
            rates = "/".join(f"{moved / s / 1e9:.1f}" for s in times[size].values())
            said.append(f"{size >> 10} KiB {rates}")
    except CopyRefused as error:
        return each, f"copied by {each.name} ({error})"
    best = BySize(fastest_by_size(times)) if times else each
    figures = f"{each.name}/{batch.name} in GB/s: {', '.join(said)}"
    return best, f"copied by {best.name} ({figures})"


class _Trial:
    """Test copies between a temporary pinned buffer and a pool that is not in use yet."""

    def __init__(self, pool: CudaPool, host: int, num_blocks: int, block_bytes: int) -> None:
        self._pool = pool
        self._stream = pool.cupy.cuda.Stream(non_blocking=True)
        offsets = range(0, num_blocks * block_bytes, block_bytes)
        gpu = pool.address(0, num_blocks * block_bytes)
        self._down = rows_of([(gpu + at, host + at, block_bytes) for at in offsets])
        self._up = rows_of([(host + at, gpu + at, block_bytes) for at in offsets])

    def seconds(self, path: CopyPath) -> tuple[float, float]:
        """The best of five rounds to the device, and from it; the first ones warm up."""
        down, up = [], []
        for _ in range(_TRIAL_ROUNDS):
            down.append(self._time(path, self._down, True))
            up.append(self._time(path, self._up, False))
        return min(down), min(up)

    def _time(self, path: CopyPath, pieces: Pieces, to_device: bool) -> float:
        start = time.perf_counter()
        path.enqueue(pieces, self._stream.ptr, to_device=to_device)
        self._stream.synchronize()
        return time.perf_counter() - start


@contextmanager
def _trial(pool: CudaPool, num_blocks: int, block_bytes: int) -> Iterator[_Trial]:
    runtime = pool.cupy.cuda.runtime
    pool.use()
    host = runtime.hostAlloc(num_blocks * block_bytes, 0)
    try:
        yield _Trial(pool, host, num_blocks, block_bytes)
    finally:
        runtime.deviceSynchronize()
        runtime.freeHost(host)

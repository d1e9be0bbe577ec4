"""Between the arena and GPU memory: the `hbm` tier's links where there is a GPU.

One thread per direction, each with a non-blocking stream of its own. A block is reported ready only
after the event recorded behind its copy has completed. A sticky CUDA error is `TierDamaged`: the
context is gone until the process ends, so the worker ends.

Unverified so far: nothing here has run on a GPU yet; page kernels and pinning are a later issue's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from hicache.engine.plan import Move, Outcome
from hicache.tiers.arena import Arena
from hicache.tiers.base import TierDamaged
from hicache.tiers.hbm import CudaPool
from hicache.transfer.link import Forgetful, Link, Measured, failed
from hicache.transfer.messages import WorkerConfig

_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind


class CudaLink:
    """Copies between slots of the arena and slots of the pool, in one direction."""

    def __init__(self, src: str, dst: str, arena: Arena, pool: CudaPool, to_device: bool) -> None:
        self.src, self.dst = src, dst
        self._arena, self._pool, self._to_device = arena, pool, to_device
        with pool.device:
            self._stream = pool.cupy.cuda.Stream(non_blocking=True)

    def copy(self, batch: Sequence[Move]) -> list[Outcome]:
        runtime = self._pool.cupy.cuda.runtime
        outcomes, events = [], []
        try:
            with self._pool.device:
                for move in batch:
                    try:
                        copy = self._addresses(move)
                    except ValueError as error:
                        outcomes.append(failed(move, error))
                        continue
                    runtime.memcpyAsync(*copy, self._stream.ptr)
                    events.append((move, self._stream.record()))
                for move, event in events:
                    event.synchronize()
                    outcomes.append(Outcome(move.id, ok=True))
        except runtime.CUDARuntimeError as error:
            raise TierDamaged(f"GPU {self._pool.index}: {error}") from error
        return outcomes

    def _addresses(self, move: Move) -> tuple[int, int, int, int]:
        """(destination, source, bytes, kind) of one copy."""
        if self._to_device:
            host = self._arena.view(move.src_slot, move.block_bytes).ctypes.data
            gpu = self._pool.address(move.dst_slot, move.block_bytes)
            return gpu, host, move.block_bytes, _TO_DEVICE
        host = self._arena.view(move.dst_slot, move.block_bytes).ctypes.data
        gpu = self._pool.address(move.src_slot, move.block_bytes)
        return host, gpu, move.block_bytes, _TO_HOST


class CudaMedium(Forgetful):
    """The pool in GPU memory; everything in it is gone when its worker ends."""

    def __init__(self, config: WorkerConfig, near: Arena) -> None:
        self._pool = pool = CudaPool(config.gpu, config.capacity_bytes)
        self._names = (config.near, config.far)
        self.detail = f"memory of GPU {config.gpu}"
        self.notes: list[str] = []
        self.readers: Sequence[Link] = [CudaLink(config.far, config.near, near, pool, False)]
        self.writers: Sequence[Link] = [CudaLink(config.near, config.far, near, pool, True)]

    def probe(self, num_bytes: int, block_bytes: int) -> list[Measured]:
        """The pool is new and nobody's yet, so its first bytes may be written here."""
        num_bytes = min(num_bytes, self._pool.capacity_bytes)
        runtime, host = self._pool.cupy.cuda.runtime, np.ones(num_bytes, np.uint8)
        gpu = self._pool.address(0, num_bytes)
        near, far = self._names
        copies = [(near, far, gpu, host.ctypes.data), (far, near, host.ctypes.data, gpu)]
        measured = []
        with self._pool.device:
            for src, dst, to, begin in copies:
                kind = _TO_DEVICE if dst == far else _TO_HOST
                start = time.perf_counter()
                runtime.memcpy(to, begin, num_bytes, kind)
                runtime.deviceSynchronize()
                measured.append(Measured(src, dst, num_bytes, time.perf_counter() - start))
        return measured

    def close(self) -> None:
        self._pool.close()

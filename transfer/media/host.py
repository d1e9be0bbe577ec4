"""The `hbm` tier's medium without a GPU: copies between two arenas in host memory.

One reader or writer thread of the worker calls each link. `np.copyto` releases the GIL while it
copies, so both directions run in parallel.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from hicache.engine.plan import Move, Outcome
from hicache.tiers.arena import Arena
from hicache.tiers.hbm import ArenaOptions
from hicache.transfer.media.medium import Forgetful, Link, Measured, Progress, failed, options_of
from hicache.transfer.worker_messages import WorkerConfig


class ArenaLink:
    """Copies between slots of two mappings."""

    def __init__(self, src: str, src_arena: Arena, dst: str, dst_arena: Arena) -> None:
        self.src, self.dst = src, dst
        self._from, self._to = src_arena, dst_arena

    def copy(self, batch: Sequence[Move]) -> list[Outcome]:
        outcomes = []
        for move in batch:
            try:
                np.copyto(
                    self._to.view(move.dst_slot, move.block_bytes),
                    self._from.view(move.src_slot, move.block_bytes),
                )
                outcomes.append(Outcome(move.id, ok=True))
            except ValueError as error:
                outcomes.append(failed(move, error))
        return outcomes


class MemoryMedium(Forgetful):
    """The emulated pool. The daemon owns both files. Its options: ArenaOptions."""

    def __init__(self, config: WorkerConfig, near: Arena, progress: Progress) -> None:
        path = options_of(ArenaOptions, config).path
        self._far = Arena.attach(path)
        self._far.hold()
        self._names = (config.near, config.far)
        self.detail = f"host memory at {path}, emulated"
        self.notes: list[str] = []
        self.readers: Sequence[Link] = [ArenaLink(config.far, self._far, config.near, near)]
        self.writers: Sequence[Link] = [ArenaLink(config.near, near, config.far, self._far)]

    def probe(self, num_bytes: int, block_bytes: int) -> list[Measured]:
        source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
        near, far = self._names
        measured = []
        for src, dst in ((near, far), (far, near)):
            start = time.perf_counter()
            for at in range(0, num_bytes, block_bytes):
                np.copyto(target[at : at + block_bytes], source[at : at + block_bytes])
            measured.append(Measured(src, dst, num_bytes, time.perf_counter() - start))
        return measured

    def close(self) -> None:
        self._far.close()

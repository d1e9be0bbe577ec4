"""Registers the arena's memory with CUDA, so that the copy engines read and write it directly.

Owned by the GPU worker, which registers its mapping when it starts and unregisters it when it ends.
In chunks, since pinning takes long (progress is reported after each one), and if one is refused,
those before it stay pinned:

    arena   |── chunk ──|── chunk ──|── chunk ──|·· not pinned ··|
    copy             |──a──|──b──|                 cut where two chunks meet

Memory that is not pinned is copied through the driver's buffers, several times more slowly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hicache.tiers.arena import Arena
from hicache.tiers.block import PAGE_BYTES

CHUNK_BYTES: Final = 1 << 30

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class PinnedArena:
    """The part of an arena that is registered with CUDA. `trouble`: why it is not all of it."""

    def __init__(
        self,
        runtime: Any,
        arena: Arena,
        progress: Progress = lambda done, total: None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        assert chunk_bytes % PAGE_BYTES == 0
        self._runtime = runtime
        self._arena = arena
        self._start = arena.address(0, 0)
        self._chunk_bytes = chunk_bytes
        self._chunks: list[int] = []
        self.total_bytes = arena.data_bytes
        self.pinned_bytes = 0
        self.trouble = ""
        started_s = time.perf_counter()
        while self.pinned_bytes < self.total_bytes and not self.trouble:
            self._register(min(chunk_bytes, self.total_bytes - self.pinned_bytes))
            progress(self.pinned_bytes, self.total_bytes)
        self.seconds = time.perf_counter() - started_s

    @property
    def is_whole(self) -> bool:
        return self.pinned_bytes == self.total_bytes

    def address(self, slot: int, num_bytes: int) -> int:
        """A slot's address. Raises ValueError when the slot leaves the arena."""
        return self._arena.address(slot, num_bytes)

    def cut(self, address: int, num_bytes: int) -> list[tuple[int, int]]:
        """(offset, bytes) of the parts of a run of this arena, each within one chunk."""
        parts = []
        offset = 0
        while offset < num_bytes:
            within = (address + offset - self._start) % self._chunk_bytes
            length = min(num_bytes - offset, self._chunk_bytes - within)
            parts.append((offset, length))
            offset += length
        return parts

    def is_in_one_chunk(
        self, addresses: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.bool_]:
        """For each run of at least one byte, whether it lies within one chunk."""
        start, chunk = np.uint64(self._start), np.uint64(self._chunk_bytes)
        first, last = addresses - start, addresses - start + sizes - np.uint64(1)
        is_one: npt.NDArray[np.bool_] = first // chunk == last // chunk
        return is_one

    def holds(self, addresses: npt.NDArray[np.uint64], num_bytes: int) -> bool:
        """Whether all of these runs of this arena are registered, so that a kernel may access
        them."""
        ends = addresses - np.uint64(self._start) + np.uint64(num_bytes)
        return bool((ends <= np.uint64(self.pinned_bytes)).all())

    def summary(self) -> str:
        """A sentence for the operator."""
        gib = self.total_bytes / 2**30
        if self.is_whole:
            return f"{gib:.2f} GiB of host memory pinned in {self.seconds:.1f} s"
        return (
            f"only {self.pinned_bytes / 2**30:.2f} of {gib:.2f} GiB of host memory could be pinned "
            f"({self.trouble}): copies of the rest are several times slower"
        )

    def close(self) -> None:
        """Unregister: after the last copy has ended, and before the arena is unmapped."""
        while self._chunks:
            self._runtime.hostUnregister(self._chunks.pop())
        self.pinned_bytes = 0

    def _register(self, num_bytes: int) -> None:
        address = self._start + self.pinned_bytes
        try:
            self._runtime.hostRegister(address, num_bytes, 0)
        except self._runtime.CUDARuntimeError as error:
            self.trouble = str(error)
        else:
            self._chunks.append(address)
            self.pinned_bytes += num_bytes

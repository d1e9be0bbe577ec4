"""Returns freed memory to the kernel, so that the daemon's private memory does not grow.

Without this it would grow for hours, for four reasons:

- glibc raises its limits with the largest block freed so far: after one message of 30 MiB, each
  thread's heap may keep 60 MiB. `limit_heaps` fixes the limits.
- numpy caches small freed buffers. They lie between other objects, so the free memory around them
  cannot be returned. `fill_small_buffers` allocates them in one place.
- Free memory between used blocks is returned only on request: `FreedMemory`.
- Python's table of interned names doubles minutes after the start, when it is full of unused names:
  `grow_table_of_names` does that at once.

docs/faults.md has the figures.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from typing import Final

import numpy as np

EVERY_S: Final = 1.0
MAX_SHARE: Final = 1e-3
"""The largest share of the loop's time."""
_SMALL_BYTES: Final = 1024
_MANY_NAMES: Final = 1 << 15
"""More names than fit into the table of 2¹⁶ entries, and less than fit into the next one."""
_NUM_KEPT: Final = 7  # numpy/_core/src/multiarray/alloc.c: NBUCKETS and NCACHE
_LIMITS: Final = {
    -1: 1 << 20,  # M_TRIM_THRESHOLD: may stay free at a heap's end
    -3: 1 << 20,  # M_MMAP_THRESHOLD: larger blocks are separate mappings
    -8: 2,  # M_ARENA_MAX: heaps for all threads
}


def limit_heaps() -> None:
    """Fix glibc's limits. Call before the first thread starts. Does nothing without glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return  # not glibc
    for name, value in _LIMITS.items():
        mallopt(name, value)


def fill_small_buffers() -> None:
    """Fill numpy's cache of small buffers. It keeps seven freed buffers of each size below 1 KiB,
    3.7 MiB in all, and glibc seven of each 16 bytes. Filled one by one, as sizes first occur, that
    would take a quarter of an hour, and they would lie between used blocks. Here all are allocated
    side by side. Call before long-lived objects are created."""
    for num_bytes in range(1, _SMALL_BYTES):
        count = 2 * _NUM_KEPT if num_bytes % 16 == 8 else _NUM_KEPT
        buffers = [np.empty(num_bytes, np.uint8) for _ in range(count)]
        buffers.clear()


def grow_table_of_names() -> None:
    """Grow Python's table of interned names now. In this table of 940 KiB, deleted names take room
    until it is rebuilt for three times the names in use. So it would double once, some minutes
    after the start. Call after all imports. Does nothing from Python 3.12 on, where names are never
    deleted."""
    if sys.version_info < (3, 12):
        names = [sys.intern(f"no name of anything {number}") for number in range(_MANY_NAMES)]
        names.clear()


class FreedMemory:
    """`tick`, from the daemon's loop, returns free memory between used blocks when it is due. That
    takes half a millisecond, or more with much fragmented memory; at most a thousandth of all time.
    Does nothing without glibc."""

    def __init__(self, now_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._due_s = now_s + EVERY_S
        self._clock = clock
        self._trim: Callable[[int], object] | None = None
        try:
            self._trim = ctypes.CDLL(None).malloc_trim
        except (AttributeError, OSError):
            return  # not glibc

    def tick(self, now_s: float) -> None:
        """Return free memory every `EVERY_S` seconds, less often where it takes long."""
        if self._trim is None or now_s < self._due_s:
            return
        began_s = self._clock()
        self._trim(0)
        took_s = self._clock() - began_s
        self._due_s = now_s + max(EVERY_S, took_s / MAX_SHARE)

"""What was freed goes back to the machine, so that the daemon's own memory stays as it is.

Four things would let it creep up for hours although nothing in it grows:

- The C library raises its own limits with the largest block it has seen freed: a message of 30 MiB
  once, and each thread's heap may keep 60 MiB from then on. `limit_heaps` fixes them.
- numpy keeps small buffers that were freed, and they lie between what else is used, so that what
  is free around them cannot go back. `fill_small_buffers` puts them in one place.
- What is free between what is used goes back only when asked for: `FreedMemory`.
- Python's table of the names in use doubles when it is full of names that are no more, minutes
  after the start: `grow_table_of_names`.

docs/faults.md says by how much each of them let it grow.
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
"""Of the loop's time."""
_SMALL_BYTES: Final = 1024
_MANY_NAMES: Final = 1 << 15
"""More than such a table of up to 2¹⁶ names has room for, and less than the next one has."""
_NUM_KEPT: Final = 7  # numpy/_core/src/multiarray/alloc.c: NBUCKETS and NCACHE
_LIMITS: Final = {
    -1: 1 << 20,  # M_TRIM_THRESHOLD: so much may stay free at a heap's end
    -3: 1 << 20,  # M_MMAP_THRESHOLD: what is larger is a mapping of its own
    -8: 2,  # M_ARENA_MAX: heaps, for all threads
}


def limit_heaps() -> None:
    """Before the first thread starts. Nothing happens where the C library has no such limits."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return  # not glibc
    for name, value in _LIMITS.items():
        mallopt(name, value)


def fill_small_buffers() -> None:
    """numpy keeps seven freed buffers of each size below 1 KiB, 3.7 MiB in all, and the C library
    seven of each 16 bytes. Taken one by one, as sizes occur for the first time, they would fill for
    a quarter of an hour, and lie between what is used so that nothing around them goes back. So all
    are taken here, side by side. Before what stays is made."""
    for num_bytes in range(1, _SMALL_BYTES):
        count = 2 * _NUM_KEPT if num_bytes % 16 == 8 else _NUM_KEPT
        buffers = [np.empty(num_bytes, np.uint8) for _ in range(count)]
        buffers.clear()


def grow_table_of_names() -> None:
    """Python keeps one object for all names that are equal (`sys.intern`), in a table of 940 KiB
    here, in which a name that is no more takes up room until the table is made anew, for three
    times the names in use by then. So it doubles once, when a daemon has lived for some minutes,
    and never again. Here that happens at once. When all is imported; not from Python 3.12 on,
    where a name stays for ever."""
    if sys.version_info < (3, 12):
        names = [sys.intern(f"no name of anything {number}") for number in range(_MANY_NAMES)]
        names.clear()


class FreedMemory:
    """`tick`, from the daemon's loop, gives back what lies free between what is used when it is
    time. That takes half a millisecond, or some more where very much lies free in small pieces:
    never more than a thousandth of all time. Nothing happens where the C library cannot do it."""

    def __init__(self, now_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._due_s = now_s + EVERY_S
        self._clock = clock
        self._trim: Callable[[int], object] | None = None
        try:
            self._trim = ctypes.CDLL(None).malloc_trim
        except (AttributeError, OSError):
            return  # not glibc

    def tick(self, now_s: float) -> None:
        """Every `EVERY_S` seconds, or more seldom where it takes long."""
        if self._trim is None or now_s < self._due_s:
            return
        began_s = self._clock()
        self._trim(0)
        took_s = self._clock() - began_s
        self._due_s = now_s + max(EVERY_S, took_s / MAX_SHARE)

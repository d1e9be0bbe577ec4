"""How fast a direction may copy, for tests and demonstrations: freely, throttled, or not at all.

A copied batch is held back until a slower device would have finished it, so requests that wait
and the measurements see a device of that speed. Called from the thread that ends batches, set from
the worker's main thread; a lock guards the two fields, and nothing runs under it.
"""

from __future__ import annotations

import threading
import time
from math import inf


class Pace:
    """`bytes_per_s`: infinity for freely, 0 for not at all."""

    def __init__(self, bytes_per_s: float = inf) -> None:
        self._bytes_per_s = bytes_per_s
        self._changed = threading.Condition()

    def set(self, bytes_per_s: float) -> None:
        """From now on, also for a batch that is held."""
        with self._changed:
            self._bytes_per_s = bytes_per_s
            self._changed.notify_all()

    def least_s(self, num_bytes: int) -> float:
        """Seconds that so many bytes take at least; 0 where nothing moves at all."""
        with self._changed:
            return num_bytes / self._bytes_per_s if self._bytes_per_s else 0.0

    def hold(self, num_bytes: int, start_s: float) -> None:
        """Return when a batch begun at `start_s` (time.perf_counter) may be said to be done."""
        with self._changed:
            while (left_s := self._left_s(num_bytes, start_s)) > 0:
                self._changed.wait(None if left_s == inf else left_s)

    def _left_s(self, num_bytes: int, start_s: float) -> float:
        if not self._bytes_per_s:
            return inf
        return start_s + num_bytes / self._bytes_per_s - time.perf_counter()

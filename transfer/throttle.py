"""Limits how fast a device copies, for tests and demonstrations: not at all, to a rate, or to 0.

The report of a copied batch is held back until a device of that speed would have finished, so the
measured speed is the configured one too. `hold` is called by the thread that ends batches, `set` by
the worker's main thread; a lock guards the rate, and nothing else runs under it.
"""

from __future__ import annotations

import threading
import time
from math import inf


class Throttle:
    """`bytes_per_s`: infinity for no limit, 0 to copy nothing."""

    def __init__(self, bytes_per_s: float = inf) -> None:
        self._bytes_per_s = bytes_per_s
        self._changed = threading.Condition()

    def set(self, bytes_per_s: float) -> None:
        """Change the rate, also for a batch that is being held."""
        with self._changed:
            self._bytes_per_s = bytes_per_s
            self._changed.notify_all()

    def least_s(self, num_bytes: int) -> float:
        """The least seconds for `num_bytes`; 0 at rate 0."""
        with self._changed:
            return num_bytes / self._bytes_per_s if self._bytes_per_s else 0.0

    def hold(self, num_bytes: int, start_s: float) -> None:
        """Block until a batch that began at `start_s` (time.perf_counter) may be reported."""
        with self._changed:
            while (left_s := self._left_s(num_bytes, start_s)) > 0:
                self._changed.wait(None if left_s == inf else left_s)

    def _left_s(self, num_bytes: int, start_s: float) -> float:
        if not self._bytes_per_s:
            return inf
        return start_s + num_bytes / self._bytes_per_s - time.perf_counter()

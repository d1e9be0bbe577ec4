"""Failures of the daemon's parts that no request needs, and threads that may fail or hang.

An error in such a part (a fit, the estimates file, the trace) must not affect requests: it is
caught, counted, and logged once for each series of failures, with its traceback; the part is tried
again after a pause that doubles.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0

log = logging.getLogger("hicache")
Order = TypeVar("Order")


class Faults:
    """One part's failures: their number, the current error, and the pause before the next try.
    `part` is its name for people."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.num = 0
        self.error = ""
        self._in_a_row = 0
        self._rests_until_s = 0.0

    def record_failure(self, error: BaseException, now_s: float) -> None:
        """Record a failure. Only the first one of a series is logged."""
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._in_a_row, 10))
        self.num += 1
        self._in_a_row += 1
        self._rests_until_s = now_s + pause_s
        self.error = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if self._in_a_row == 1:
            log.error("%s failed; next try in %.0f s", self.part, pause_s, exc_info=error)

    def is_paused(self, now_s: float) -> bool:
        """Whether it is too early to try again."""
        return now_s < self._rests_until_s

    def record_success(self) -> None:
        """Record a success: the series of failures has ended."""
        if self._in_a_row:
            log.info("%s works again", self.part)
            self._in_a_row = 0
            self.error = ""

    def guard(self, step: Callable[[], object]) -> None:
        """Run a step of the part, unless it is in a pause."""
        now_s = time.monotonic()
        if self.is_paused(now_s):
            return
        try:
            step()
        except Exception as error:  # no part of this kind may end the daemon
            self.record_failure(error, now_s)
        else:
            self.record_success()


class WorkThread(Generic[Order]):
    """A thread for work that may be slow or hang, such as file access.

    An exception of `work` ends the thread; `tick` starts another one after a pause. At most
    `max_waiting` orders wait. All methods are called from the daemon's loop; the thread calls
    `work`.
    """

    def __init__(self, part: str, work: Callable[[Order], None], max_waiting: int) -> None:
        self.faults = Faults(part)
        self.num_refused = 0
        self.max_waiting = max_waiting
        self._work = work
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._num_given = 0
        # Written by the thread, read by the loop:
        self._num_done = 0
        self._busy_since_s: float | None = None
        self._failure: BaseException | None = None
        self._thread = self._start()

    def give(self, order: Order) -> bool:
        """Queue an order. Returns False, and counts it, where too many are waiting."""
        if self.num_waiting >= self.max_waiting:
            self.num_refused += 1
            return False
        self._num_given += 1
        self._orders.put(order)
        return True

    @property
    def num_waiting(self) -> int:
        """The number of orders not done yet, including the current one."""
        return self._num_given - self._num_done

    def owes_s(self, now_s: float) -> float:
        """For how long it has been working on the current order; 0 if there is none."""
        since = self._busy_since_s
        return 0.0 if since is None else max(0.0, now_s - since)

    def tick(self, now_s: float) -> None:
        """Start the thread again if it has ended and the pause is over."""
        if self._thread.is_alive():
            return
        failure, self._failure = self._failure, None
        if failure is not None:
            self.faults.record_failure(failure, now_s)
        if not self.faults.is_paused(now_s):
            self._thread = self._start()

    def close(self, patience_s: float) -> bool:
        """Finish waiting orders, for at most `patience_s`. Returns whether the thread has ended."""
        self._orders.put(None)
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._work_on, name=self.faults.part, daemon=True)
        thread.start()
        return thread

    def _work_on(self) -> None:
        try:
            while (order := self._orders.get()) is not None:
                self._busy_since_s = time.monotonic()
                try:
                    self._work(order)
                finally:
                    self._busy_since_s = None
                    self._num_done += 1
                self.faults.record_success()
        except BaseException as error:  # reported by the loop, which starts another thread
            self._failure = error

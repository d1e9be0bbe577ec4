"""What goes wrong in a part of the daemon that requests do not need, and threads that may fail.

A part (the fit of a model, the file of estimates, a record of requests) is worth nothing to a
request that waits: whatever it raises ends at its boundary. There it is counted and told, once for
each row of failures and with its story; the part is tried again after a pause that doubles.
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
    """Of one part: how many there were, what the last one was while it lasts, and how long to
    rest. `part` is its name for people."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.num = 0
        self.error = ""
        self._in_a_row = 0
        self._rests_until_s = 0.0

    def met(self, error: BaseException, now_s: float) -> None:
        """It failed. Only the first failure of a row is logged."""
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._in_a_row, 10))
        self.num += 1
        self._in_a_row += 1
        self._rests_until_s = now_s + pause_s
        self.error = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if self._in_a_row == 1:
            log.error("%s failed; it is tried again in %.0f s", self.part, pause_s, exc_info=error)

    def is_resting(self, now_s: float) -> bool:
        """Whether it is too early to try again."""
        return now_s < self._rests_until_s

    def over(self) -> None:
        """It went well."""
        if self._in_a_row:
            log.info("%s goes on", self.part)
            self._in_a_row = 0
            self.error = ""

    def guard(self, step: Callable[[], object]) -> None:
        """Do a step of the part's, unless it is resting."""
        now_s = time.monotonic()
        if self.is_resting(now_s):
            return
        try:
            step()
        except Exception as error:  # the boundary: no part of this kind may end the daemon
            self.met(error, now_s)
        else:
            self.over()


class Hand(Generic[Order]):
    """A thread for work that may take its time, or never end: what touches a file system.

    Whatever `work` raises ends the thread; `tick` starts another one after the pause. At most
    `max_waiting` orders wait. Everything but `work` is called from the daemon's loop.
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
        """Have it done. False, counted, and nothing changed, where too much is waiting already."""
        if self.num_waiting >= self.max_waiting:
            self.num_refused += 1
            return False
        self._num_given += 1
        self._orders.put(order)
        return True

    @property
    def num_waiting(self) -> int:
        """Orders not done yet, the one at hand among them."""
        return self._num_given - self._num_done

    def owes_s(self, now_s: float) -> float:
        """For how long it has been at the same order; 0 if it does nothing."""
        since = self._busy_since_s
        return 0.0 if since is None else max(0.0, now_s - since)

    def tick(self, now_s: float) -> None:
        """Start it again if it ended and has rested."""
        if self._thread.is_alive():
            return
        failure, self._failure = self._failure, None
        if failure is not None:
            self.faults.met(failure, now_s)
        if not self.faults.is_resting(now_s):
            self._thread = self._start()

    def close(self, patience_s: float) -> bool:
        """Do what is still waiting; what takes longer than that is left undone. Returns whether the
        thread has ended."""
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
                self.faults.over()
        except BaseException as error:  # the boundary: told by the loop, which starts another one
            self._failure = error

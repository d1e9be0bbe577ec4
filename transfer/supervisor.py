"""Keeps one device's worker process alive: start, restart with back-off, kill when stuck.

    down ── start ──▶ starting ── ready ──▶ up
     ▲                    │                 │
     └─────── reap ───────┴─────────────────┘      next start after 0.2 s, 0.4 s, 0.8 s … 10 s

A worker that ran for 60 s resets the back-off. After two crashes or reports of damage in a row, the
next worker is told to set the medium's contents aside (`WorkerConfig.set_aside`).

Owned by the mover, which reads the process's messages. Used from the daemon's loop; never blocks.
"""

from __future__ import annotations

import select
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal, NamedTuple

from hicache.transfer.liveness import Liveness
from hicache.transfer.move_queue import MoveQueue
from hicache.transfer.worker_messages import WorkerConfig, pack
from hicache.transfer.worker_process import WorkerProcess

FIRST_DELAY_S, LAST_DELAY_S = 0.2, 10.0
HEALTHY_S: Final = 60.0
_CRASHES: Final = {signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}

DeviceState = Literal["starting", "up", "down"]


class Down(NamedTuple):
    """The worker has ended or could not be started; the next start is after `retry_s`. `is_crash`:
    it died by a signal that a damaged medium may cause."""

    error: str
    retry_s: float
    is_crash: bool


class Supervisor:
    """One device's worker. `watched`: the liveness of each queue, and the queue itself. A worker
    that is overdue for `stuck_s`, or makes no progress with starting for `start_s`, is killed."""

    def __init__(
        self,
        config: WorkerConfig,
        poller: select.epoll,
        watched: Sequence[tuple[Liveness, MoveQueue]],
        stuck_s: float,
        start_s: float,
    ) -> None:
        self.config = config
        self.state: DeviceState = "down"
        self.process: WorkerProcess | None = None
        self.heard_s = 0.0
        self.num_starts = 0
        self.error = ""
        self.is_damaged = False
        self._poller, self._watched = poller, watched
        self._stuck_s, self._start_s = stuck_s, start_s
        self._is_restoring = False
        self._start_at_s = self._started_s = self._progress_s = 0.0
        self._num_failures = self._num_damages = 0

    def start(self, now_s: float) -> Down | None:
        """Start the process. Returns a Down where that fails."""
        config = replace(self.config, set_aside=self._num_damages >= 2)
        try:
            self.process = WorkerProcess(config, self._poller)
        except OSError as error:  # no memory, no descriptors: try again later
            return self._down(now_s, f"cannot be started: {error}")
        if config.set_aside:
            self._num_damages = 0
        self.state = "starting"
        self.num_starts += 1
        self._started_s = self.heard_s = now_s
        self.error, self.is_damaged = "", False
        return None

    def is_start_due(self, now_s: float) -> bool:
        return self.process is None and self._start_at_s <= now_s

    def ready(self, is_restoring: bool) -> None:
        """The worker has opened its device. `is_restoring`: it now lists the stored blocks."""
        self.state = "up"
        self._is_restoring = is_restoring
        self._progress_s = self.heard_s
        for liveness, _ in self._watched:
            liveness.begin(self.heard_s)

    def restoring(self, *, is_done: bool) -> None:
        """Stored blocks were listed, or (`is_done`) all of them."""
        self._progress_s = self.heard_s
        self._is_restoring = not is_done

    def ponged(self, queue: str) -> None:
        for liveness, _ in self._watched:
            if liveness.name == queue:
                liveness.answered(self.heard_s)

    def check(self, now_s: float, *, was_away: bool) -> None:
        """Ping idle queues, and kill a stuck worker. `was_away`: the daemon did not read messages
        for a while, so nothing counts as overdue yet."""
        assert self.process is not None
        for liveness, _ in self._watched:
            if was_away:
                liveness.moved(now_s)
            if self.state == "up" and liveness.is_due(now_s):
                self.process.send(pack("ping", queue=liveness.name))
                liveness.pinged(now_s)
        if self._is_stuck(now_s) and not self.error:
            self.error = "did not answer any more"
            self.process.kill()

    def overdue_s(self, now_s: float) -> float:
        """For how long the worker has been overdue with a reply; 0 if it is not."""
        if self.state != "up":
            return 0.0
        return max(liveness.overdue_s(now_s, queue.oldest_s()) for liveness, queue in self._watched)

    def reap(self, now_s: float) -> Down | None:
        """Clean up after a dead process. Returns None while it is alive."""
        assert self.process is not None
        status = self.process.exit_status()
        if status is None:
            return None
        self.process.close()
        self.process = None
        if now_s - self._started_s >= HEALTHY_S:
            self._num_failures = self._num_damages = 0
        is_crash = -status in _CRASHES
        if is_crash or self.is_damaged:
            self._num_damages += 1
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        reported = f": {self.error}" if self.error else ""
        error = f"{self.config.spec.title} ended with {how}{reported}"
        return self._down(now_s, error, is_crash)

    def _down(self, now_s: float, error: str, is_crash: bool = False) -> Down:
        retry_s = min(LAST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self._num_failures, 10))
        self.state = "down"
        self._is_restoring = False
        self._num_failures += 1
        self._start_at_s = now_s + retry_s
        return Down(error, retry_s, is_crash)

    def _is_stuck(self, now_s: float) -> bool:
        if self.state == "starting":
            return now_s - self.heard_s > self._start_s
        is_stuck = self.overdue_s(now_s) > self._stuck_s
        return is_stuck or (self._is_restoring and now_s - self._progress_s > self._start_s)

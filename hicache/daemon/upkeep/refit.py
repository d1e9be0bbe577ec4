"""Refits the hazard model outside the daemon's loop: one short-lived process per fit.

    counts, a slice each tick ──▶ snapshot ──▶ process ──▶ model, taken at the next tick

The loop never waits for it. The ghost index is scanned in slices of about half a millisecond, ten a
second. Snapshot and model are passed in memory files, the process's standard input and output:
writing one takes only a copy, even if the process is not running. It has a low priority from its
start on. A fit that fails, dies or hangs costs only its model, and is tried again after a pause.
The process ends after writing its model. Called from the daemon's loop only.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

import psutil

from hicache.daemon.upkeep.supervised import Faults
from hicache.engine.policies.hazard.history import History
from hicache.engine.policies.hazard.model import Model, Snapshot, fit

STUCK_S = 30.0
LONGEST_S = 300.0
"""A fit takes 1–2 s of CPU time, at a low priority."""
NICENESS: Final = 10
_ROOT: Final = Path(__file__).absolute().parents[3]


class FitFailed(Exception):
    """A fit's process died, hung, or took too long."""


class _Fit:
    """One running fit."""

    def __init__(self, snapshot: Snapshot, now_s: float) -> None:
        self.started_s = self.moved_s = now_s
        self.used_s = -1.0
        self._answer = _memory_file()
        with _memory_file() as question:
            question.write(pickle.dumps(snapshot, pickle.HIGHEST_PROTOCOL))
            question.seek(0)
            # A separate process group: Ctrl-C in a terminal is only for the daemon.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hicache.daemon.upkeep.refit"],
                stdin=question,
                stdout=self._answer,
                cwd=_ROOT,
                process_group=0,
            )
        with suppress(OSError):  # it may have ended
            os.setpriority(os.PRIO_PROCESS, self.process.pid, NICENESS)

    @property
    def is_over(self) -> bool:
        """Whether its process has ended."""
        return self.process.poll() is not None

    def look(self, now_s: float) -> None:
        """Check whether its process has used CPU time since the last check."""
        with suppress(psutil.Error):  # it has ended
            times = psutil.Process(self.process.pid).cpu_times()
            if (used_s := times.user + times.system) > self.used_s:
                self.used_s, self.moved_s = used_s, now_s

    def result(self) -> Model | Exception | None:
        """The ended process's result."""
        if self.process.returncode:
            return FitFailed("its process died")
        self._answer.seek(0)
        said: Model | Exception | None = pickle.loads(self._answer.read())
        return said

    def end(self) -> None:
        """Kill the process if it still runs, and clean up."""
        self.process.kill()
        self.process.wait()
        self._answer.close()


class Fitter:
    """Keeps a history's model up to date. Call `tick` now and then, `close` at the end.

    A fit may run while its process uses CPU time (`owes_s`); one that does not for `STUCK_S`, or
    that takes longer than `LONGEST_S`, is killed."""

    def __init__(self, history: History) -> None:
        self.faults = Faults("the fit of the eviction model")
        self.fit: _Fit | None = None
        self._history = history
        self._slices: Iterator[Snapshot | None] | None = None
        self._snapshot: Snapshot | None = None

    def tick(self, now_s: float) -> None:
        """Take a model that is ready; start or continue a fit that is due."""
        if self.fit is not None:
            self._watch(self.fit, now_s)
        elif self._snapshot is not None:
            if not self.faults.is_paused(now_s):
                self.fit = _Fit(self._snapshot, now_s)
        elif self._slices is not None:
            self._snapshot = next(self._slices)
            if self._snapshot is not None:
                self._slices = None
        elif self._history.is_fit_due():
            self._slices = self._history.snapshot_in_slices()

    def owes_s(self, now_s: float) -> float:
        """For how long the running fit has used no CPU time; 0 if none is running."""
        return 0.0 if self.fit is None else max(0.0, now_s - self.fit.moved_s)

    def close(self) -> None:
        """End the running fit, if any."""
        if self.fit is not None:
            self.fit.end()
            self.fit = None

    def _watch(self, fit: _Fit, now_s: float) -> None:
        result: Model | Exception | None
        if fit.is_over:
            result = fit.result()
        else:
            fit.look(now_s)
            if now_s - fit.moved_s <= STUCK_S and now_s - fit.started_s <= LONGEST_S:
                return
            result = FitFailed("it hung, or took too long")
        self.close()
        if isinstance(result, Exception):  # keep the old model, and try the same counts again
            self.faults.record_failure(result, now_s)
            return
        self._history.adopt(result)
        self._snapshot = None
        self.faults.record_success()


def _memory_file() -> IO[bytes]:
    return os.fdopen(os.memfd_create("hicache-fit"), "w+b", buffering=0)


def _fit_and_answer() -> None:
    """In the process: read a snapshot from standard input, write its model to standard output."""
    snapshot = pickle.load(sys.stdin.buffer)
    told: Model | Exception | None
    try:
        told = fit(snapshot)
    except Exception as error:  # returned to the daemon, which logs it
        told = error
    pickle.dump(told, sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)


if __name__ == "__main__":
    _fit_and_answer()

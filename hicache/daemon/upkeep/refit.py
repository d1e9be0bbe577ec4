"""Refitting the eviction model beside the daemon's loop: one short-lived process per fit.

    counts, a slice each tick ──▶ snapshot ──▶ process ──▶ model, taken at the next tick

The loop never waits for it. The ghost index is looked through in slices of about half a
millisecond, ten a second. Snapshot and model change hands in memory files, the process's standard
input and output: writing one takes as long as copying it, whether or not the process gets to run,
and it may stand still in the middle of a word. It has a low priority from its start on, so what
wakes the loop goes first. A fit that fails, dies or stands still costs nothing but its model, and
is tried again after a pause. The process ends by itself, with its answer. Called from the daemon's
loop only.
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
"""A fit takes a second or two of processor time, at a low priority."""
NICENESS: Final = 10
_ROOT: Final = Path(__file__).absolute().parents[3]


class FitFailed(Exception):
    """A fit died, stood still or took for ever."""


class _Fit:
    """One fit under way."""

    def __init__(self, snapshot: Snapshot, now_s: float) -> None:
        self.started_s = self.moved_s = now_s
        self.used_s = -1.0
        self._answer = _memory_file()
        with _memory_file() as question:
            question.write(pickle.dumps(snapshot, pickle.HIGHEST_PROTOCOL))
            question.seek(0)
            # In a group of its own Ctrl-C in a terminal does not reach it: it is the daemon's.
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
        """Note whether its process has used processor time since the last look."""
        with suppress(psutil.Error):  # gone
            times = psutil.Process(self.process.pid).cpu_times()
            if (used_s := times.user + times.system) > self.used_s:
                self.used_s, self.moved_s = used_s, now_s

    def told(self) -> Model | Exception | None:
        """What its process said before it ended."""
        if self.process.returncode:
            return FitFailed("its process died")
        self._answer.seek(0)
        said: Model | Exception | None = pickle.loads(self._answer.read())
        return said

    def end(self) -> None:
        """It may stand still, or have ended."""
        self.process.kill()
        self.process.wait()
        self._answer.close()


class Fitter:
    """Keeps a history's model up to date. `tick` now and then, `close` at the end.

    A fit goes on as long as its process uses processor time (`owes_s`); one that does not for
    `STUCK_S`, or that takes longer than `LONGEST_S`, is killed."""

    def __init__(self, history: History) -> None:
        self.faults = Faults("the fit of the eviction model")
        self.fit: _Fit | None = None
        self._history = history
        self._slices: Iterator[Snapshot | None] | None = None
        self._snapshot: Snapshot | None = None

    def tick(self, now_s: float) -> None:
        """Take a model that is ready; go on with a fit that is due."""
        if self.fit is not None:
            self._watch(self.fit, now_s)
        elif self._snapshot is not None:
            if not self.faults.is_resting(now_s):
                self.fit = _Fit(self._snapshot, now_s)
        elif self._slices is not None:
            self._snapshot = next(self._slices)
            if self._snapshot is not None:
                self._slices = None
        elif self._history.is_fit_due():
            self._slices = self._history.snapshot_in_slices()

    def owes_s(self, now_s: float) -> float:
        """For how long the fit under way has not moved; 0 if none is."""
        return 0.0 if self.fit is None else max(0.0, now_s - self.fit.moved_s)

    def close(self) -> None:
        """End the fit under way, if any."""
        if self.fit is not None:
            self.fit.end()
            self.fit = None

    def _watch(self, fit: _Fit, now_s: float) -> None:
        told: Model | Exception | None
        if fit.is_over:
            told = fit.told()
        else:
            fit.look(now_s)
            if now_s - fit.moved_s <= STUCK_S and now_s - fit.started_s <= LONGEST_S:
                return
            told = FitFailed("it stood still, or took too long")
        self.close()
        if isinstance(told, Exception):  # the old model stays, and the same counts are tried again
            self.faults.met(told, now_s)
            return
        self._history.adopt(told)
        self._snapshot = None
        self.faults.over()


def _memory_file() -> IO[bytes]:
    return os.fdopen(os.memfd_create("hicache-fit"), "w+b", buffering=0)


def _fit_and_answer() -> None:
    """The process: a snapshot from standard input, its model to standard output."""
    snapshot = pickle.load(sys.stdin.buffer)
    told: Model | Exception | None
    try:
        told = fit(snapshot)
    except Exception as error:  # the boundary: told to the daemon, which tells the log
        told = error
    pickle.dump(told, sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)


if __name__ == "__main__":
    _fit_and_answer()

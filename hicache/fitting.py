"""Refitting the eviction model beside the daemon's loop: one short-lived process per fit.

    counts, a slice each tick ──▶ thread ──▶ process ──▶ model ──▶ taken at the next tick

The loop hands over a snapshot of counts and takes the model when it comes; until then the old one
serves. Nothing here holds the loop up: the ghost index is looked through in slices of about half a
millisecond, ten a second, and a thread talks to the process, which may stand still in the middle of
a word. A fit that fails, dies or stands still costs nothing but its model, and is tried again after
a pause. The process ends by itself: with its answer, or when nobody is there to take it. Called
from the daemon's loop only.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection

import psutil

from hicache.engine.hazard import Model, Snapshot, fit
from hicache.engine.history import History
from hicache.faults import Faults

STUCK_S = 30.0
LONGEST_S = 300.0
"""A fit takes a second or two of processor time, at the lowest priority."""


class FitFailed(Exception):
    """A fit died, stood still or took for ever."""


class _Fit:
    """One fit under way. `failure` and `model` are set before its thread ends."""

    def __init__(self, snapshot: Snapshot, now_s: float) -> None:
        self.started_s = self.moved_s = now_s
        self.used_s = -1.0
        self.model: Model | None = None
        self.failure: Exception | None = None
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_fit_and_answer, args=(theirs,), name="hicache-fit", daemon=True
        )
        self.process.start()
        theirs.close()
        self.thread = threading.Thread(
            target=self._talk, args=(snapshot,), name="hicache-fit", daemon=True
        )
        self.thread.start()

    def look(self, now_s: float) -> None:
        """Note whether its process has used processor time since the last look."""
        with suppress(psutil.Error):  # gone: its thread ends
            times = psutil.Process(self.process.pid).cpu_times()
            if (used_s := times.user + times.system) > self.used_s:
                self.used_s, self.moved_s = used_s, now_s

    def end(self) -> None:
        """It holds nothing, and may stand still."""
        self.process.kill()
        self.process.join()
        self.thread.join()
        self._pipe.close()

    def _talk(self, snapshot: Snapshot) -> None:
        try:
            self._pipe.send(snapshot)
            said = self._pipe.recv()
        except (EOFError, OSError):
            self.failure = FitFailed("its process died")
            return
        if isinstance(said, Exception):
            self.failure = said
        else:
            self.model = said


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
        fit.look(now_s)
        failure = fit.failure
        if fit.thread.is_alive():
            if now_s - fit.moved_s <= STUCK_S and now_s - fit.started_s <= LONGEST_S:
                return
            failure = FitFailed("it stood still, or took too long")
        self.close()
        if failure is not None:  # the old model stays, and the same counts are tried again
            self.faults.met(failure, now_s)
            return
        self._history.adopt(fit.model)
        self._snapshot = None
        self.faults.over()


def _fit_and_answer(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's to handle
    os.nice(10)  # a model can wait; the daemon and its workers cannot
    try:
        snapshot = pipe.recv()
        try:
            told: object = fit(snapshot)
        except Exception as error:  # the boundary: told to the daemon, which tells the log
            told = error
        pipe.send(told)
    except (EOFError, BrokenPipeError):
        return  # the daemon is gone, or wants no model any more

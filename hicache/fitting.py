"""Refitting the eviction model beside the daemon's loop: one short-lived process per fit.

    counts, a slice each tick ──▶ process ──▶ it is ready ──▶ snapshot ──▶ model

The loop hands over a snapshot of counts and takes the model when it comes; until then the old one
serves. Nothing here holds the loop up: the ghost index is looked through in slices of about half a
millisecond, ten a second, and the snapshot, larger than a pipe's buffer, is sent only to a process
that reads it (a starting Python takes a quarter of a second to get there). A fit that fails or dies
costs nothing but its model. The child ends by itself: with its answer, or when nobody is there to
take it. Called from the daemon's loop only.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Final

from hicache.engine.hazard import Snapshot, fit
from hicache.engine.history import History

READY: Final = "ready"

log = logging.getLogger(__name__)


class Fitter:
    """Keeps a history's model up to date. `tick` now and then, `close` at the end."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._slices: Iterator[Snapshot | None] | None = None
        self._snapshot: Snapshot | None = None

    def tick(self) -> None:
        """Take a model that is ready; go on with a fit that is due."""
        if self._pipe is not None:
            if self._pipe.poll():
                self._hear(self._pipe)
        elif self._slices is not None:
            self._snapshot = next(self._slices)
            if self._snapshot is not None:
                self._slices = None
                self._start()
        elif self._history.is_fit_due():
            self._slices = self._history.snapshot_in_slices()

    def close(self) -> None:
        """End the fit under way, if any."""
        if self._process is not None and self._pipe is not None:
            self._process.terminate()
            self._process.join()
            self._pipe.close()
        self._process = self._pipe = self._snapshot = None

    def _hear(self, pipe: Connection) -> None:
        try:
            said = pipe.recv()
            if said == READY:
                pipe.send(self._snapshot)
                return
            self._history.adopt(said)
        except (EOFError, BrokenPipeError):
            log.warning("a fit of the eviction model died; the old model stays")
        self.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_fit_and_answer, args=(theirs,), name="hicache-fit", daemon=True
        )
        self._process.start()
        theirs.close()


def _fit_and_answer(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's to handle
    os.nice(10)  # a model can wait; the daemon and its workers cannot
    pipe.send(READY)
    try:
        pipe.send(fit(pipe.recv()))
    except (EOFError, BrokenPipeError):
        return  # the daemon is gone, or wants no model any more

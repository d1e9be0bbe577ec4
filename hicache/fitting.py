"""Refitting the eviction model beside the daemon's loop: one short-lived process per fit.

The loop hands over a snapshot of counts and takes the model when it comes; until then the old one
serves. A fit that fails or dies costs nothing but its model. The child ends by itself: with its
answer, or when nobody is there to take it. Called from the daemon's loop only.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from hicache.engine.hazard import Snapshot, fit
from hicache.engine.history import History

log = logging.getLogger(__name__)


class Fitter:
    """Keeps a history's model up to date. `tick` now and then, `close` at the end."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._process: BaseProcess | None = None
        self._answer: Connection | None = None

    def tick(self) -> None:
        """Take a model that is ready; start a fit that is due."""
        if self._answer is not None:
            if not self._answer.poll():
                return
            try:
                self._history.adopt(self._answer.recv())
            except EOFError:
                log.warning("a fit of the eviction model died; the old model stays")
            self.close()
        elif self._history.is_fit_due():
            self._start(self._history.snapshot())

    def close(self) -> None:
        """End the fit under way, if any."""
        if self._process is not None and self._answer is not None:
            self._process.terminate()
            self._process.join()
            self._answer.close()
        self._process = self._answer = None

    def _start(self, snapshot: Snapshot) -> None:
        context = multiprocessing.get_context("spawn")
        self._answer, theirs = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_fit_and_answer, args=(snapshot, theirs), name="hicache-fit", daemon=True
        )
        self._process.start()
        theirs.close()


def _fit_and_answer(snapshot: Snapshot, answer: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's to handle
    answer.send(fit(snapshot))

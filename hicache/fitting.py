"""Refitting the eviction model beside the daemon's loop: one short-lived process per fit.

    counts, a slice each tick ──▶ snapshot ──▶ process ──▶ model

The loop never waits for it. The ghost index is looked through in slices of about half a
millisecond, ten a second. Snapshot and model change hands in memory files, the child's standard
input and output: writing one takes as long as copying it, whether or not the child gets to run (a
pipe holds less than either, and its writer waits for a reader that everybody else goes before).
The child runs only when a processor has nothing else to do (SCHED_IDLE), so a ping that wakes the
loop never waits for it. A fit that fails or dies costs nothing but its model, and the old one
serves until a new one is there. Called from the daemon's loop only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from hicache.engine.hazard import Snapshot, fit
from hicache.engine.history import History

_ROOT: Final = Path(__file__).absolute().parents[1]

log = logging.getLogger(__name__)


class Fitter:
    """Keeps a history's model up to date. `tick` now and then, `close` at the end."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._process: subprocess.Popen[bytes] | None = None
        self._answer: IO[bytes] | None = None
        self._slices: Iterator[Snapshot | None] | None = None

    def tick(self) -> None:
        """Take a model that is ready; go on with a fit that is due."""
        if self._process is not None:
            if self._process.poll() is not None:
                self._hear()
                self.close()
        elif self._slices is not None:
            snapshot = next(self._slices)
            if snapshot is not None:
                self._slices = None
                self._start(snapshot)
        elif self._history.is_fit_due():
            self._slices = self._history.snapshot_in_slices()

    def close(self) -> None:
        """End the fit under way, if any."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._answer is not None:
            self._answer.close()
        self._process = self._answer = None

    def _hear(self) -> None:
        assert self._process is not None
        assert self._answer is not None
        if self._process.returncode:
            log.warning("a fit of the eviction model died; the old model stays")
            self._history.adopt(None)
            return
        self._answer.seek(0)
        self._history.adopt(pickle.loads(self._answer.read()))

    def _start(self, snapshot: Snapshot) -> None:
        self._answer = _memory_file()
        with _memory_file() as question:
            question.write(pickle.dumps(snapshot, pickle.HIGHEST_PROTOCOL))
            question.seek(0)
            # In a group of its own Ctrl-C in a terminal does not reach it: it is the daemon's.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hicache.fitting"],
                stdin=question,
                stdout=self._answer,
                cwd=_ROOT,
                process_group=0,
            )
        with contextlib.suppress(OSError):  # it may have ended, or a sandbox may forbid it
            os.sched_setscheduler(self._process.pid, os.SCHED_IDLE, os.sched_param(0))


def _memory_file() -> IO[bytes]:
    return os.fdopen(os.memfd_create("hicache-fit"), "w+b", buffering=0)


def main() -> None:
    """The child: a snapshot from standard input, its model to standard output."""
    snapshot = pickle.load(sys.stdin.buffer)
    pickle.dump(fit(snapshot), sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)


if __name__ == "__main__":
    main()

"""A worker in which one system call on the disk tier's files fails, a real one with a real errno.

    python -m tests.e2e.faulty_worker FD            run by tests/e2e/faulty_daemon.py

Which call is said by the JSON file that HICACHE_TEST_FAULT names: {"folder", "kind", "nth",
"errno"}, and "at_start": whether to count from the start of the process on, or from SIGUSR1. Once
it has failed, a file beside that one says so, and no call fails any more, here or in the next; with
"for_good" all after it fail too, until SIGUSR2.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from hicache.transfer import worker
from tests.tiers.faults import Faults

CONTROL = "HICACHE_TEST_FAULT"


def mark_beside(control: Path) -> Path:
    """Where it is said that the call has failed."""
    return control.with_suffix(".failed")


class ToldFaults(Faults):
    """Says in a file that the call has failed."""

    def __init__(self, control: Path, folder: Path) -> None:
        self._control = control
        self._stack = contextlib.ExitStack()  # left with the process
        super().__init__(folder)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "has_failed" and value:
            mark_beside(self._control).touch()

    def arm(self, at_start: bool) -> None:
        """If this is the moment, and it has not failed before."""
        wanted = json.loads(self._control.read_text())
        if wanted["at_start"] == at_start and not mark_beside(self._control).exists():
            what = wanted["kind"], wanted["nth"], wanted["errno"]
            self._stack.enter_context(self.fail_at(*what, for_good=wanted["for_good"]))

    def end(self) -> None:
        """The cause is gone."""
        self._stack.close()


def main(fd: int) -> int:
    control = Path(os.environ[CONTROL])
    import lmdb  # its tables are looked for below

    assert lmdb.version()
    faults = ToldFaults(control, Path(json.loads(control.read_text())["folder"]))
    signal.signal(signal.SIGUSR1, lambda *_: faults.arm(at_start=False))
    signal.signal(signal.SIGUSR2, lambda *_: faults.end())
    faults.arm(at_start=True)
    return worker.main(fd)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

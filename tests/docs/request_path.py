"""Which product files one request runs, in the client and in the daemon, found by tracing.

    python -m tests.docs.request_path       prints them for a match of a held prompt

A profile function notes each call of a product function with the product functions that led to it,
and whether the daemon had sent its reply by then. The daemon's loop also does work that has nothing
to do with the request (timers, a look at its workers). Two rules leave that out: calls that stand
in a record made without a request do not count, and a file must stand in all records.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

from tests.e2e.daemon_process import DaemonProcess, prompt, store, wait_for

TRACE_FILE: Final = "HICACHE_TEST_TRACE_FILE"
ROOT: Final = Path(__file__).resolve().parents[2]
ROOMS: Final = ("engine", "tiers", "transfer", "hicache")
TIMES: Final = 16

SENDS: Final = ("send_multipart", "noted_send")  # of pyzmq and of traced_daemon.py
BEFORE: Final = "before"
AFTER: Final = "after"

Row = tuple[str, str, str]  # the functions that led there; the file; before or after the reply


class Recorder:
    """Notes rows in the thread that calls `begin`, until `end`."""

    def __init__(self) -> None:
        self._files: dict[str, str | None] = {}
        self._rows: dict[Row, None] = {}
        self._stack: list[str] = []
        self._when = BEFORE
        self._at_poll: Callable[[], object] | None = None

    def begin(self) -> None:
        self._rows, self._stack, self._when, self._at_poll = {}, [], BEFORE, None
        sys.setprofile(self._note)

    def end(self) -> list[Row]:
        sys.setprofile(None)
        return list(self._rows)

    def when_it_polls(self, then: Callable[[], object]) -> None:
        """Call `then` once the loop waits for requests again."""
        self._at_poll = then

    def _note(self, frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if code.co_filename not in self._files:
            self._files[code.co_filename] = product_file(code.co_filename)
        file = self._files[code.co_filename]
        if event == "return" and file is not None and self._stack:
            self._stack.pop()
        elif event == "call" and file is not None:
            self._stack.append(code.co_qualname)
            self._rows[" ".join(self._stack), file, self._when] = None
        elif event == "call" and code.co_name in SENDS:
            self._when = AFTER
        elif event == "call" and code.co_name == "poll" and self._at_poll is not None:
            self._at_poll()


@dataclass(frozen=True)
class RequestPath:
    """The files of a request in the order of their first use."""

    client: tuple[str, ...]
    daemon: tuple[str, ...]  # until the reply is sent
    afterwards: tuple[str, ...]  # what the daemon runs besides when the reply has left

    @property
    def until_reply(self) -> set[str]:
        return {*self.client, *self.daemon}


def product_file(name: str) -> str | None:
    """The path in the repository; None for what is not the product's."""
    try:
        path = Path(name).resolve().relative_to(ROOT)
    except (OSError, ValueError):
        return None
    return str(path) if path.parts[0] in ROOMS else None


class TracedDaemon:
    """A daemon of which records can be made; its clients are traced in this process."""

    def __init__(self, **changes: Any) -> None:
        self._target = Path(tempfile.mkdtemp(prefix="hc-")) / "trace"
        os.environ[TRACE_FILE] = str(self._target)
        self.server = DaemonProcess(
            module="tests.docs.traced_daemon", **{"debug": {"check": False}, **changes}
        )

    def path_of(
        self, request: Callable[[], object], after: Callable[[], object] = lambda: None
    ) -> RequestPath:
        """The files that `request` runs. It is made TIMES times, with `after` after each."""
        idle = {row[0] for _ in range(TIMES) for row in self.record(lambda: None)[1]}
        records = []
        for _ in range(TIMES):
            records.append(self.record(request))
            after()
        daemon = [[row for row in rows if row[0] not in idle] for _, rows in records]
        before = _in_all([[row for row in rows if row[2] == BEFORE] for rows in daemon])
        later = _in_all([[row for row in rows if row[2] == AFTER] for rows in daemon])
        return RequestPath(
            client=_in_all([rows for rows, _ in records]),
            daemon=before,
            afterwards=tuple(file for file in later if file not in before),
        )

    def record(self, request: Callable[[], object]) -> tuple[list[Row], list[Row]]:
        """The client's rows and the daemon's while `request` is made."""
        self._signal(signal.SIGUSR1)
        mine = Recorder()
        mine.begin()
        try:
            request()
        finally:
            client = mine.end()
        self._signal(signal.SIGUSR2)
        rows: list[Row] = []
        for line in self._target.read_text().splitlines():
            stack, file, when = line.split("\t")
            rows.append((stack, file, when))
        return client, rows

    def _signal(self, number: signal.Signals) -> None:
        """Send it, and wait until its handler has written the file."""
        self._target.unlink(missing_ok=True)
        os.kill(self.server.pid, number)
        wait_for(self._target.exists, "a record of the daemon")


def _in_all(records: list[list[Row]]) -> tuple[str, ...]:
    """The files that stand in all of them, in the order of the first. A reply that is late takes
    another way through the client, so the functions differ from record to record."""
    common = set.intersection(*({file for _, file, _ in rows} for rows in records))
    return tuple(dict.fromkeys(file for _, file, _ in records[0] if file in common))


def path_of_a_match(num_blocks: int = 32) -> RequestPath:
    """A match of a prompt that is held, after others have measured what loads cost."""
    traced = TracedDaemon(planner={"mode": "measured", "probe_links": True})
    with traced.server as server:
        client, tokens = server.client(), prompt(1, num_blocks)
        assert store(client, tokens) == num_blocks
        answers: list[Any] = []

        def match() -> None:
            answers.append(client.match(tokens))

        path = traced.path_of(match, lambda: client.release(answers[-1]))
        assert all(answer.hit_blocks == num_blocks for answer in answers)
    return path


def files_of_evictions() -> set[str]:
    """What a daemon runs while prompts are stored for which others must leave its memory."""
    traced = TracedDaemon(hbm=None, dram={"size": "16MiB"})
    files: set[str] = set()
    with traced.server as server:
        client = server.client()

        def fill(seed: int) -> None:
            assert store(client, prompt(seed, 8)) == 8
            server.settle()

        for seed in range(12):  # of 2 MiB each
            files |= {file for _, file, _ in traced.record(partial(fill, seed))[1]}
        assert server.tier("disk")["blocks"] > 0
    return files


def main() -> None:
    path = path_of_a_match()
    for name in ("client", "daemon", "afterwards"):
        files = getattr(path, name)
        print(f"{name}: {len(files)}", *files, sep="\n  ")
    print(f"until the reply has left: {len(path.until_reply)} product files")


if __name__ == "__main__":
    main()

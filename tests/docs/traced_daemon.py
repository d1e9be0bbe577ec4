"""A daemon that notes which product files it runs, for tests/docs/request_path.py:

python -m tests.docs.traced_daemon serve --config FILE

SIGUSR1 begins a record and writes an empty TRACE_FILE. SIGUSR2 ends it when the loop waits for
requests again, and writes its rows there.
"""

import os
import signal
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import zmq

from hicache import cli
from tests.docs.request_path import TRACE_FILE, Recorder, Row


def install() -> None:
    recorder, target = Recorder(), Path(os.environ[TRACE_FILE])

    def write(rows: list[Row]) -> None:
        new = target.with_suffix(".new")
        new.write_text("\n".join("\t".join(row) for row in rows))
        new.replace(target)

    def begin(_signal: int, _frame: FrameType | None) -> None:
        write([])
        recorder.begin()

    def end(_signal: int, _frame: FrameType | None) -> None:
        recorder.when_it_polls(lambda: write(recorder.end()))

    send = zmq.backend.Socket.send

    def noted_send(*arguments: Any) -> Any:
        """The daemon sends by a method that a profile function does not see."""
        return send(*arguments)

    setattr(zmq.backend, "Socket", SimpleNamespace(send=noted_send))  # noqa: B010
    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)


if __name__ == "__main__":
    install()
    cli.main()

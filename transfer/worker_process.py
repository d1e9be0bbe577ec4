"""One worker process, in the daemon: starts it, exchanges messages, and detects its end.

Used from the daemon's loop only, which it never blocks: sends are buffered, receives return what is
there, and the process's end shows as a readable pidfd. What a worker sent before it ended can still
be read: the daemon's end of the socket stays open.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from hicache.transfer.worker_messages import Message, Stream, WorkerConfig, pack

_RECEIVE_BYTES = 1 << 20
_BUFFER_BYTES = 4 << 20
_MODULE = "hicache.transfer.worker"
_ROOT = Path(__file__).absolute().parents[2]  # not resolved: hicache/transfer may be a link


class WorkerProcess:
    """A running worker: its socket, its pidfd, and the bytes not sent to it yet."""

    def __init__(self, config: WorkerConfig, poller: select.epoll) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            # Started in the folder that holds the package: so `-m` finds it wherever it is
            # installed, and never another module in the daemon's working directory.
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=_ROOT,
            )
        ours.setblocking(False)
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.sock = ours
        self._stream = Stream()
        self._unsent = bytearray()
        self._poller = poller
        self._is_open = True
        poller.register(self.pidfd, select.EPOLLIN)
        poller.register(ours, select.EPOLLIN)
        self.send(pack("config", parent=os.getpid(), config=asdict(config)))

    @property
    def fds(self) -> tuple[int, int]:
        return self.pidfd, self.sock.fileno()

    @property
    def num_unsent(self) -> int:
        """Bytes not sent yet, because the process has not read earlier ones."""
        return len(self._unsent)

    def send(self, message: bytes) -> None:
        """Send a message now or later, in order; never blocks."""
        is_idle = not self._unsent
        self._unsent += message
        if is_idle:
            self.flush()

    def flush(self) -> None:
        """Send what the socket accepts; have the poller report when it accepts more."""
        if not self._is_open:
            return
        had_unsent = len(self._unsent)
        try:
            while self._unsent:
                del self._unsent[: self.sock.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # the process has ended; the pidfd reports it too
        if had_unsent:
            events = select.EPOLLIN | (select.EPOLLOUT if self._unsent else 0)
            self._poller.modify(self.sock, events)

    def receive(self) -> Iterator[Message]:
        """The messages received so far. At the end of the stream the process is killed. Raises
        MalformedMessage."""
        while self._is_open:
            try:
                data = self.sock.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.hang_up()
                return
            yield from self._stream.feed(data)

    def hang_up(self) -> None:
        """Stop reading, and kill the process: its moves may fail only once it is dead."""
        if self._is_open:
            self._is_open = False
            self._poller.unregister(self.sock)
            self.kill()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    def exit_status(self) -> int | None:
        """None while it runs; negative: the number of the signal that ended it."""
        return self._process.poll()

    def close(self) -> None:
        """Close the descriptors, after its end."""
        if self._is_open:
            self._is_open = False
            self._poller.unregister(self.sock)
        self._poller.unregister(self.pidfd)
        os.close(self.pidfd)
        self.sock.close()

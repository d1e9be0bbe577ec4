"""One daemon per socket: a lock file beside the socket contains the pid of its daemon.

The lock is the kernel's (flock): it is free when its daemon was killed with -9, and never while the
daemon lives. Used at the start and at the end, from the main thread.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import zmq

from hicache.protocol.endpoint import ipc_path


class AlreadyServed(Exception):
    """Another daemon holds this endpoint; the message is a sentence for the operator."""


class SocketLock:
    """Holds the endpoint's lock until `close`. For `tcp://` the bind itself is the lock. `setting`:
    its configuration key. Raises AlreadyServed, and FileExistsError where the path is not a
    socket."""

    def __init__(self, endpoint: str, setting: str = "socket.endpoint") -> None:
        self.endpoint = endpoint
        self._fd = -1
        self._socket: Path | None = None
        path = ipc_path(endpoint)
        if path is None:
            return
        self._socket = Path(path)
        if self._socket.exists() and not self._socket.is_socket():
            raise FileExistsError(
                f"{path} is not a socket, and is not replaced: give {setting} another path"
            )
        self._socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = self._socket.with_name(self._socket.name + ".lock")
        self._fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            self._fd = -1
            raise AlreadyServed(
                f"a hicache daemon (pid {pid}) already serves {endpoint}: stop it first, or give "
                f"this one another {setting} and other tier paths"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        self._socket.unlink(missing_ok=True)  # of a dead daemon: this one holds the lock now

    def close(self) -> None:
        """Release the endpoint. The lock file stays: removing it would race with the next
        daemon."""
        if self._fd >= 0:
            if self._socket is not None:
                self._socket.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def listen(socket: zmq.Socket[Any], endpoint: str, verb: str = "listen") -> None:
    """Bind; on `ipc://` for this user only. The caller holds the endpoint's lock. Raises OSError
    with a sentence, and closes the socket."""
    path = ipc_path(endpoint)
    before = os.umask(0o177)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise OSError(f"cannot {verb} at {endpoint}: {error.strerror}") from None
    finally:
        os.umask(before)
    if path is not None:
        Path(path).chmod(0o600)


def peer_pid(frame: zmq.Frame) -> int:
    """The pid of the process at the other end of an ipc socket, 0 when it is not visible.

    From the kernel through the socket (SO_PEERCRED), never from the message. ZeroMQ's
    "Peer-Address" contains the same as `host:uid:gid:pid`.
    """
    try:
        pid = int(str(frame.get("Peer-Address")).rsplit(":", 1)[1])
    except (zmq.ZMQError, ValueError, IndexError):
        return 0
    return pid if pid > 0 else 0

"""A subscriber that speaks ZMTP 3.0 itself, and says what ZeroMQ's own sockets would not send."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Final, Self

from hicache.protocol.endpoint import ipc_path

PATIENCE_S: Final = 60.0
_GREETING: Final = (
    b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)  # RFC 23
)
_READY: Final = b"\x05READY" + b"\x0bSocket-Type" + b"\0\0\0\x03SUB"


def frame(body: bytes, *, flags: int = 0) -> bytes:
    """One frame: a message of one part, or (flags 4) a command."""
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | 2,)) + len(body).to_bytes(8, "big") + body


def subscription(topic: bytes) -> bytes:
    return frame(b"\1" + topic)


def unsubscription(topic: bytes) -> bytes:
    return frame(b"\0" + topic)


class RawSubscriber:
    """At an `ipc://` endpoint."""

    def __init__(self, endpoint: str) -> None:
        path = ipc_path(endpoint)
        assert path is not None
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(PATIENCE_S)
        self._socket.connect(path)
        self._heard = b""
        self.send(_GREETING)
        self._receive(len(_GREETING))
        self.send(frame(_READY, flags=4))
        _, size = self._receive(2)
        self._receive(size)

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            some = self._socket.recv(size - len(data))
            assert some, "it hung up"
            data += some
        return data

    def send(self, frames: bytes) -> None:
        """However long that takes. Who has hung up takes no more."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(frames)

    def hears(self, what: bytes) -> bool:
        """Whether these bytes have come."""
        self._socket.setblocking(False)
        try:
            while data := self._socket.recv(1 << 20):
                self._heard = self._heard[-len(what) :] + data
                if what in self._heard:
                    return True
        except BlockingIOError:
            pass
        finally:
            self._socket.settimeout(PATIENCE_S)
        return what in self._heard

    def wait_for_the_end(self) -> None:
        """Until the other side has hung up."""
        with suppress(ConnectionResetError):
            while self._socket.recv(1 << 16):
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

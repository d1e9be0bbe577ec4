"""The floor of a call: a ROUTER socket in its own process that sends every message back.

`python -m hicache.bench.echo_floor ENDPOINT` is that process.
"""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType

import zmq


def serve(endpoint: str) -> None:
    """Echo every message. Never returns."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint)
    while True:
        router.send_multipart(router.recv_multipart())


class Echo:
    """The process, and a DEALER connected to it."""

    def __init__(self, endpoint: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hicache.bench.echo_floor", endpoint]
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, 30_000)
        self._socket.connect(endpoint)
        self.call(b"ready?")

    def call(self, payload: bytes) -> bytes:
        self._socket.send(payload)
        return self._socket.recv()

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Echo:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


if __name__ == "__main__":
    serve(sys.argv[1])

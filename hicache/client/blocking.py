"""A blocking client of the daemon, for use inside an inference engine's process.

    with Client(spec) as client:
        match = client.match(tokens)
        fetched = client.fetch(match, buffer)       # whole blocks at the front of `buffer`
        client.release(match)
        ...                                         # prefill the rest
        client.put(tokens, blocks, first=fetched.blocks)

The calls are declared in `calls` and `gpu_pages`. Not thread-safe: one client per thread. After a
fork the child's client opens a session of its own. Loads no lmdb, cupy or daemon; `aio` has the
same calls for asyncio.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from functools import wraps
from typing import Any, Self

from hicache.client.client_base import ClientBase
from hicache.client.exchange import Exchange
from hicache.client.session import Connection
from hicache.client.steps import Blocking, Steps, Stream
from hicache.client.transport import BlockingDriver
from hicache.protocol.curve import CurveKeys


class Client(ClientBase, Blocking):
    __doc__ = ClientBase.__doc__

    _driver: BlockingDriver

    def _drive(self, core: Connection, max_part_bytes: int, curve: CurveKeys | None) -> None:
        self._driver = BlockingDriver(core, max_part_bytes, curve)

    @staticmethod
    def call_of(steps: Callable[..., Steps[Any]]) -> Callable[..., Any]:
        @wraps(steps)
        def call(self: Client, *args: Any, **named: Any) -> Any:
            return self._driver.run(steps(self, *args, **named))

        return call

    @staticmethod
    def stream_of(steps: Callable[..., Stream[Any]]) -> Callable[..., Generator[Any, None, None]]:
        @wraps(steps)
        def call(self: Client, *args: Any, **named: Any) -> Generator[Any, None, None]:
            return self._driver.each(steps(self, *args, **named))

        return call

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AdminLine:
    """Requests without a session, one after another over one connection. Not thread-safe."""

    def __init__(self, endpoint: str, curve: CurveKeys | None = None) -> None:
        self.endpoint = endpoint
        self._core = Exchange(endpoint, time.monotonic)
        self._driver = BlockingDriver(self._core, curve=curve)

    def call(
        self, op: str, body: Mapping[str, Any] | None = None, timeout_s: float = 5.0
    ) -> dict[str, Any]:
        """The reply's fields. Raises DaemonAbsent or DaemonError, whose texts are sentences for
        people."""
        request = {"op": op, "deadline_s": timeout_s, **(body or {})}
        deadline_s = self._core.clock() + timeout_s
        reply, _ = self._driver.run(self._core.exchange(request, deadline_s))
        return {name: value for name, value in reply.items() if name not in ("id", "ok")}

    def close(self) -> None:
        self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def admin_call(
    endpoint: str,
    op: str,
    body: Mapping[str, Any] | None = None,
    timeout_s: float = 5.0,
    curve: CurveKeys | None = None,
) -> dict[str, Any]:
    """One request without a session, such as stats or reload; its reply's fields.

    Raises DaemonAbsent or DaemonError, whose texts are sentences for people.
    """
    with AdminLine(endpoint, curve) as line:
        return line.call(op, body, timeout_s)

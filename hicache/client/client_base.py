"""The common base of the blocking and the asyncio client: everything except the driver."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from typing import Protocol

from hicache.client.calls import DaemonCalls, PromptCalls
from hicache.client.gpu_pages import PageCalls
from hicache.client.results import Greeting
from hicache.client.session import Connection, Timeouts, Transport
from hicache.protocol.curve import CurveKeys
from hicache.protocol.endpoint import default_endpoint
from hicache.protocol.keys import NamespaceSpec


class Driver(Protocol):
    @property
    def connected(self) -> bool: ...


class ClientBase(PromptCalls, PageCalls, DaemonCalls):
    """Calls with a deadline. A daemon that is absent, dies, refuses or sends garbage is a miss, so
    an inference engine works as without it. Connects on the first call.

    `endpoint` defaults to HICACHE_ENDPOINT, or the user's daemon. `timeout_s` limits an ordinary
    call, `fetch_timeout_s` a whole fetch, `put_timeout_s` a whole put: a running copy (of at most
    1 GiB) is not interrupted then, and is reported within 0.4 s. `transport`: `arena` maps the
    daemon's memory, `frames` sends blocks through the socket, `auto` prefers the first on `ipc://`.
    `name` shows in logs. `curve`: the keys for a daemon on `tcp://` with CURVE; without valid ones
    every call is a miss. `group`: another client's `greeting.group`, to share its leases.
    """

    _driver: Driver

    def __init__(
        self,
        spec: NamespaceSpec,
        endpoint: str | None = None,
        *,
        timeout_s: float = 1.0,
        fetch_timeout_s: float = 5.0,
        put_timeout_s: float = 5.0,
        transport: Transport = "auto",
        name: str = "",
        curve: CurveKeys | None = None,
        group: bytes = b"",
    ) -> None:
        self.endpoint = endpoint or default_endpoint(os.environ, os.getuid())
        timeouts = Timeouts(timeout_s, fetch_timeout_s, put_timeout_s)
        self._connection = Connection(
            spec,
            self.endpoint,
            timeouts,
            time.monotonic,
            transport=transport,
            name=name,
            group=group,
        )
        self._drive(self._connection, spec.block_bytes, curve)

    @abstractmethod
    def _drive(self, core: Connection, max_part_bytes: int, curve: CurveKeys | None) -> None:
        """Make `_driver`."""

    @property
    def connected(self) -> bool:
        """Whether a session is open, without sending anything (`ping` checks it)."""
        return self._connection.greeting is not None and self._driver.connected

    @property
    def last_error(self) -> str:
        """The last failure as a sentence; "" if there was none."""
        return self._connection.last_error

    @property
    def greeting(self) -> Greeting | None:
        """The daemon's reply to `hello`; None without a session."""
        return self._connection.greeting

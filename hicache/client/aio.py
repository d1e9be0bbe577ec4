"""The client of `hicache.client` for asyncio: the same calls, as coroutines.

Calls may run side by side on one client; replies find their call by id. Big copies run in a
thread, and a cancelled call ends only when its copy has ended: nothing writes into a slot or a
buffer that has been given back. Use a client within one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import ExitStack, closing, suppress
from functools import wraps
from typing import Any, Self, TypeVar

import zmq
import zmq.asyncio

from hicache.client.client_base import ClientBase
from hicache.client.session import Connection, DaemonAbsent, Exchange
from hicache.client.steps import (
    Asynchronous,
    Give,
    MapArenas,
    Pause,
    Send,
    Step,
    Steps,
    Stream,
    Wait,
    Work,
)
from hicache.client.transport import (
    Lineage,
    absent,
    close_socket,
    is_up,
    map_arenas,
    open_socket,
)
from hicache.protocol.curve import CurveKeys

T = TypeVar("T")


async def in_thread(task: Callable[[], T]) -> T:
    """Run a copy in a thread. If cancelled, returns only when the copy has ended, so that it does
    not write into memory that was freed."""
    copying = asyncio.ensure_future(asyncio.to_thread(task))
    try:
        return await asyncio.shield(copying)
    except asyncio.CancelledError:
        while not copying.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([copying])
        if not copying.cancelled():
            copying.exception()  # retrieved: the caller gets the cancellation instead
        raise


class _Link:
    """One connection and the two tasks that read it."""

    def __init__(self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
        self.socket = socket
        self.monitor = monitor
        self.tasks: list[asyncio.Task[None]] = []


class AsyncDriver:
    """Carries out the steps of a core's calls within an event loop."""

    def __init__(
        self, core: Exchange, max_part_bytes: int = 0, curve: CurveKeys | None = None
    ) -> None:
        self._core = core
        self._max_part_bytes = max_part_bytes
        self._curve = curve
        self._context: zmq.asyncio.Context | None = None
        self._link: _Link | None = None
        self._connecting = asyncio.Lock()
        self._lineage = Lineage.generation

    async def run(self, call: Steps[T]) -> T:
        """The result of a call. A cancellation is thrown into the call, which cleans up first."""
        self._look_for_fork()
        try:
            step = next(call)
            while True:
                try:
                    result = await self._carried_out(step)
                except BaseException as error:
                    step = call.throw(error)
                else:
                    step = call.send(result)
        except StopIteration as stop:
            value: T = stop.value
            return value

    async def each(self, call: Stream[T]) -> AsyncGenerator[T, None]:
        """The items of a stream."""
        self._look_for_fork()
        with closing(call):
            step = next(call, None)
            while step is not None:
                if isinstance(step, Give):
                    yield step.item
                    step = next(call, None)
                    continue
                try:
                    try:
                        result = await self._carried_out(step)
                    except BaseException as error:
                        step = call.throw(error)
                    else:
                        step = call.send(result)
                except StopIteration:
                    return

    @property
    def connected(self) -> bool:
        return self._link is not None

    def close(self) -> None:
        if self._link is not None:
            self._hang_up(self._link, "the client was closed")
        if self._context is not None:
            self._context.destroy(linger=0)
        self._context = None

    def _look_for_fork(self) -> None:
        if self._lineage != Lineage.generation:
            self._lineage = Lineage.generation
            self._context = None
            self._link = None
            self._core.forked()

    async def _carried_out(self, step: Step) -> Any:
        if isinstance(step, Send):
            return await self._send(step)
        if isinstance(step, Wait):
            return await self._wait(step)
        if isinstance(step, Work):
            return await in_thread(step.task)
        if isinstance(step, Pause):
            return await asyncio.sleep(step.seconds)
        if isinstance(step, MapArenas):
            return map_arenas(step.paths)
        if step.is_final:
            return self.close()
        return self._hang_up(self._link, step.why)

    async def _send(self, step: Send) -> None:
        for _ in range(2):  # the daemon may have gone since the last call, and be back
            if self._link is None and not step.may_connect:
                raise DaemonAbsent(self._gone())
            link = await self._linked(step.deadline_s)
            try:
                await link.socket.send_multipart(step.frames, zmq.NOBLOCK)
                return
            except zmq.ZMQError:
                self._hang_up(link, self._gone())
        raise absent(self._core.endpoint)

    async def _wait(self, step: Wait) -> None:
        has_come = asyncio.Event()
        step.inbox.wake = has_come.set
        with suppress(TimeoutError):
            async with asyncio.timeout(step.deadline_s - self._core.clock()):
                await has_come.wait()

    async def _linked(self, deadline_s: float) -> _Link:
        async with self._connecting:
            if self._link is None:
                self._link = await self._connect(deadline_s)
            return self._link

    async def _connect(self, deadline_s: float) -> _Link:
        if self._context is None:
            self._context = zmq.asyncio.Context()
        endpoint = self._core.endpoint
        link = _Link(*open_socket(self._context, endpoint, self._max_part_bytes, self._curve))
        event: list[bytes] = []
        with ExitStack() as undo:
            undo.callback(close_socket, link.socket, link.monitor)
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline_s - self._core.clock()):
                    event = await link.monitor.recv_multipart()
            if not event or not is_up(event):
                raise absent(endpoint, event)
            undo.pop_all()
        reading, watching = self._read(link), self._watch(link)
        link.tasks = [asyncio.create_task(reading), asyncio.create_task(watching)]
        return link

    async def _read(self, link: _Link) -> None:
        while True:
            if why := self._core.feed(await link.socket.recv_multipart()):
                return self._hang_up(link, why)

    async def _watch(self, link: _Link) -> None:
        while is_up(await link.monitor.recv_multipart()):
            pass
        idle = 0
        while link is self._link and idle < 3:  # what arrived before the end is still read
            idle = 0 if await link.socket.poll(0) else idle + 1
            await asyncio.sleep(0)
        self._hang_up(link, self._gone())

    def _hang_up(self, link: _Link | None, why: str) -> None:
        """Close a connection; the next Send opens another. Every waiting call gets DaemonAbsent."""
        if link is None or link is not self._link:
            return
        self._link = None
        for task in link.tasks:
            task.cancel()
        close_socket(link.socket, link.monitor)
        self._core.lost(why)

    def _gone(self) -> str:
        return f"the daemon at {self._core.endpoint} has gone"


class AsyncClient(ClientBase, Asynchronous):
    __doc__ = ClientBase.__doc__

    _driver: AsyncDriver

    def _drive(self, core: Connection, max_part_bytes: int, curve: CurveKeys | None) -> None:
        self._driver = AsyncDriver(core, max_part_bytes, curve)

    @staticmethod
    def call_of(steps: Callable[..., Steps[Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        @wraps(steps)
        async def call(self: AsyncClient, *args: Any, **named: Any) -> Any:
            return await self._driver.run(steps(self, *args, **named))

        return call

    @staticmethod
    def stream_of(steps: Callable[..., Stream[Any]]) -> Callable[..., AsyncGenerator[Any, None]]:
        @wraps(steps)
        def call(self: AsyncClient, *args: Any, **named: Any) -> AsyncGenerator[Any, None]:
            return self._driver.each(steps(self, *args, **named))

        return call

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

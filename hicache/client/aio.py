"""The client of `hicache.client` for asyncio: the same names, as coroutines.

Calls may run side by side on one client; replies find their call by id. Big copies run in a
thread, and a cancelled call ends only when its copy has: nobody writes into a slot or a buffer
that has been given back. Use a client within one event loop.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, suppress
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from hicache.client.calls import Dialogue, Ended
from hicache.client.gpu_pages import (
    LoadedPages,
    LoadedPart,
    Paged,
    PageShare,
    PageTable,
    SharedPages,
)
from hicache.client.put import Fill
from hicache.client.results import (
    Bytes2D,
    Fetched,
    FetchedRun,
    Greeting,
    Match,
    Ping,
    Pinned,
    PutResult,
    Score,
    Warmed,
)
from hicache.client.session import Connection, Timeouts, Transport
from hicache.client.transport import (
    Mailbox,
    Part,
    Reply,
    absent,
    close_socket,
    is_up,
    late,
    open_socket,
)
from hicache.protocol.curve import CurveKeys
from hicache.protocol.endpoint import default_endpoint
from hicache.protocol.keys import NamespaceSpec, Tokens
from hicache.protocol.messages import WireError, decode_reply

T = TypeVar("T")


async def in_thread(task: Callable[[], T]) -> T:
    """Run something that copies. Cancelled, this returns only when it has ended, so that nobody
    writes into memory that has been given back."""
    copying = asyncio.ensure_future(asyncio.to_thread(task))
    try:
        return await asyncio.shield(copying)
    except asyncio.CancelledError:
        while not copying.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([copying])
        if not copying.cancelled():
            copying.exception()  # seen: the cancellation is what the caller hears of
        raise


class _Link:
    """One connection and the two tasks that read it."""

    def __init__(self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
        self.socket = socket
        self.monitor = monitor
        self.tasks: list[asyncio.Task[None]] = []


class AsyncChannel:
    """The port of an event loop."""

    ask_at_once = None

    def sort_in(self, message: bytes) -> None:
        raise NotImplementedError("there is no short cut here")

    def __init__(
        self, endpoint: str, max_part_bytes: int = 0, curve: CurveKeys | None = None
    ) -> None:
        self.endpoint = endpoint
        self.mailbox = Mailbox()
        self.has_parts = False
        self._max_part_bytes = max_part_bytes
        self._curve = curve
        self._context: zmq.asyncio.Context | None = None
        self._link: _Link | None = None
        self._connecting = asyncio.Lock()
        self._greeting = asyncio.Lock()
        self._waiting: dict[int, asyncio.Event] = {}

    @property
    def connected(self) -> bool:
        return self._link is not None

    @property
    def lock(self) -> AbstractAsyncContextManager[Any]:
        return self._greeting

    async def send(self, frames: Sequence[Part], deadline_s: float) -> None:
        for _ in range(2):  # the daemon may have gone since the last call, and be back
            link = await self._linked(deadline_s)
            try:
                await link.socket.send_multipart(frames, zmq.NOBLOCK)
                return
            except zmq.ZMQError:
                self._hang_up(link, f"the daemon at {self.endpoint} has gone")
        raise absent(self.endpoint)

    async def receive(self, request_id: int, deadline_s: float) -> tuple[Reply, list[Part]]:
        event = self._waiting.setdefault(request_id, asyncio.Event())
        try:
            while (answer := self.mailbox.take(request_id)) is None:
                event.clear()
                try:
                    async with asyncio.timeout(deadline_s - time.monotonic()):
                        await event.wait()
                except TimeoutError:
                    raise late(self.endpoint) from None
            return answer
        finally:
            self._waiting.pop(request_id, None)

    async def work(self, task: Callable[[], T]) -> T:
        return await in_thread(task)

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def forked(self) -> None:
        self._context = None
        self._link = None
        self.mailbox = Mailbox()
        self._waiting = {}

    def close(self) -> None:
        if self._link is not None:
            self._hang_up(self._link, "the client was closed")
        if self._context is not None:
            self._context.destroy(linger=0)
        self._context = None

    async def _linked(self, deadline_s: float) -> _Link:
        async with self._connecting:
            if self._link is None:
                self._link = await self._connect(deadline_s)
            return self._link

    async def _connect(self, deadline_s: float) -> _Link:
        if self._context is None:
            self._context = zmq.asyncio.Context()
        link = _Link(*open_socket(self._context, self.endpoint, self._max_part_bytes, self._curve))
        event: list[bytes] = []
        with ExitStack() as undo:
            undo.callback(close_socket, link.socket, link.monitor)
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline_s - time.monotonic()):
                    event = await link.monitor.recv_multipart()
            if not event or not is_up(event):
                raise absent(self.endpoint, event)
            undo.pop_all()
        reading, watching = self._read(link), self._watch(link)
        link.tasks = [asyncio.create_task(reading), asyncio.create_task(watching)]
        return link

    async def _read(self, link: _Link) -> None:
        while True:
            frames = await link.socket.recv_multipart()
            try:
                reply = decode_reply(frames[0])
            except WireError as error:
                return self._hang_up(link, f"the daemon answered garbage: {error}")
            self.mailbox.deliver(reply, list[Part](frames[1:]))
            if (event := self._waiting.get(reply["id"])) is not None:
                event.set()

    async def _watch(self, link: _Link) -> None:
        while is_up(await link.monitor.recv_multipart()):
            pass
        idle = 0
        while link is self._link and idle < 3:  # what arrived before the end is still read
            idle = 0 if await link.socket.poll(0) else idle + 1
            await asyncio.sleep(0)
        if link is not self._link:
            return
        self._hang_up(link, f"the daemon at {self.endpoint} has gone")

    def _hang_up(self, link: _Link, why: str) -> None:
        """Close a connection; the next send opens another. Whoever waits gets DaemonAbsent."""
        if link is not self._link:
            return
        self._link = None
        for task in link.tasks:
            task.cancel()
        close_socket(link.socket, link.monitor)
        self.mailbox.lost(why)
        for event in self._waiting.values():
            event.set()


class AsyncClient:
    """`hicache.client.Client` for asyncio: same parameters, same results."""

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
        port = AsyncChannel(self.endpoint, spec.block_bytes, curve)
        timeouts = Timeouts(timeout_s, fetch_timeout_s, put_timeout_s)
        self._connection = Connection(spec, self.endpoint, port, timeouts, transport, name, group)
        self._dialogue = Dialogue(self._connection)
        self._paged = Paged(self._connection)

    @property
    def connected(self) -> bool:
        return self._connection.connected

    @property
    def last_error(self) -> str:
        return self._connection.last_error

    @property
    def greeting(self) -> Greeting | None:
        return self._connection.greeting

    async def match(
        self,
        tokens: Tokens,
        *,
        request: str = "",
        skip_blocks: int = 0,
        hop_bytes_per_s: float = 0.0,
        explain: bool = False,
        conversation: str = "",
    ) -> Match:
        return await self._dialogue.match(
            tokens, request, skip_blocks, hop_bytes_per_s, explain, conversation
        )

    async def score(self, prompts: Sequence[Tokens]) -> list[Score]:
        return await self._dialogue.score(prompts)

    async def warm(self, tokens: Tokens, *, wait_s: float = 0.0) -> Warmed:
        return await self._dialogue.warm(tokens, wait_s)

    async def pin(self, tokens: Tokens, *, ttl_s: float = 3600.0, name: str = "") -> Pinned:
        return await self._dialogue.pin(tokens, ttl_s, name)

    async def unpin(self, pin: Pinned | str) -> bool:
        return await self._dialogue.unpin(pin)

    async def adopt(self, lease: int, blocks: int, group: bytes, epoch: str) -> Match:
        return await self._dialogue.adopt(lease, blocks, group, epoch)

    def fetch_runs(self, match: Match) -> AsyncGenerator[FetchedRun, None]:
        return self._dialogue.fetch_runs(match)

    async def fetch(self, match: Match, out: Bytes2D) -> Fetched:
        """On cancellation, returns only when nothing writes to `out` any more."""
        return await self._dialogue.fetch(match, out)

    async def release(
        self, match: Match, *, hop_bytes: float = 0.0, hop_s: float = 0.0, total_s: float = 0.0
    ) -> None:
        await self._dialogue.release(match, hop_bytes, hop_s, total_s)

    async def put(
        self,
        tokens: Tokens,
        blocks: Bytes2D | Fill,
        *,
        first: int = 0,
        last: int | None = None,
        durable: bool = False,
    ) -> PutResult:
        """`fill` is called in a thread."""
        return await self._dialogue.put(tokens, blocks, first, last, durable)

    async def share_pages(self, pages: SharedPages) -> PageShare | None:
        return await self._paged.share(pages)

    async def load_pages(self, match: Match, share: PageShare, pages: PageTable) -> LoadedPages:
        """A cancelled load leaves its pages in doubt (`share.is_in_doubt`)."""
        return await self._paged.load(match, share, pages)

    def load_pages_by_part(
        self, match: Match, share: PageShare, pages: PageTable, *, planes_per_part: int
    ) -> AsyncGenerator[LoadedPart, None]:
        return self._paged.parts(match, share, pages, planes_per_part)

    async def save_pages(
        self,
        tokens: Tokens,
        share: PageShare,
        pages: PageTable,
        *,
        first: int = 0,
        durable: bool = False,
    ) -> PutResult:
        return await self._paged.save(tokens, share, pages, first, durable)

    async def unshare_pages(self, share: PageShare) -> bool:
        return await self._paged.unshare(share)

    async def observe(
        self,
        *,
        num_requests: int = 1,
        sum_n: float,
        sum_nc: float,
        seconds: float,
        decode_tokens: int = 0,
    ) -> None:
        await self._dialogue.observe(num_requests, sum_n, sum_nc, decode_tokens, seconds)

    async def hint(
        self,
        tokens: Tokens | None = None,
        *,
        conversation: str = "",
        ended: Ended = "",
        finish_reason: str = "",
        return_s: float = 0.0,
        keep: bool = True,
        answer_tokens: int = 0,
    ) -> None:
        await self._dialogue.hint(
            tokens, conversation, ended, finish_reason, return_s, keep, answer_tokens
        )

    async def ping(self) -> Ping | None:
        return await self._dialogue.ping()

    async def stats(self) -> dict[str, Any] | None:
        return await self._dialogue.stats()

    async def health(self) -> dict[str, Any] | None:
        return await self._dialogue.health()

    async def heartbeat(self) -> bool:
        return await self._dialogue.heartbeat()

    async def clear(self) -> int:
        return await self._dialogue.clear()

    async def close(self) -> None:
        await self._connection.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

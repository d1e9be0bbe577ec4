"""One client's connection to one daemon, as a session about one namespace.

Requests and their replies, the session (opened when first needed, opened anew when the daemon does
not know it any more), the arenas it maps, the circuit breaker in front. What is asked for is the
business of `hicache.client.calls` and `hicache.client.put`; sockets and waiting are a Port's.

    begin ──▶ ask ──▶ [hello, map arenas] ──▶ send ──▶ receive ──▶ reply
      │ Held: the breaker is open                 DaemonAbsent, DaemonError, WireError: `failed`
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from hicache.client.results import Greeting, Match, read_greeting
from hicache.client.transport import (
    Breaker,
    DaemonAbsent,
    Held,
    Lineage,
    Mailbox,
    Part,
    Port,
    Reply,
)
from hicache.protocol.endpoint import ipc_path
from hicache.protocol.keys import NamespaceSpec
from hicache.protocol.messages import PROTOCOL, WireError, pack
from hicache.protocol.operations import MatchRequest
from hicache.tiers.arena import Arena, ArenaError

log = logging.getLogger("hicache.client")

T = TypeVar("T")
Transport = Literal["auto", "arena", "frames"]

Body = Mapping[str, Any] | MatchRequest
"""What a request asks for; who asks, until when and as which is filled in here."""
Reader = Callable[[bytes, int], T | None]

TOLD_SHARE: Final = 0.9
"""The daemon is told a little less than the caller waits, so that its answer is in time."""
BYE_S: Final = 0.2
_WANTS_CLEANING: Final = {"match", "put"}


class DaemonError(Exception):
    """The daemon's answer to one request was an error: its code and its sentence."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code
        self.message = message


TROUBLE: Final = (DaemonAbsent, DaemonError, WireError)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds a caller waits: for an ordinary call, for a fetch, for a whole put."""

    call_s: float
    fetch_s: float
    put_s: float


class Connection:
    """Raises TROUBLE and nothing else, except where a method says so."""

    def __init__(
        self,
        spec: NamespaceSpec,
        endpoint: str,
        port: Port,
        timeouts: Timeouts,
        transport: Transport,
        name: str,
        group: bytes = b"",
    ) -> None:
        if transport not in ("auto", "arena", "frames"):
            raise ValueError(f"transport must be auto, arena or frames, not {transport!r}")
        self.spec = spec
        self.timeouts = timeouts
        self.last_error = ""
        self.greeting: Greeting | None = None
        self.arenas: dict[str, Arena] = {}
        self._spec_fields = spec.to_wire()
        self._port = port
        # A path of another host may exist here too: over tcp, sharing memory must be asked for.
        # On ipc `auto` lets the daemon choose: it shares memory if it can see this process die.
        self._may_fall_back = transport == "auto"
        is_remote = transport == "auto" and ipc_path(endpoint) is None
        self._wished: str = "frames" if is_remote else transport
        self._name = name[:200]
        self._group = group
        self._retired: list[Arena] = []
        self._num_copying = 0
        self._breaker = Breaker()
        self._ids = itertools.count(1)
        self._lineage = Lineage.generation

    @property
    def connected(self) -> bool:
        return self.greeting is not None and self._port.connected

    @property
    def mailbox(self) -> Mailbox:
        return self._port.mailbox

    def succeeded(self) -> None:
        self._breaker.succeeded()

    async def pause(self, seconds: float) -> None:
        await self._port.pause(seconds)

    async def close(self) -> None:
        if (
            self._lineage == Lineage.generation
            and self.greeting is not None
            and self._port.connected
        ):
            deadline_s = time.monotonic() + BYE_S
            with suppress(*TROUBLE):
                await self.exchange("bye", {}, deadline_s, self.greeting)
        self.greeting = None
        self._port.close()
        self._drop_arenas()

    # --- one request ------------------------------------------------------------------------

    def begin(self, now_s: float) -> None:
        if self._lineage != Lineage.generation:
            self._lineage = Lineage.generation
            self._port.forked()
            self._breaker = Breaker()
            self._drop_arenas()
            self.greeting = None
        self._breaker.admit(now_s)

    def failed(self, trouble: Exception, started_s: float) -> str:
        self.last_error = str(trouble)
        is_gone = isinstance(trouble, DaemonAbsent) and not isinstance(trouble, Held)
        if is_gone or (isinstance(trouble, DaemonError) and trouble.code == "stopping"):
            self._breaker.failed(time.monotonic(), started_s, self.last_error)
        elif not isinstance(trouble, Held):
            self.succeeded()  # something answers
        return self.last_error

    def session_of(self, match: Match) -> Greeting | None:
        """The session that holds this match's lease, if it is still ours and there is a lease."""
        if match.lease and self.greeting is not None and match.session == self.greeting.session:
            return self.greeting
        return None

    async def ask_plain(self, op: str) -> Reply | None:
        started_s = time.monotonic()
        try:
            self.begin(started_s)
            deadline_s = started_s + self.timeouts.call_s
            reply: Reply = (await self.exchange(op, {}, deadline_s, None))[0]
        except TROUBLE as trouble:
            self.failed(trouble, started_s)
            return None
        self.succeeded()
        return reply

    async def ask_in_session(self, op: str) -> Reply | None:
        started_s = time.monotonic()
        try:
            self.begin(started_s)
            reply: Reply = (await self.ask(op, {}, started_s + self.timeouts.call_s))[1]
        except TROUBLE as trouble:
            self.failed(trouble, started_s)
            return None
        self.succeeded()
        return reply

    async def ask(
        self, op: str, body: Body, deadline_s: float, asked: int | None = None
    ) -> tuple[Greeting, Reply, list[Part]]:
        """Ask within a session; a session that the daemon does not know is opened anew, once.

        `asked`: see `exchange`."""
        greeting = self.greeting or await self.greeted(deadline_s)
        try:
            return greeting, *await self.exchange(op, body, deadline_s, greeting, (), asked)
        except DaemonError as error:
            if error.code != "unknown_session":
                raise
        greeting = await self.greeted(deadline_s)
        return greeting, *await self.exchange(op, body, deadline_s, greeting)

    def ask_at_once(
        self,
        op: str,
        body: Body,
        deadline_s: float,
        greeting: Greeting | None,
        read: Reader[T] | None = None,
    ) -> tuple[int, T | None]:
        """A request and its reply without one step too many, where the port has a way to do that
        and nothing is out of the ordinary. Returns the request's id (0 if it was not sent) and what
        `read(message, id)` made of the reply; if that is None, `exchange` has to go on with it."""
        mailbox, at_once = self._port.mailbox, self._port.ask_at_once
        if at_once is None or mailbox.late:
            return 0, None
        request_id = next(self._ids)
        request = self._packed(op, request_id, body, deadline_s, greeting)
        was_sent, message = at_once(request, deadline_s)
        if message is not None and read is not None:
            answer = read(message, request_id)
            if answer is not None:
                return request_id, answer
        if not was_sent:
            return 0, None
        mailbox.expect(request_id)
        if message is not None:
            self._port.sort_in(message)
        return request_id, None

    async def exchange(
        self,
        op: str,
        body: Body,
        deadline_s: float,
        greeting: Greeting | None,
        parts: Sequence[Part] = (),
        asked: int | None = None,
    ) -> tuple[Reply, list[Part]]:
        """One request and its one reply. `asked`: what `ask_at_once` said, if it was tried already.
        Raises TROUBLE."""
        if asked is None and not parts:
            asked, _ = self.ask_at_once(op, body, deadline_s, greeting)
        request_id = asked or await self.send(op, body, deadline_s, greeting, parts)
        mailbox = self._port.mailbox
        with contextlib.ExitStack() as undo:
            undo.callback(mailbox.done, request_id)
            if op in _WANTS_CLEANING and greeting is not None:
                # Too late, or cancelled: what it will grant must be given back.
                undo.callback(mailbox.give_up, request_id, op, greeting.session)
            reply, parts = await self._port.receive(request_id, deadline_s)
            undo.pop_all()
        mailbox.done(request_id)
        return self._accepted(reply, greeting), parts

    async def send(
        self,
        op: str,
        body: Body,
        deadline_s: float,
        greeting: Greeting | None,
        parts: Sequence[Part] = (),
        is_awaited: bool = True,
    ) -> int:
        mailbox = self._port.mailbox
        if mailbox.late:
            await self._clean_up()
        request_id = next(self._ids)
        head = self._packed(op, request_id, body, deadline_s, greeting)
        await self._port.send([head, *parts], deadline_s)
        if is_awaited:  # after sending, which may have closed a broken connection first
            mailbox.expect(request_id)
        return request_id

    def _packed(
        self,
        op: str,
        request_id: int,
        body: Body,
        deadline_s: float,
        greeting: Greeting | None,
    ) -> bytes:
        """A request's map as bytes."""
        now_s = time.monotonic()
        left_s = min(3600.0, max(0.001, (deadline_s - now_s) * TOLD_SHARE))
        session = greeting.session if greeting is not None else b""
        if isinstance(body, MatchRequest):
            body.id, body.sent_s, body.deadline_s, body.s = request_id, now_s, left_s, session
            return pack(body)
        head: dict[str, Any] = {
            "op": op,
            "id": request_id,
            "sent_s": now_s,
            "deadline_s": left_s,
        }
        if session:
            head["s"] = session
        head.update(body)
        return pack(head)

    async def post(
        self, op: str, body: Mapping[str, Any], deadline_s: float, greeting: Greeting
    ) -> None:
        """Say something that nobody waits for; an error may come back, and is looked at later."""
        told = {"quiet": True, **body}
        request_id = await self.send(op, told, deadline_s, greeting, is_awaited=False)
        self.mailbox.give_up(request_id, op, greeting.session)

    async def answer(
        self, request_id: int, deadline_s: float, greeting: Greeting | None
    ) -> tuple[Reply, list[Part]]:
        reply, parts = await self._port.receive(request_id, deadline_s)
        return self._accepted(reply, greeting), parts

    def _accepted(self, reply: Reply, greeting: Greeting | None) -> Reply:
        """The reply, if it is no error. Raises DaemonError."""
        if not reply["ok"]:
            if reply["error"] == "unknown_session" and greeting is not None:
                self.lose(greeting)
            raise DaemonError(reply["error"], str(reply.get("message", ""))[:1000])
        return reply

    async def _clean_up(self) -> None:
        """Give back what answers that came too late had promised."""
        late = self.mailbox.late
        while late:
            op, session, reply = late.popleft()
            greeting = self.greeting
            if greeting is None or greeting.session != session:
                continue
            if not reply["ok"]:
                if reply["error"] == "unknown_session":
                    self.lose(greeting)
                continue
            name, undo = ("lease", "release") if op == "match" else ("ticket", "abort")
            held = reply.get(name)
            if type(held) is int and held > 0:
                deadline_s = time.monotonic() + self.timeouts.call_s
                await self.post(undo, {name: held}, deadline_s, greeting)

    # --- the session ------------------------------------------------------------------------

    async def greeted(self, deadline_s: float) -> Greeting:
        if self.greeting is None:
            async with self._port.lock:
                if self.greeting is None:
                    self.greeting = await self._hello(deadline_s)
        return self.greeting

    async def _hello(self, deadline_s: float) -> Greeting:
        """Raises DaemonAbsent also when the daemon refuses: asking on gains nothing."""
        greeting = await self._hello_by(self._wished, deadline_s)
        if greeting.transport == "frames":
            self._drop_arenas()
            return greeting
        try:
            self._attach_arenas(greeting)
            return greeting
        except (ArenaError, OSError, ValueError) as error:
            if not self._may_fall_back:
                raise DaemonAbsent(f"cannot map the daemon's arenas: {error}") from None
            log.warning("hicache: cannot map the daemon's arenas (%s); sending frames", error)
            self._wished = "frames"
            await self.post("bye", {}, deadline_s, greeting)
        return await self._hello_by("frames", deadline_s)

    async def _hello_by(self, transport: str, deadline_s: float) -> Greeting:
        body = {
            "protocol": PROTOCOL,
            "client": self._name,
            "spec": self._spec_fields,
            "transport": transport,
            "group": self._group,
        }
        try:
            reply, _ = await self.exchange("hello", body, deadline_s, None)
        except DaemonError as error:
            raise DaemonAbsent(f"the daemon refused: {error}") from None
        greeting = read_greeting(reply, self.spec.block_tokens, self.spec.block_bytes)
        self._port.has_parts = greeting.transport == "frames"
        return greeting

    def _attach_arenas(self, greeting: Greeting) -> None:
        """All of them, or (raising) the ones mapped before stay."""
        arenas: dict[str, Arena] = {}
        with contextlib.ExitStack() as undo:  # the second of two cannot be mapped, say
            for file in greeting.arenas:
                arenas[file.tier] = arena = Arena.attach(file.path)
                undo.callback(arena.close)
            undo.pop_all()
        self._drop_arenas()
        self.arenas = arenas

    def _drop_arenas(self) -> None:
        self._retired += self.arenas.values()
        self.arenas = {}
        self._close_retired()

    def _close_retired(self) -> None:
        """Another task's copy may be under way in an arena that was replaced meanwhile."""
        if not self._num_copying:
            for arena in self._retired:
                arena.close()
            self._retired = []

    async def copy(self, task: Callable[[], T]) -> T:
        self._num_copying += 1
        try:
            return await self._port.work(task)
        finally:
            self._num_copying -= 1
            self._close_retired()

    def lose(self, greeting: Greeting) -> None:
        if self.greeting is greeting:
            self.greeting = None

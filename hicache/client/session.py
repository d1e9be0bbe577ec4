"""One client's connection to one daemon, as a session about one namespace, without I/O.

`Exchange` sends requests and finds the replies by their ids. `Connection` adds the session (opened
when first needed, and again when the daemon no longer knows it), the arenas that it maps, and the
circuit breaker. Other modules define the calls; a driver executes the steps.

    exchange ──Send──▶ driver ──▶ daemon         a driver passes received messages to `feed`, and
    reply ◀── inbox ◀── feed ◀── driver          calls `lost` when a connection has ended

    attempt ──▶ ask ──▶ [hello, map arenas] ──▶ exchange ──▶ reply
      │ the breaker is open: BreakerOpen       DaemonAbsent, DaemonError, WireError: a miss

Leases and tickets are valid only in the session that got them: another daemon's lease of the same
number must never be fetched. The text of each exception is a sentence for people: it becomes the
client's `last_error`.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, TypeVar

import msgspec

from hicache.client.replies import read_greeting
from hicache.client.results import Greeting, Match
from hicache.client.steps import HangUp, Inbox, MapArenas, Part, ReplyMap, Send, Steps, Wait, Work
from hicache.protocol.endpoint import ipc_path
from hicache.protocol.keys import NamespaceSpec
from hicache.protocol.messages import PROTOCOL, WireError, decode_reply, pack
from hicache.protocol.operations import (
    MATCH,
    MAX_DEADLINE_S,
    PUT,
    AbortRequest,
    ByeRequest,
    HelloRequest,
    HintRequest,
    ObserveRequest,
    ReleaseRequest,
    Request,
    operation_of,
)
from hicache.tiers.arena import Arena, ArenaError

log = logging.getLogger("hicache.client")

T = TypeVar("T")
Transport = Literal["auto", "arena", "frames"]

BYE_S: Final = 0.2
TOLD_SHARE: Final = 0.9
"""The share of the caller's time that the daemon gets, so that its reply is in time."""
MAX_LATE: Final = 1024
_MIN_DEADLINE_S: Final = 0.001

Posted = AbortRequest | ByeRequest | HintRequest | ObserveRequest | ReleaseRequest
"""A request that may be sent without waiting for its reply."""
Sent = tuple[int, Sequence[Part] | None]
"""A request's id, and the result of its Send."""


class DaemonAbsent(Exception):
    """No reply came, and none will."""


class BreakerOpen(DaemonAbsent):
    """The request was not sent, because the circuit breaker is open."""


class DaemonError(Exception):
    """The reply to one request was an error: its code and its sentence."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code
        self.message = message


TROUBLE: Final = (DaemonAbsent, DaemonError, WireError)
"""The failures that a call turns into a miss."""


@dataclass(slots=True)
class Breaker:
    """After a failure, calls are refused until a retry time; then one probe is let through.

    The first wait is `first_s`; each further failure doubles it, up to `last_s`.
    """

    first_s: float = 0.1
    last_s: float = 2.0
    failures: int = 0
    opened_s: float = 0.0
    retry_s: float = 0.0
    why: str = ""

    def admit(self, now_s: float) -> None:
        """Raises BreakerOpen while calls are refused. Otherwise this call is the probe, and others
        are refused until its outcome is known or its time is up."""
        if not self.failures:
            return
        if now_s < self.retry_s:
            raise BreakerOpen(self.why)
        self.retry_s = now_s + self._wait_s()

    def record_failure(self, now_s: float, started_s: float, why: str) -> None:
        """A call that began at `started_s` failed. A call that had begun before the breaker opened
        failed for the same reason and is not counted again."""
        if self.failures and started_s < self.opened_s:
            return
        self.failures += 1
        self.opened_s = now_s
        self.retry_s = now_s + self._wait_s()
        self.why = why

    def record_success(self) -> None:
        self.failures = 0

    def _wait_s(self) -> float:
        return min(self.last_s, self.first_s * 2.0 ** min(self.failures - 1, 16))


class Exchange:
    """Requests and their replies over one connection. The clock is passed in.

    A reply to a call that has ended is kept in `late` if it may have granted a lease or ticket, and
    dropped otherwise. `has_parts`: replies may have parts behind their map (the transport
    `frames`)."""

    def __init__(self, endpoint: str, clock: Callable[[], float]) -> None:
        self.endpoint = endpoint
        self.clock = clock
        self.has_parts = False
        self.late: deque[tuple[str, bytes, ReplyMap]] = deque(maxlen=MAX_LATE)
        self._ids = itertools.count(1)
        self._inboxes: dict[int, Inbox] = {}
        self._given_up: OrderedDict[int, tuple[str, bytes]] = OrderedDict()

    # --- for the driver ---------------------------------------------------------------------------

    def feed(self, frames: Sequence[Part]) -> str:
        """Take one message. Returns why the connection must be closed, or an empty string."""
        try:
            reply = decode_reply(frames[0])
        except WireError as error:
            return f"the daemon sent garbage: {error}"
        request_id: int = reply["id"]
        inbox = self._inboxes.get(request_id)
        if inbox is not None:
            inbox.put((reply, list(frames[1:])))
        elif request_id in self._given_up:
            self.late.append((*self._given_up.pop(request_id), reply))
        return ""

    def lost(self, why: str) -> None:
        """The connection has ended: no reply comes to the requests that were sent."""
        for inbox in self._inboxes.values():
            inbox.put(why)

    def forked(self) -> None:
        """In a child process: forget the parent's connection and requests."""
        self._inboxes = {}
        self._given_up.clear()
        self.late.clear()

    # --- steps ------------------------------------------------------------------------------------

    def exchange(
        self,
        request: Request | dict[str, Any],
        deadline_s: float,
        session: bytes = b"",
        parts: Sequence[Part] = (),
        *,
        sent: Sent | None = None,
        may_connect: bool = True,
    ) -> Steps[tuple[ReplyMap, list[Part]]]:
        """Send one request, and return its reply: map and parts. `sent`: the request was packed and
        sent already. Raises DaemonAbsent, DaemonError."""
        if sent is None:
            if self.late:
                yield from self.clean_up()
            request_id, head = self.packed(request, deadline_s, session)
            frames = None
        else:
            request_id, frames = sent
        try:
            if sent is None:
                frames = yield Send((head, *parts), deadline_s, may_connect=may_connect)
            inbox = yield from self._inbox(request_id, session, frames)
            return (yield from self.next_reply(inbox, deadline_s))
        except BaseException as error:  # a later reply may still grant a lease or ticket
            if session and not isinstance(error, DaemonError):
                self._give_up(request_id, request, session)
            raise
        finally:
            self._inboxes.pop(request_id, None)

    def open(self, request: Request, deadline_s: float, session: bytes = b"") -> Steps[Inbox]:
        """Send a request that has several replies: `next_reply` takes them, then `close_inbox`."""
        if self.late:
            yield from self.clean_up()
        request_id, head = self.packed(request, deadline_s, session)
        frames = yield Send((head,), deadline_s)
        return (yield from self._inbox(request_id, session, frames))

    def close_inbox(self, inbox: Inbox) -> None:
        self._inboxes.pop(inbox.request_id, None)

    def next_reply(self, inbox: Inbox, deadline_s: float) -> Steps[tuple[ReplyMap, list[Part]]]:
        """The next reply. Raises DaemonAbsent where none comes in time, DaemonError for an
        error."""
        item = yield from self.next_item(inbox, deadline_s)
        if isinstance(item, str):
            raise DaemonAbsent(item)
        reply = item[0]
        if not reply["ok"]:
            raise DaemonError(reply["error"], str(reply.get("message", ""))[:1000])
        return item

    def next_item(
        self, inbox: Inbox, deadline_s: float
    ) -> Steps[tuple[ReplyMap, list[Part]] | str]:
        while not inbox.items:
            yield Wait(inbox, deadline_s)
            if not inbox.items and self.clock() >= deadline_s:
                raise DaemonAbsent(f"the daemon at {self.endpoint} gave no answer in time")
        return inbox.items.popleft()

    def post(self, request: Posted, deadline_s: float, session: bytes) -> Steps[None]:
        """Send a request without waiting for its reply; an error may come later."""
        if self.late:
            yield from self.clean_up()
        request.quiet = True
        request_id, head = self.packed(request, deadline_s, session)
        yield Send((head,), deadline_s, is_awaited=False)
        self._give_up(request_id, request, session)

    def clean_up(self) -> Steps[None]:
        """Release the leases and tickets that replies in `late` have granted."""
        self.late.clear()
        yield from ()

    def _inbox(
        self, request_id: int, session: bytes, frames: Sequence[Part] | None
    ) -> Steps[Inbox]:
        """After sending, which may have closed a broken connection first."""
        inbox = self._inboxes[request_id] = Inbox(request_id, session)
        if frames is not None and (why := self.feed(frames)):
            yield HangUp(why)
        return inbox

    def _give_up(self, request_id: int, request: Request | dict[str, Any], session: bytes) -> None:
        """Put a later reply to this request into `late`."""
        if isinstance(request, Request):
            self._given_up[request_id] = (operation_of(request).name, session)
            if len(self._given_up) > MAX_LATE:
                self._given_up.popitem(last=False)

    def packed(
        self, request: Request | dict[str, Any], deadline_s: float, session: bytes
    ) -> tuple[int, bytes]:
        """A request's id, and its bytes with that id, its session and its times. A deadline that
        the request has already (`warm` with `wait_s`) is kept."""
        request_id = next(self._ids)
        now_s = self.clock()
        left_s = (deadline_s - now_s) * TOLD_SHARE
        if not _MIN_DEADLINE_S <= left_s <= MAX_DEADLINE_S:
            left_s = min(MAX_DEADLINE_S, max(_MIN_DEADLINE_S, left_s))
        if isinstance(request, dict):
            head = {"id": request_id, "sent_s": now_s, "deadline_s": left_s, **request}
            return request_id, pack(head)
        request.id, request.sent_s, request.s = request_id, now_s, session
        request.deadline_s = request.deadline_s or left_s
        return request_id, pack(request)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts in seconds: of an ordinary call, of a fetch, of a whole put."""

    call_s: float
    fetch_s: float
    put_s: float


class Connection(Exchange):
    """Its steps raise TROUBLE and nothing else, except where a method says so.

    Of calls that run side by side the first one opens the session and the others wait for it."""

    def __init__(
        self,
        spec: NamespaceSpec,
        endpoint: str,
        timeouts: Timeouts,
        clock: Callable[[], float],
        *,
        transport: Transport = "auto",
        name: str = "",
        group: bytes = b"",
    ) -> None:
        if transport not in ("auto", "arena", "frames"):
            raise ValueError(f"transport must be auto, arena or frames, not {transport!r}")
        super().__init__(endpoint, clock)
        self.spec = spec
        self.timeouts = timeouts
        self.last_error = ""
        self.greeting: Greeting | None = None
        self.arenas: dict[str, Arena] = {}
        self._packed_spec = msgspec.Raw(pack(spec.to_wire()))
        # A path of another host may exist here, too: over tcp, `arena` must be explicit. On ipc
        # `auto` lets the daemon choose: it shares memory if it can detect this process's death.
        self._may_fall_back = transport == "auto"
        is_remote = transport == "auto" and ipc_path(endpoint) is None
        self._wished: str = "frames" if is_remote else transport
        self._name = name[:200]
        self._group = group
        self._retired: list[Arena] = []
        self._num_copying = 0
        self._breaker = Breaker()
        self._waiting_for_hello: list[Inbox] | None = None

    def forked(self) -> None:
        super().forked()
        self._breaker = Breaker()
        self._waiting_for_hello = None
        self._drop_arenas()
        self.greeting = None

    def close(self) -> Steps[None]:
        """End the session, if one is open, and close the connection. Its leases end."""
        with suppress(*TROUBLE):
            if self.greeting is not None:
                deadline_s = self.clock() + BYE_S
                yield from self.exchange(
                    ByeRequest(), deadline_s, self.greeting.session, may_connect=False
                )
        self.greeting = None
        yield HangUp("the client was closed", is_final=True)
        self._drop_arenas()

    # --- one call -----------------------------------------------------------------------------

    def attempt(self, timeout_s: float, *, is_answered: bool = True) -> Attempt:
        """A call with a deadline. `is_answered`: it is a success only if the daemon has replied."""
        return Attempt(self, timeout_s, is_answered)

    def admit(self, now_s: float) -> None:
        """Raises BreakerOpen."""
        self._breaker.admit(now_s)

    def record_success(self) -> None:
        self._breaker.record_success()

    def record_failure(self, trouble: BaseException, started_s: float) -> None:
        self.last_error = str(trouble)
        if isinstance(trouble, BreakerOpen):
            return
        is_gone = isinstance(trouble, DaemonAbsent)
        if is_gone or (isinstance(trouble, DaemonError) and trouble.code == "stopping"):
            self._breaker.record_failure(self.clock(), started_s, self.last_error)
        else:
            self._breaker.record_success()  # the daemon answers

    def ask(
        self,
        request: Request,
        deadline_s: float,
        greeting: Greeting | None = None,
        sent: Sent | None = None,
    ) -> Steps[tuple[Greeting, ReplyMap]]:
        """Send a request within a session. Returns the session and the reply's map. If the daemon
        does not know the session, opens another, once. `sent`: the request was sent already, in
        that session."""
        greeting = greeting or self.greeting or (yield from self.greeted(deadline_s))
        try:
            reply, _ = yield from self.exchange(request, deadline_s, greeting.session, sent=sent)
            return greeting, reply
        except DaemonError as error:
            if error.code != "unknown_session":
                raise
        greeting = yield from self.greeted(deadline_s)
        request.deadline_s = 0.0
        reply, _ = yield from self.exchange(request, deadline_s, greeting.session)
        return greeting, reply

    def next_reply(self, inbox: Inbox, deadline_s: float) -> Steps[tuple[ReplyMap, list[Part]]]:
        try:
            return (yield from super().next_reply(inbox, deadline_s))
        except DaemonError as error:
            if error.code == "unknown_session":
                self.lose(inbox.session)
            raise

    def clean_up(self) -> Steps[None]:
        late = list(self.late)
        self.late.clear()
        for op, session, reply in late:
            if self.greeting is None or self.greeting.session != session:
                continue
            if not reply["ok"]:
                if reply["error"] == "unknown_session":
                    self.lose(session)
                continue
            deadline_s = self.clock() + self.timeouts.call_s
            if op == MATCH.name and _is_number(reply.get("lease")):
                yield from self.post(ReleaseRequest(lease=reply["lease"]), deadline_s, session)
            elif op == PUT.name and _is_number(reply.get("ticket")):
                yield from self.post(AbortRequest(ticket=reply["ticket"]), deadline_s, session)

    # --- the session --------------------------------------------------------------------------

    def session_of(self, match: Match) -> Greeting | None:
        """The session of this match's lease; None if it has ended or there is no lease."""
        if match.lease and self.greeting is not None and match.session == self.greeting.session:
            return self.greeting
        return None

    def lose(self, session: bytes) -> None:
        """The daemon no longer knows this session."""
        if self.greeting is not None and self.greeting.session == session:
            self.greeting = None

    def greeted(self, deadline_s: float) -> Steps[Greeting]:
        """The open session; opens one if there is none. Raises DaemonAbsent also where the daemon
        refuses, since a retry would not help."""
        while self.greeting is None:
            if self._waiting_for_hello is not None:
                inbox = Inbox()
                self._waiting_for_hello.append(inbox)
                yield from self.next_item(inbox, deadline_s)
                continue
            waiting: list[Inbox] = []
            self._waiting_for_hello = waiting
            try:
                self.greeting = yield from self._hello(deadline_s)
            finally:
                self._waiting_for_hello = None
                for inbox in waiting:
                    inbox.put("the session was opened, or could not be")
        return self.greeting

    def _hello(self, deadline_s: float) -> Steps[Greeting]:
        greeting = yield from self._hello_by(self._wished, deadline_s)
        if greeting.transport == "frames":
            self._drop_arenas()
            return greeting
        try:
            arenas = yield MapArenas([file.path for file in greeting.arenas])
        except (ArenaError, OSError, ValueError) as error:
            if not self._may_fall_back:
                raise DaemonAbsent(f"cannot map the daemon's arenas: {error}") from None
            log.warning("hicache: cannot map the daemon's arenas (%s); sending frames", error)
            self._wished = "frames"
            yield from self.post(ByeRequest(), deadline_s, greeting.session)
            return (yield from self._hello_by("frames", deadline_s))
        self._drop_arenas()
        self.arenas = {
            file.tier: arena for file, arena in zip(greeting.arenas, arenas, strict=True)
        }
        return greeting

    def _hello_by(self, transport: str, deadline_s: float) -> Steps[Greeting]:
        request = HelloRequest(
            protocol=PROTOCOL,
            spec=self._packed_spec,
            client=self._name,
            transport=transport,
            group=self._group,
        )
        try:
            reply, _ = yield from self.exchange(request, deadline_s)
        except DaemonError as error:
            raise DaemonAbsent(f"the daemon refused: {error}") from None
        greeting = read_greeting(reply, self.spec.block_tokens, self.spec.block_bytes)
        self.has_parts = greeting.transport == "frames"
        return greeting

    # --- arenas -------------------------------------------------------------------------------

    def copy(self, task: Callable[[], T]) -> Steps[T]:
        """Run a function that reads or writes the arenas."""
        self._num_copying += 1
        try:
            result: T = yield Work(task)
            return result
        finally:
            self._num_copying -= 1
            self._close_retired()

    def _drop_arenas(self) -> None:
        self._retired += self.arenas.values()
        self.arenas = {}
        self._close_retired()

    def _close_retired(self) -> None:
        """Close replaced arenas, except those that another call still copies from or to."""
        if not self._num_copying:
            for arena in self._retired:
                arena.close()
            self._retired = []


class Attempt:
    """One call: TROUBLE within it ends the block, is recorded, and is not raised.

    attempt = connection.attempt(timeout_s)
    with attempt:
        attempt.admit()
        ...
        return result
    return miss
    """

    __slots__ = ("_connection", "_is_answered", "deadline_s", "started_s")

    def __init__(self, connection: Connection, timeout_s: float, is_answered: bool) -> None:
        self._connection = connection
        self._is_answered = is_answered
        self.started_s = connection.clock()
        self.deadline_s = self.started_s + timeout_s

    def admit(self) -> None:
        """Raises BreakerOpen."""
        self._connection.admit(self.started_s)

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            if self._is_answered:
                self._connection.record_success()
            return False
        if isinstance(error, TROUBLE):
            self._connection.record_failure(error, self.started_s)
            return True
        return False


def _is_number(value: object) -> bool:
    """Whether a field of a late reply is the number of a lease or ticket."""
    return type(value) is int and value > 0

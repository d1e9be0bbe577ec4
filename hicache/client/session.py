"""One client's connection to one daemon, as a session about one namespace, without I/O.

The session (opened when first needed, and again when the daemon no longer knows it), the arenas
that it maps, and the circuit breaker. Other modules define the calls; a driver executes the steps.

    attempt ──▶ ask ──▶ [hello, map arenas] ──▶ exchange ──▶ reply
      │ the breaker is open: BreakerOpen       DaemonAbsent, DaemonError, WireError: a miss

Leases and tickets are valid only in the session that got them: another daemon's lease of the same
number must never be fetched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, TypeVar

import msgspec

from hicache.client.exchange import (
    TROUBLE,
    Breaker,
    BreakerOpen,
    DaemonAbsent,
    DaemonError,
    Exchange,
    Sent,
)
from hicache.client.replies import read_greeting
from hicache.client.results import Greeting, Match
from hicache.client.steps import HangUp, Inbox, MapArenas, Part, ReplyMap, Steps, Work
from hicache.protocol.endpoint import ipc_path
from hicache.protocol.keys import NamespaceSpec
from hicache.protocol.messages import PROTOCOL, pack
from hicache.protocol.operations import (
    MATCH,
    PUT,
    AbortRequest,
    ByeRequest,
    HelloRequest,
    ReleaseRequest,
    Request,
)
from hicache.tiers.arena import Arena, ArenaError

log = logging.getLogger("hicache.client")

T = TypeVar("T")
Transport = Literal["auto", "arena", "frames"]

BYE_S: Final = 0.2


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

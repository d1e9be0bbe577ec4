"""Requests and their replies over one connection, without I/O.

    exchange ──Send──▶ driver ──▶ daemon         a driver passes received messages to `feed`, and
    reply ◀── inbox ◀── feed ◀── driver          calls `lost` when a connection has ended

Replies are matched to calls by the request's id. A reply to a call that has ended is kept in `late`
if it may have granted a lease or ticket, and dropped otherwise. The clock is passed in.
The text of each exception is a sentence for people: it becomes the client's `last_error`.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hicache.client.steps import HangUp, Inbox, Part, ReplyMap, Send, Steps, Wait
from hicache.protocol.messages import WireError, decode_reply, pack
from hicache.protocol.operations import (
    MAX_DEADLINE_S,
    AbortRequest,
    ByeRequest,
    HintRequest,
    ObserveRequest,
    ReleaseRequest,
    Request,
    operation_of,
)

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
    """`has_parts`: replies may have parts behind their map (the transport `frames`)."""

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

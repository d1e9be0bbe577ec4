"""Serves requests: passes each message to its operation's handler, which acts through `Gate`.

    message ──▶ decode_request ──▶ too late? stopping? ──▶ session ──▶ the operation's handler
                                                                       (daemon/operations/)

A handler gets the request (`Asked`) and the gate:

    @handles(MATCH)
    def match(gate: Gate, asked: Asked[MatchRequest]) -> None:
        matched = gate.do(p.MatchPrompt(…))              an event for the cache engine
        gate.engine.queries.lease_of(…)                  a query of it
        gate.reply(asked.peer, MatchReply(…))            the answer, now or later
        raise WireError("refused", "a sentence")         or an error reply instead
        gate.waiting.puts.append(WaitingPut(…))          or an answer by a deadline
        gate.state(Conversations)                        what an operation keeps between requests

`handles` registers a handler with its operation; there is no other table of handlers. Used from the
daemon's loop only.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NoReturn, Protocol, TypeVar

import msgspec

from hicache.config import DeadlinesConfig, LimitsConfig
from hicache.daemon.build import Parts
from hicache.daemon.pending import Part, Peer, Waiting
from hicache.daemon.serving_config import ServingConfig
from hicache.daemon.sessions import Session, Sessions, Tracker
from hicache.daemon.upkeep.health import Health
from hicache.daemon.upkeep.kv_publisher import Publisher
from hicache.daemon.upkeep.observers import Observers
from hicache.daemon.upkeep.request_sample import Sample
from hicache.daemon.upkeep.tier_scrub import Scrubbing
from hicache.engine import plan as p
from hicache.engine.core import CacheEngine
from hicache.protocol.keys import NamespaceSpec
from hicache.protocol.messages import (
    OPERATIONS,
    Operation,
    Q,
    R,
    Reply,
    Request,
    WireError,
    decode_request,
    error_reply,
    operation_of,
)
from hicache.protocol.operations import HELLO
from hicache.tiers.arena import Arena
from hicache.transfer.mover import Mover

MAX_LATE_S = 3600.0
"""A message that seems later than this was sent with another clock."""

log = logging.getLogger("hicache")

Answer = TypeVar("Answer")
State = TypeVar("State")


class Asked(msgspec.Struct, Generic[Q]):
    """A request and its sender. `pid` is 0 where the socket does not provide it."""

    peer: Peer
    request: Q
    parts: Sequence[Part]
    pid: int
    now_s: float
    in_session: Session | None = None

    @property
    def session(self) -> Session:
        """The request's session. Only for operations that need a session."""
        assert self.in_session is not None, "this operation is declared without a session"
        return self.in_session

    @property
    def owner(self) -> int:
        """The owner of the session's leases and tickets in the cache engine."""
        return self.session.group.number


class Outlet(Protocol):
    """Sends replies to clients, and moves to workers."""

    def send(
        self, peer: Peer, message: Mapping[str, Any] | Reply, parts: Sequence[Part] = ()
    ) -> Tracker | None:
        """Send one message. With parts, returns a tracker of when ZeroMQ frees them, or None where
        they could not be sent."""

    def dispatch(self, plan: p.Plan[Any]) -> None:
        """Carry out a plan."""

    def describe(self, spec: NamespaceSpec) -> None:
        """Write a namespace's readable description beside its blocks."""


@dataclass(frozen=True, slots=True)
class Upkeep:
    """The parts of the daemon that operators' operations use."""

    parts: Parts
    mover: Mover
    health: Health
    scrubbing: Scrubbing
    serving: ServingConfig
    publisher: Publisher | None
    sample: Sample | None
    is_private: bool


class Gate:
    """A handler's access to the daemon.

    `slot_sizes`: block bytes → slot size in each tier; empty where no tier has a codec.
    `namespaces`: the specs, by digest; `leased_share`: the share of memory leased as of the last
    tick; `page_owners`: the (group, namespace) pairs that the GPU worker copies for;
    `written_owners`: groups whose slots it is writing now.
    """

    upkeep: Upkeep
    """Set by the loop before the first request."""

    def __init__(
        self,
        engine: CacheEngine,
        sessions: Sessions,
        arenas: Mapping[str, Arena],
        epoch: str,
        deadlines: DeadlinesConfig,
        limits: LimitsConfig,
        outlet: Outlet,
        slot_sizes: Callable[[int], Mapping[str, int]] = lambda block_bytes: {},
    ) -> None:
        self.engine = engine
        self.sessions = sessions
        self.arenas = arenas
        self.epoch = epoch
        self.deadlines = deadlines
        self.limits = limits
        self.outlet = outlet
        self.slot_sizes = slot_sizes
        self.waiting = Waiting()
        self.observers = Observers()
        self.namespaces: dict[bytes, NamespaceSpec] = {}
        self.leased_share = 0.0
        self.page_owners: set[tuple[int, int]] = set()
        self.written_owners: Counter[int] = Counter()
        self.requests: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.turned_away: Counter[str] = Counter()
        self._states: dict[Any, Any] = {}

    def do(self, event: p.Event[Answer]) -> Answer:
        """Pass an event to the cache engine, and its plan to the outlet. Returns the answer."""
        plan = self.engine.handle(event)
        self.outlet.dispatch(plan)
        return plan.answer

    def reply(self, peer: Peer, reply: Reply, parts: Sequence[Part] = ()) -> Tracker | None:
        """Reply to a request."""
        reply.id = peer.request_id
        return self.outlet.send(peer, reply, parts)

    def confirm(self, asked: Asked[Any], reply: Reply) -> None:
        """Reply to a request, unless it is `quiet`."""
        if not asked.request.quiet:
            self.reply(asked.peer, reply)

    def refuse(self, peer: Peer, code: str, sentence: str) -> None:
        """Send an error reply, after the request's handler has returned."""
        self.errors[code] += 1
        self.outlet.send(peer, error_reply(peer.request_id, code, sentence))

    def turn_away(self, limit: str, sentence: str) -> NoReturn:
        """Refuse a request because `limit` is reached. Raises WireError('refused')."""
        self.turned_away[limit] += 1
        raise WireError("refused", sentence)

    def state(self, kind: Callable[[Gate], State]) -> State:
        """An operation's state between requests: the daemon's only `kind(gate)`."""
        found: State | None = self._states.get(kind)
        if found is None:
            found = self._states[kind] = kind(self)
        return found

    def deadline_s(self, asked: Asked[Any]) -> float:
        """When the reply must be sent: at the caller's deadline, or at the configured limit if that
        is earlier."""
        key = operation_of(asked.request).deadline
        assert key, "an operation whose answer waits is declared with a deadline"
        limit_s: float = getattr(self.deadlines, f"{key}_s")
        # A little before the caller's deadline, so that the reply arrives in time.
        return asked.now_s + 0.95 * min(asked.request.deadline_s or limit_s, limit_s)

    def check_tokens(self, tokens: bytes) -> None:
        """Raises WireError('too_large') for a prompt longer than the limit."""
        if len(tokens) > 4 * self.limits.max_prompt_tokens:
            raise WireError(
                "too_large",
                f"{len(tokens) // 4} tokens; at most {self.limits.max_prompt_tokens} "
                "(limits.max_prompt_tokens)",
            )

    def check_leases(self) -> None:
        """Raises WireError('refused') where the number of leases, or their share of memory, has
        reached its limit."""
        if self.engine.num_leases >= self.limits.max_leases:
            self.turn_away("leases", f"{self.limits.max_leases} leases are open (max_leases)")
        if self.leased_share > self.limits.max_leased:
            share = f"{self.leased_share:.0%}"
            self.turn_away("leased memory", f"leases hold {share} of memory (limits.max_leased)")

    def free_if_over(self, owner: int, now_s: float) -> None:
        """Free a group's slots if its sessions have ended, and neither one of its processes nor the
        GPU worker can still write them."""
        is_over = all(group.number != owner for group in self.sessions.groups.values())
        can_write = self.written_owners[owner] or self.sessions.has_writer_left(owner)
        if is_over and not can_write:
            self.do(p.WriterGone(owner, now_s))

    def configure(self, deadlines: DeadlinesConfig, limits: LimitsConfig) -> None:
        """Apply a live change of the configuration."""
        self.deadlines, self.limits = deadlines, limits
        self.sessions.max_sessions = limits.max_sessions
        self.sessions.session_ttl_s = limits.session_ttl_s


Handler = Callable[[Gate, Asked[Any]], None]
HANDLERS: Final[dict[str, Handler]] = {}
"""By the operation's name."""


def handles(
    operation: Operation[Q, R],
) -> Callable[[Callable[[Gate, Asked[Q]], None]], Callable[[Gate, Asked[Q]], None]]:
    """Register the decorated function as the operation's handler. It must reply exactly once, now
    or later, or raise WireError for an error reply."""

    def register(handler: Callable[[Gate, Asked[Q]], None]) -> Callable[[Gate, Asked[Q]], None]:
        assert operation.name not in HANDLERS, operation.name
        HANDLERS[operation.name] = handler
        return handler

    return register


def _unsupported(gate: Gate, asked: Asked[Any]) -> None:
    raise WireError("unsupported", "")


class RequestServer:
    """Serves messages: decodes each, finds its session, and calls its operation's handler.

    `shares_clock`: clients are on this host, so that the times at which they sent their requests
    can be compared with this process's clock. Create it when all handlers are registered."""

    def __init__(self, gate: Gate, *, shares_clock: bool = True) -> None:
        self.gate = gate
        self.is_stopping = False
        self._shares_clock = shares_clock
        self._rows: dict[type[Request], tuple[Operation[Any, Any], Handler]] = {
            operation.request: (operation, HANDLERS.get(name, _unsupported))
            for name, operation in OPERATIONS.items()
        }

    def serve(
        self, peer: Peer, head: bytes | memoryview, parts: Sequence[Part], pid_of: Callable[[], int]
    ) -> None:
        """Serve one message of a client, with one reply. Never raises: every error is a reply.
        `pid_of` returns the sender's pid."""
        gate, now_s = self.gate, time.monotonic()
        try:
            request = decode_request(head)
            peer.request_id = request.id
            operation, handler = self._rows[type(request)]
            if request.sent_s and self._shares_clock and not operation.runs_late:
                late_s = now_s - request.sent_s
                if 0 < request.deadline_s < late_s < MAX_LATE_S:
                    raise WireError("expired", f"it came {late_s:.3f} s after it was sent")
            if self.is_stopping and not operation.is_admin:
                raise WireError("stopping", "")
            pid = pid_of() if operation is HELLO else 0
            self._run(operation, handler, Asked(peer, request, parts, pid, now_s))
            if not operation.is_admin:
                os.sched_yield()  # let ZeroMQ's thread send the reply before the bookkeeping
                plan = gate.engine.catch_up()
                if plan is not None:
                    gate.outlet.dispatch(plan)
        except WireError as error:
            gate.errors[error.code] += 1
            request_id = peer.request_id or error.request_id
            gate.outlet.send(peer, error_reply(request_id, error.code, error.message))
        except Exception:  # a bug in this daemon: the client gets a miss, the log the traceback
            gate.errors["internal"] += 1
            log.exception("a request could not be served")
            gate.outlet.send(peer, error_reply(peer.request_id, "internal"))

    def handle(self, asked: Asked[Any]) -> None:
        """Serve one request. Raises WireError for an error reply."""
        self._run(*self._rows[type(asked.request)], asked)

    def _run(self, operation: Operation[Any, Any], handler: Handler, asked: Asked[Any]) -> None:
        gate, request = self.gate, asked.request
        if not operation.is_admin:
            gate.requests[operation.name] += 1
        if operation.needs_session:
            asked.in_session = gate.sessions.get(request.s, asked.now_s)
        try:
            handler(gate, asked)
        except p.UnknownLease:
            raise WireError("unknown_lease", "", request.id) from None
        except p.UnknownTicket:
            raise WireError("unknown_ticket", "", request.id) from None

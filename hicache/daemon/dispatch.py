"""Passes messages to their handlers, and the cache engine's results to waiting requests.

    message ──▶ decode_request ──▶ too late? stopping? ──▶ session ──▶ the operation's handler
                                                                       (daemon/operations/)

Without sockets, workers and clock: the gate's outlet stands for the first two, and time is passed
in. The loop calls `serve` for every message, `answer_waiting` with the results of moves, and `tick`
when time has passed. Used from the daemon's loop only.
"""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import time
from collections.abc import Callable, Sequence
from typing import Any

from hicache.daemon import operations
from hicache.daemon.gate import HANDLERS, Asked, Gate, Handler
from hicache.daemon.operations import fetch, hello, put, warm
from hicache.daemon.operations.clear import Clearances
from hicache.daemon.pending import Part, Peer
from hicache.engine import plan as p
from hicache.protocol.messages import WireError, error_reply
from hicache.protocol.operations import HELLO, OPERATIONS, decode_request
from hicache.protocol.registry import Operation, Request

MAX_LATE_S = 3600.0
"""A message that seems later than this was sent with another clock."""

log = logging.getLogger("hicache")


def _unsupported(gate: Gate, asked: Asked[Any]) -> None:
    raise WireError("unsupported", "")


def _rows() -> dict[type[Request], tuple[Operation[Any, Any], Handler]]:
    """The table of all declared operations and their handlers."""
    for module in pkgutil.iter_modules(operations.__path__):
        importlib.import_module(f"{operations.__name__}.{module.name}")
    return {
        operation.request: (operation, HANDLERS.get(name, _unsupported))
        for name, operation in OPERATIONS.items()
    }


class Service:
    """Serves requests through the gate. `shares_clock`: clients are on this host, so that the times
    at which they sent their requests can be compared with this process's clock."""

    def __init__(self, gate: Gate, *, shares_clock: bool = True) -> None:
        self.gate = gate
        self.is_stopping = False
        self._shares_clock = shares_clock
        self._rows = _rows()
        self._clearances = gate.state(Clearances)

    # --- requests -------------------------------------------------------------------------------

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

    # --- waiting requests -----------------------------------------------------------------------

    def answer_waiting(self, arrivals: p.Arrivals, now_s: float) -> None:
        """Blocks arrived, were freed, or became persistent: answer requests that wait for that."""
        fetch.blocks_arrived(self.gate, arrivals)
        put.became_durable(self.gate, arrivals.durable)
        warm.warmings_ended(self.gate, arrivals)
        if arrivals.freed and self.gate.waiting.puts:
            put.try_puts(self.gate, now_s)

    def tick(self, now_s: float) -> None:
        """Answer overdue requests with what has come, end silent sessions, expire leases."""
        gate = self.gate
        self._limit_leases(now_s)
        for session in gate.sessions.silent(now_s):
            hello.end_session(gate, session, now_s)
        self.answer_waiting(gate.do(p.Tick(now_s)), now_s)
        fetch.end_overdue_fetches(gate, now_s)
        put.end_overdue_commits(gate, now_s)
        if any(waiting.deadline_s <= now_s for waiting in gate.waiting.puts):
            put.try_puts(gate, now_s)
        self._clearances.tick(now_s)

    def between_polls(self, now_s: float) -> None:
        """Do a step of work that takes more than one turn of the loop."""
        gate = self.gate
        if self._clearances.is_stepping and self._clearances.go_on(now_s) and gate.waiting.puts:
            put.try_puts(gate, now_s)
        if gate.waiting.fetches:
            if gate.waiting.is_sending:
                fetch.send_more(gate)
            fetch.end_overdue_fetches(gate, now_s)

    def longest_wait_s(self, wait_s: float, now_s: float, send_more_s: float) -> float:
        """How long the loop may sleep, at most `wait_s`; `send_more_s` while a client has to read
        before more is sent to it."""
        waiting = self.gate.waiting
        if self._clearances.is_stepping:
            return 0.0
        if waiting.is_sending:
            wait_s = min(wait_s, send_more_s)
        if waiting.fetches:
            wait_s = min(wait_s, max(waiting.next_fetch_deadline_s() - now_s, 0.0))
        return wait_s

    def _limit_leases(self, now_s: float) -> None:
        """Warmings are cancelled before a match is refused for lack of memory."""
        gate = self.gate
        gate.leased_share = gate.engine.queries.leased_share()
        if gate.leased_share > gate.limits.max_leased and len(gate.engine.warming):
            gate.do(p.EndWarmings(now_s))
            gate.leased_share = gate.engine.queries.leased_share()

"""Answers waiting requests with the cache engine's results.

The loop calls `answer_waiting` with the results of moves, and `tick` when time has passed; `serve`
(gate.py) takes the messages. Without sockets, workers and clock: the gate's outlet stands for the
first two, and time is passed in. Used from the daemon's loop only.
"""

from __future__ import annotations

import importlib
import pkgutil

from hicache.daemon import operations
from hicache.daemon.gate import Gate, RequestServer
from hicache.daemon.operations import fetch, hello, put, warm
from hicache.daemon.operations.clear import Clearances
from hicache.engine import plan as p


def _load_handlers() -> None:
    """Import every operation's file, which registers its handler."""
    for module in pkgutil.iter_modules(operations.__path__):
        importlib.import_module(f"{operations.__name__}.{module.name}")


class Service(RequestServer):
    """Serves requests, and answers those that wait."""

    def __init__(self, gate: Gate, *, shares_clock: bool = True) -> None:
        _load_handlers()
        super().__init__(gate, shares_clock=shares_clock)
        self._clearances = gate.state(Clearances)

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

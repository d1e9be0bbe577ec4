"""`fetch`: reports or sends a lease's blocks as they become readable, until the deadline."""

from __future__ import annotations

from hicache.daemon.fetch_replies import FetchReplies
from hicache.daemon.gate import Asked, Gate, handles
from hicache.daemon.pending import WaitingFetch
from hicache.engine import plan as p
from hicache.protocol.messages import WireError
from hicache.protocol.operations import FETCH, FetchRequest


@handles(FETCH)
def fetch(gate: Gate, asked: Asked[FetchRequest]) -> None:
    """Sends progress replies, and the final one when no more blocks will come or at the
    deadline."""
    session, by_worker = asked.session, asked.request.pages
    lease = gate.engine.queries.lease_of(asked.request.lease, asked.owner)
    if lease.id in gate.waiting.fetches:
        raise WireError("refused", "this lease is being fetched already")
    fetched = gate.do(p.Fetch(lease.id, asked.now_s, gate.deadline_s(asked), by_worker))
    waiting = WaitingFetch(
        asked.peer, session.token, lease.id, fetched.deadline_s, bytearray(len(lease.ids))
    )
    waiting.by_worker = by_worker
    is_last = not fetched.waiting and not fetched.unplaced
    if not gate.state(FetchReplies).add(waiting, session, fetched.ready, is_last):
        gate.waiting.fetches[lease.id] = waiting


def blocks_arrived(gate: Gate, arrivals: p.Arrivals) -> None:
    """Report blocks that are readable now, and end fetches for which no more will come."""
    fetches, replies = gate.waiting.fetches, gate.state(FetchReplies)
    for number, runs in arrivals.arrived.items():
        waiting = fetches.get(number)
        if waiting is not None and number not in arrivals.finished:
            replies.add(waiting, gate.sessions.by_token[waiting.session], runs, is_last=False)
    for number in arrivals.finished:
        waiting = fetches.get(number)
        if waiting is not None:
            runs = arrivals.arrived.get(number, [])
            session = gate.sessions.by_token[waiting.session]
            if replies.add(waiting, session, runs, is_last=True):
                del fetches[number]


def send_more(gate: Gate) -> None:
    """Clients may have read earlier messages: send more."""
    for number, waiting in list(gate.waiting.fetches.items()):
        session = gate.sessions.by_token[waiting.session]
        if waiting.unsent and gate.state(FetchReplies).send(waiting, session):
            del gate.waiting.fetches[number]


def end_overdue_fetches(gate: Gate, now_s: float) -> None:
    """End fetches whose deadline has passed with the blocks that have come."""
    for waiting in gate.waiting.overdue_fetches(now_s):
        cut_short(gate, waiting)


def cut_short(gate: Gate, waiting: WaitingFetch) -> None:
    """End a fetch now: its deadline has passed, or its lease is released."""
    if waiting.unsent:
        gate.errors["unread"] += 1
    session = gate.sessions.by_token[waiting.session]
    gate.state(FetchReplies).end(waiting, session)
    gate.do(p.CutShort(waiting.lease, waiting.prefix_blocks()))

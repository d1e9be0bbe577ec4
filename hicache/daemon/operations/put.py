"""`put`, `commit`, `abort`: store blocks. The client gets slots, writes them, and commits.

put ──▶ ticket with slots ──▶ the client writes ──▶ commit ──▶ visible to the next match
 └─ waits while demotions make room                └──▶ durable: waits for the persistent tier
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from hicache.daemon.gate import Asked, Gate, handles
from hicache.daemon.operations.gpu_pages import GpuPages
from hicache.daemon.pending import Peer, WaitingCommit, WaitingPut
from hicache.daemon.sessions import Session
from hicache.engine import plan as p
from hicache.protocol.messages import WireError
from hicache.protocol.operations import (
    ABORT,
    COMMIT,
    PUT,
    AbortReply,
    AbortRequest,
    CommitReply,
    CommitRequest,
    PutReply,
    PutRequest,
)
from hicache.tiers.block import Ids, slot_bytes_for


class PutCounts:
    """Counts of offered blocks, by result."""

    def __init__(self, _: Gate) -> None:
        self.blocks = Counter({"stored": 0, "present": 0, "busy": 0, "refused": 0})


@handles(PUT)
def put(gate: Gate, asked: Asked[PutRequest]) -> None:
    """Where room is coming, the reply waits for it until the deadline."""
    request, session = asked.request, asked.session
    gate.check_tokens(request.tokens)
    whole = len(request.tokens) // (4 * session.spec.block_tokens)
    if not request.first < request.last <= whole:
        raise WireError(
            "malformed",
            f"first and last: blocks {request.first} … {request.last} of {whole} whole blocks",
        )
    event = p.Put(
        session.namespace,
        request.tokens,
        request.first,
        request.last,
        asked.owner,
        asked.now_s,
        gate.limits.lease_ttl_s,
    )
    placed = gate.do(event)
    may_wait = not placed.ticket and placed.refused and placed.room_coming
    if may_wait and len(gate.waiting.puts) >= gate.limits.max_waiting:
        gate.turned_away["waiting puts"] += 1
    elif may_wait:
        waiting = WaitingPut(asked.peer, session.token, event, gate.deadline_s(asked))
        gate.waiting.puts.append(waiting)
        return
    _reply_placed(gate, asked.peer, session, placed)


def try_puts(gate: Gate, now_s: float) -> None:
    """Try each waiting put once more, the oldest first. Without room it continues to wait."""
    waiting, gate.waiting.puts = gate.waiting.puts, []
    for item in waiting:
        placed = gate.do(item.event)
        may_wait = not placed.ticket and placed.refused and placed.room_coming
        if may_wait and now_s < item.deadline_s:
            gate.waiting.puts.append(item)
        else:
            _reply_placed(gate, item.peer, gate.sessions.by_token[item.session], placed)


def _reply_placed(gate: Gate, peer: Peer, session: Session, placed: p.Placed) -> None:
    counts = gate.state(PutCounts).blocks
    counts["present"] += placed.present
    counts["busy"] += placed.busy
    counts["refused"] += placed.refused
    if placed.ticket:
        arena = gate.arenas[placed.tier]
        arena.raise_generations(placed.slots)
        if session.transport == "arena":  # with frames the daemon writes the slots
            slot_bytes = slot_bytes_for(session.spec.block_bytes)
            arena.mark(placed.slots, slot_bytes, gate.sessions.writer_of(session))
    gate.reply(
        peer,
        PutReply(
            ticket=placed.ticket,
            tier=placed.tier,
            indices=placed.indices.astype("<u4").tobytes(),
            slots=placed.slots.astype("<u4").tobytes(),
            present=placed.present,
            busy=placed.busy,
            refused=placed.refused,
        ),
    )


@handles(COMMIT)
def commit(gate: Gate, asked: Asked[CommitRequest]) -> None:
    """Make the blocks visible. A durable commit gets its reply when they are persistent."""
    request, session, pages = asked.request, asked.session, gate.state(GpuPages)
    queries = gate.engine.queries
    ticket = queries.ticket_of(request.ticket, asked.owner)
    if pages.is_saving(ticket.id):
        raise WireError("refused", "a save into this ticket's slots is still running")
    indices = np.frombuffer(request.indices, "<u4").astype(np.int32)
    tier, slots = queries.ticket_slots(ticket)
    gate.arenas[tier].unmark(slots)
    if session.transport == "frames" and not pages.was_saved(ticket.id):
        slot_of = dict(zip(ticket.indices.tolist(), slots.tolist(), strict=True))
        _write_parts(gate, asked, indices, tier, slot_of)
    committed = gate.do(p.Commit(request.ticket, indices, asked.now_s, request.durable))
    gate.state(PutCounts).blocks["stored"] += committed
    if request.durable and committed and gate.engine.queries.has_persistent_tier():
        deadline_s = gate.deadline_s(asked)
        waiting = WaitingCommit(asked.peer, request.ticket, committed, deadline_s)
        gate.waiting.commits[request.ticket] = waiting
        return
    gate.reply(asked.peer, CommitReply(committed=committed, durable=False))


def _write_parts(
    gate: Gate, asked: Asked[CommitRequest], indices: Ids, tier: str, slot_of: dict[int, int]
) -> None:
    """Write blocks that came as message parts into the ticket's slots."""
    size, arena = asked.session.spec.block_bytes, gate.arenas[tier]
    if len(asked.parts) != len(indices) or any(len(part) != size for part in asked.parts):
        raise WireError("malformed", f"commit needs one part of {size} bytes for every index")
    for index, part in zip(indices.tolist(), asked.parts, strict=True):
        if index in slot_of:
            np.copyto(arena.view(slot_of[index], size), np.frombuffer(part, np.uint8))


def became_durable(gate: Gate, tickets: list[int]) -> None:
    """Reply to the durable commits of these tickets."""
    for ticket in tickets:
        waiting = gate.waiting.commits.pop(ticket, None)
        if waiting is not None:
            gate.reply(waiting.peer, CommitReply(committed=waiting.committed, durable=True))


def end_overdue_commits(gate: Gate, now_s: float) -> None:
    """Reply to durable commits whose deadline has passed. Their blocks are visible."""
    for waiting in gate.waiting.overdue_commits(now_s):
        gate.reply(waiting.peer, CommitReply(committed=waiting.committed, durable=False))


@handles(ABORT)
def abort(gate: Gate, asked: Asked[AbortRequest]) -> None:
    """The client no longer writes the ticket's slots. The GPU worker may still be writing."""
    ticket, pages = asked.request.ticket, gate.state(GpuPages)
    if not gate.engine.queries.is_writer(ticket, asked.owner):
        raise p.UnknownTicket(ticket)
    aborted, is_saving = 0, pages.is_saving(ticket)
    if is_saving:
        pages.give_up_later(ticket)
    if not is_saving or ticket in gate.engine.queries.tickets():
        aborted = gate.do(p.Abort(ticket, asked.now_s, writer_gone=not is_saving))
    gate.confirm(asked, AbortReply(aborted=aborted))

"""`hello`, `heartbeat`, `bye`: open, keep and close sessions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from hicache import __version__
from hicache.daemon.admission import check_spec
from hicache.daemon.gate import HANDLERS, Asked, Gate, handles
from hicache.daemon.operations.gpu_pages import GpuPages
from hicache.daemon.sessions import Session
from hicache.engine import plan as p
from hicache.protocol.keys import NamespaceSpec
from hicache.protocol.messages import PROTOCOL, WireError, unpack
from hicache.protocol.operations import (
    BYE,
    HEARTBEAT,
    HELLO,
    OPERATIONS,
    REGISTER,
    ArenaFile,
    ByeRequest,
    HeartbeatRequest,
    HelloReply,
    HelloRequest,
    Reply,
)
from hicache.tiers.block import slot_bytes_for

TRANSPORTS: Final = ("auto", "arena", "frames")


@handles(HELLO)
def hello(gate: Gate, asked: Asked[HelloRequest]) -> None:
    """Open a session for a namespace."""
    request, limits = asked.request, gate.limits
    spec = _spec_of(gate, request)
    if len(gate.sessions) >= gate.sessions.max_sessions:
        _end_idle_sessions(gate, asked.now_s)
    gate.turned_away["sessions"] += len(gate.sessions) >= gate.sessions.max_sessions
    gate.sessions.check_room()
    digest = spec.digest()
    number = _open_namespace(gate, digest, spec)
    sends_frames = request.transport == "frames"
    sends_frames |= request.transport == "auto" and not asked.pid
    session = gate.sessions.open(
        number,
        spec,
        "frames" if sends_frames else "arena",
        request.client,
        request.group,
        asked.pid,
        asked.now_s,
    )
    reply = HelloReply(
        session=session.token,
        group=session.group.token,
        epoch=gate.epoch,
        version=__version__,
        pid=os.getpid(),
        namespace=digest,
        block_tokens=spec.block_tokens,
        block_bytes=spec.block_bytes,
        slot_bytes=slot_bytes_for(spec.block_bytes),
        transport=session.transport,
        arenas=[] if sends_frames else _arena_files(gate),
        lease_ttl_s=limits.lease_ttl_s,
        heartbeat_s=limits.session_ttl_s / 3,
        max_message_bytes=limits.max_message_bytes,
        max_prompt_tokens=limits.max_prompt_tokens,
        capabilities=_capabilities(gate),
    )
    gate.reply(asked.peer, reply)


def _spec_of(gate: Gate, request: HelloRequest) -> NamespaceSpec:
    """The request's namespace. Raises WireError where the client or namespace cannot be served."""
    if request.protocol != PROTOCOL:
        raise WireError(
            "version", f"this daemon speaks protocol {PROTOCOL}, not {request.protocol}"
        )
    if request.transport not in TRANSPORTS:
        raise WireError("malformed", f"transport: must be one of {', '.join(TRANSPORTS)}")
    fields = unpack(bytes(request.spec))
    try:
        spec = NamespaceSpec.from_wire(fields)
    except ValueError as error:
        raise WireError("spec", f"spec: {error}") from None
    check_spec(spec, gate.engine)
    return spec


def _arena_files(gate: Gate) -> list[ArenaFile]:
    return [
        ArenaFile(tier, str(arena.path), arena.data_bytes) for tier, arena in gate.arenas.items()
    ]


def _capabilities(gate: Gate) -> list[str]:
    """The capabilities of the operations with a handler; `pages` only with a GPU worker."""
    missing = set() if gate.state(GpuPages).is_possible else {REGISTER.capability}
    named = {operation.capability for op, operation in OPERATIONS.items() if op in HANDLERS}
    return sorted(named - missing - {""})


def _open_namespace(gate: Gate, digest: bytes, spec: NamespaceSpec) -> int:
    """The namespace's number. Raises WireError('refused') when the limit is reached and every
    namespace has a session or blocks."""
    known, instead_of = gate.engine.queries.namespaces(), None
    if len(known) >= gate.limits.max_namespaces and not gate.engine.knows(digest):
        instead_of = gate.engine.idle_namespace({s.namespace for s in gate.sessions})
        if instead_of is None:
            gate.turn_away(
                "namespaces",
                f"{len(known)} namespaces have clients or blocks, which is "
                "limits.max_namespaces; raise it, or let fewer of them be used",
            )
        gate.namespaces.pop(known[instead_of].digest, None)
    event = p.OpenNamespace(
        digest,
        spec.block_tokens,
        spec.block_bytes,
        instead_of,
        spec.flop_per_token,
        spec.flop_per_pair,
        tuple(gate.slot_sizes(spec.block_bytes).values()),
    )
    number = gate.do(event)
    if digest not in gate.namespaces:
        gate.namespaces[digest] = spec
        gate.outlet.describe(spec)
    return number


@handles(HEARTBEAT)
def heartbeat(gate: Gate, asked: Asked[HeartbeatRequest]) -> None:
    """Keep the session alive, as any request does."""
    gate.reply(asked.peer, Reply())


@handles(BYE)
def bye(gate: Gate, asked: Asked[ByeRequest]) -> None:
    """End the session, its leases and its tickets."""
    end_session(gate, asked.session, asked.now_s)
    gate.confirm(asked, Reply())


def end_session(gate: Gate, session: Session, now_s: float, *, may_write: bool = False) -> None:
    """End a session after `bye` or its process's death. Its slots are freed, unless the process
    (`may_write`) or another one of its group may still write them."""
    for lease, fetch in list(gate.waiting.fetches.items()):
        if fetch.session == session.token:
            del gate.waiting.fetches[lease]
    gate.waiting.puts = [put for put in gate.waiting.puts if put.session != session.token]
    gate.state(GpuPages).end(session)
    group = gate.sessions.close(session, may_write=may_write)
    if group is not None:
        gate.free_if_over(group.number, now_s)


def writers_gone(gate: Gate, owners: Sequence[int], now_s: float) -> None:
    """The last process that could write these groups' slots is dead: free them."""
    for owner in owners:
        if not gate.written_owners[owner]:
            gate.do(p.WriterGone(owner, now_s))


def _end_idle_sessions(gate: Gate, now_s: float) -> None:
    """End sessions that have been silent for long and hold nothing: probably their client was
    dropped in a living process. If not, it sends hello again."""
    queries = gate.engine.queries
    busy, set_aside = queries.busy_owners(), queries.quarantined_owners()
    waiting = {fetch.session for fetch in gate.waiting.fetches.values()}
    waiting |= {put.session for put in gate.waiting.puts}
    for session in gate.sessions.idle(now_s):
        owner = session.group.number
        if owner not in busy and session.token not in waiting:
            may_write = owner in set_aside and session.transport == "arena"
            end_session(gate, session, now_s, may_write=may_write)

"""What a request means, and what we answer: wire structs ↔ events of the cache engine.

No sockets and no workers here: replies go to `send`, moves to `dispatch`, time comes in. The daemon
calls `handle` for every request, `news` for every answer of the cache engine that concerns somebody
who waits, and `tick` when time passed. Used from the daemon's loop only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import xxhash

from hicache import __version__
from hicache.config import DeadlinesConfig, LimitsConfig
from hicache.daemon.admission import check_spec
from hicache.daemon.fetch_replies import Delivery, Part, Send
from hicache.daemon.operations.clear import Clearances
from hicache.daemon.operations.conversations import Conversations
from hicache.daemon.operations.gpu_pages import Paging
from hicache.daemon.operations.score import Scoring
from hicache.daemon.operations.warm import Foresight
from hicache.daemon.pending import Peer, Waiting, WaitingCommit, WaitingFetch, WaitingPut
from hicache.daemon.sessions import RememberedMatch, Session, Sessions
from hicache.daemon.upkeep.observers import Witnesses
from hicache.engine import plan as p
from hicache.engine.core import CacheEngine
from hicache.engine.planner.cost import plausible_hop
from hicache.engine.residency.pinned import leased_share
from hicache.protocol.keys import NamespaceSpec
from hicache.protocol.messages import PROTOCOL, WireError, unpack
from hicache.protocol.operations import (
    DecisionReply,
    MatchReply,
    MatchRequest,
    Request,
    operation_of,
)
from hicache.tiers.arena import Arena
from hicache.tiers.block import slot_bytes_for

Answer = TypeVar("Answer")
CAPABILITIES: Final = (
    "match",
    "fetch",
    "put",
    "durable",
    "observe",
    "hint",
    "frames",
    "clear",
    "score",
    "warm",
    "pin",
    "events",
)
TRANSPORTS: Final = ("auto", "arena", "frames")
ENDED: Final[Mapping[str, p.Ended]] = {
    "": "",
    "turn": "turn",
    "tool_call": "tool_call",
    "conversation": "conversation",
}


class Asked(msgspec.Struct, frozen=True):
    """A request with where it came from. `pid` is 0 where the socket does not tell it."""

    peer: Peer
    request: Any
    parts: Sequence[Part]
    pid: int
    now_s: float


class Service:
    """All operations. `arenas` are the mapped tiers' by name; `describe` writes a namespace's
    readable description beside its blocks."""

    def __init__(
        self,
        engine: CacheEngine,
        sessions: Sessions,
        arenas: Mapping[str, Arena],
        epoch: str,
        pid: int,
        deadlines: DeadlinesConfig,
        limits: LimitsConfig,
        send: Send,
        dispatch: Callable[[p.Plan[Any]], None],
        describe: Callable[[NamespaceSpec], None],
    ) -> None:
        self.engine = engine
        self.sessions = sessions
        self.arenas = arenas
        self.epoch = epoch
        self.pid = pid
        self.deadlines = deadlines
        self.limits = limits
        self.delivery = Delivery(engine, arenas, send, limits.max_unread_bytes)
        self.waiting = Waiting()
        self.conversations = Conversations()
        self.leased_share = 0.0
        self.turned_away: Counter[str] = Counter()
        self.witnesses = Witnesses()
        self.namespaces: dict[bytes, NamespaceSpec] = {}
        self.requests: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.puts: Counter[str] = Counter({"stored": 0, "present": 0, "busy": 0, "refused": 0})
        self._send = send
        self.paging = Paging(engine, self._reply_with, self.do, self._owner_at_rest)
        self._scoring = Scoring(engine, self.paging)
        self.foresight = Foresight(
            engine,
            self.paging,
            self.waiting,
            limits,
            self.turned_away,
            epoch,
            self.do,
            self._reply_with,
            self._check_leases,
            self._check_tokens,
        )
        self.clearances = Clearances(engine, self.do, self._reply_with)
        self._dispatch = dispatch
        self._describe = describe
        self._handlers: dict[str, Callable[[Asked, Session], None]] = {
            "match": self._match,
            "fetch": self._fetch,
            "release": self._release,
            "put": self._put,
            "commit": self._commit,
            "abort": self._abort,
            "observe": self._observe,
            "hint": self._hint,
            "register": self._register,
            "load": self._load,
            "save": self._save,
            "unregister": self._unregister,
            "heartbeat": self._heartbeat,
            "bye": self._bye,
            "clear": self._clear,
        }

    def configure(self, deadlines: DeadlinesConfig, limits: LimitsConfig) -> None:
        """Apply what can change while serving."""
        self.deadlines = deadlines
        self.limits = self.foresight.limits = limits
        self.delivery.max_unread_bytes = limits.max_unread_bytes
        self.sessions.max_sessions = limits.max_sessions
        self.sessions.session_ttl_s = limits.session_ttl_s

    def handle(self, asked: Asked) -> None:
        """Serve one request. Raises WireError for the one error reply it gets instead."""
        request: Request = asked.request
        op = operation_of(request).name
        self.requests[op] += 1
        if op == "hello":
            self._hello(asked)
            return
        if op == "score":
            self._reply(asked.peer, **self._scoring.answer(asked.request, asked.now_s))
            return
        if (foreseen := self.foresight.handlers.get(op)) is not None:
            foreseen(asked.peer, request, asked.now_s)
            return
        session = self.sessions.get(request.s, asked.now_s)
        try:
            self._handlers[op](asked, session)
        except p.UnknownLease:
            raise WireError("unknown_lease", "", request.id) from None
        except p.UnknownTicket:
            raise WireError("unknown_ticket", "", request.id) from None

    def do(self, event: p.Event[Answer]) -> Answer:
        """One event through the cache engine, its moves to the mover."""
        plan = self.engine.handle(event)
        self._dispatch(plan)
        return plan.answer

    # --- sessions -------------------------------------------------------------------------------

    def _hello(self, asked: Asked) -> None:
        body = asked.request
        if body.protocol != PROTOCOL:
            raise WireError(
                "version", f"this daemon speaks protocol {PROTOCOL}, not {body.protocol}"
            )
        if body.transport not in TRANSPORTS:
            raise WireError("malformed", f"transport: must be one of {', '.join(TRANSPORTS)}")
        try:
            spec = NamespaceSpec.from_wire(unpack(bytes(body.spec)))
        except WireError:
            raise
        except ValueError as error:
            raise WireError("spec", f"spec: {error}") from None
        check_spec(spec, self.engine)
        if len(self.sessions) >= self.sessions.max_sessions:
            self._end_idle_sessions(asked.now_s)
        self.turned_away["sessions"] += len(self.sessions) >= self.sessions.max_sessions
        self.sessions.check_room()
        digest = spec.digest()
        number = self._open_namespace(digest, spec)
        by_frames = body.transport == "frames" or (body.transport == "auto" and not asked.pid)
        session = self.sessions.open(
            number,
            spec,
            "frames" if by_frames else "arena",
            body.client,
            body.group,
            asked.pid,
            asked.now_s,
        )
        self._reply(
            asked.peer,
            session=session.token,
            group=session.group.token,
            epoch=self.epoch,
            version=__version__,
            pid=self.pid,
            namespace=digest,
            block_tokens=spec.block_tokens,
            block_bytes=spec.block_bytes,
            slot_bytes=slot_bytes_for(spec.block_bytes),
            transport=session.transport,
            arenas=[
                {"tier": tier, "path": str(arena.path), "bytes": arena.data_bytes}
                for tier, arena in self.arenas.items()
            ]
            if session.transport == "arena"
            else [],
            lease_ttl_s=self.limits.lease_ttl_s,
            heartbeat_s=self.limits.session_ttl_s / 3,
            max_message_bytes=self.limits.max_message_bytes,
            max_prompt_tokens=self.limits.max_prompt_tokens,
            capabilities=[*CAPABILITIES, *(["pages"] if self.paging.is_possible else [])],
        )

    def _open_namespace(self, digest: bytes, spec: NamespaceSpec) -> int:
        """Raises WireError('refused') when there are as many as the limit allows and each has a
        session or blocks."""
        known = self.engine.residency.namespaces
        instead_of = None
        if len(known) >= self.limits.max_namespaces and not self.engine.knows(digest):
            instead_of = self.engine.idle_namespace({s.namespace for s in self.sessions})
            if instead_of is None:
                self.turned_away["namespaces"] += 1
                raise WireError(
                    "refused",
                    f"{len(known)} namespaces have clients or blocks, which is "
                    "limits.max_namespaces; raise it, or let fewer of them be used",
                )
            self.namespaces.pop(known[instead_of].digest, None)
        event = p.OpenNamespace(
            digest,
            spec.block_tokens,
            spec.block_bytes,
            instead_of,
            spec.flop_per_token,
            spec.flop_per_pair,
        )
        number = self.do(event)
        if digest not in self.namespaces:
            self.namespaces[digest] = spec
            self._describe(spec)
        return number

    def _heartbeat(self, asked: Asked, session: Session) -> None:
        self._reply(asked.peer)

    def _bye(self, asked: Asked, session: Session) -> None:
        self.end(session, asked.now_s)
        self._confirm(asked)

    def _end_idle_sessions(self, now_s: float) -> None:
        """Of clients that were dropped in a process that lives, as far as can be told: silent for
        long, and with nothing in their hands. One that comes back says hello again."""
        book = self.engine.residency.leases
        busy = {lease.owner for lease in book.leases.values()}
        busy |= {ticket.owner for ticket in book.tickets.values()}
        set_aside = {held.owner for held in book.quarantine.values()}
        waiting = {fetch.session for fetch in self.waiting.fetches.values()}
        waiting |= {put.session for put in self.waiting.puts}
        for session in self.sessions.idle(now_s):
            owner = session.group.number
            if owner not in busy and session.token not in waiting:
                may_write = owner in set_aside and session.transport == "arena"
                self.end(session, now_s, may_write=may_write)

    def buried(self, owners: Sequence[int], now_s: float) -> None:
        """A process is dead that these groups' slots were set aside for."""
        for owner in owners:
            if not self.paging.is_writing(owner):
                self.do(p.WriterGone(owner, now_s))

    def end(self, session: Session, now_s: float, *, may_write: bool = False) -> None:
        """The session said goodbye, or its process is dead: nobody writes its slots any more,
        unless it `may_write`, or another process of its group may."""
        for lease, fetch in list(self.waiting.fetches.items()):
            if fetch.session == session.token:
                del self.waiting.fetches[lease]
        self.waiting.puts = [put for put in self.waiting.puts if put.session != session.token]
        self.paging.end(session)
        group = self.sessions.close(session, may_write=may_write)
        if group is not None:
            self._owner_at_rest(group.number, now_s)

    def _owner_at_rest(self, owner: int, now_s: float) -> None:
        """A group has ended, or the GPU worker has written the last byte for it: if both, and no
        process of it may write, its slots are free."""
        is_over = all(group.number != owner for group in self.sessions.groups.values())
        is_written = self.paging.is_writing(owner) or self.sessions.has_writer_left(owner)
        if is_over and not is_written:
            self.do(p.WriterGone(owner, now_s))

    # --- asking for a prefix --------------------------------------------------------------------

    def _match(self, asked: Asked, session: Session) -> None:
        wanted: MatchRequest = asked.request
        tokens, request = wanted.tokens, wanted.request
        self._check_tokens(tokens)
        digest = b""
        if request:
            digest = xxhash.xxh3_128_digest(tokens)
            known = session.matches.get(request)
            if known is not None and self._is_same(known, digest, wanted.skip_blocks):
                known.reply.id = wanted.id
                self._send(asked.peer, known.reply, ())
                return
        self._check_leases()
        matched = self.do(
            p.MatchPrompt(
                session.namespace,
                tokens,
                session.group.number,
                asked.now_s,
                self.limits.lease_ttl_s,
                plausible_hop(wanted.hop_bytes_per_s),
                wanted.skip_blocks,
                by_worker=self.paging.copies_for(session),
            )
        )
        decision = matched.decision
        reply = MatchReply(
            id=wanted.id,
            lease=matched.lease,
            hit_blocks=matched.hit_blocks,
            runs=[(run.tier, run.num_blocks) for run in matched.runs],
            decision=DecisionReply(
                decision.name,
                decision.reload_blocks,
                decision.reason,
                decision.reload_s,
                decision.prefill_s,
                decision.recompute_s,
                decision.sentence if wanted.explain else "",
            ),
        )
        if request and matched.lease:
            session.remember(
                request, RememberedMatch(digest, wanted.skip_blocks, matched.lease, reply)
            )
        self._send(asked.peer, reply, ())
        conversation = wanted.conversation
        if conversation:
            self.conversations.went_on(session.namespace, conversation, tokens)
        self.witnesses.note(
            lambda witness: witness.asked(session, tokens, conversation, asked.now_s)
        )

    def _is_same(self, known: RememberedMatch, tokens: bytes, skip_blocks: int) -> bool:
        """Idempotent: the same request asking the same gets the same lease while it lasts."""
        same = known.tokens == tokens and known.skip_blocks == skip_blocks
        return same and known.lease in self.engine.residency.leases.leases

    def _fetch(self, asked: Asked, session: Session) -> None:
        lease = self._own_lease(asked, session)
        if lease in self.waiting.fetches:
            raise WireError("refused", "this lease is being fetched already")
        deadline_s = self._deadline(asked, self.deadlines.fetch_s)
        by_worker = asked.request.pages
        fetched = self.do(p.Fetch(lease, asked.now_s, deadline_s, by_worker))
        leased = self.engine.residency.leases.leases[lease]
        fetch = WaitingFetch(
            asked.peer, session.token, lease, fetched.deadline_s, bytearray(len(leased.ids))
        )
        fetch.by_worker = by_worker
        is_last = not fetched.waiting and not fetched.unplaced
        if not self.delivery.tell(fetch, session, fetched.ready, is_last):
            self.waiting.fetches[lease] = fetch

    def _release(self, asked: Asked, session: Session) -> None:
        body = asked.request
        lease = body.lease
        leased = self.engine.residency.leases.leases.get(lease)
        if leased is None or leased.owner != session.group.number:
            self._confirm(asked, released=False)
            return
        self.do(p.ObserveReload(lease, body.hop_bytes, body.hop_s, body.total_s))
        fetch = self.waiting.fetches.pop(lease, None)
        if fetch is not None:  # given up while blocks were still on their way
            self._give_up(fetch)
        self._confirm(asked, released=self.do(p.Release(lease, asked.now_s)))

    # --- handing blocks over --------------------------------------------------------------------

    def _put(self, asked: Asked, session: Session) -> None:
        body = asked.request
        self._check_tokens(body.tokens)
        whole = len(body.tokens) // (4 * session.spec.block_tokens)
        if not body.first < body.last <= whole:
            raise WireError(
                "malformed",
                f"first and last: blocks {body.first} … {body.last} of {whole} whole blocks",
            )
        event = p.Put(
            session.namespace,
            body.tokens,
            body.first,
            body.last,
            session.group.number,
            asked.now_s,
            self.limits.lease_ttl_s,
        )
        placed = self.do(event)
        may_wait = not placed.ticket and placed.refused and placed.room_coming
        if may_wait and len(self.waiting.puts) >= self.limits.max_waiting:
            self.turned_away["waiting puts"] += 1
        elif may_wait:
            deadline_s = self._deadline(asked, self.deadlines.put_s)
            self.waiting.puts.append(WaitingPut(asked.peer, session.token, event, deadline_s))
            return
        self._placed(asked.peer, session, placed)

    def _placed(self, peer: Peer, session: Session, placed: p.Placed) -> None:
        self.puts["present"] += placed.present
        self.puts["busy"] += placed.busy
        self.puts["refused"] += placed.refused
        if placed.ticket:
            arena = self.arenas[placed.tier]
            arena.raise_generations(placed.slots)
            if session.transport == "arena":  # else we write
                slot_bytes = slot_bytes_for(session.spec.block_bytes)
                arena.mark(placed.slots, slot_bytes, self.sessions.writer_of(session))
        self._reply(
            peer,
            ticket=placed.ticket,
            tier=placed.tier,
            indices=placed.indices.astype("<u4").tobytes(),
            slots=placed.slots.astype("<u4").tobytes(),
            present=placed.present,
            busy=placed.busy,
            refused=placed.refused,
        )

    def _commit(self, asked: Asked, session: Session) -> None:
        body = asked.request
        ticket = self.engine.residency.leases.tickets.get(body.ticket)
        if ticket is None or ticket.owner != session.group.number:
            raise p.UnknownTicket(body.ticket)
        if self.paging.is_saving(ticket.id):
            raise WireError("refused", "a save into this ticket's slots is still under way")
        indices = np.frombuffer(body.indices, "<u4").astype(np.int32)
        server = self.engine.residency
        arena = self.arenas[server.tiers[ticket.tier].name]
        arena.unmark(server.blocks.slot[ticket.tier][ticket.ids])
        if session.transport == "frames" and not self.paging.was_saved(ticket.id):
            self._take_parts(asked, session, indices)
        committed = self.do(p.Commit(body.ticket, indices, asked.now_s, body.durable))
        self.puts["stored"] += committed
        if body.durable and committed and self.engine.writedown.tier is not None:
            deadline_s = self._deadline(asked, self.deadlines.put_s)
            commit = WaitingCommit(asked.peer, body.ticket, committed, deadline_s)
            self.waiting.commits[body.ticket] = commit
            return
        self._reply(asked.peer, committed=committed, durable=False)

    def _take_parts(self, asked: Asked, session: Session, indices: Any) -> None:
        """Blocks that came as message parts are written by us into the ticket's slots."""
        ticket = self.engine.residency.leases.tickets[asked.request.ticket]
        size = session.spec.block_bytes
        if len(asked.parts) != len(indices) or any(len(part) != size for part in asked.parts):
            raise WireError("malformed", f"commit needs one part of {size} bytes for every index")
        server = self.engine.residency
        slot_of = dict(
            zip(
                ticket.indices.tolist(),
                server.blocks.slot[ticket.tier][ticket.ids].tolist(),
                strict=True,
            )
        )
        arena = self.arenas[server.tiers[ticket.tier].name]
        for index, part in zip(indices.tolist(), asked.parts, strict=True):
            if index in slot_of:
                np.copyto(arena.view(slot_of[index], size), np.frombuffer(part, np.uint8))

    def _abort(self, asked: Asked, session: Session) -> None:
        book = self.engine.residency.leases
        number = asked.request.ticket
        held = book.tickets.get(number) or book.quarantine.get(number)
        if held is None or held.owner != session.group.number:
            raise p.UnknownTicket(number)
        # The client says it: it writes those slots no more. The GPU worker may.
        aborted, is_saving = 0, self.paging.is_saving(number)
        if is_saving:
            self.paging.give_up_later(number)
        if not is_saving or number in book.tickets:
            aborted = self.do(p.Abort(number, asked.now_s, writer_gone=not is_saving))
        self._confirm(asked, aborted=aborted)

    def _clear(self, asked: Asked, session: Session) -> None:
        deadline_s = self._deadline(asked, self.deadlines.put_s)
        self.clearances.ask(asked.peer, session.namespace, deadline_s, asked.now_s)

    def _register(self, asked: Asked, session: Session) -> None:
        self.paging.register(asked.peer, session, asked.request)

    def _load(self, asked: Asked, session: Session) -> None:
        self.paging.load(asked.peer, session, asked.request)

    def _save(self, asked: Asked, session: Session) -> None:
        self.paging.save(asked.peer, session, asked.request)

    def _unregister(self, asked: Asked, session: Session) -> None:
        self.paging.unregister(asked.peer, session, asked.request.registration)

    def _observe(self, asked: Asked, session: Session) -> None:
        body = asked.request
        self.do(
            p.Observe(
                session.namespace,
                body.num_requests,
                body.sum_n,
                body.sum_nc,
                body.seconds,
                body.decode_tokens,
            )
        )
        self._confirm(asked)

    def _hint(self, asked: Asked, session: Session) -> None:
        """About the prompt of `tokens`, or the newest one of the conversation."""
        body = asked.request
        tokens, conversation = body.tokens, body.conversation
        ended = ENDED.get(body.ended)
        if ended is None:
            raise WireError("malformed", f"ended: must be one of {', '.join(ENDED)[2:]}")
        self._check_tokens(tokens)
        if conversation and tokens:
            self.conversations.went_on(session.namespace, conversation, tokens)
        known = tokens or self.conversations.newest(session.namespace, conversation)
        if known:
            self.do(
                p.Hint(
                    session.namespace,
                    known,
                    asked.now_s,
                    ended,
                    body.finish_reason,
                    body.return_s,
                    body.keep,
                    body.answer_tokens,
                )
            )
        stop = " ".join(filter(None, (ended, body.finish_reason)))
        told = session, conversation, stop, body.answer_tokens, asked.now_s
        self.witnesses.note(lambda witness: witness.hinted(*told))
        if conversation and ended == "conversation":
            self.conversations.ended(session.namespace, conversation)
        self._confirm(asked, known=bool(known))

    # --- those who wait -------------------------------------------------------------------------

    def news(self, arrivals: p.Arrivals, now_s: float) -> None:
        """Blocks arrived, were freed, or became durable: tell whoever waits for that."""
        for lease, runs in arrivals.arrived.items():
            fetch = self.waiting.fetches.get(lease)
            if fetch is not None and lease not in arrivals.finished:
                self.delivery.tell(fetch, self._session_of(fetch), runs, is_last=False)
        for lease in arrivals.finished:
            fetch = self.waiting.fetches.get(lease)
            if fetch is not None:
                runs = arrivals.arrived.get(lease, [])
                if self.delivery.tell(fetch, self._session_of(fetch), runs, is_last=True):
                    del self.waiting.fetches[lease]
        for ticket in arrivals.durable:
            commit = self.waiting.commits.pop(ticket, None)
            if commit is not None:
                self._reply(commit.peer, committed=commit.committed, durable=True)
        self.foresight.news(arrivals)
        if arrivals.freed and self.waiting.puts:
            self._try_puts(now_s)

    def _try_puts(self, now_s: float) -> None:
        """Oldest first, once each: what is still without room goes on waiting."""
        waiting, self.waiting.puts = self.waiting.puts, []
        for put in waiting:
            placed = self.do(put.event)
            may_wait = not placed.ticket and placed.refused and placed.room_coming
            if may_wait and now_s < put.deadline_s:
                self.waiting.puts.append(put)
            else:
                self._placed(put.peer, self.sessions.by_token[put.session], placed)

    def tick(self, now_s: float) -> None:
        """Answer what is overdue with what there is, end silent sessions, let leases expire."""
        self._count_leased(now_s)
        for session in self.sessions.silent(now_s):
            self.end(session, now_s)
        self.news(self.do(p.Tick(now_s)), now_s)
        self.end_overdue_fetches(now_s)
        for commit in self.waiting.overdue_commits(now_s):
            self._reply(commit.peer, committed=commit.committed, durable=False)
        if any(put.deadline_s <= now_s for put in self.waiting.puts):
            self._try_puts(now_s)
        self.clearances.tick(now_s)

    def _count_leased(self, now_s: float) -> None:
        """What is only foreseen gives way before anybody who asks is refused."""
        self.leased_share = leased_share(self.engine.residency)
        if self.leased_share > self.limits.max_leased and len(self.engine.warming):
            self.do(p.EndWarmings(now_s))
            self.leased_share = leased_share(self.engine.residency)

    def end_overdue_fetches(self, now_s: float) -> None:
        """Their clients go on with what has come."""
        for fetch in self.waiting.overdue_fetches(now_s):
            self._give_up(fetch)

    def clear_more(self, now_s: float) -> None:
        """Where namespaces are being cleared: a step."""
        if self.clearances.go_on(now_s) and self.waiting.puts:
            self._try_puts(now_s)

    def send_more(self) -> None:
        """Clients may have read what was sent to them: what waits for that goes on."""
        for lease, fetch in list(self.waiting.fetches.items()):
            if fetch.unsent and self.delivery.go_on(fetch, self._session_of(fetch)):
                del self.waiting.fetches[lease]

    def _give_up(self, fetch: WaitingFetch) -> None:
        """Its time is over, or nobody wants the rest: it has been taken out of those who wait."""
        if fetch.unsent:
            self.errors["unread"] += 1
        self.delivery.give_up(fetch, self._session_of(fetch))
        self.do(p.CutShort(fetch.lease, fetch.prefix_blocks()))

    def _session_of(self, fetch: WaitingFetch) -> Session:
        return self.sessions.by_token[fetch.session]

    # --- small things ---------------------------------------------------------------------------

    def _reply(self, peer: Peer, parts: Sequence[Part] = (), **fields: Any) -> None:
        self._send(peer, {"id": peer.request_id, "ok": True, **fields}, parts)

    def _reply_with(self, peer: Peer, fields: Mapping[str, Any]) -> None:
        self.errors.update([fields["error"]] if "error" in fields else [])
        self._send(peer, {"id": peer.request_id, "ok": True, **fields}, ())

    def _confirm(self, asked: Asked, **fields: Any) -> None:
        """Reply that it is done, to whoever wants to hear that."""
        if not asked.request.quiet:
            self._reply(asked.peer, **fields)

    def _deadline(self, asked: Asked, default_s: float) -> float:
        """When the caller stops waiting, or our own limit, whichever is first."""
        request = asked.request
        wait_s = min(request.deadline_s or default_s, default_s)
        # A little earlier than the caller gives up, so that what arrived is not lost on the way.
        return asked.now_s + 0.95 * wait_s

    def _own_lease(self, asked: Asked, session: Session) -> int:
        lease: int = asked.request.lease
        leased = self.engine.residency.leases.leases.get(lease)
        if leased is None or leased.owner != session.group.number:
            raise p.UnknownLease(lease)
        return lease

    def _check_leases(self) -> None:
        if len(self.engine.residency.leases.leases) >= self.limits.max_leases:
            self.turned_away["leases"] += 1
            raise WireError("refused", f"{self.limits.max_leases} leases are open (max_leases)")
        if self.leased_share > self.limits.max_leased:
            self.turned_away["leased memory"] += 1
            share = f"{self.leased_share:.0%}"
            raise WireError("refused", f"leases hold {share} of memory (limits.max_leased)")

    def _check_tokens(self, tokens: bytes) -> None:
        if len(tokens) > 4 * self.limits.max_prompt_tokens:
            raise WireError(
                "too_large",
                f"{len(tokens) // 4} tokens; at most {self.limits.max_prompt_tokens} "
                "(limits.max_prompt_tokens)",
            )

"""Inference engines' own pages: registrations, and the copies from and to them.

    register ──▶ worker maps ──▶ loads and saves ──▶ unregister, session's end ──▶ worker unmaps
                                   └─ unmapped once the last of these has been reported

A client registers its KV tensors by CUDA IPC; the GPU worker copies between them and slots. Until
when pages and slots may not be reused:

1. Pages of a load belong to the worker until the reply, after which no copy is running, whether or
   not it failed. A client that gets no reply in time sends `unregister`, or waits for the end of
   the worker's process (`pid` in the reply to `register`).
2. Slots of a load are held by its lease. If the lease ends meanwhile, they may get other bytes:
   then the load has failed, whatever the worker reports.
3. Slots of a save belong to a ticket, and are written by the worker. They are not reused before the
   save has ended, whatever happens to the ticket: a commit is refused meanwhile; an abort, or the
   end of the session, takes effect when the save has ended (`written_owners`).
4. The worker dies: its copies have ended, and its mappings are gone. Loads and saves get an error
   reply, and registrations are removed.

The cache engine gets an event when a load starts, and one with its time when it has ended; it
counts only loaded blocks as delivered. Its planner needs to know before the first load which groups
the worker copies for (`Gate.page_owners`).

Used from the daemon's loop only.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from hicache.daemon.gate import Asked, Gate, handles
from hicache.daemon.pending import Peer
from hicache.daemon.sessions import Session
from hicache.engine import plan as p
from hicache.protocol.messages import WireError
from hicache.protocol.operations import (
    LOAD,
    REGISTER,
    SAVE,
    UNREGISTER,
    LoadReply,
    LoadRequest,
    RegisterReply,
    RegisterRequest,
    Reply,
    SaveReply,
    SaveRequest,
    UnregisterRequest,
)
from hicache.tiers.block import Ids
from hicache.transfer.gpu_pages.page_messages import (
    Claim,
    PageCopy,
    PageReport,
    claim_of,
    pack_claim,
    pack_copy,
)
from hicache.transfer.worker_events import PageEvent
from hicache.transfer.worker_messages import pack

MAX_REGISTRATIONS: Final = 256
MAX_COPIES: Final = 64
"""The most running copies of one registration."""


class Workers(Protocol):
    """The part of the mover that is used here."""

    def send_pages(self, device: str, message: bytes) -> bool: ...
    def pids(self) -> dict[str, int]: ...


@dataclass(slots=True)
class _Registration:
    """A registration of the group `owner`. `peer`: the request that waits for `map` or `unmap`."""

    number: int
    session: bytes
    owner: int
    namespace: int
    pid: int
    device: str
    pages_per_block: int
    num_planes: int
    state: str = "mapping"  # mapping → mapped → closing → unmapping
    num_copies: int = 0
    peer: Peer | None = None


@dataclass(slots=True)
class _Copy:
    """A running copy. `peer` is None when its session has ended. A load's runs are those of
    `lease`; a save's slots are those of `ticket`, of the group `owner`."""

    number: int
    registration: _Registration
    peer: Peer | None
    lease: int = 0
    runs: tuple[p.ReadyRun, ...] = ()
    ticket: int = 0
    owner: int = 0
    num_blocks: int = 0


@handles(REGISTER)
def register(gate: Gate, asked: Asked[RegisterRequest]) -> None:
    """Register pages. The reply is sent when the worker has mapped them."""
    gate.state(GpuPages).register(asked)


@handles(LOAD)
def load(gate: Gate, asked: Asked[LoadRequest]) -> None:
    """Copy blocks of a lease of this session's group into pages."""
    gate.state(GpuPages).load(asked)


@handles(SAVE)
def save(gate: Gate, asked: Asked[SaveRequest]) -> None:
    """Copy pages into slots of a ticket of this session's group."""
    gate.state(GpuPages).save(asked)


@handles(UNREGISTER)
def unregister(gate: Gate, asked: Asked[UnregisterRequest]) -> None:
    """Remove a registration. The reply is sent when its copies have ended and the worker has
    unmapped its pages."""
    gate.state(GpuPages).unregister(asked)


class GpuPages:
    """All registrations and copies. Updates the gate's `page_owners` and `written_owners`."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._engine = gate, gate.engine
        self._workers: Workers | None = None
        self._devices: list[str] = []
        self._registrations: dict[int, _Registration] = {}
        self._copies: dict[int, _Copy] = {}
        self._written_tickets: Counter[int] = Counter()
        self._acknowledged: set[int] = set()
        self._saved_tickets: set[int] = set()
        self._numbers = itertools.count(1)

    def serve(self, devices: list[str], workers: Workers) -> None:
        """Use these GPU workers from now on."""
        self._devices, self._workers = devices, workers

    @property
    def is_possible(self) -> bool:
        """Whether there is a GPU worker."""
        return bool(self._devices)

    def copies_in(self, namespace: int) -> bool:
        """Whether a client of this namespace has registered pages."""
        return any(number == namespace for _, number in self._gate.page_owners)

    def _note_owners(self) -> None:
        served = (known for known in self._registrations.values() if known.state == "mapped")
        self._gate.page_owners = {(known.owner, known.namespace) for known in served}

    def counts(self) -> dict[str, int]:
        """For `stats`."""
        return {"registrations": len(self._registrations), "copies": len(self._copies)}

    # --- requests -------------------------------------------------------------------------------

    def register(self, asked: Asked[RegisterRequest]) -> None:
        """Raises WireError where the pages cannot be mapped."""
        body, session = asked.request, asked.session
        if not self._devices:
            raise WireError("refused", "this daemon has no GPU worker: copy through the arena")
        if not session.pid:
            raise WireError(
                "refused",
                "this client's pid is not visible, so its end could not be detected and its memory "
                "not be unmapped: copy through the arena",
            )
        claim = _claim(next(self._numbers), body)
        num_planes = len(claim.planes)
        block_bytes = num_planes * body.pages_per_block * body.page_bytes
        if block_bytes != session.spec.block_bytes:
            raise WireError(
                "malformed",
                f"blocks of these pages have {block_bytes} bytes, and the namespace's "
                f"{session.spec.block_bytes}",
            )
        if len(self._registrations) >= MAX_REGISTRATIONS:
            raise WireError("refused", f"{MAX_REGISTRATIONS} registrations of pages are open")
        device = self._devices[0]
        self._send(device, pack_claim(claim))
        self._registrations[claim.number] = _Registration(
            claim.number,
            session.token,
            session.group.number,
            session.namespace,
            session.pid,
            device,
            body.pages_per_block,
            num_planes,
            peer=asked.peer,
        )

    def load(self, asked: Asked[LoadRequest]) -> None:
        """Raises UnknownLease, WireError."""
        body, session, peer = asked.request, asked.session, asked.peer
        registration = self._mapped(session, body.registration)
        lease = self._engine.queries.lease_of(body.lease, asked.owner)
        if not lease.by_worker:
            raise WireError("refused", "a load needs a fetch of its lease with `pages`, before it")
        pages = _table(body.pages, registration.pages_per_block)
        first, last = body.first, body.first + len(pages)
        if last > len(lease.ids):
            raise WireError("malformed", f"blocks {first} … {last} of {len(lease.ids)} leased ones")
        runs = tuple(self._engine.readable_now(lease.id, first, last))
        num_blocks = sum(len(run.slots) for run in runs)
        if not num_blocks:
            self._gate.reply(peer, LoadReply(blocks=0, seconds=0.0))
            return
        self._start(
            _Copy(next(self._numbers), registration, peer, lease.id, runs, num_blocks=num_blocks),
            session,
            [(run.tier, run.slots) for run in runs],
            pages[:num_blocks],
            body.planes_per_part,
        )
        self._gate.do(p.Loading(lease.id, first))

    def save(self, asked: Asked[SaveRequest]) -> None:
        """Raises UnknownTicket, WireError."""
        body, session = asked.request, asked.session
        registration = self._mapped(session, body.registration)
        ticket = self._engine.queries.ticket_of(body.ticket, asked.owner)
        indices = np.frombuffer(body.indices, "<u4").astype(np.int64)
        pages = _table(body.pages, registration.pages_per_block)
        places = np.searchsorted(ticket.indices, indices)
        is_known = places < len(ticket.indices)
        is_known &= ticket.indices[np.minimum(places, len(ticket.indices) - 1)] == indices
        if len(pages) != len(indices) or not len(indices) or not is_known.all():
            raise WireError("malformed", "indices: blocks of this ticket, and pages for each")
        if len(np.unique(indices)) != len(indices):
            raise WireError("malformed", "indices: a block is named twice")
        tier, slots = self._engine.queries.ticket_slots(ticket, places.astype(np.int32))
        copy = _Copy(
            next(self._numbers),
            registration,
            asked.peer,
            ticket=ticket.id,
            owner=ticket.owner,
            num_blocks=len(indices),
        )
        self._start(copy, session, [(tier, slots)], pages, 0)
        self._written_tickets[ticket.id] += 1
        self._gate.written_owners[ticket.owner] += 1

    def unregister(self, asked: Asked[UnregisterRequest]) -> None:
        """Also for another session of the same process, which may not know that the registering one
        has ended. Raises WireError."""
        registration = self._registrations.get(asked.request.registration)
        if registration is None or registration.pid != asked.session.pid:
            raise WireError("unknown_registration", "")
        if registration.peer is not None:
            raise WireError("refused", "this registration is being mapped or unmapped already")
        registration.peer = asked.peer
        self._close(registration)

    # --- for the rest of the daemon ---------------------------------------------------------------

    def is_saving(self, ticket: int) -> bool:
        """Whether the worker is writing this ticket's slots."""
        return self._written_tickets[ticket] > 0

    def was_saved(self, ticket: int) -> bool:
        """Whether the worker wrote slots of this ticket: then a commit contains no bytes."""
        return ticket in self._saved_tickets

    def give_up_later(self, ticket: int) -> None:
        """Its client no longer writes: abort it when the worker has finished, too."""
        self._acknowledged.add(ticket)

    def end(self, session: Session) -> None:
        """The session has ended: its copies get no reply, and its pages are unmapped as soon as
        they have ended."""
        for registration in list(self._registrations.values()):
            if registration.session == session.token:
                registration.peer = None
                self._close(registration)
        for copy in self._copies.values():
            if copy.registration.session == session.token:
                copy.peer = None

    # --- the worker's reports ---------------------------------------------------------------------

    def take(self, event: PageEvent, now_s: float) -> None:
        """Handle a worker's report; an unexpected one is ignored."""
        report = event.report
        if report.kind in ("part", "copied"):
            copy = self._copies.get(report.number)
            if copy is not None and report.kind == "part":
                self._part(copy, report)
            elif copy is not None:
                self._copied(copy, report, now_s)
            return
        registration = self._registrations.get(report.number)
        if registration is None:
            return
        if report.kind == "unmapped" or report.error:
            del self._registrations[report.number]
            self._note_owners()
            self._answer(registration, report)
        elif registration.state == "mapping":
            registration.state = "mapped"
            self._note_owners()
            self._answer(registration, report)
        else:  # the session ended while it was being mapped
            self._unmap_when_idle(registration)

    def worker_gone(self, device: str, now_s: float) -> None:
        """The worker's process is dead: its copies and mappings have ended."""
        error = "the GPU worker ended"
        for copy in [c for c in self._copies.values() if c.registration.device == device]:
            self._copied(copy, PageReport("copied", copy.number, error), now_s)
        for registration in list(self._registrations.values()):
            if registration.device == device:
                del self._registrations[registration.number]
                self._note_owners()
                is_asked_for = registration.state in ("closing", "unmapping")
                self._answer(registration, PageReport("", 0, "" if is_asked_for else error))

    def _part(self, copy: _Copy, report: PageReport) -> None:
        if copy.peer is not None and self._still_there(copy):
            reply = LoadReply(blocks=copy.num_blocks, more=True, planes=report.planes)
            self._gate.reply(copy.peer, reply)

    def _copied(self, copy: _Copy, report: PageReport, now_s: float) -> None:
        del self._copies[copy.number]
        is_there = self._still_there(copy)
        if copy.peer is not None:
            self._report_end(copy, report, is_there)
        if copy.lease and is_there and not report.error:
            self._gate.do(p.Loaded(copy.lease, copy.runs, report.seconds, now_s))
        registration = copy.registration
        registration.num_copies -= 1
        if registration.state == "closing":
            self._unmap_when_idle(registration)
        if copy.ticket:
            self._saved(copy, now_s)

    def _report_end(self, copy: _Copy, report: PageReport, is_there: bool) -> None:
        assert copy.peer is not None
        if report.error:
            self._gate.refuse(copy.peer, "refused", report.error)
        elif not is_there:
            self._gate.refuse(
                copy.peer, "unknown_lease", "the lease ended while its blocks were copied"
            )
        else:
            kind = SaveReply if copy.ticket else LoadReply
            self._gate.reply(copy.peer, kind(blocks=copy.num_blocks, seconds=report.seconds))

    def _saved(self, copy: _Copy, now_s: float) -> None:
        """The slots are no longer written: continue what waited for that."""
        for counts, key in (
            (self._written_tickets, copy.ticket),
            (self._gate.written_owners, copy.owner),
        ):
            counts[key] -= 1
            if not counts[key]:
                del counts[key]
        self._saved_tickets &= self._engine.queries.tickets()
        self._saved_tickets.add(copy.ticket)
        if not self.is_saving(copy.ticket) and copy.ticket in self._acknowledged:
            self._acknowledged.discard(copy.ticket)
            self._gate.do(p.Abort(copy.ticket, now_s, writer_gone=True))
        if not self._gate.written_owners[copy.owner]:
            self._gate.free_if_over(copy.owner, now_s)

    def _still_there(self, copy: _Copy) -> bool:
        """Whether a load's blocks are still in their slots: its lease has not ended."""
        return all(self._engine.is_still_at(copy.lease, run) for run in copy.runs)

    # --- helpers ----------------------------------------------------------------------------------

    def _start(
        self,
        copy: _Copy,
        session: Session,
        runs: list[tuple[str, Ids]],
        pages: Ids,
        planes_per_part: int,
    ) -> None:
        registration = copy.registration
        if registration.num_copies >= MAX_COPIES:
            raise WireError("refused", f"{MAX_COPIES} copies of this registration are running")
        order = PageCopy(
            copy.number,
            registration.number,
            bool(copy.ticket),
            session.spec.block_bytes,
            tuple(runs),
            pages,
            planes_per_part,
        )
        self._send(registration.device, pack_copy(order))
        self._copies[copy.number] = copy
        registration.num_copies += 1

    def _close(self, registration: _Registration) -> None:
        if registration.state == "mapped":
            self._unmap_when_idle(registration)
        elif registration.state == "mapping":
            registration.state = "closing"  # the rest when it has been mapped

    def _unmap_when_idle(self, registration: _Registration) -> None:
        registration.state = "closing"
        self._note_owners()
        if registration.num_copies or self._workers is None:
            return
        registration.state = "unmapping"
        # A worker that is not up has no mappings; `worker_gone` replies to waiting requests.
        self._workers.send_pages(registration.device, pack("unmap", n=registration.number))

    def _answer(self, registration: _Registration, report: PageReport) -> None:
        peer, registration.peer = registration.peer, None
        if peer is None:
            return
        if report.error:
            self._gate.refuse(peer, "refused", report.error)
        elif registration.state == "mapped":
            assert self._workers is not None
            pid = self._workers.pids().get(registration.device, 0)
            reply = RegisterReply(registration=registration.number, pid=pid)
            self._gate.reply(peer, reply)
        else:
            self._gate.reply(peer, Reply())

    def _mapped(self, session: Session, number: int) -> _Registration:
        registration = self._registrations.get(number)
        if registration is None or registration.session != session.token:
            raise WireError("unknown_registration", "")
        if registration.state != "mapped":
            raise WireError("refused", "this registration is being mapped or unmapped")
        return registration

    def _send(self, device: str, message: bytes) -> None:
        if self._workers is None or not self._workers.send_pages(device, message):
            raise WireError("refused", "the GPU worker is not up: copy through the arena")


def _claim(number: int, body: RegisterRequest) -> Claim:
    sizes = body.page_bytes, body.pages_per_block
    try:
        claim = claim_of(number, body.bus_id, body.handles, body.planes, *sizes)
    except ValueError as error:
        raise WireError("malformed", str(error)) from error
    if not len(claim.planes):
        raise WireError("malformed", "handles are 64 bytes each, and planes one at least")
    return claim


def _table(packed: bytes, pages_per_block: int) -> Ids:
    """Page numbers [blocks, pages per block]; the worker checks them."""
    pages = np.frombuffer(packed, "<i4").astype(np.int32)
    if not len(pages) or len(pages) % pages_per_block:
        raise WireError("malformed", f"pages: {pages_per_block} for each block")
    return pages.reshape(-1, pages_per_block)

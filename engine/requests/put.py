"""Put: chooses which offered blocks to store and where, and makes them visible on commit.

    put ──▶ ticket (slots, filling) ──▶ commit ──▶ ready
                       │                  └──────▶ blocks not written: dropped
                       └─▶ abort, expiry, death ─▶ dropped; slots quarantined while the writer
                                                   may still write them

A block is stored once: held blocks are `present`, blocks being written by another put are `busy`. A
block whose last record is being deleted is not held: it is stored again.
Owned by the daemon's one loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from hicache.engine import plan as p
from hicache.engine.index.radix import Path
from hicache.engine.placement.evictor import Evictor
from hicache.engine.placement.path_writer import PathWriter
from hicache.engine.placement.write_back import WriteBack
from hicache.engine.policies.hazard.ghost import Mark
from hicache.engine.policies.hazard.history import History, symbols_of
from hicache.engine.requests.fetch import Positions
from hicache.engine.residency.block_ids import Span
from hicache.engine.residency.blocks import LEAVING_SHIFT, CopyState
from hicache.engine.residency.copies import Namespace, Residency
from hicache.engine.residency.leases import Lease, Quarantined, Ticket
from hicache.engine.settings import EngineSettings
from hicache.tiers.block import Ids

DURABLE_WAIT_S: Final = 60.0
"""Blocks of a durable put are leased at most this long, which is longer than any caller waits."""

_NO_IDS: Final = np.empty(0, np.int32)
_NOWHERE: Final[Positions] = np.empty(0, np.intp)


class Storing:
    """Answers Put, Commit and Abort."""

    def __init__(
        self,
        residency: Residency,
        evictor: Evictor,
        write_back: WriteBack,
        settings: EngineSettings,
        history: History | None = None,
    ) -> None:
        self.residency = residency
        self.evictor = evictor
        self.write_back = write_back
        self.settings = settings
        self.history = history
        self._durable_waits: dict[int, tuple[Lease, PathWriter]] = {}

    def put(self, event: p.Put) -> p.Placed:
        residency = self.residency
        namespace = residency.namespaces[event.namespace]
        step = namespace.step
        path = residency.index.match(namespace.root, event.tokens[: event.last * step], step)
        known = path.num_blocks
        asked = event.last - event.first
        if event.first > known:  # blocks without their parents would be unreachable
            return p.Placed(0, "", _NO_IDS, _NO_IDS, 0, 0, asked, False)
        ids = path.ids()[event.first :]
        present, busy, lacking = self._known(path, ids)
        new = event.last - known
        wanted = len(lacking) + new
        if wanted == 0:
            return p.Placed(0, "", _NO_IDS, _NO_IDS, present, busy, 0, False)
        pinned = path.spans(0, known)  # the path must not be evicted to make room for its end
        for pin in pinned:
            residency.blocks.pin(pin)
        marks = self._marks(event, namespace)
        tier, slots = self._place(namespace, wanted, marks, event)
        for pin in pinned:
            residency.blocks.unpin(pin)
        residency.candidates.unpark()
        refused = wanted - len(slots)
        if len(slots) == 0:
            coming = any(map(self.evictor.room_is_coming, range(len(residency.tiers))))
            return p.Placed(0, "", _NO_IDS, _NO_IDS, present, busy, refused, coming)
        fill_ids: Ids = ids[lacking[: len(slots)]]
        indices = (lacking[: len(slots)] + event.first).astype(np.int32)
        num_new = len(slots) - len(fill_ids)
        span: Span = fill_ids
        if num_new:  # making room may have split and merged nodes along the path
            path = residency.index.match(namespace.root, event.tokens[: event.last * step], step)
            assert path.num_blocks == known
            node = residency.index.extend(
                namespace.root, path, event.tokens[known * step : (known + num_new) * step], step
            )
            node.touched_s = event.now_s
            span = node.span
            numbers = np.arange(known, known + num_new, dtype=np.int32)
            if len(fill_ids):
                fill_ids = span = np.concatenate([fill_ids, node.block_ids()])
                indices = np.concatenate([indices, numbers])
            else:
                fill_ids, indices = node.block_ids(), numbers
            if marks:
                residency.index.mark([node], marks, step)
        residency.blocks.fill(tier, span, slots)
        ticket = Ticket(
            residency.leases.next_id(),
            event.owner,
            event.namespace,
            tier,
            fill_ids,
            span,
            indices,
            event.now_s + event.ttl_s,
        )
        residency.leases.tickets[ticket.id] = ticket
        name = residency.tiers[tier].name
        return p.Placed(ticket.id, name, indices, slots, present, busy, refused, refused > 0)

    def _known(self, path: Path, ids: Ids) -> tuple[int, int, Positions]:
        """Of blocks on the path: the number held, the number being written, and the positions of
        the others: holes, and blocks whose last record is being deleted."""
        if all(node.staying for node in path.nodes):
            return len(ids), 0, _NOWHERE
        residency = self.residency
        tags = residency.blocks.tags[ids]
        held = tags != 0
        for position in np.flatnonzero(held & ((tags & 0xFF & ~(tags >> LEAVING_SHIFT)) == 0)):
            held[position] = not residency.is_going(int(ids[position]))
        filling = np.zeros(len(ids), bool)
        for state in residency.blocks.state:
            filling |= (state[ids] == CopyState.FILLING) | (state[ids] == CopyState.CANCELLED)
        lacking = np.flatnonzero(~held & ~filling)
        return int(held.sum()), int((filling & ~held).sum()), lacking

    def _marks(self, event: p.Put, namespace: Namespace) -> list[Mark]:
        """The history's marks of the prompt's blocks; [] without a history."""
        if self.history is None:
            return []
        symbols = symbols_of(event.tokens[: event.last * namespace.step], namespace.step)
        return self.history.marks_of(namespace.number, symbols)

    def _place(
        self, namespace: Namespace, count: int, marks: Sequence[Mark], event: p.Put
    ) -> tuple[int, Ids]:
        """Slots for new blocks: in the fastest mapped tier with room, or where room can be made at
        once by evicting blocks of less worth. If the policy does not rank, free room of a slower
        tier is used before blocks of a faster one are evicted."""
        residency = self.residency
        mapped = [n for n, tier in enumerate(residency.tiers) if tier.mapped and residency.is_up(n)]
        ranking = []
        for tier in mapped:
            if residency.pools[tier].available(namespace.slot_bytes[tier]) >= count:
                return tier, residency.pools[tier].allocate(namespace.slot_bytes[tier], count)
            if marks and residency.candidates.ranks(tier):
                ranking.append(tier)
                if self._make_room(tier, namespace.slot_bytes[tier], count, marks, event):
                    return tier, residency.pools[tier].allocate(namespace.slot_bytes[tier], count)
        for tier in mapped:
            if tier in ranking:
                continue
            if self._make_room(tier, namespace.slot_bytes[tier], count, marks, event):
                return tier, residency.pools[tier].allocate(namespace.slot_bytes[tier], count)
        return 0, _NO_IDS

    def _make_room(
        self, tier: int, slot_bytes: int, count: int, marks: Sequence[Mark], event: p.Put
    ) -> int:
        """Make room for the last `count` blocks of a put, in the tiers where their worth allows."""
        if self.history is None:
            return self.evictor.make_room(tier, slot_bytes, count)
        policy = self.residency.candidates.policies[tier]
        first = event.last - count
        ends = [(end, kind) for end, kind, *_ in marks if end > first] or [(event.last, -1)]
        room = 0
        for end, kind in ends:
            wanted = min(end, event.last) - first
            worth = policy.worth(kind, event.now_s)
            room = self.evictor.make_room(tier, slot_bytes, wanted, worth)
            if room < wanted:
                break
        return room

    def commit(self, event: p.Commit) -> int:
        residency = self.residency
        ticket = residency.leases.tickets.get(event.ticket)
        if ticket is None:
            raise p.UnknownTicket(event.ticket)
        del residency.leases.tickets[ticket.id]
        done = ticket.ids
        if np.array_equal(ticket.indices, event.indices):
            residency.blocks.change(ticket.tier, ticket.span, CopyState.READY)
        else:
            written = np.isin(ticket.indices, event.indices)
            done, undone = ticket.ids[written], ticket.ids[~written]
            slot_bytes = residency.namespaces[ticket.namespace].slot_bytes[ticket.tier]
            residency.blocks.change(ticket.tier, done, CopyState.READY)
            residency.blocks.vacate(ticket.tier, undone, slot_bytes)
        residency.settle(ticket.ids)
        if len(done):
            last = residency.index.node_of(int(done[-1]))
            if self.settings.write_policy == "write_through":
                self.write_back.write_through(last)
            writer = self.write_back.first()
            if event.durable and writer is not None:
                writer.want(last)
                self._wait_until_durable(ticket, done, writer, event.now_s)
        return len(done)

    def _wait_until_durable(
        self, ticket: Ticket, ids: Ids, writer: PathWriter, now_s: float
    ) -> None:
        """Lease the blocks meanwhile: otherwise their ids might be reused for other blocks."""
        book = self.residency.leases
        decision = p.ReloadDecision("reload", len(ids), "durable", 0.0, 0.0, 0.0)
        lease = Lease(
            book.next_id(),
            ticket.owner,
            ticket.namespace,
            ids,
            [ids],
            now_s + DURABLE_WAIT_S,
            (),
            decision,
        )
        book.open(lease)
        self._durable_waits[ticket.id] = lease, writer

    def abort(self, event: p.Abort) -> int:
        residency = self.residency
        ticket = residency.leases.tickets.pop(event.ticket, None)
        if ticket is None:  # an expired ticket's writer acknowledges
            return self.end_quarantine(event.ticket)
        slot_bytes = residency.namespaces[ticket.namespace].slot_bytes[ticket.tier]
        if event.writer_gone:
            residency.blocks.vacate(ticket.tier, ticket.ids, slot_bytes)
        else:
            slots = residency.blocks.slot[ticket.tier][ticket.ids]
            residency.blocks.change(ticket.tier, ticket.ids, CopyState.ABSENT)
            residency.pools[ticket.tier].quarantine(slot_bytes, slots)
            residency.leases.quarantine[ticket.id] = Quarantined(
                ticket.owner, ticket.tier, slot_bytes, slots
            )
        residency.settle(ticket.ids)
        return len(ticket.ids)

    def end_quarantine(self, ticket: int) -> int:
        held = self.residency.leases.quarantine.pop(ticket, None)
        if held is None:
            return 0
        self.residency.pools[held.tier].end_quarantine(held.slot_bytes, held.slots)
        return len(held.slots)

    def durable_now(self) -> list[int]:
        """Tickets whose blocks are all in a persistent tier: the fastest that took blocks at their
        commit, or, where that has stopped, the fastest that takes them now."""
        book = self.residency.leases
        tags = self.residency.blocks.tags
        first = self.write_back.first() if self._durable_waits else None
        durable = []
        for ticket, (lease, writer) in list(self._durable_waits.items()):
            is_open = lease.id in book.leases  # else it has expired, or its owner is gone
            if is_open and not writer.takes and first is not None:
                writer = first
                writer.want(self.residency.index.node_of(int(lease.ids[-1])))
                writer.advance()
                self._durable_waits[ticket] = lease, writer
            is_durable = is_open and bool((tags[lease.ids] >> writer.tier & 1).all())
            if is_durable and writer.takes:
                durable.append(ticket)
            if is_durable or not is_open or not writer.takes:
                del self._durable_waits[ticket]
                book.close(lease.id)
        if durable:
            self.residency.candidates.unpark()
        return durable

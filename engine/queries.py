"""Queries of the cache engine's state, for the daemon and for tools. They change nothing.

Returned leases, tickets, namespaces and moves belong to the cache engine: read them only; they
change with the next event. Used from the daemon's one loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from hicache.engine import plan as p
from hicache.engine.index.snapshot import TreePage, page
from hicache.engine.residency.blocks import CopyState
from hicache.engine.residency.copies import Namespace, Residency
from hicache.engine.residency.leases import Lease, Pin, Ticket
from hicache.engine.residency.pinned import leased_share, pinned_bytes
from hicache.tiers.block import Ids, TierSpec

NODE_BYTES = 400
"""A node's memory in the index, without symbols: an estimate, measured by
`tests/bench/index.py`."""


class Queries:
    """Reached as `engine.queries`."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency

    # --- leases, tickets, pins ------------------------------------------------------------------

    def lease_of(self, number: int, owner: int | None = None) -> Lease:
        """The lease. Raises UnknownLease where it does not exist or belongs to another owner."""
        lease = self._residency.leases.leases.get(number)
        if lease is None or owner not in (None, lease.owner):
            raise p.UnknownLease(number)
        return lease

    def has_lease(self, number: int, owner: int | None = None) -> bool:
        """Whether this lease is open and belongs to the owner."""
        lease = self._residency.leases.leases.get(number)
        return lease is not None and owner in (None, lease.owner)

    def ticket_of(self, number: int, owner: int | None = None) -> Ticket:
        """The ticket. Raises UnknownTicket where it does not exist or belongs to another owner."""
        ticket = self._residency.leases.tickets.get(number)
        if ticket is None or owner not in (None, ticket.owner):
            raise p.UnknownTicket(number)
        return ticket

    def tickets(self) -> Set[int]:
        """The numbers of the open tickets."""
        return self._residency.leases.tickets.keys()

    def ticket_slots(self, ticket: Ticket, places: Ids | None = None) -> tuple[str, Ids]:
        """The tier's name and the slots of the ticket's blocks: all, or those at `places`."""
        ids = ticket.ids if places is None else ticket.ids[places]
        slots: Ids = self._residency.blocks.slot[ticket.tier][ids]
        return self._residency.tiers[ticket.tier].name, slots

    def is_writer(self, ticket: int, owner: int) -> bool:
        """Whether this owner may still write the slots of a ticket, open or expired."""
        book = self._residency.leases
        held = book.tickets.get(ticket) or book.quarantine.get(ticket)
        return held is not None and held.owner == owner

    def busy_owners(self) -> set[int]:
        """Owners with a lease or a ticket."""
        book = self._residency.leases
        owners = {lease.owner for lease in book.leases.values()}
        return owners | {ticket.owner for ticket in book.tickets.values()}

    def quarantined_owners(self) -> set[int]:
        """Owners whose expired tickets have slots in quarantine."""
        return {held.owner for held in self._residency.leases.quarantine.values()}

    def pins(self) -> Sequence[Pin]:
        """All pins, the oldest first."""
        return list(self._residency.leases.pins.values())

    def num_pinned_blocks(self) -> int:
        """The number of pinned blocks; one with several pins counts once."""
        return len(self._residency.leases.kept)

    def leased_share(self) -> float:
        """The share of memory that leases hold (see residency.pinned)."""
        return leased_share(self._residency)

    def pinned_share(self) -> float:
        """The largest share of a tier that pins hold."""
        pools = enumerate(self._residency.pools)
        return max(pinned_bytes(self._residency, n) / max(1, q.capacity_bytes) for n, q in pools)

    # --- namespaces and tiers -------------------------------------------------------------------

    def namespace(self, number: int) -> Namespace:
        """The namespace with this number now. Numbers of idle namespaces are reused."""
        return self._residency.namespaces[number]

    def namespaces(self) -> Sequence[Namespace]:
        """All namespaces, by number."""
        return self._residency.namespaces

    def num_blocks_of(self, namespace: int) -> int:
        """Blocks of a namespace in the index."""
        return self._residency.index.num_blocks[namespace]

    def tiers(self) -> Sequence[TierSpec]:
        """All tiers, the fastest first."""
        return self._residency.tiers

    def has_persistent_tier(self) -> bool:
        """Whether blocks can be durable at all."""
        return self._residency.persistent != 0

    def restoring_tiers(self) -> set[str]:
        """Tiers whose stored blocks are still being restored."""
        tiers = enumerate(self._residency.tiers)
        return {spec.name for n, spec in tiers if self._residency.restoring >> n & 1}

    def refusing_tiers(self) -> dict[str, str]:
        """Tier → reason, for the tiers that refused the last write."""
        reasons = self._residency.backoff.reasons()
        return {self._residency.tiers[tier].name: reason for tier, reason in reasons.items()}

    def move(self, number: int) -> p.Move | None:
        """A move that has not ended; None where it has."""
        return self._residency.moves.get(number)

    # --- for operators --------------------------------------------------------------------------

    def tier_counters(self) -> dict[str, dict[str, Any]]:
        """Sizes and counts of each tier, by name."""
        residency = self._residency
        rows = {}
        for number, spec in enumerate(residency.tiers):
            pool, states = residency.pools[number], residency.blocks.counts[number]
            into = [move for move in residency.moves.values() if move.dst == spec.name]
            rows[spec.name] = {
                "is_up": residency.is_up(number),
                "capacity_bytes": pool.capacity_bytes,
                "used_bytes": pool.used_bytes,
                "given_back_bytes": len(pool.withheld) * pool.slab_bytes,
                "quarantined_bytes": pool.quarantined_bytes,
                "pinned_bytes": pinned_bytes(residency, number),
                "blocks": int(states[CopyState.READY] + states[CopyState.DRAINING]),
                "promotions": residency.promoted[number],
                "demotions": residency.demoted[number],
                "evictions": residency.evicted[number],
                "corrupt": residency.corrupt[number],
                "queue_depth": len(into),
                "queue_bytes": sum(move.block_bytes for move in into),
            }
        return rows

    def queued_bytes(self, link: tuple[int, int]) -> int:
        """Bytes queued and in flight over a link, of all priorities."""
        return self._residency.moves.bytes_over(link, p.Priority.DEMOTION)

    def index_counters(self) -> Mapping[str, int]:
        """Blocks and nodes of the index, and bytes that it takes without its tokens (estimated)."""
        blocks, index = self._residency.blocks, self._residency.index
        num_bytes = blocks.num_bytes() + NODE_BYTES * index.num_nodes
        return {"blocks": len(blocks), "nodes": index.num_nodes, "bytes": num_bytes}

    def tree_page(
        self, after: int, most: int, now_s: float, digest: bytes, *, with_tokens: bool
    ) -> TreePage:
        """Nodes of the index (see index.snapshot)."""
        return page(self._residency, after, most, now_s, digest, with_tokens=with_tokens)

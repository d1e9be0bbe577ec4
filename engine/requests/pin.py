"""Pins: prefixes that are not evicted until they are unpinned or expire, independent of sessions.

For prompts that an operator knows to be important, for example a tool catalogue. A pin is a long
lease without an owner, so it keeps all copies of its blocks, present and future: the copy on disk,
and the one in memory that makes a hit fast. Like a lease, it does not protect a copy that is
corrupt, or whose tier's worker dies.

All pins together may hold a share of each tier (`LeaseBook.max_share`); blocks with several pins
count once:

    tiers that blocks are copied to for reading or writing   all pinned blocks count
    other tiers                                              only pinned blocks there; no more
                                                             are promoted

So later copies do not make pins exceed their share. Owned by the daemon's one loop.
"""

from __future__ import annotations

from hicache.engine import plan as p
from hicache.engine.requests.match import Matching
from hicache.engine.residency.block_ids import ids_along
from hicache.engine.residency.blocks import CopyState
from hicache.engine.residency.copies import NO_TIER, Residency
from hicache.engine.residency.leases import Pin, once_each
from hicache.engine.residency.pinned import bytes_in
from hicache.tiers.block import Ids


class Pinning:
    """Takes Pin and Unpin events."""

    def __init__(self, residency: Residency, matching: Matching) -> None:
        self.residency = residency
        self.matching = matching
        tiers = residency.tiers
        landed = {residency.landing[n] for n, tier in enumerate(tiers) if not tier.mapped}
        self._comes_unasked = (landed - {NO_TIER}) | {
            n for n, t in enumerate(tiers) if t.persistent
        }

    def pin(self, event: p.PinPrompt) -> p.PinPlaced:
        """Pin the prompt's held blocks; draining copies are rescued. Pins nothing where the share
        would be exceeded."""
        residency = self.residency
        namespace = residency.namespaces[event.namespace]
        spans = self.matching.take_up(namespace, event.tokens, event.now_s)
        ids = ids_along(spans)
        if not len(ids):
            return p.PinPlaced(0, 0)
        full = self._full(ids)
        if full is not None:
            return p.PinPlaced(0, len(ids), residency.tiers[full].name)
        expires_s = event.now_s + event.ttl_s
        pin = Pin(residency.leases.next_id(), event.namespace, event.name, spans, expires_s)
        residency.leases.keep(pin)
        return p.PinPlaced(pin.id, len(ids))

    def unpin(self, *pin_ids: int) -> bool:
        """Remove pins. Returns False when none of them exists."""
        residency = self.residency
        num_ended, gone = residency.leases.let_go(pin_ids)
        lost = gone[residency.blocks.tags[gone] == 0]
        if len(lost):
            residency.settle(lost)
        if num_ended:
            residency.candidates.unpark()
        return num_ended > 0

    def expire(self, now_s: float) -> None:
        """Remove expired pins."""
        pins = self.residency.leases.pins.values()
        self.unpin(*(pin.id for pin in pins if pin.expires_s <= now_s))

    def _full(self, ids: Ids) -> int | None:
        """A tier in which pins would exceed their share with these blocks; None if there is
        none."""
        residency = self.residency
        kept = once_each((residency.leases.kept, ids))
        for tier, pool in enumerate(residency.pools):
            inside = kept
            if tier not in self._comes_unasked:
                inside = kept[residency.blocks.state[tier][kept] != CopyState.ABSENT]
            if bytes_in(residency, inside, tier) > residency.leases.max_share * pool.capacity_bytes:
                return tier
        return None

"""Pins: prefixes that stay, whoever comes and goes, until they are unpinned or their time is over.

Somebody knows what no policy can: this tool catalogue must never be evicted. A pin is a lease of
nobody's that lasts long, so it holds every copy that its blocks have and get, each where it is: the
copy on disk, and the one in memory that makes a hit fast. What a lease does not keep from happening
a pin does not either: a copy that is corrupt, or whose tier dies, is gone.

All pins together have a share of what each tier has now (`LeaseBook.max_share`), the blocks that
several hold counted once:

    where blocks come unasked (to be read, written down)   all that is pinned counts
    elsewhere                                              what is there; no more is promoted

So copies that come later do not make pins hold more of a tier than that. Owned by the daemon's one
loop.
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
        """What is leaving of the prompt stays. Nothing is held where the share is too small."""
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
        """Their blocks are as all others. False when there are no such pins."""
        residency = self.residency
        num_ended, gone = residency.leases.let_go(pin_ids)
        lost = gone[residency.blocks.tags[gone] == 0]
        if len(lost):
            residency.settle(lost)
        if num_ended:
            residency.candidates.unpark()
        return num_ended > 0

    def expire(self, now_s: float) -> None:
        """Unpin those whose time is over."""
        pins = self.residency.leases.pins.values()
        self.unpin(*(pin.id for pin in pins if pin.expires_s <= now_s))

    def _full(self, ids: Ids) -> int | None:
        """A tier of which pins would have more than their share with these blocks."""
        residency = self.residency
        kept = once_each((residency.leases.kept, ids))
        for tier, pool in enumerate(residency.pools):
            inside = kept
            if tier not in self._comes_unasked:
                inside = kept[residency.blocks.state[tier][kept] != CopyState.ABSENT]
            if bytes_in(residency, inside, tier) > residency.leases.max_share * pool.capacity_bytes:
                return tier
        return None

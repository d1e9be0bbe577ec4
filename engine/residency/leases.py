"""Leases: claims that keep copies from being evicted; tickets: claims on slots being written.

Both belong to an owner (a client group, by number) and expire. A lease pins every copy of its
blocks by a count per block id, so tree nodes may be split and merged meanwhile.

A pin is a long lease without an owner. It is kept separately: code that waits for leases to end, or
for room that readers will free, must not wait for pins.

Shared memory cannot be revoked: an expired ticket's slots are quarantined, never freed, until the
writer acknowledges or is dead (`Quarantined`). Owned by the daemon's one loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import numpy as np

from hicache.engine.plan import ReloadDecision, TierRun
from hicache.engine.residency.block_ids import Span, ids_of, size_of
from hicache.engine.residency.blocks import BlockTable
from hicache.tiers.block import Ids

NO_OWNER: Final = 0
"""The owner of leases that belong to no session."""
_NO_IDS: Final = np.empty(0, np.int32)


@dataclass(slots=True)
class Lease:
    """A leased prefix; `spans` are its `ids` as indices into the arrays.

    `awaited`: blocks being copied; `unplaced`: blocks from this position of `ids` on still need
    room; `failed_at`: the readable prefix ends here at the latest. `started_s` and `deadline_s` are
    set by the first fetch, `took_s` at its end. `by_worker`: the GPU's worker reads the blocks, not
    a client. `not_loaded`: the first positions of its loads that are running or have failed.
    """

    id: int
    owner: int
    namespace: int
    ids: Ids
    spans: list[Span]
    expires_s: float
    runs: tuple[TierRun, ...]
    decision: ReloadDecision
    awaited: set[int] = field(default_factory=set)
    unplaced: int = 0
    failed_at: int = 0
    not_loaded: set[int] = field(default_factory=set)
    fetching: bool = False
    by_worker: bool = False
    started_s: float = 0.0
    deadline_s: float = 0.0
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pin:
    """A pinned prefix; `spans` are its blocks' ids, each once."""

    id: int
    namespace: int
    name: str
    spans: list[Span]
    expires_s: float

    @property
    def num_blocks(self) -> int:
        return sum(map(size_of, self.spans))


@dataclass(slots=True)
class Ticket:
    """Slots granted for a put: `ids` (`span`: as an index) in `tier`, written by `owner`."""

    id: int
    owner: int
    namespace: int
    tier: int
    ids: Ids
    span: Span
    indices: Ids
    expires_s: float


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Slots that a client may still write."""

    owner: int
    tier: int
    slot_bytes: int
    slots: Ids


def once_each(parts: Sequence[Ids]) -> Ids:
    """All these ids, each once, in order. Merged run by run, in a tenth of the time of sorting."""
    ids = np.concatenate((_NO_IDS, *parts))
    ids.sort(kind="stable")
    is_first = np.ones(len(ids), bool)
    np.not_equal(ids[1:], ids[:-1], out=is_first[1:])
    return ids[is_first]


class LeaseBook:
    """All leases, pins, tickets and quarantines. `kept`: each pinned block once, in order.
    `max_share`: the share of each tier that all pins together may hold."""

    def __init__(self, blocks: BlockTable) -> None:
        self.blocks = blocks
        self.leases: dict[int, Lease] = {}
        self.pins: dict[int, Pin] = {}
        self.kept: Ids = _NO_IDS
        self._num_keeping = _NO_IDS  # by block, the number of its pins
        self.max_share = 0.0
        self.tickets: dict[int, Ticket] = {}
        self.quarantine: dict[int, Quarantined] = {}
        self.next_id: Callable[[], int] = count(1).__next__
        """A number never used before in this run, for a lease, a pin or a ticket."""

    def open(self, lease: Lease) -> None:
        """Pin the lease's blocks."""
        for span in lease.spans:
            self.blocks.pin(span)
        self.leases[lease.id] = lease

    def close(self, lease_id: int) -> Lease | None:
        """Close a lease and unpin its blocks. Returns None when it does not exist."""
        lease = self.leases.pop(lease_id, None)
        if lease is not None:
            for span in lease.spans:
                self.blocks.unpin(span)
        return lease

    def shorten(self, lease: Lease, num_blocks: int) -> None:
        """Unpin all but the first blocks of a lease."""
        for span in lease.spans:
            self.blocks.unpin(span)
        lease.ids = lease.ids[:num_blocks]
        lease.spans = [lease.ids]
        self.blocks.pin(lease.ids)
        lease.failed_at = min(lease.failed_at, num_blocks)

    def keep(self, pin: Pin) -> None:
        """Add a pin."""
        new = [self.unkept(ids_of(span)) for span in pin.spans]
        for span in pin.spans:
            self.blocks.pin(span)
            self._num_keeping[span] += 1
        self.pins[pin.id] = pin
        self.kept = once_each((self.kept, *new))

    def let_go(self, pin_ids: Iterable[int]) -> tuple[int, Ids]:
        """Remove the pins that exist. Returns how many, and the blocks that have no pin now. Its
        time does not depend on the pins that stay: a prompt may be pinned a thousand times."""
        ended = [self.pins.pop(number) for number in pin_ids if number in self.pins]
        for pin in ended:
            for span in pin.spans:
                self.blocks.unpin(span)
                self._num_keeping[span] -= 1
        is_kept = self._num_keeping[self.kept] > 0 if ended else np.ones(len(self.kept), bool)
        gone, self.kept = self.kept[~is_kept], self.kept[is_kept]
        return len(ended), gone

    def unkept(self, ids: Ids) -> Ids:
        """The blocks of `ids` without a pin."""
        more = len(self.blocks.leases) - len(self._num_keeping)
        if more:
            self._num_keeping = np.append(self._num_keeping, np.zeros(more, np.int32))
        unkept: Ids = ids[self._num_keeping[ids] == 0]
        return unkept

    def expired(self, now_s: float) -> tuple[list[int], list[int]]:
        """The ids of expired leases, and of expired tickets."""
        return (
            [lease.id for lease in self.leases.values() if lease.expires_s <= now_s],
            [ticket.id for ticket in self.tickets.values() if ticket.expires_s <= now_s],
        )

    def validate(self) -> None:
        """Recount the pins."""
        counted = self.blocks.leases.copy()
        for lease in self.leases.values():
            counted[lease.ids] -= 1
        num_keeping = np.zeros(len(counted), np.int32)
        for pin in self.pins.values():
            for span in pin.spans:
                num_keeping[span] += 1
        assert not (counted - num_keeping).any(), "lease counts differ from leases and pins"
        assert np.array_equal(np.flatnonzero(num_keeping), self.kept), "pinned blocks differ"
        known = len(self._num_keeping)
        assert np.array_equal(num_keeping[:known], self._num_keeping), "pin counts differ"
        for tier, pool in enumerate(self.blocks.pools):
            held = sum(
                len(item.slots) * item.slot_bytes
                for item in self.quarantine.values()
                if item.tier == tier
            )
            assert held == pool.quarantined_bytes, (held, pool.quarantined_bytes)

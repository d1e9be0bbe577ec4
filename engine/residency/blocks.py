"""Blocks as a struct of arrays, and the table of the allowed transitions of their copies.

All state is by block id, not by tree node: nodes are split and merged freely during leases and
moves. Owned by the daemon's one loop.

The states of a copy (one block in one tier):

    absent ──▶ filling ──▶ ready ──▶ draining ──▶ absent
                 │  ▲        ▲           │
                 ▼  │        └───────────┘ rescued: requested before it was freed
              cancelled ──▶ ready (the copy completed) or absent

A copy can be read while it is ready or draining. `tags` holds, per block, a bit for each tier it
can be read from (low byte) and a bit for each tier it is leaving (high byte): the residency that
tree nodes carry.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from hicache.engine.residency.block_ids import IdSpace, Span, ids_of, size_of, together
from hicache.tiers.block import Ids, SlotAllocator, TierSpec

Item = TypeVar("Item", bound=np.generic)

MAX_TIERS: Final = 8
LEAVING_SHIFT: Final = 8


class CopyState(IntEnum):
    """The state of one copy."""

    ABSENT = 0
    FILLING = 1
    READY = 2
    DRAINING = 3
    CANCELLED = 4


_ALLOWED: Final = {
    CopyState.ABSENT: {CopyState.FILLING},
    CopyState.FILLING: {CopyState.READY, CopyState.CANCELLED, CopyState.ABSENT},
    CopyState.CANCELLED: {CopyState.FILLING, CopyState.READY, CopyState.ABSENT},
    CopyState.READY: {CopyState.DRAINING},
    CopyState.DRAINING: {CopyState.READY, CopyState.ABSENT},
}
_MAY_BECOME: Final = np.array([[new in _ALLOWED[old] for old in CopyState] for new in CopyState])


class IllegalTransition(AssertionError):
    """The table does not allow this transition. Nothing was changed."""


class BlockTable:
    """Every block's node, depth, leases, hits, and per tier its copy's state and slot.

    States are set only by `change`, which also updates `tags` and `counts`.
    """

    def __init__(self, tiers: Sequence[TierSpec], pools: Sequence[SlotAllocator]) -> None:
        assert len(tiers) <= MAX_TIERS
        self.tiers = tuple(tiers)
        self.pools = tuple(pools)
        self.counts = np.zeros((len(tiers), len(CopyState)), np.int64)
        self.ids = IdSpace()
        self.num_pins = 0
        self._pinned_ends: list[int] = []  # the deepest block of each pinned span, sorted
        self.node = np.empty(0, np.int32)
        self.depth = np.empty(0, np.int32)
        self.leases = np.empty(0, np.int32)
        self.hits = np.empty(0, np.uint32)
        self.noted_hits = {  # by persistent tier: the hits that are written beside the block there
            number: np.empty(0, np.uint32) for number, tier in enumerate(tiers) if tier.persistent
        }
        self.tags = np.empty(0, np.uint16)
        self.state: list[npt.NDArray[np.uint8]] = [np.empty(0, np.uint8) for _ in tiers]
        self.slot: list[Ids] = [np.empty(0, np.int32) for _ in tiers]
        self._ramp = np.empty(0, np.int32)

    def __len__(self) -> int:
        return self.ids.size - self.ids.num_free

    def allocate(self, count: int) -> Span:
        """Allocate `count` ids without copies, nearly always consecutive ones: an id costs about
        thirty bytes, so a quarter more ids is better than fragmented spans."""
        span = self.ids.take(count)
        if span is None and self.ids.num_free < max(count, self.ids.size // 4):
            self._grow(count)
            span = self.ids.take(count)
        return self.ids.gather(count) if span is None else span

    def place(self, span: Span, node: int, depth: int) -> None:
        """These blocks belong to this node, the first of them at this depth."""
        end = depth + size_of(span)
        if end > len(self._ramp):
            self._ramp = np.arange(2 * end, dtype=np.int32)
        self.node[span] = node
        self.depth[span] = self._ramp[depth:end]

    def pin(self, span: Span) -> None:
        """Add a lease to these blocks, which are of one path."""
        if count := size_of(span):
            self.leases[span] += 1
            self.num_pins += count
            insort(self._pinned_ends, self._end_of(span))

    def unpin(self, span: Span) -> None:
        """Remove a lease from blocks that were pinned together."""
        if count := size_of(span):
            self.leases[span] -= 1
            self.num_pins -= count
            del self._pinned_ends[bisect_left(self._pinned_ends, self._end_of(span))]

    def is_pinned(self, span: Span) -> bool:
        """Whether any of these blocks is leased."""
        return bool(self.num_pins and np.count_nonzero(self.leases[span]))

    def is_tail_pinned(self, span: Span, first: int = 0) -> bool:
        """Whether any block of a childless node, from `first` on, is leased. Its cost does not grow
        with the node: no path continues below it, so a lease of its blocks ends in them."""
        if not isinstance(span, slice):
            return self.is_pinned(span[first:])
        ends = self._pinned_ends
        at = bisect_left(ends, span.start + first)
        return at < len(ends) and ends[at] < span.stop

    def num_held(self, span: Span) -> int:
        """The number of blocks from the node's front up to its last leased one."""
        if not self.num_pins:
            return 0
        leased = np.flatnonzero(self.leases[span])
        return int(leased[-1]) + 1 if len(leased) else 0

    def is_path_pinned(self, span: Span) -> bool:
        """Whether any block of a node is leased, for any node: a lease of its blocks begins above
        it or in it, and ends in it or below it."""
        if not isinstance(span, slice):
            return self.is_pinned(span)
        return bool(self.leases[span.stop - 1]) or self.is_tail_pinned(span)

    def _end_of(self, span: Span) -> int:
        """The deepest of these blocks."""
        if isinstance(span, slice):
            return int(span.stop) - 1
        return int(span[self.depth[span].argmax()])

    def free(self, span: Span) -> None:
        """Free blocks without copies and leases."""
        assert not np.count_nonzero(self.tags[span]), "a block with copies was freed"
        assert not self.is_pinned(span), "a leased block was freed"
        self.node[span] = -1
        self.hits[span] = 0
        self.ids.give(span)

    def forget(self, tier: int, spans: list[Span], slot_bytes: int) -> int:
        """ready → absent, and free: for blocks whose only copy is not leased or read.

        The same as draining, vacating and freeing them, in one step. Adjacent `spans` are joined.
        Returns the number of blocks."""
        if len(spans) > 1:
            spans[:] = together(spans)
        slots = self.slot[tier]
        freed = [slots[span] for span in spans]
        self.pools[tier].free(slot_bytes, freed[0] if len(freed) == 1 else np.concatenate(freed))
        states, tags, node, hits = self.state[tier], self.tags, self.node, self.hits
        num_blocks = 0
        for span in spans:
            states[span] = 0
            tags[span] = 0
            node[span] = -1
            hits[span] = 0
            self.ids.give(span)
            num_blocks += size_of(span)
        self.counts[tier, CopyState.READY] -= num_blocks
        self.counts[tier, CopyState.ABSENT] += num_blocks
        return num_blocks

    def change(self, tier: int, ids: Span, new: CopyState) -> None:
        """Set copies to a new state. Raises IllegalTransition, and changes nothing."""
        states = self.state[tier]
        old = states[ids]
        if len(old) == 0:
            return
        allowed = _MAY_BECOME[new]
        counts = self.counts[tier]
        first = int(old[0])
        if (old == first).all():  # nearly always
            if not allowed[first]:
                raise self._illegal(tier, ids, 0, new)
            counts[first] -= len(old)
        else:
            if not allowed[old].all():
                raise self._illegal(tier, ids, int(np.argmin(allowed[old])), new)
            counts -= np.bincount(old, minlength=len(CopyState))
        states[ids] = new
        counts[new] += len(old)
        readable = 1 << tier
        leaving = readable << LEAVING_SHIFT
        kept = self.tags[ids] & np.uint16(0xFFFF & ~(readable | leaving))
        if new == CopyState.READY:
            kept |= np.uint16(readable)
        elif new == CopyState.DRAINING:
            kept |= np.uint16(readable | leaving)
        self.tags[ids] = kept

    def _illegal(self, tier: int, ids: Span, position: int, new: CopyState) -> IllegalTransition:
        block = int(ids_of(ids)[position])
        old = CopyState(self.state[tier][block]).name
        story = self.story(block)
        return IllegalTransition(f"{old} → {new.name} in {self.tiers[tier].name}: {story}")

    def fill(self, tier: int, ids: Span, slots: Ids) -> None:
        """absent → filling, into these slots."""
        self.change(tier, ids, CopyState.FILLING)
        self.slot[tier][ids] = slots

    def vacate(self, tier: int, ids: Ids, slot_bytes: int) -> None:
        """→ absent, and free the slots. A ready copy must drain first."""
        if len(ids) == 0:
            return
        ready = ids[self.state[tier][ids] == CopyState.READY]
        if len(ready):
            self.change(tier, ready, CopyState.DRAINING)
        self.change(tier, ids, CopyState.ABSENT)
        self.pools[tier].free(slot_bytes, self.slot[tier][ids])

    def story(self, block: int) -> str:
        """A block's state in words, for errors."""
        copies = ", ".join(
            f"{tier.name}={CopyState(self.state[number][block]).name.lower()}@{self.slot[number][block]}"
            for number, tier in enumerate(self.tiers)
        )
        return (
            f"block {block} of node {self.node[block]} at depth {self.depth[block]}: {copies}; "
            f"{self.leases[block]} leases, {self.hits[block]} hits"
        )

    def num_bytes(self) -> int:
        """Memory of all per-block state."""
        arrays = self.node, self.depth, self.leases, self.hits, self.tags
        noted = sum(a.nbytes for a in self.noted_hits.values())
        per_tier = sum(a.nbytes for a in self.state) + sum(a.nbytes for a in self.slot)
        return sum(a.nbytes for a in arrays) + noted + per_tier

    def live_ids(self) -> Ids:
        """All ids in use."""
        return np.flatnonzero(self.node >= 0).astype(np.int32)

    def _grow(self, count: int) -> None:
        old = self.ids.size
        new = max(1024, old + count, old + old // 4)
        for name in ("node", "depth", "leases", "hits", "tags"):
            setattr(self, name, _extended(getattr(self, name), new))
        self.node[old:] = -1
        for tier, noted in self.noted_hits.items():
            self.noted_hits[tier] = _extended(noted, new)
        self.state = [_extended(array, new) for array in self.state]
        self.slot = [_extended(array, new) for array in self.slot]
        self.ids.grow(new)
        self.counts[:, CopyState.ABSENT] += new - old

    def validate(self) -> None:
        """Recount tags and counts from the states."""
        tags = np.zeros(self.ids.size, np.uint16)
        for number in range(len(self.tiers)):
            state = self.state[number]
            readable = (state == CopyState.READY) | (state == CopyState.DRAINING)
            tags |= readable.astype(np.uint16) << np.uint16(number)
            leaving = (state == CopyState.DRAINING).astype(np.uint16)
            tags |= leaving << np.uint16(number + LEAVING_SHIFT)
            counted = np.bincount(state, minlength=len(CopyState))
            assert (counted == self.counts[number]).all(), (counted, self.counts[number])
            assert not (state[self.node < 0] != CopyState.ABSENT).any(), "a free id has a copy"
        assert (tags == self.tags).all()
        assert (self.leases >= 0).all()
        assert self.num_pins == int(self.leases.sum())
        assert self._pinned_ends == sorted(self._pinned_ends)
        assert not self.leases[self.node < 0].any()
        self.ids.validate()
        assert self.ids.num_free == int((self.node < 0).sum())


def _extended(array: npt.NDArray[Item], size: int) -> npt.NDArray[Item]:
    bigger: npt.NDArray[Item] = np.zeros(size, array.dtype)
    bigger[: len(array)] = array
    return bigger

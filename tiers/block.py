"""The vocabulary every room shares: what a block, a slot and a tier are called.

Light on purpose (numpy only): clients import it inside an inference engine's process.

A *block* is a fixed run of tokens' KV for all layers of one namespace. A *slot* is room for one
block in one tier. Slots are named by where they start, counted in 4 KiB pages from the start of
the tier, so one 31-bit number names any slot of a tier of up to 8 TiB whatever its size class:

    page   0        1        2        3        4        5
           |--- slot 0 (8 KiB) ---|--- slot 2 (8 KiB) ---|-- free ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

PAGE_BYTES = 4096
MAX_BLOCK_TOKENS = 4096
"""A block has no more tokens, in any namespace."""
MAX_TIER_BYTES = PAGE_BYTES << 31

Ids = npt.NDArray[np.int32]
"""Block ids or slot pages: int32, shape [n]."""

Counts = npt.NDArray[np.uint32]
"""Hits, lengths, or seconds since 1970: uint32, shape [n]."""


def slot_bytes_for(block_bytes: int) -> int:
    """The slot-size class of a block: its length rounded up to whole pages."""
    if block_bytes <= 0:
        raise ValueError(f"a block holds at least one byte, not {block_bytes}")
    return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class TierTraits:
    """What kind of medium a tier is. The cache engine asks for these and never for a tier's name.

    `mapped`: clients on this host can read and write its slots through a shared mapping.
    `persistent`: its blocks are found again after a restart, so each carries its identity.
    `deletion_is_io`: a copy is given up by a move, and its room is free after the outcome.
    `keeps_whole_prefixes`: a block is written after its ancestors and deleted before them.
    `shared_between_hosts`: other hosts read, write and delete there too.
    """

    mapped: bool = False
    persistent: bool = False
    deletion_is_io: bool = False
    keeps_whole_prefixes: bool = False
    shared_between_hosts: bool = False


@dataclass(frozen=True, slots=True)
class TierSpec:
    """What the cache engine knows of a tier. Tiers are ordered, fastest first.

    `high_watermark`, `low_watermark`: shares of the capacity; above the first, cold blocks are
    demoted ahead of need until the second is reached.
    `min_return`, `write_bytes_per_s`: an evicted block is written to this tier, a persistent one,
    only if its probability of reuse is at least this, and within this average rate.
    """

    name: str
    capacity_bytes: int
    traits: TierTraits
    high_watermark: float = 0.95
    low_watermark: float = 0.90
    min_return: float = 0.0
    write_bytes_per_s: float = math.inf

    @property
    def mapped(self) -> bool:
        return self.traits.mapped

    @property
    def persistent(self) -> bool:
        return self.traits.persistent

    @property
    def is_gated(self) -> bool:
        """Whether some evicted blocks are not written to it."""
        return self.min_return > 0 or self.write_bytes_per_s < math.inf


@dataclass(frozen=True, slots=True, eq=False)
class StoredRows:
    """Some of the blocks that a persistent tier holds of one namespace, read back after a restart.

    They come as chains of blocks that follow one another, and are numbered in the order in which
    they are told, these from `first` on. Of each chain: its `lengths`; `parents`, the number of the
    row above its first, told before, or -1 for the root; that row's key (32 bytes in
    `parent_keys`). Of each row: `step` bytes of `tokens`; its `hits`; `used_s`, when it or one
    below it was used last, in seconds since 1970, so that it never rises along a chain. `total`
    rows will have been told at the end.
    """

    namespace: bytes
    block_bytes: int
    step: int
    first: int
    total: int
    lengths: Counts
    parents: Ids
    parent_keys: bytes
    tokens: bytes
    hits: Counts
    used_s: Counts

    def __len__(self) -> int:
        return len(self.hits)

    def is_sound(self) -> bool:
        """Whether the lengths of all its parts agree. What is in them is not looked at."""
        count = int(self.lengths.sum())
        return (
            0 < count == len(self.hits) == len(self.used_s)
            and self.step > 0
            and self.first >= 0
            and len(self.tokens) == count * self.step
            and len(self.lengths) == len(self.parents)
            and len(self.parent_keys) == 32 * len(self.lengths)
            and bool(self.lengths.all())
        )


@dataclass(frozen=True, slots=True)
class SlabClearing:
    """A run of pages of one tier, first_page … end_page-1, that is emptied of the slots it holds so
    that slots of another class, `slot_bytes` large, find room there."""

    slot_bytes: int
    first_page: int
    end_page: int


class SlotAllocator(Protocol):
    """The free list of one tier, as the cache engine sees it (tiers/pool.py implements it)."""

    capacity_bytes: int
    used_bytes: int
    quarantined_bytes: int
    clearing: SlabClearing | None
    slab_bytes: int
    withheld: set[int]
    reshaped: list[tuple[int, int]]

    def allocate(self, slot_bytes: int, count: int) -> Ids:
        """Up to `count` slots of the class, fewer (perhaps none) when the tier lacks room."""

    def available(self, slot_bytes: int) -> int:
        """How many slots of the class `allocate` could hand out now."""

    def free(self, slot_bytes: int, slots: Ids) -> None:
        """Give slots back. Raises ValueError on a slot that is not in use."""

    def quarantine(self, slot_bytes: int, slots: Ids) -> None:
        """Take slots out of use without offering them again: somebody may still write them."""

    def end_quarantine(self, slot_bytes: int, slots: Ids) -> None:
        """The writer is known to be gone: the slots are free."""

    def can_hold(self, slot_bytes: int) -> bool:
        """Whether a slot of the class would fit if the tier were empty."""

    def num_used(self, slot_bytes: int) -> int:
        """How many slots of the class are in use."""

    def clearings(self, slot_bytes: int, count: int) -> Sequence[SlabClearing]:
        """What could be emptied to make room for a slot of the class, the least used first."""

    def close(self, clearing: SlabClearing) -> None:
        """Hand out nothing there until it is empty, and then only to its class."""

    def reopen(self) -> None:
        """End the clearing, empty or not."""

    @property
    def clearing_bytes(self) -> int:
        """What is still in use in the clearing."""

    def withhold(self, count: int) -> Sequence[int]:
        """Take free slabs out of use. Returns the pages they begin at, fewer than asked for where
        there are no more."""

    def restore(self, first_page: int) -> None:
        """A slab that was withheld is room again."""

    def validate(self) -> None:
        """Recount everything from the ground; AssertionError tells what differs."""

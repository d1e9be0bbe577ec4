"""The vocabulary that every package shares: blocks, slots and tiers.

Imports only numpy: clients import it inside an inference engine's process.

A *block* is a fixed run of tokens' KV for all layers of one namespace. A *slot* is room for one
block in one tier. A slot's number is its first 4 KiB page, counted from the start of the tier, so
one 31-bit number names any slot of a tier of up to 8 TiB, of any size class:

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
"""The most tokens of a block, in any namespace."""
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
    """The properties of a tier's medium. The cache engine uses these, never a tier's name.

    `mapped`: clients on this host can read and write its slots through a shared mapping.
    `persistent`: its blocks are found again after a restart, so each carries its identity.
    `deletion_is_io`: a copy is deleted by a move, and its room is free after the outcome.
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
    """A tier as the cache engine sees it. Tiers are ordered, fastest first.

    `high_watermark`, `low_watermark`: shares of the capacity; above the first, cold blocks are
    demoted before their room is needed, until the second is reached.
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
    """A part of a persistent tier's blocks of one namespace, listed after a restart.

    Rows form chains of consecutive blocks, and are numbered in their order, these from `first` on,
    `total` in all. Per chain: its `lengths`; `parents`, the number of the row above its first one,
    which came earlier, or -1 for the root; that row's key (32 bytes in `parent_keys`). Per row:
    `step` bytes of `tokens`; its `hits`; `used_s`, the last use of it or a row below it, in seconds
    since 1970, so that it never rises along a chain.
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
        """Whether the lengths of all fields agree. Their contents are not checked."""
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
    """A run of pages of one tier, first_page … end_page-1, that is emptied to make room for slots
    of another class, `slot_bytes` large."""

    slot_bytes: int
    first_page: int
    end_page: int


class SlotAllocator(Protocol):
    """A tier's free list as the cache engine sees it (implemented by tiers/pool.py)."""

    capacity_bytes: int
    used_bytes: int
    quarantined_bytes: int
    clearing: SlabClearing | None
    slab_bytes: int
    withheld: set[int]
    reshaped: list[tuple[int, int]]

    def allocate(self, slot_bytes: int, count: int) -> Ids:
        """Allocate up to `count` slots of the class, fewer or none when the tier lacks room."""

    def available(self, slot_bytes: int) -> int:
        """The number of slots of the class that `allocate` could return now."""

    def free(self, slot_bytes: int, slots: Ids) -> None:
        """Free slots. Raises ValueError on a slot that is not in use."""

    def quarantine(self, slot_bytes: int, slots: Ids) -> None:
        """Take slots out of use without freeing them: a process may still write them."""

    def end_quarantine(self, slot_bytes: int, slots: Ids) -> None:
        """Free slots in quarantine: their writer has ended."""

    def can_hold(self, slot_bytes: int) -> bool:
        """Whether a slot of the class would fit if the tier were empty."""

    def num_used(self, slot_bytes: int) -> int:
        """The number of slots of the class in use."""

    def clearings(self, slot_bytes: int, count: int) -> Sequence[SlabClearing]:
        """Runs of pages that could be emptied for a slot of the class, the least used first."""

    def close(self, clearing: SlabClearing) -> None:
        """Allocate nothing there until it is empty, and then only for its class."""

    def reopen(self) -> None:
        """End the clearing, empty or not."""

    @property
    def clearing_bytes(self) -> int:
        """The bytes still in use in the clearing."""

    def withhold(self, count: int) -> Sequence[int]:
        """Take up to `count` free slabs out of use. Returns their first pages."""

    def restore(self, first_page: int) -> None:
        """Use a withheld slab again."""

    def validate(self) -> None:
        """Recount everything. Raises AssertionError where a count differs."""

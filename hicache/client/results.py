"""The results of a client's calls: frozen structs, and fetched blocks.

`replies` creates them from the daemon's replies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from hicache.protocol.operations import ArenaFile, Count, DecisionName
from hicache.tiers.arena import Arena
from hicache.tiers.block import PAGE_BYTES, Ids, slot_bytes_for

Bytes2D = npt.NDArray[np.uint8]
"""Blocks: uint8, shape [n, block_bytes], C-contiguous."""


class Decision(msgspec.Struct, frozen=True):
    """How much of a hit to reload, and why. Seconds are the daemon's expectations.

    `name` is reload, partial or recompute; `reason` a short word for statistics; `reload_s` to get
    `reload_blocks`, `prefill_s` for the rest of the prompt,
    `recompute_s` to prefill everything instead.
    """

    name: DecisionName
    reload_blocks: Count
    reason: str
    explained: str = msgspec.field(default="", name="sentence")
    reload_s: float = 0.0
    prefill_s: float = 0.0
    recompute_s: float = 0.0

    @property
    def sentence(self) -> str:
        """The decision for people; composed by the daemon if `explain` was set."""
        if self.explained:
            return self.explained
        everything = f"{self.recompute_s * 1e3:.1f} ms"
        if self.name == "recompute":
            return f"Recompute everything ({everything}; {self.reason})."
        return (
            f"Reload {self.reload_blocks} blocks ({self.reload_s * 1e3:.1f} ms) and prefill the "
            f"rest ({self.prefill_s * 1e3:.1f} ms), against {everything} ({self.reason})."
        )


class Match(msgspec.Struct):
    """The held blocks of a prompt, from its first block on.

    `hit_blocks` whole blocks are held; `runs` lists their tiers, front to back, as (tier, number of
    blocks). The first `decision.reload_blocks` of them are worth fetching, and are leased for this
    client under `lease` until `release` (0: nothing is leased). `is_answered` is False when no
    daemon answered; `session`: the session of the lease.
    """

    lease: Count
    hit_blocks: Count
    runs: tuple[tuple[str, Count], ...]
    decision: Decision
    is_answered: bool = True
    session: bytes = b""

    @classmethod
    def miss(cls, sentence: str) -> Match:
        """No answer: recompute."""
        return cls(0, 0, (), Decision("recompute", 0, "unavailable", sentence), is_answered=False)


class Score(msgspec.Struct, frozen=True):
    """What a match of a prompt would find now, without a lease.

    `hit_blocks` whole blocks, which are `hit_tokens`, are held; `runs` as in Match. Seconds are the
    daemon's estimates: `reload_s` to reload the `reload_blocks` worth it, `prefill_s` for the rest
    of the prompt, `recompute_s` to prefill everything instead. Not `is_measured`: no prefill of
    this model was measured yet, so they are meaningless, and `expected_s` and `saved_s` are None.
    `is_answered` is False when no daemon answered.
    """

    hit_blocks: int = 0
    hit_tokens: int = 0
    runs: tuple[tuple[str, int], ...] = ()
    reload_blocks: int = 0
    reload_s: float = 0.0
    prefill_s: float = 0.0
    recompute_s: float = 0.0
    is_measured: bool = False
    is_answered: bool = True

    @property
    def expected_s(self) -> float | None:
        """Estimated seconds from the request to the prompt's first token."""
        return self.reload_s + self.prefill_s if self.is_measured else None

    @property
    def saved_s(self) -> float | None:
        """Estimated seconds that the hit saves."""
        return self.recompute_s - self.reload_s - self.prefill_s if self.is_measured else None


class Warmed(msgspec.Struct, frozen=True):
    """The state of warming a prompt. Of `held_blocks` at its front, `warm_blocks` can be read where
    they are now; `refused_blocks` will not come for lack of room; the rest is being copied. False
    where no daemon answered."""

    held_blocks: int = 0
    warm_blocks: int = 0
    refused_blocks: int = 0
    is_answered: bool = True

    def __bool__(self) -> bool:
        return self.is_answered


class Pinned(msgspec.Struct, frozen=True):
    """A prefix that is kept: `blocks` whole blocks of a prompt, under this `pin` of the daemon's
    run `epoch`, which ends with it. False where nothing is kept: nothing was held, or it was
    refused, or no daemon answered."""

    pin: str = ""
    blocks: int = 0
    epoch: str = ""

    def __bool__(self) -> bool:
        return bool(self.pin)


@dataclass(frozen=True, slots=True)
class Fetched:
    """The first `blocks` blocks of the caller's buffer are valid; the rest is undefined.

    `by_tier`: the tiers that they were read from: {tier: number of blocks}.
    """

    blocks: int
    seconds: float
    by_tier: dict[str, int]


@dataclass(frozen=True, slots=True)
class PutResult:
    """Counts of blocks: `stored` now, `present` already, `busy` (being written by another put),
    `refused` (no room, beyond a limit, or no daemon).

    `durable`: requested, and all stored blocks are on disk.
    """

    stored: int = 0
    present: int = 0
    busy: int = 0
    refused: int = 0
    durable: bool = False


@dataclass(frozen=True, slots=True)
class Ping:
    """A daemon's sign of life. `tiers` maps each tier to up, down, starting or read-only;
    `round_trip_s` is what this call took."""

    epoch: str
    version: str
    pid: int
    uptime_s: float
    ready: bool
    tiers: dict[str, str]
    round_trip_s: float


@dataclass(frozen=True, slots=True)
class Greeting:
    """What the daemon agreed to when the session was opened."""

    session: bytes
    epoch: str
    version: str
    pid: int
    block_tokens: int
    block_bytes: int
    transport: str
    arenas: tuple[ArenaFile, ...]
    lease_ttl_s: float
    heartbeat_s: float
    max_message_bytes: int
    max_prompt_tokens: int
    group: bytes = field(default=b"", repr=False)


class FetchedRun:
    """Blocks `first … first + num_blocks - 1` of the prompt, readable now, from `tier`.

    Copy what you need out of `views` (or with `copy_to`), then call `verify()`: False means that
    the bytes were reused meanwhile, and no copy of this run may be used.
    """

    __slots__ = ("first", "num_blocks", "tier")

    def __init__(self, first: int, tier: str, num_blocks: int) -> None:
        self.first, self.tier, self.num_blocks = first, tier, num_blocks

    @property
    def views(self) -> list[npt.NDArray[np.uint8]]:
        """One uint8 array of block_bytes per block. Do not write to them."""
        raise NotImplementedError

    def copy_to(self, out: Bytes2D) -> None:
        """Copy the first len(out) blocks of the run."""
        for row, view in zip(out, self.views, strict=False):
            row[:] = view

    def verify(self) -> bool:
        raise NotImplementedError


class MappedRun(FetchedRun):
    """In an arena that this process maps. The mapping lives at least as long as this run."""

    __slots__ = ("_arena", "_block_bytes", "_data", "_generations", "_slots")

    def __init__(
        self,
        first: int,
        tier: str,
        arena: Arena,
        slots: Ids,
        generations: npt.NDArray[np.uint32],
        block_bytes: int,
    ) -> None:
        super().__init__(first, tier, len(slots))
        self._arena, self._slots, self._generations = arena, slots, generations
        self._block_bytes = block_bytes
        self._data = arena.data

    @property
    def views(self) -> list[npt.NDArray[np.uint8]]:
        starts = (slot * PAGE_BYTES for slot in self._slots.tolist())
        return [self._data[start : start + self._block_bytes] for start in starts]

    def copy_to(self, out: Bytes2D) -> None:
        self._arena.copy_out(self._slots[: len(out)], out, slot_bytes_for(self._block_bytes))

    def verify(self) -> bool:
        try:
            return bool((self._arena.generations(self._slots) == self._generations).all())
        except IndexError:  # another daemon's arena has taken its place
            return False


class FramedRun(FetchedRun):
    """Blocks in message parts, which belong to this process."""

    __slots__ = ("_parts",)

    def __init__(self, first: int, tier: str, parts: Sequence[bytes | memoryview]) -> None:
        super().__init__(first, tier, len(parts))
        self._parts = parts

    @property
    def views(self) -> list[npt.NDArray[np.uint8]]:
        return [np.frombuffer(part, np.uint8) for part in self._parts]

    def verify(self) -> bool:
        return True

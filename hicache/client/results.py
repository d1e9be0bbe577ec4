"""What the daemon's replies mean to a client: results as frozen structs, read strictly.

`read_…` functions turn a reply's map into one of them and raise WireError('malformed') on
anything that is not as docs/protocol.md says; the client treats that as a miss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from hicache.protocol.messages import SESSION_BYTES, WireError
from hicache.protocol.operations import Count, DecisionName
from hicache.tiers.arena import Arena
from hicache.tiers.block import PAGE_BYTES, Ids, slot_bytes_for

Bytes2D = npt.NDArray[np.uint8]
"""Blocks: uint8, shape [n, block_bytes], C-contiguous."""

TRANSPORTS: Final = ("arena", "frames")
_DECISIONS: Final = ("reload", "partial", "recompute")


class Decision(msgspec.Struct, frozen=True):
    """How much of a hit to reload, and why. Seconds are the daemon's expectations.

    `name` is reload, partial or recompute; `reason` a short word for statistics; `reload_s` to get
    `reload_blocks`, `prefill_s` for the rest of the prompt,
    `recompute_s` to prefill everything instead.
    """

    name: DecisionName
    reload_blocks: Count
    reason: str
    told: str = msgspec.field(default="", name="sentence")
    reload_s: float = 0.0
    prefill_s: float = 0.0
    recompute_s: float = 0.0

    @property
    def sentence(self) -> str:
        """The decision for people: in the daemon's words, where it was asked to `explain`."""
        if self.told:
            return self.told
        everything = f"{self.recompute_s * 1e3:.1f} ms"
        if self.name == "recompute":
            return f"Recompute everything ({everything}; {self.reason})."
        return (
            f"Reload {self.reload_blocks} blocks ({self.reload_s * 1e3:.1f} ms) and prefill the "
            f"rest ({self.prefill_s * 1e3:.1f} ms), against {everything} ({self.reason})."
        )


class Match(msgspec.Struct):
    """What the cache holds of a prompt, from its first block on.

    `hit_blocks` whole blocks are held; `runs` says in which tier, front to back, as (tier, number
    of blocks). The first `decision.reload_blocks` of them are worth fetching and are held for this
    client under `lease` until `release` (0: nothing is held). `is_answered` is false when no
    daemon answered; `session` is whose lease it is.
    """

    lease: Count
    hit_blocks: Count
    runs: tuple[tuple[str, Count], ...]
    decision: Decision
    is_answered: bool = True
    session: bytes = b""

    @classmethod
    def miss(cls, sentence: str) -> Match:
        """Nothing is known: recompute."""
        return cls(0, 0, (), Decision("recompute", 0, "unavailable", sentence), is_answered=False)


class Score(msgspec.Struct, frozen=True):
    """What a match of a prompt would find now. Nothing of it is held for anybody.

    `hit_blocks` whole blocks, which are `hit_tokens`, are held; `runs` says where, as in Match.
    Seconds are the daemon's expectations: `reload_s` to get the `reload_blocks` that are worth it,
    `prefill_s` for the rest of the prompt, `recompute_s` to prefill everything instead. Not
    `is_measured`: no prefill of this model was measured yet, they say nothing, and what is made of
    them is None. `is_answered` is false when no daemon answered.
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
        """From the ask to the prompt's first token."""
        return self.reload_s + self.prefill_s if self.is_measured else None

    @property
    def saved_s(self) -> float | None:
        """What the hit is worth."""
        return self.recompute_s - self.reload_s - self.prefill_s if self.is_measured else None


class Warmed(msgspec.Struct, frozen=True):
    """What has come of warming a prompt. Of `held_blocks` at its front `warm_blocks` can be read
    where they are now; `refused_blocks` will not come, for want of room. What is left is on its
    way. False where no daemon answered."""

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
    """`blocks` blocks from the front are valid in the caller's buffer; what follows is not.

    `by_tier` says where those came from: {tier: number of blocks}.
    """

    blocks: int
    seconds: float
    by_tier: dict[str, int]


@dataclass(frozen=True, slots=True)
class PutResult:
    """Blocks by what became of them: `stored` now, `present` already, `busy` (being written by
    somebody else), `refused` (no room, beyond a limit, or no daemon).

    `durable`: it was asked for, blocks were stored, and all of them are on disk.
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
class ArenaFile:
    """A tier's slots as a file to map: `num_bytes` of data, not counting the file's header."""

    tier: str
    path: str
    num_bytes: int


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


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the blocks of a put go: block `indices[i]` of the prompt into `slots[i]` of `tier`."""

    ticket: int
    tier: str
    indices: npt.NDArray[np.uint32]
    slots: Ids
    present: int
    busy: int
    refused: int


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
    """In message parts of our own: nobody else can change them."""

    __slots__ = ("_parts",)

    def __init__(self, first: int, tier: str, parts: Sequence[bytes | memoryview]) -> None:
        super().__init__(first, tier, len(parts))
        self._parts = parts

    @property
    def views(self) -> list[npt.NDArray[np.uint8]]:
        return [np.frombuffer(part, np.uint8) for part in self._parts]

    def verify(self) -> bool:
        return True


# --- replies, read strictly ---------------------------------------------------------------------


def read_greeting(reply: Mapping[str, Any], block_tokens: int, block_bytes: int) -> Greeting:
    greeting = Greeting(
        session=_get(reply, "session", bytes),
        epoch=_get(reply, "epoch", str),
        version=_get(reply, "version", str),
        pid=read_count(reply, "pid"),
        block_tokens=read_count(reply, "block_tokens"),
        block_bytes=read_count(reply, "block_bytes"),
        transport=_get(reply, "transport", str),
        arenas=tuple(_arena_file(entry) for entry in _get(reply, "arenas", list)),
        lease_ttl_s=read_seconds(reply, "lease_ttl_s"),
        heartbeat_s=read_seconds(reply, "heartbeat_s"),
        max_message_bytes=read_count(reply, "max_message_bytes"),
        max_prompt_tokens=read_count(reply, "max_prompt_tokens"),
        group=_get(reply, "group", bytes),
    )
    if len(greeting.session) != SESSION_BYTES:
        raise WireError("malformed", f"session: {len(greeting.session)} bytes, not {SESSION_BYTES}")
    if greeting.transport not in TRANSPORTS:
        raise WireError("malformed", f"transport: {greeting.transport[:40]!r} is not known")
    if (greeting.block_tokens, greeting.block_bytes) != (block_tokens, block_bytes):
        raise WireError("malformed", "the daemon took other block sizes than it was told")
    return greeting


_DECISION_FIELDS: Final = (
    ("name", str),
    ("reload_blocks", int),
    ("reason", str),
    ("reload_s", float),
    ("prefill_s", float),
    ("recompute_s", float),
)
_MATCH_FIELDS: Final = (("lease", int), ("hit_blocks", int), ("runs", list), ("decision", dict))


class AnsweredMatch(Match, kw_only=True):
    """A match straight from the bytes of its reply, which stands between an inference engine and
    its first token."""

    id: Count
    ok: bool


_plain_match: Final = msgspec.msgpack.Decoder(AnsweredMatch)


def read_plain_match(data: bytes, request_id: int) -> Match | None:
    """None where anything is not as usual: `read_match` says what, or takes it all the same."""
    try:
        match = _plain_match.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if match.id != request_id or not match.ok or match.decision.reload_blocks > match.hit_blocks:
        return None
    return match


def read_match(reply: Mapping[str, Any]) -> Match:
    lease, hit_blocks, runs, fields = _read(reply, _MATCH_FIELDS)
    name, reload_blocks, reason, *seconds = _read(fields, _DECISION_FIELDS)
    told = fields.get("sentence", "")
    if type(told) is not str:
        raise WireError("malformed", "sentence: must be a string")
    decision = Decision(name, reload_blocks, reason, told, *seconds)
    if decision.name not in _DECISIONS:
        raise WireError("malformed", f"decision: {decision.name[:40]!r} is not known")
    if decision.reload_blocks > hit_blocks:
        raise WireError("malformed", "decision: more blocks to reload than are held")
    return Match(lease, hit_blocks, _tier_runs(runs), decision)


_SCORE_FIELDS: Final = (
    ("hit_blocks", int),
    ("runs", list),
    ("reload_blocks", int),
    ("reload_s", float),
    ("prefill_s", float),
    ("recompute_s", float),
)


def read_scores(reply: Mapping[str, Any], num_prompts: int) -> list[Score]:
    """One for each prompt, in order."""
    block_tokens = read_count(reply, "block_tokens")
    is_measured = _get(reply, "measured", bool)
    scores = _get(reply, "scores", list)
    if len(scores) != num_prompts:
        raise WireError("malformed", f"scores: {len(scores)} for {num_prompts} prompts")
    read = []
    for fields in scores:
        if type(fields) is not dict:
            raise WireError("malformed", "scores: each must be a map")
        hit_blocks, runs, reload_blocks, *seconds = _read(fields, _SCORE_FIELDS)
        if reload_blocks > hit_blocks:
            raise WireError("malformed", "scores: more blocks to reload than are held")
        reload_s, prefill_s, recompute_s = seconds
        read.append(
            Score(
                hit_blocks,
                hit_blocks * block_tokens,
                _tier_runs(runs),
                reload_blocks,
                reload_s,
                prefill_s,
                recompute_s,
                is_measured,
            )
        )
    return read


def _tier_runs(runs: list[Any]) -> tuple[tuple[str, int], ...]:
    for run in runs:
        if type(run) is not list or len(run) != 2 or (type(run[0]), type(run[1])) != (str, int):
            raise WireError("malformed", "runs: each must be [tier, n]")
    return tuple([(run[0], run[1]) for run in runs])


def read_runs(
    reply: Mapping[str, Any],
    parts: Sequence[bytes | memoryview],
    arenas: Mapping[str, Arena],
    block_bytes: int,
) -> list[FetchedRun]:
    """The runs that a fetch's reply says are readable, with their bytes within reach."""
    runs: list[FetchedRun] = []
    taken = 0
    for run in _get(reply, "ready", list):
        if type(run) is not list or len(run) != 5:
            raise WireError("malformed", "ready: a run is [first, tier, slots, gens, n]")
        fields = dict(zip(("first", "tier", "slots", "gens", "n"), run, strict=True))
        first, tier, num = (
            read_count(fields, "first"),
            _get(fields, "tier", str),
            read_count(fields, "n"),
        )
        slots, generations = _slots(fields, "slots"), _numbers(fields, "gens")
        if len(slots):
            if not len(slots) == len(generations) == num:
                raise WireError("malformed", "ready: slots, gens and n do not correspond")
            arena = _arena_of(arenas, tier, slots, block_bytes)
            runs.append(MappedRun(first, tier, arena, slots, generations, block_bytes))
        else:
            mine = parts[taken : taken + num]
            if len(mine) != num or any(len(part) != block_bytes for part in mine):
                raise WireError("malformed", "ready: a part is missing or is no whole block")
            taken += num
            runs.append(FramedRun(first, tier, mine))
    return runs


def read_warmed(reply: Mapping[str, Any]) -> Warmed:
    """Raises WireError where the counts contradict each other."""
    names = ("held_blocks", "warm_blocks", "refused_blocks")
    held, warm, refused = (read_count(reply, name) for name in names)
    if warm + refused > held:
        raise WireError("malformed", "warm_blocks: more than are held")
    return Warmed(held, warm, refused)


def read_pinned(reply: Mapping[str, Any]) -> Pinned:
    """Raises WireError where a pin keeps nothing, or there is none that keeps something."""
    pinned = Pinned(_get(reply, "pin", str), read_count(reply, "blocks"), _get(reply, "epoch", str))
    if bool(pinned.pin) != bool(pinned.blocks):
        raise WireError("malformed", "pin: must have blocks, and nothing else may have any")
    return pinned


def read_unpinned(reply: Mapping[str, Any]) -> bool:
    """Whether there was such a pin."""
    unpinned: bool = _get(reply, "unpinned", bool)
    return unpinned


def read_runs_named(reply: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The runs that a fetch's reply says are readable by the GPU worker, as (first, blocks)."""
    runs = []
    for run in _get(reply, "ready", list):
        if type(run) is not list or len(run) != 5:
            raise WireError("malformed", "ready: a run is [first, tier, slots, gens, n]")
        runs.append((read_count({"first": run[0]}, "first"), read_count({"n": run[4]}, "n")))
    return runs


def read_placement(
    reply: Mapping[str, Any],
    first: int,
    last: int,
    arenas: Mapping[str, Arena] | None,
    block_bytes: int,
) -> Placement:
    """`arenas` is None where blocks travel as frames. No index or slot out of bounds passes."""
    placement = Placement(
        ticket=read_count(reply, "ticket"),
        tier=_get(reply, "tier", str),
        indices=_numbers(reply, "indices"),
        slots=_slots(reply, "slots"),
        present=read_count(reply, "present"),
        busy=read_count(reply, "busy"),
        refused=read_count(reply, "refused"),
    )
    indices = placement.indices
    if not placement.ticket or not len(indices):
        return placement
    if int(indices.min()) < first or int(indices.max()) >= last:
        raise WireError("malformed", "indices: a block that was not offered")
    if len(indices) > 1 and not bool((indices[1:] > indices[:-1]).all()):
        raise WireError("malformed", "indices: must rise")
    if arenas is not None:
        if len(placement.slots) != len(indices):
            raise WireError("malformed", "indices and slots do not correspond")
        _arena_of(arenas, placement.tier, placement.slots, block_bytes)
    return placement


def read_ping(reply: Mapping[str, Any], round_trip_s: float) -> Ping:
    tiers = _get(reply, "tiers", dict)
    return Ping(
        epoch=_get(reply, "epoch", str),
        version=_get(reply, "version", str),
        pid=read_count(reply, "pid"),
        uptime_s=read_seconds(reply, "uptime_s"),
        ready=_get(reply, "ready", bool),
        tiers={name: _get(tiers, name, str) for name in tiers},
        round_trip_s=round_trip_s,
    )


def read_committed(reply: Mapping[str, Any]) -> tuple[int, bool]:
    """How many blocks became visible, and whether they are on disk."""
    return read_count(reply, "committed"), _get(reply, "durable", bool)


def _read(fields: Mapping[str, Any], table: Sequence[tuple[str, type]]) -> list[Any]:
    """The fields of a table in order; on the way of every match, so one loop and no calls."""
    values: list[Any] = []
    for name, kind in table:
        value = fields.get(name)
        if type(value) is not kind:
            value = read_seconds(fields, name) if kind is float else _get(fields, name, kind)
        elif isinstance(value, int) and value < 0:
            raise WireError("malformed", f"{name}: {value} in a reply")
        values.append(value)
    return values


def _get(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if type(value) is not kind:
        found = "missing" if value is None else type(value).__name__
        raise WireError("malformed", f"{name}: {found} in a reply, where {kind.__name__} belongs")
    return value


def read_count(fields: Mapping[str, Any], name: str) -> int:
    value: int = _get(fields, name, int)
    if value < 0:
        raise WireError("malformed", f"{name}: {value} in a reply")
    return value


def read_seconds(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    if type(value) is not float and type(value) is not int:
        raise WireError("malformed", f"{name}: a reply needs a number here")
    return float(value)


def _numbers(fields: Mapping[str, Any], name: str) -> npt.NDArray[np.uint32]:
    packed: bytes = _get(fields, name, bytes)
    if len(packed) % 4:
        raise WireError("malformed", f"{name}: length {len(packed)} is no multiple of 4")
    return np.frombuffer(packed, dtype="<u4")


def _slots(fields: Mapping[str, Any], name: str) -> Ids:
    slots = _numbers(fields, name)
    if len(slots) and int(slots.max()) >= 1 << 31:
        raise WireError("malformed", f"{name}: a slot's number has 31 bits")
    return slots.astype(np.int32)


def _arena_file(entry: object) -> ArenaFile:
    if type(entry) is not dict:
        raise WireError("malformed", "arenas: each must be a map")
    return ArenaFile(_get(entry, "tier", str), _get(entry, "path", str), read_count(entry, "bytes"))


def _arena_of(
    arenas: Mapping[str, Arena],
    tier: str,
    slots: Ids,
    block_bytes: int,
) -> Arena:
    arena = arenas.get(tier)
    if arena is None:
        raise WireError("malformed", f"tier {tier[:40]!r} is not mapped here")
    end = int(slots.max()) * PAGE_BYTES + slot_bytes_for(block_bytes)
    if end > arena.data_bytes:
        raise WireError("malformed", f"slots: beyond the end of tier {tier}")
    return arena

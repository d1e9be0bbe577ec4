"""Decodes replies strictly, from a reply's map to a client's result.

`read_…` functions raise WireError('malformed') where a reply does not follow docs/protocol.md; the
client treats that as a miss. All indices and slots are checked for range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from hicache.client.results import (
    Decision,
    FetchedRun,
    FramedRun,
    Greeting,
    MappedRun,
    Match,
    Pinned,
    Score,
    Warmed,
)
from hicache.client.steps import Part, ReplyMap
from hicache.protocol.messages import SESSION_BYTES, WireError
from hicache.protocol.operations import (
    FetchReply,
    HelloReply,
    MatchReply,
    PinReply,
    PutReply,
    Reply,
    ScoreReply,
    WarmReply,
)
from hicache.tiers.arena import Arena
from hicache.tiers.block import PAGE_BYTES, Ids, slot_bytes_for

TRANSPORTS: Final = ("arena", "frames")
R = TypeVar("R", bound=Reply)


def read_reply(reply_map: ReplyMap, kind: type[R]) -> R:
    """A reply as its operation declares it; undeclared fields are ignored."""
    try:
        return msgspec.convert(reply_map, kind, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise WireError("malformed", f"a reply: {error}") from None


def read_greeting(reply_map: ReplyMap, block_tokens: int, block_bytes: int) -> Greeting:
    reply = read_reply(reply_map, HelloReply)
    if len(reply.session) != SESSION_BYTES:
        raise WireError("malformed", f"session: {len(reply.session)} bytes, not {SESSION_BYTES}")
    if reply.transport not in TRANSPORTS:
        raise WireError("malformed", f"transport: {reply.transport[:40]!r} is not known")
    if (reply.block_tokens, reply.block_bytes) != (block_tokens, block_bytes):
        raise WireError("malformed", "the daemon replied with other block sizes than requested")
    agreed = {field.name: getattr(reply, field.name) for field in fields(Greeting)}
    return Greeting(**{**agreed, "arenas": tuple(reply.arenas)})


def read_match(reply_map: ReplyMap) -> Match:
    reply = read_reply(reply_map, MatchReply)
    found = reply.decision
    if found.reload_blocks > reply.hit_blocks:
        raise WireError("malformed", "decision: more blocks to reload than are held")
    decision = Decision(
        found.name,
        found.reload_blocks,
        found.reason,
        found.sentence,
        found.reload_s,
        found.prefill_s,
        found.recompute_s,
    )
    return Match(reply.lease, reply.hit_blocks, tuple(reply.runs), decision)


def read_scores(reply_map: ReplyMap, num_prompts: int) -> list[Score]:
    """One for each prompt, in order."""
    reply = read_reply(reply_map, ScoreReply)
    if len(reply.scores) != num_prompts:
        raise WireError("malformed", f"scores: {len(reply.scores)} for {num_prompts} prompts")
    if any(score.reload_blocks > score.hit_blocks for score in reply.scores):
        raise WireError("malformed", "scores: more blocks to reload than are held")
    return [
        Score(
            score.hit_blocks,
            score.hit_blocks * reply.block_tokens,
            tuple(score.runs),
            score.reload_blocks,
            score.reload_s,
            score.prefill_s,
            score.recompute_s,
            reply.measured,
        )
        for score in reply.scores
    ]


def read_warmed(reply_map: ReplyMap) -> Warmed:
    reply = read_reply(reply_map, WarmReply)
    if reply.warm_blocks + reply.refused_blocks > reply.held_blocks:
        raise WireError("malformed", "warm_blocks: more than are held")
    return Warmed(reply.held_blocks, reply.warm_blocks, reply.refused_blocks)


def read_pinned(reply_map: ReplyMap) -> Pinned:
    reply = read_reply(reply_map, PinReply)
    if bool(reply.pin) != bool(reply.blocks):
        raise WireError("malformed", "pin: a pin without blocks, or blocks without a pin")
    return Pinned(reply.pin, reply.blocks, reply.epoch)


def read_runs(
    reply_map: ReplyMap,
    parts: Sequence[Part],
    arenas: Mapping[str, Arena],
    block_bytes: int,
) -> list[FetchedRun]:
    """The readable runs of a fetch's reply, with access to their bytes."""
    runs: list[FetchedRun] = []
    taken = 0
    for first, tier, packed_slots, packed_generations, num in read_reply(
        reply_map, FetchReply
    ).ready:
        slots, generations = _slots(packed_slots), _numbers("gens", packed_generations)
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


@dataclass(frozen=True, slots=True)
class Placement:
    """The slots of a put: block `indices[i]` of the prompt goes into `slots[i]` of `tier`."""

    ticket: int
    tier: str
    indices: npt.NDArray[np.uint32]
    slots: Ids
    present: int
    busy: int
    refused: int


def read_placement(
    reply_map: ReplyMap,
    first: int,
    last: int,
    arenas: Mapping[str, Arena] | None,
    block_bytes: int,
) -> Placement:
    """The placement of a put's reply. `arenas` is None where blocks are sent as frames."""
    reply = read_reply(reply_map, PutReply)
    indices, slots = _numbers("indices", reply.indices), _slots(reply.slots)
    placement = Placement(
        reply.ticket, reply.tier, indices, slots, reply.present, reply.busy, reply.refused
    )
    if not placement.ticket or not len(indices):
        return placement
    if int(indices.min()) < first or int(indices.max()) >= last:
        raise WireError("malformed", "indices: a block that was not offered")
    if len(indices) > 1 and not bool((indices[1:] > indices[:-1]).all()):
        raise WireError("malformed", "indices: must rise")
    if arenas is not None:
        if len(slots) != len(indices):
            raise WireError("malformed", "indices and slots do not correspond")
        _arena_of(arenas, placement.tier, slots, block_bytes)
    return placement


def _numbers(name: str, packed: bytes) -> npt.NDArray[np.uint32]:
    if len(packed) % 4:
        raise WireError("malformed", f"{name}: length {len(packed)} is no multiple of 4")
    return np.frombuffer(packed, dtype="<u4")


def _slots(packed: bytes) -> Ids:
    slots = _numbers("slots", packed)
    if len(slots) and int(slots.max()) >= 1 << 31:
        raise WireError("malformed", "slots: a slot's number has 31 bits")
    return slots.astype(np.int32)


def _arena_of(arenas: Mapping[str, Arena], tier: str, slots: Ids, block_bytes: int) -> Arena:
    arena = arenas.get(tier)
    if arena is None:
        raise WireError("malformed", f"tier {tier[:40]!r} is not mapped here")
    end = int(slots.max()) * PAGE_BYTES + slot_bytes_for(block_bytes)
    if end > arena.data_bytes:
        raise WireError("malformed", f"slots: beyond the end of tier {tier}")
    return arena

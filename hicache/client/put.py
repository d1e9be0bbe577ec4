"""Stores blocks: put (get slots), write, commit (make visible).

    offer first … last-1 ──▶ placement: slots for the blocks not held yet
                             write ──▶ commit ──▶ some refused? offer again while there is room

Between put and commit the daemon holds the slots for this client: in every case the ticket is
committed or aborted, and only after writing has ended.

A put ends by its deadline, plus the time of a running copy, `TELL_S` to commit it, and `BYE_S` to
abort it where that failed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from hicache.client.replies import Placement, read_placement, read_reply
from hicache.client.results import Bytes2D, Greeting, PutResult
from hicache.client.session import BYE_S, TROUBLE, Connection
from hicache.client.steps import Part, Pause, Steps
from hicache.protocol.messages import TOKEN_BYTES, WireError
from hicache.protocol.operations import AbortRequest, CommitReply, CommitRequest, PutRequest
from hicache.tiers.arena import Arena
from hicache.tiers.block import slot_bytes_for

Fill = Callable[[int, npt.NDArray[np.uint8]], object]
"""Write block number `index` of the prompt into a uint8 array of block_bytes."""

CHUNK_BYTES: Final = 1 << 30
"""The most bytes of one ticket, since they must be written before it expires."""
TELL_S: Final = 0.2
"""The time for a commit after the put's deadline, so that a finished copy is not lost."""
_FRAME_ROOM: Final = 64 << 10
_PAUSE_S: Final = 0.002
_PATIENCE_S: Final = 0.1


@dataclass(slots=True)
class PutTally:
    """Counts of a call's blocks, by result."""

    stored: int = 0
    present: int = 0
    busy: int = 0
    is_durable: bool = True


class Supply(Protocol):
    """The source of a put's blocks."""

    def hand_over(
        self, connection: Connection, placement: Placement, greeting: Greeting, deadline_s: float
    ) -> Steps[list[Part]]:
        """Write the blocks of a placement, or return them as parts for the commit. Waits for
        another process's writes until `deadline_s`. Raises TROUBLE, and the exceptions of the
        caller's function."""


class Source:
    """The blocks of a put: an array of them, or a function that writes one."""

    def __init__(self, blocks: Bytes2D | Fill, first: int, block_bytes: int) -> None:
        self._blocks = blocks
        self._first = first
        self._block_bytes = block_bytes

    def hand_over(
        self, connection: Connection, placement: Placement, greeting: Greeting, deadline_s: float
    ) -> Steps[list[Part]]:
        if greeting.transport == "arena":
            arena = connection.arenas[placement.tier]
            yield from connection.copy(partial(self.copy_in, arena, placement))
            return []
        return (yield from connection.copy(partial(self.parts, placement)))

    def copy_in(self, arena: Arena, placement: Placement) -> None:
        indices, slots = placement.indices, placement.slots
        if callable(self._blocks):
            for index, slot in zip(indices.tolist(), slots.tolist(), strict=True):
                self._blocks(index, arena.view(slot, self._block_bytes))
            return
        # Consecutive indices are a slice of the caller's array, without a copy.
        breaks = np.flatnonzero(np.diff(indices.astype(np.int64)) != 1) + 1
        slot_bytes = slot_bytes_for(self._block_bytes)
        for run, run_slots in zip(np.split(indices, breaks), np.split(slots, breaks), strict=True):
            start = int(run[0]) - self._first
            arena.copy_in(run_slots, self._blocks[start : start + len(run)], slot_bytes)

    def parts(self, placement: Placement) -> list[Part]:
        if callable(self._blocks):
            parts: list[Part] = []
            for index in placement.indices.tolist():
                block = np.empty(self._block_bytes, np.uint8)
                self._blocks(index, block)
                parts.append(block.data)
            return parts
        return [self._blocks[i - self._first].data for i in placement.indices.tolist()]


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks `first … last-1` of a prompt, and the deadline for storing them."""

    packed: bytes
    first: int
    last: int
    source: Supply
    durable: bool
    deadline_s: float

    def commit_by_s(self, now_s: float, call_s: float) -> float:
        """The deadline of a commit, where a call may take `call_s`. A durable commit is answered
        once the blocks are persistent."""
        last_s = max(self.deadline_s, now_s + min(TELL_S, call_s))
        return last_s if self.durable else min(now_s + call_s, last_s)


class PutCall:
    """The put of one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def put(
        self, packed: bytes, first: int, last: int, source: Supply, durable: bool
    ) -> Steps[PutResult]:
        """Store the blocks. Never raises TROUBLE: blocks that were not stored are `refused`."""
        tally = PutTally()
        attempt = self._connection.attempt(self._connection.timeouts.put_s)
        with attempt:
            attempt.admit()
            if first < last:
                offer = Offer(packed, first, last, source, durable, attempt.deadline_s)
                yield from self._put_chunks(offer, attempt.started_s, tally)
        # A block that was evicted and stored again counts once.
        stored = min(tally.stored, last - first - tally.present - tally.busy)
        is_durable = durable and stored > 0 and tally.is_durable
        refused = last - first - stored - tally.present - tally.busy
        return PutResult(stored, tally.present, tally.busy, refused, is_durable)

    def _put_chunks(self, whole: Offer, started_s: float, tally: PutTally) -> Steps[None]:
        connection = self._connection
        timeouts = connection.timeouts
        greeting = yield from connection.greeted(started_s + min(timeouts.call_s, timeouts.put_s))
        last = min(whole.last, greeting.max_prompt_tokens // greeting.block_tokens)
        chunk_bytes = CHUNK_BYTES
        if greeting.transport == "frames":
            chunk_bytes = greeting.max_message_bytes - _FRAME_ROOM
        step = chunk_bytes // greeting.block_bytes
        if step < 1:
            connection.last_error = "a block is larger than a message may be"
            return
        for start in range(whole.first, last, step):
            if start > whole.first and connection.clock() >= whole.deadline_s:
                connection.last_error = "the put's deadline passed before all blocks were copied"
                return
            chunk = replace(whole, first=start, last=min(start + step, last))
            if not (yield from self._put_chunk(chunk, tally)):
                return

    def _put_chunk(self, offer: Offer, tally: PutTally) -> Steps[bool]:
        """Offer blocks until all are held, or there is no more room. False: some were refused."""
        stored, before, present, busy = 0, tally.stored, tally.present, tally.busy
        pause_s, impatient_s, first_held, most_held = _PAUSE_S, 0.0, -1, 0
        while True:
            greeting, placement = yield from self._place(offer)
            tally.present = present + max(0, placement.present - stored)
            tally.busy = busy + placement.busy
            if first_held < 0:
                first_held = most_held = placement.present
            committed = 0
            if placement.ticket:
                committed = yield from self._write(placement, offer, greeting, tally)
                stored += committed
            held = placement.present + committed  # may fall: this put may evict its own blocks
            tally.stored = before + max(held, most_held) - first_held
            now_s = self._connection.clock()
            if not placement.refused or now_s >= offer.deadline_s:
                return not placement.refused
            if held > most_held:
                pause_s, impatient_s, most_held = _PAUSE_S, now_s + _PATIENCE_S, held
            elif now_s >= impatient_s:
                return False
            else:  # the stored blocks are being demoted, which makes room
                yield Pause(pause_s)
                pause_s *= 2

    def _place(self, offer: Offer) -> Steps[tuple[Greeting, Placement]]:
        connection = self._connection
        token_bytes = TOKEN_BYTES * connection.spec.block_tokens
        request = PutRequest(
            tokens=offer.packed[: offer.last * token_bytes], first=offer.first, last=offer.last
        )
        deadline_s = min(offer.deadline_s, connection.clock() + connection.timeouts.call_s)
        greeting, reply = yield from connection.ask(request, deadline_s)
        arenas = connection.arenas if greeting.transport == "arena" else None
        try:
            placement = read_placement(reply, offer.first, offer.last, arenas, greeting.block_bytes)
        except WireError:
            yield from self._give_up_ticket(reply.get("ticket"), greeting)
            raise
        return greeting, placement

    def _write(
        self, placement: Placement, offer: Offer, greeting: Greeting, tally: PutTally
    ) -> Steps[int]:
        """Write the blocks and commit them. Returns the number that became visible."""
        connection, source = self._connection, offer.source
        request = CommitRequest(
            ticket=placement.ticket, indices=placement.indices.tobytes(), durable=offer.durable
        )
        try:
            parts = yield from source.hand_over(connection, placement, greeting, offer.deadline_s)
            deadline_s = offer.commit_by_s(connection.clock(), connection.timeouts.call_s)
            reply, _ = yield from connection.exchange(request, deadline_s, greeting.session, parts)
        except BaseException:  # the caller's `fill` may raise, or the call is cancelled
            # Aborts a commit that came too late; ignored if the commit was done.
            yield from self._give_up_ticket(placement.ticket, greeting)
            raise
        commit = read_reply(reply, CommitReply)
        tally.stored += commit.committed
        tally.is_durable = tally.is_durable and commit.durable
        return commit.committed

    def _give_up_ticket(self, ticket: object, greeting: Greeting) -> Steps[None]:
        if type(ticket) is int and ticket > 0:
            with suppress(*TROUBLE):
                deadline_s = self._connection.clock() + BYE_S
                request = AbortRequest(ticket=ticket)
                yield from self._connection.post(request, deadline_s, greeting.session)


def check_blocks(blocks: Bytes2D, name: str, block_bytes: int) -> None:
    """Raises ValueError where these are not the blocks that a call takes."""
    if (
        not isinstance(blocks, np.ndarray)
        or blocks.dtype != np.uint8
        or blocks.ndim != 2
        or blocks.shape[1] != block_bytes
        or not blocks.flags.c_contiguous
    ):
        found = f"{getattr(blocks, 'dtype', type(blocks).__name__)} {getattr(blocks, 'shape', '')}"
        raise ValueError(f"{name} must be C-contiguous uint8 [n, {block_bytes}], not {found}")

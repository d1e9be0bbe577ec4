"""The messages between the daemon's mover and a worker process: bytes ↔ structs, no sockets.

A stream of msgpack maps over one socket pair, self-delimiting, no pickle. Both sides check types
and lengths although both are hicache: a damaged worker may send anything.

    daemon → worker   config · batch · forget · note · taken · scrub · describe · throttle · ping ·
                      stop
    worker → daemon   opening* · measured* · ready · rows* · restored · done* · pong* · scrubbed* ·
                      noted* · broken

`rows` are acknowledged with `taken`. A worker sends only a few without acknowledgement, so that the
daemon has time for requests in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

import msgpack
import numpy as np

from hicache.engine.plan import BlockIdentity, Move, Outcome, Priority, Use
from hicache.tiers.block import StoredRows
from hicache.tiers.tier import DeviceSpec, checked
from hicache.transfer.media.medium import Scrubbed, Spoilt

MAX_MESSAGE_BYTES: Final = 64 << 20
_WORD: Final = np.dtype("<u4")

Message = dict[str, Any]


class MalformedMessage(ValueError):
    """A message that is not of this protocol."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The first message a worker reads: which device it opens and between which tiers it copies.

    `near` is the tier whose arena the daemon owns, mapped from `near_path` (absolute); `far` is the
    device's tier. `probe_bytes` are copied in each direction at start. `set_aside` is set by the
    supervisor after two crashes. `read_bytes_per_s`, `write_bytes_per_s`: limits of the speed from
    and to the device (throttle.py).
    """

    spec: DeviceSpec
    near: str
    near_path: str
    far: str
    probe_bytes: int = 8 << 20
    set_aside: bool = False
    read_bytes_per_s: float = inf
    write_bytes_per_s: float = inf

    def __post_init__(self) -> None:
        if not self.near_path.startswith("/"):
            raise ValueError(f"{self.device}: the path {self.near_path!r} must be absolute")

    @property
    def device(self) -> str:
        """The device's name."""
        return self.spec.name

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> WorkerConfig:
        """Raises MalformedMessage on a field that is unknown or of the wrong type."""
        try:
            return checked(cls, fields)
        except ValueError as error:
            raise MalformedMessage(str(error)) from error


@dataclass(slots=True)
class Batch:
    """Moves of one queue of one device (queues.py), all copies or all deletions."""

    number: int
    moves: list[Move]
    queue: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """A batch's outcomes. `seconds` and `num_bytes`: the measured copy."""

    batch: int
    outcomes: list[Outcome]
    seconds: float
    num_bytes: int


@dataclass(slots=True)
class Stream:
    """Turns the bytes read from a socket into messages."""

    _unpacker: Any = field(
        default_factory=lambda: msgpack.Unpacker(raw=False, max_buffer_size=MAX_MESSAGE_BYTES)
    )

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete now. Raises MalformedMessage; do not use it after that."""
        try:
            self._unpacker.feed(data)
            for message in self._unpacker:
                if not isinstance(message, dict) or type(message.get("t")) is not str:
                    raise MalformedMessage(f"not a message: {str(message)[:80]}")
                yield message
        except MalformedMessage:
            raise
        except (ValueError, msgpack.exceptions.UnpackException, msgpack.BufferFull) as error:
            raise MalformedMessage(f"not msgpack: {error!r}") from error


def pack(kind: str, **fields: Any) -> bytes:
    """One message as bytes."""
    packed: bytes = msgpack.packb({"t": kind} | fields, use_bin_type=True)
    return packed


def pack_batch(batch: Batch) -> bytes:
    """Moves as lists; priority and deadline are not sent."""
    moves = [
        [
            move.id,
            move.src,
            move.src_slot,
            move.dst,
            move.dst_slot,
            move.block_bytes,
            move.src_slot_bytes,
            move.dst_slot_bytes,
            None if identity is None else _identity_fields(identity),
        ]
        for move in batch.moves
        for identity in (move.identity,)
    ]
    return pack("batch", n=batch.number, queue=batch.queue, moves=moves)


def unpack_batch(message: Message) -> Batch:
    queue = message.get("queue")
    if type(queue) is not str:
        raise MalformedMessage("batch: the queue is missing")
    moves = [_move(fields) for fields in _list(message, "moves")]
    return Batch(_int(message.get("n")), moves, queue)


def pack_done(done: Done) -> bytes:
    outcomes = [[o.move, o.ok, o.error, o.corrupt, o.rejected] for o in done.outcomes]
    return pack("done", n=done.batch, seconds=done.seconds, bytes=done.num_bytes, out=outcomes)


def unpack_done(message: Message) -> Done:
    seconds = _float(message.get("seconds"))
    found = _list(message, "out")
    share = seconds / max(1, len(found))
    outcomes = []
    for fields in found:
        kinds = [type(f) for f in fields] if isinstance(fields, list) else []
        if kinds != [int, bool, str, bool, bool]:
            raise MalformedMessage("done: an outcome is [move, ok, error, corrupt, rejected]")
        move, is_ok, error, is_corrupt, is_rejected = fields
        outcomes.append(Outcome(move, is_ok, share, error, is_corrupt, is_rejected))
    return Done(_int(message.get("n")), outcomes, seconds, _int(message.get("bytes")))


def pack_rows(rows: StoredRows) -> bytes:
    names = [rows.namespace, rows.block_bytes, rows.step, rows.first, rows.total]
    words = [rows.lengths, rows.parents.view(np.uint32), rows.hits, rows.used_s]
    packed = [array.astype(_WORD).tobytes() for array in words]
    return pack("rows", names=names, words=packed, keys=rows.parent_keys, tokens=rows.tokens)


def unpack_rows(message: Message) -> StoredRows:
    names, words = _list(message, "names"), _list(message, "words")
    keys, tokens = message.get("keys"), message.get("tokens")
    if [type(f) for f in names] != [bytes] + [int] * 4 or [type(f) for f in words] != [bytes] * 4:
        raise MalformedMessage("rows: a namespace, four numbers and four arrays")
    if type(keys) is not bytes or type(tokens) is not bytes or any(len(w) % 4 for w in words):
        raise MalformedMessage("rows: keys, tokens and whole words")
    lengths, parents, hits, used_s = (np.frombuffer(w, _WORD).astype(np.uint32) for w in words)
    namespace, *numbers = names
    block_bytes, step, first, total = numbers
    up = parents.view(np.int32)
    rows = StoredRows(
        namespace=namespace,
        block_bytes=block_bytes,
        step=step,
        first=first,
        total=total,
        lengths=lengths,
        parents=up,
        parent_keys=keys,
        tokens=tokens,
        hits=hits,
        used_s=used_s,
    )
    if not rows.is_sound():
        raise MalformedMessage("rows: the lengths of their parts differ")
    return rows


def pack_uses(uses: Sequence[Use], zero_s: float) -> bytes:
    """`zero_s`: the time at 0 of the daemon's clock, in seconds since 1970."""
    packed = [[u.slot_bytes, u.key, u.hits, max(0, int(u.used_s + zero_s))] for u in uses]
    return pack("note", uses=packed)


def unpack_uses(message: Message) -> dict[int, list[tuple[bytes, int, int]]]:
    """Slot size → (key, hits, last use in seconds since 1970)."""
    uses: dict[int, list[tuple[bytes, int, int]]] = {}
    for fields in _list(message, "uses"):
        if not isinstance(fields, list) or [type(f) for f in fields] != [int, bytes, int, int]:
            raise MalformedMessage("note: a use is [slot bytes, key, hits, seconds]")
        uses.setdefault(fields[0], []).append((fields[1], fields[2], fields[3]))
    return uses


def pack_scrubbed(progress: Scrubbed) -> bytes:
    bad = [[b.key, b.problem, b.namespace, b.tokens] for b in progress.bad]
    numbers = [progress.blocks, progress.num_bytes, progress.total_blocks]
    return pack("scrubbed", numbers=numbers, bad=bad, done=progress.is_done)


def unpack_scrubbed(message: Message) -> Scrubbed:
    numbers, bad = _list(message, "numbers"), _list(message, "bad")
    if [type(number) for number in numbers] != [int] * 3 or type(message.get("done")) is not bool:
        raise MalformedMessage("scrubbed: three numbers and whether it is done")
    for fields in bad:
        kinds = [type(f) for f in fields] if isinstance(fields, list) else []
        if kinds != [bytes, str, bytes, bytes]:
            raise MalformedMessage("scrubbed: a bad block is [key, problem, namespace, tokens]")
    blocks, num_bytes, total = numbers
    return Scrubbed(blocks, num_bytes, total, [Spoilt(*f) for f in bad], message["done"])


def unpack_keys(message: Message) -> dict[int, list[bytes]]:
    """Slot size → the keys of a `forget`."""
    keys: dict[int, list[bytes]] = {}
    for fields in _list(message, "keys"):
        if not isinstance(fields, list) or [type(f) for f in fields] != [int, bytes]:
            raise MalformedMessage("forget: a key is [slot bytes, key]")
        keys.setdefault(fields[0], []).append(fields[1])
    return keys


def _identity_fields(identity: BlockIdentity) -> list[Any]:
    i = identity
    return [i.namespace, i.key, i.parent, i.tokens, i.depth, i.hits]


def _move(fields: Any) -> Move:
    if not isinstance(fields, list) or len(fields) != 9:
        raise MalformedMessage("batch: a move has 9 fields")
    number, src, src_slot, dst, dst_slot, block_bytes, src_bytes, dst_bytes, about = fields
    if [type(f) for f in fields[:3] + fields[4:8]] != [int, str, *[int] * 5]:
        raise MalformedMessage("batch: a move's numbers and names")
    if dst is not None and type(dst) is not str:
        raise MalformedMessage("batch: a move's destination")
    identity = None
    if about is not None:
        if not isinstance(about, list) or [type(f) for f in about] != [bytes] * 4 + [int] * 2:
            raise MalformedMessage("batch: a block's identity")
        identity = BlockIdentity(*about)
    return Move(
        id=number,
        block=0,
        src=src,
        src_slot=src_slot,
        dst=dst,
        dst_slot=dst_slot,
        block_bytes=block_bytes,
        src_slot_bytes=src_bytes,
        dst_slot_bytes=dst_bytes,
        priority=Priority.DEMAND,
        identity=identity,
    )


def _list(message: Message, name: str) -> list[Any]:
    value = message.get(name)
    if not isinstance(value, list):
        raise MalformedMessage(f"{message['t']}: {name} must be a list")
    return value


def _int(value: Any) -> int:
    if type(value) is not int:
        raise MalformedMessage(f"a number is missing: {value!r}")
    return value


def _float(value: Any) -> float:
    if type(value) not in (int, float):
        raise MalformedMessage(f"a number is missing: {value!r}")
    return float(value)

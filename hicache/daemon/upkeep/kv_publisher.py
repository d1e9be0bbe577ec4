"""Publishes KV events: blocks stored in and removed from tiers.

    loop ──tick──▶ Changes ──▶ messages ──▶ thread ──PUB──▶ subscribers
    loop ──page──▶ Changes ──▶ reply on the clients' socket

A separate thread owns the PUB socket, with a separate ZeroMQ context and I/O thread: messages from
subscribers never reach the loop. At most MAX_WAITING messages wait for the thread; further ones are
dropped and counted, and show as a gap in the topic's sequence. The topic is the namespace's digest
in hex. Messages have vLLM's layout, so that its subscribers can read them:

    [topic, sequence (u64, big-endian), msgpack [wall clock, [event, …], nil]]

    {"type": "BlockStored", "block_hashes": [key, …], "parent_block_hash": key or nil,
     "token_ids": [int, …], "block_size": int, "lora_id": nil, "lora_name": nil, "medium": str, …}
    {"type": "BlockRemoved", "block_hashes": [key, …], "medium": str, …}
    {"type": "AllBlocksCleared", …}         the first of all in a topic's messages of an epoch

and each event has hicache's `tier` and `epoch`, which other subscribers ignore. Blocks held already
are not published again for a new subscriber: it requests pages on the clients' socket (`page`),
each the state at exactly the sequence that it names. Used from the daemon's loop only, except
`_publish`, which the thread calls.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import zmq

from hicache.daemon.curve_auth import CurveAuth
from hicache.daemon.socket_lock import listen
from hicache.daemon.upkeep.supervised import WorkThread
from hicache.engine.kv_changes.diff import Changes, Removed, Stored
from hicache.protocol.keys import ROOT_KEY
from hicache.protocol.messages import TOKEN_BYTES
from hicache.tiers.catalog import event_media

MAX_BYTES_PER_TICK: Final = 128 << 10
"""Of changes, as `Changes.take` counts: 1,020 blocks of 16 tokens, 8,192 removed ones, 7 blocks of
4,096 tokens. At most about 5 ms, in which no request is served."""
MAX_MESSAGE_BYTES: Final = 64 << 10
MAX_WAITING: Final = 64
"""Messages that wait for the thread: those of about ten ticks."""
MAX_SUBSCRIPTION_BYTES: Final = 128
"""The longest message of a subscriber: a topic of 64 characters, and ZeroMQ's framing. Each
character takes ZeroMQ about 48 bytes of memory until the connection ends."""
MAX_HANDSHAKE_BYTES: Final = 512
"""The same with CURVE, whose handshake has messages of about 300 bytes."""
MAX_PAGE_BLOCKS: Final = 4096
MAX_TOPICS: Final = 4096
"""Topics without held blocks whose sequence numbers are kept."""
CLOSE_S: Final = 1.0

_KEY_BYTES: Final = 34
_TOKEN_BYTES: Final = 5
_EVENT_BYTES: Final = 320
"""The most packed bytes of a key, of a token id, and of an event without both."""
_pack: Final = msgspec.msgpack.Encoder().encode

News = Stored | Removed


class Publisher:
    """Publishes `changes` at `endpoint`, with CURVE authentication by `curve_auth` if given. Raises
    OSError where it cannot listen."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        hwm: int,
        changes: Changes,
        tiers: Sequence[str],
        epoch: str,
        curve_auth: CurveAuth | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.num_sent = 0
        self._context = context
        self._changes = changes
        self._tiers = list(tiers)
        self._media = event_media()
        self._epoch = epoch
        self._sequences: dict[bytes, int] = {}
        self._first_sequence = 0
        self._socket = _open(context, endpoint, hwm, curve_auth)
        self.work_thread: WorkThread[list[bytes]] = WorkThread("events", self._publish, MAX_WAITING)
        changes.listen()

    def tick(self, now_s: float) -> None:
        """Publish the next changes, up to the limit."""
        self.work_thread.tick(now_s)
        try:
            for digest, news in _by_namespace(self._changes.take(MAX_BYTES_PER_TICK)):
                self._tell(digest, news)
        except Exception:
            self._show_a_gap()
            raise
        if len(self._sequences) > MAX_TOPICS:
            self._forget_idle()

    def page(self, namespace: bytes, after: int) -> dict[str, Any]:
        """The reply to `events`: published blocks, from `after` on."""
        page = self._changes.page(namespace, after, MAX_PAGE_BLOCKS)
        return {
            "epoch": self._epoch,
            "endpoint": self.endpoint,
            "topic": topic_of(namespace).decode(),
            "sequence": self._sequences.get(namespace, self._first_sequence),
            "tier_names": self._tiers,
            "keys": page.keys,
            "tiers": page.tiers,
            "next": page.next,
        }

    def counts(self) -> dict[str, int]:
        """For `stats`."""
        return {
            "messages": self.num_sent,
            "dropped": self.work_thread.num_refused,
            "blocks_pending": self._changes.num_pending(),
        }

    def close(self) -> None:
        """Publish waiting messages, and close. If the thread hangs, its socket stays open until the
        process ends."""
        if self.work_thread.close(CLOSE_S):
            self._context.destroy(linger=0)

    def _tell(self, digest: bytes, news: Iterable[News]) -> None:
        """Send changes, in messages of limited size."""
        events: list[Any] = []
        if digest not in self._sequences:
            self._sequences[digest] = self._first_sequence
            events.append({"type": "AllBlocksCleared", "epoch": self._epoch})
        num_bytes = _EVENT_BYTES
        for item in news:
            for event, size in self._events(item, num_bytes):
                if num_bytes + size > MAX_MESSAGE_BYTES:
                    self._send(digest, events)
                    events, num_bytes = [], _EVENT_BYTES
                events.append(event)
                num_bytes += size
        self._send(digest, events)

    def _events(self, item: News, used_bytes: int) -> Iterator[tuple[dict[str, Any], int]]:
        """(event, its most bytes) for one change. The first event fits into a message of
        `used_bytes`, if one block does."""
        head = {
            "medium": self._media.get(item.tier, item.tier),
            "tier": item.tier,
            "epoch": self._epoch,
        }
        step = len(item.tokens) // len(item.keys) if isinstance(item, Stored) else 0
        block_bytes = _KEY_BYTES + step // TOKEN_BYTES * _TOKEN_BYTES
        start = 0
        while start < len(item.keys):
            room = (MAX_MESSAGE_BYTES - used_bytes - _EVENT_BYTES) // block_bytes
            if room < 1:
                used_bytes = _EVENT_BYTES
                continue
            keys = item.keys[start : start + room]
            event: dict[str, Any] = {"type": "BlockRemoved", "block_hashes": keys, **head}
            if isinstance(item, Stored):
                parent = item.keys[start - 1] if start else item.parent
                symbols = item.tokens[start * step : (start + len(keys)) * step]
                event |= {
                    "type": "BlockStored",
                    "parent_block_hash": None if parent == ROOT_KEY else parent,
                    "token_ids": np.frombuffer(symbols, "<u4").tolist(),
                    "block_size": step // TOKEN_BYTES,
                    "lora_id": None,
                    "lora_name": None,
                }
            yield event, _EVENT_BYTES + block_bytes * len(keys)
            start += len(keys)
            used_bytes = MAX_MESSAGE_BYTES

    def _send(self, digest: bytes, events: Sequence[Any]) -> None:
        """Send a message. A dropped one uses its number, too, so that subscribers see the gap."""
        number = self._sequences[digest]
        self._sequences[digest] += 1
        packed = _pack([time.time(), events, None])
        message = [topic_of(digest), number.to_bytes(8, "big"), packed]
        self.num_sent += self.work_thread.give(message)

    def _publish(self, parts: list[bytes]) -> None:
        self._socket.send_multipart(parts)

    def _show_a_gap(self) -> None:
        """Changes may be recorded as published that were not sent."""
        self._first_sequence += 1
        for digest in self._sequences:
            self._sequences[digest] += 1

    def _forget_idle(self) -> None:
        """Drop idle topics. Such a topic later continues with a higher number than before."""
        for digest in self._changes.forget_idle():
            number = self._sequences.pop(digest, 0)
            self._first_sequence = max(self._first_sequence, number)


def unpublished(namespace: bytes, epoch: str) -> dict[str, Any]:
    """The reply to `events` without a publisher."""
    topic = topic_of(namespace).decode()
    nothing = {"sequence": 0, "tier_names": [], "keys": b"", "tiers": b"", "next": None}
    return {"epoch": epoch, "endpoint": None, "topic": topic, **nothing}


def topic_of(namespace: bytes) -> bytes:
    """The topic of a namespace's events."""
    return namespace.hex().encode()


def _by_namespace(news: Sequence[News]) -> Iterator[tuple[bytes, list[News]]]:
    """The changes grouped by namespace, in order."""
    sorted_out: dict[bytes, list[News]] = {}
    for item in news:
        sorted_out.setdefault(item.namespace, []).append(item)
    yield from sorted_out.items()


def _open(
    context: zmq.Context[Any], endpoint: str, hwm: int, curve_auth: CurveAuth | None
) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.PUB)
    socket.linger = 0
    socket.setsockopt(zmq.SNDHWM, hwm)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_SUBSCRIPTION_BYTES)
    if curve_auth is not None:
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_HANDSHAKE_BYTES)
        curve_auth.guard(socket)
    listen(socket, endpoint, "publish")
    return socket

"""KV events: what came to be held and what is gone, published to whoever subscribes.

    loop ──tick──▶ Changes ──▶ messages ──▶ thread ──PUB──▶ subscribers
    loop ──page──▶ Changes ──▶ reply on the front door

A thread of its own has the PUB socket, with a ZeroMQ context and an I/O thread of its own: what
subscribers say, however much and of what, never reaches the loop. At most MAX_WAITING messages wait
for the thread; what does not fit is dropped, counted, and shows as a gap in the topic's sequence.
The topic is the namespace's digest in hex. Messages are laid out as vLLM's, so that what reads
those reads these:

    [topic, sequence (u64, big-endian), msgpack [wall clock, [event, …], nil]]

    {"type": "BlockStored", "block_hashes": [key, …], "parent_block_hash": key or nil,
     "token_ids": [int, …], "block_size": int, "lora_id": nil, "lora_name": nil, "medium": str, …}
    {"type": "BlockRemoved", "block_hashes": [key, …], "medium": str, …}
    {"type": "AllBlocksCleared", …}         the first of all in a topic's messages of an epoch

and each event has our `tier` and `epoch`, which others pass over. What is held already is not told
again for whoever comes: it asks for pages on the front door (`page`), each the state of exactly the
sequence that it names. Used from the daemon's loop only; `_publish` is the thread's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import zmq

from hicache.daemon.curve_auth import Doorkeeper
from hicache.daemon.socket_lock import listen
from hicache.daemon.upkeep.supervised import Hand
from hicache.engine.kv_changes.diff import Changes, Removed, Stored
from hicache.protocol.keys import ROOT_KEY, TOKEN_BYTES
from hicache.tiers.catalog import event_media

MAX_BYTES_PER_TICK: Final = 128 << 10
"""Of news, as `Changes.take` counts: 1,020 blocks of 16 tokens, 8,192 that are gone, 7 blocks of
4,096 tokens. Some 5 ms at most, in which nobody else is served."""
MAX_MESSAGE_BYTES: Final = 64 << 10
MAX_WAITING: Final = 64
"""Messages for the thread; some ten ticks of them."""
MAX_SUBSCRIPTION_BYTES: Final = 128
"""Of one message from a subscriber: a topic of 64 characters, and what ZeroMQ puts around it. Each
character costs ZeroMQ some 48 bytes until the connection ends."""
MAX_HANDSHAKE_BYTES: Final = 512
"""The same where a handshake of CURVE comes before, whose longest part has some 300."""
MAX_PAGE_BLOCKS: Final = 4096
MAX_TOPICS: Final = 4096
"""Whose sequences are kept though nothing is held of them."""
CLOSE_S: Final = 1.0

_KEY_BYTES: Final = 34
_TOKEN_BYTES: Final = 5
_EVENT_BYTES: Final = 320
"""At most, packed: a key, a token id, an event without either."""
_pack: Final = msgspec.msgpack.Encoder().encode

News = Stored | Removed


class Publisher:
    """Tells what `changes` says, at `endpoint`, behind `doorkeeper` where there is one. Raises
    OSError where it cannot listen."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        hwm: int,
        changes: Changes,
        tiers: Sequence[str],
        epoch: str,
        doorkeeper: Doorkeeper | None = None,
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
        self._socket = _open(context, endpoint, hwm, doorkeeper)
        self.hand: Hand[list[bytes]] = Hand("events", self._publish, MAX_WAITING)
        changes.listen()

    def tick(self, now_s: float) -> None:
        """Tell what is new, so much of it."""
        self.hand.tick(now_s)
        try:
            for digest, news in _by_namespace(self._changes.take(MAX_BYTES_PER_TICK)):
                self._tell(digest, news)
        except Exception:
            self._show_a_gap()
            raise
        if len(self._sequences) > MAX_TOPICS:
            self._forget_idle()

    def page(self, namespace: bytes, after: int) -> dict[str, Any]:
        """The reply to `events`: what has been told as held, from `after` on."""
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
            "dropped": self.hand.num_refused,
            "blocks_pending": self._changes.num_pending(),
        }

    def close(self) -> None:
        """What waits still leaves, if the thread gets to it. One that stands still keeps its socket
        until the process ends."""
        if self.hand.close(CLOSE_S):
            self._context.destroy(linger=0)

    def _tell(self, digest: bytes, news: Iterable[News]) -> None:
        """In messages of bounded size."""
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
        """One piece of news as events, the first of which fits into a message that has so much
        already, if one block does; each with what it takes, at most."""
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
        """Its number is used up even if it is dropped: that is how it is missed."""
        number = self._sequences[digest]
        self._sequences[digest] += 1
        packed = _pack([time.time(), events, None])
        self.num_sent += self.hand.give([topic_of(digest), number.to_bytes(8, "big"), packed])

    def _publish(self, parts: list[bytes]) -> None:
        self._socket.send_multipart(parts)

    def _show_a_gap(self) -> None:
        """Something may be noted as told that was not."""
        self._first_sequence += 1
        for digest in self._sequences:
            self._sequences[digest] += 1

    def _forget_idle(self) -> None:
        """A topic that is forgotten goes on later with a higher number than it ever had."""
        for digest in self._changes.forget_idle():
            number = self._sequences.pop(digest, 0)
            self._first_sequence = max(self._first_sequence, number)


def unpublished(namespace: bytes, epoch: str) -> dict[str, Any]:
    """The reply to `events` where nothing is published."""
    topic = topic_of(namespace).decode()
    nothing = {"sequence": 0, "tier_names": [], "keys": b"", "tiers": b"", "next": None}
    return {"epoch": epoch, "endpoint": None, "topic": topic, **nothing}


def topic_of(namespace: bytes) -> bytes:
    """The topic that a namespace's events have."""
    return namespace.hex().encode()


def _by_namespace(news: Sequence[News]) -> Iterator[tuple[bytes, list[News]]]:
    """In the order in which they are to be told."""
    sorted_out: dict[bytes, list[News]] = {}
    for item in news:
        sorted_out.setdefault(item.namespace, []).append(item)
    yield from sorted_out.items()


def _open(
    context: zmq.Context[Any], endpoint: str, hwm: int, doorkeeper: Doorkeeper | None
) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.PUB)
    socket.linger = 0
    socket.setsockopt(zmq.SNDHWM, hwm)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_SUBSCRIPTION_BYTES)
    if doorkeeper is not None:
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_HANDSHAKE_BYTES)
        doorkeeper.guard(socket)
    listen(socket, endpoint, "publish")
    return socket

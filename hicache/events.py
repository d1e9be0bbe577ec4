"""KV events: what came to be held and what is gone, published to whoever subscribes.

A PUB socket (XPUB, since who subscribes must be known). The topic is the namespace's digest in hex;
messages are laid out as vLLM's, so that what reads those reads these:

    [topic, sequence (u64, big-endian), msgpack [wall clock, [event, …], nil, epoch]]
    ["BlockStored", keys, parent key or nil, token ids, block_tokens, nil, tier]
    ["BlockRemoved", keys, tier]
    ["AllBlocksCleared"]                     first of all in each namespace's messages of an epoch

Sequences count by topic from 0 and end with the epoch. Who does not read as fast as it is told
loses messages at the high-water mark and sees a gap. Then, and when it begins, it subscribes
(again), and everything that is held is told once more to everybody, for whom that is no news.
Nothing is computed while nobody subscribes. Used from the daemon's loop only, once a tick.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import zmq

from hicache.endpoint import ipc_path
from hicache.engine.changes import Changes, Removed, Stored
from hicache.keys import ROOT_KEY

MAX_BLOCKS_PER_TICK: Final = 1024
"""Some 5 ms, hashing and packing included; nobody else is served meanwhile."""
MAX_BLOCKS_PER_MESSAGE: Final = 512
_pack: Final = msgspec.msgpack.Encoder().encode

News = Stored | Removed


class Publisher:
    """Tells what `changes` says. `guard` makes the socket a CURVE server. Raises OSError where it
    cannot listen."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        hwm: int,
        changes: Changes,
        epoch: str,
        guard: Callable[[zmq.Socket[bytes]], None] | None = None,
    ) -> None:
        self.num_sent = 0
        self._changes = changes
        self._epoch = epoch
        self._sequences: Counter[bytes] = Counter()
        self._subscriptions: Counter[bytes] = Counter()
        self._socket = _open(context, endpoint, hwm, guard)

    @property
    def num_subscriptions(self) -> int:
        return self._subscriptions.total()

    def tick(self, now_s: float) -> None:
        """Hear who has come and gone; tell what is new."""
        self._hear()
        if self._changes.is_listening:
            for digest, news in _by_namespace(self._changes.take(MAX_BLOCKS_PER_TICK)):
                self._tell(digest, news)

    def counts(self) -> dict[str, int]:
        """For `stats`."""
        return {"subscriptions": self.num_subscriptions, "messages": self.num_sent}

    def close(self) -> None:
        self._changes.stop()
        self._socket.close(0)

    def _hear(self) -> None:
        """Subscriptions come as messages: 1 and the topic, or 0 and the topic."""
        while int(self._socket.get(zmq.EVENTS)) & int(zmq.POLLIN):
            said = self._socket.recv(zmq.NOBLOCK)
            if said[:1] == b"\1":
                self._subscriptions[said[1:]] += 1
                self._changes.listen()
            elif said[:1] == b"\0":
                self._subscriptions[said[1:]] -= 1
                if not self.num_subscriptions:
                    self._changes.stop()

    def _tell(self, digest: bytes, news: Sequence[News]) -> None:
        topic = digest.hex().encode()
        events: list[Any] = [] if self._sequences[topic] else [["AllBlocksCleared"]]
        num_blocks = 0
        for item in news:
            for event, count in _events(item):
                if num_blocks and num_blocks + count > MAX_BLOCKS_PER_MESSAGE:
                    self._send(topic, events)
                    events, num_blocks = [], 0
                events.append(event)
                num_blocks += count
        self._send(topic, events)

    def _send(self, topic: bytes, events: Sequence[Any]) -> None:
        sequence = self._sequences[topic].to_bytes(8, "big")
        self._sequences[topic] += 1
        self._socket.send_multipart(
            [topic, sequence, _pack([time.time(), events, None, self._epoch])]
        )
        self.num_sent += 1


def _by_namespace(news: Sequence[News]) -> Iterator[tuple[bytes, list[News]]]:
    """In the order in which they are to be told."""
    sorted_out: dict[bytes, list[News]] = {}
    for item in news:
        sorted_out.setdefault(item.namespace, []).append(item)
    yield from sorted_out.items()


def _events(item: News) -> Iterator[tuple[list[Any], int]]:
    """One piece of news as events of bounded size, and how many blocks each is about."""
    keys = item.keys
    for start in range(0, len(keys), MAX_BLOCKS_PER_MESSAGE):
        some = keys[start : start + MAX_BLOCKS_PER_MESSAGE]
        if isinstance(item, Removed):
            yield ["BlockRemoved", some, item.tier], len(some)
            continue
        parent = keys[start - 1] if start else item.parent
        step = len(item.tokens) // len(keys)
        symbols = item.tokens[start * step : (start + len(some)) * step]
        tokens = np.frombuffer(symbols, "<u4").tolist()
        told_parent = None if parent == ROOT_KEY else parent
        yield ["BlockStored", some, told_parent, tokens, step // 4, None, item.tier], len(some)


def _open(
    context: zmq.Context[Any],
    endpoint: str,
    hwm: int,
    guard: Callable[[zmq.Socket[bytes]], None] | None,
) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.XPUB)
    socket.linger = 0
    socket.setsockopt(zmq.SNDHWM, hwm)
    socket.setsockopt(zmq.XPUB_VERBOSER, 1)
    if guard is not None:
        guard(socket)
    before = os.umask(0o177)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise OSError(f"cannot publish at {endpoint}: {error.strerror}") from None
    finally:
        os.umask(before)
    path = ipc_path(endpoint)
    if path is not None:
        Path(path).chmod(0o600)
    return socket

"""What a router needs: the prefixes that a daemon holds, kept up to date by its KV events.

    held = HeldPrefixes(events_endpoint, spec.digest(), spec.block_tokens)
    ...
    held.poll()                              # take what has been told since
    held.match(token_ids)                    # [("dram", 12), ("disk", 40)]: its first 52 blocks

Knows only what was told: it is a little behind, and empty until the first events are there. A gap
in what it hears makes it forget everything and subscribe again; then, and in another run of the
daemon, it is told all anew. A daemon that has died tells nothing: ask `ping` or `score` for that.
Not thread-safe.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import zmq

from hicache.curve import CurveKeys
from hicache.keys import KEY_BYTES, ROOT_KEY, TOKEN_BYTES, Tokens, encode_tokens

_unpack: Final = msgspec.msgpack.Decoder().decode


class HeldPrefixes:
    """One namespace of one daemon. `endpoint`: where it publishes (`events.endpoint`).
    `num_gaps`: how often messages were lost. `tiers` are named fastest first, for `match`."""

    def __init__(
        self,
        endpoint: str,
        namespace: bytes,
        block_tokens: int,
        *,
        curve: CurveKeys | None = None,
        tiers: tuple[str, ...] = ("hbm", "dram", "disk"),
    ) -> None:
        self.num_gaps = 0
        self.epoch = ""
        self._namespace = namespace
        self._step = block_tokens * TOKEN_BYTES
        self._tiers = tiers
        self._held: dict[bytes, set[str]] = {}
        self._next: int | None = None
        self._topic = namespace.hex().encode()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.linger = 0
        if curve is not None:
            curve.apply(self._socket)
        self._socket.connect(endpoint)
        self._socket.subscribe(self._topic)

    def __len__(self) -> int:
        """How many blocks are held, in whatever tier."""
        return len(self._held)

    def poll(self, timeout_s: float = 0.0) -> int:
        """Take what has been told, waiting so long for the first of it. Returns the messages."""
        taken = 0
        while self._socket.poll(0 if taken else round(timeout_s * 1000)):
            self._take(self._socket.recv_multipart())
            taken += 1
        return taken

    def match(self, tokens: Tokens) -> list[tuple[str, int]]:
        """Where the longest held prefix of a prompt lies: (tier, blocks) front to back, by each
        block's fastest tier."""
        runs: list[tuple[str, int]] = []
        for key in self._keys_of(encode_tokens(tokens)):
            held = self._held.get(key)
            if held is None:
                break
            tier = next((name for name in self._tiers if name in held), "")
            count = runs.pop()[1] if runs and runs[-1][0] == tier else 0
            runs.append((tier, count + 1))
        return runs

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()

    def __enter__(self) -> HeldPrefixes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keys_of(self, packed: bytes) -> Iterator[bytes]:
        parent = ROOT_KEY
        for start in range(0, len(packed) - self._step + 1, self._step):
            data = self._namespace + parent + packed[start : start + self._step]
            parent = hashlib.blake2b(data, digest_size=KEY_BYTES).digest()
            yield parent

    def _take(self, message: list[bytes]) -> None:
        """Raises ValueError for what no hicache has said."""
        try:
            _, number, packed = message
            _, events, _, epoch = _unpack(packed)
        except (ValueError, msgspec.DecodeError) as error:
            raise ValueError(f"not a KV event of hicache's: {error}") from None
        sequence = int.from_bytes(number, "big")
        if epoch != self.epoch:  # another run of the daemon, which has been subscribed to anew
            self._held.clear()
            self.epoch = epoch
        elif self._next is not None and sequence != self._next:
            self.num_gaps += 1
            self._held.clear()
            self._socket.unsubscribe(self._topic)
            self._socket.subscribe(self._topic)
        self._next = sequence + 1
        for event in events:
            self._apply(event)

    def _apply(self, event: list[Any]) -> None:
        """Kinds that are not known are passed over."""
        match event:
            case ["BlockStored", keys, _, _, _, _, tier, *_]:
                for key in keys:
                    self._held.setdefault(key, set()).add(tier)
            case ["BlockRemoved", keys, tier, *_]:
                for key in keys:
                    held = self._held.get(key)
                    if held is not None:
                        held.discard(tier)
                        if not held:
                            del self._held[key]
            case ["AllBlocksCleared", *_]:
                self._held.clear()

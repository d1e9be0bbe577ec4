"""A sample of what was asked for lately, from which `hicache stats --what-if` works out what tiers
of other sizes would have hit.

Blocks are sampled by a hash of themselves and all before them (SHARDS: Waldspurger et al., 2015),
so a block is in the sample at all of its uses or at none, and a cache of a share of the blocks
under a share of the requests hits what the whole would. Everything is sampled while it fits; the
share is halved while fewer than MIN_REQUESTS are remembered, down to where the smallest tier still
has some MIN_TIER_BLOCKS in the sample. Nothing is simulated here: the command does that, in its own
process.

Memory: 8 bytes a block sampled, 4 MiB at most. Used from the daemon's loop only, when an answer has
left: some 30 µs for a prompt of 8,192 tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache.daemon.sessions import Session
from hicache.tiers.block import MAX_BLOCK_TOKENS, slot_bytes_for

MAX_BLOCKS: Final = 1 << 19
MIN_REQUESTS: Final = 1 << 13
MIN_TIER_BLOCKS: Final = 1024
FULL: Final = 1 << 32
"""A sampled share is a threshold for 32 bits of a block's hash."""

Hashes = npt.NDArray[np.uint64]
_FACTOR: Final = 0x9E3779B97F4A7C15
_INVERSE: Final = pow(_FACTOR, -1, 1 << 64)
_MIX: Final = np.uint64(0xD6E8FEB86659FD93)
_HALF: Final = np.uint64(32)
_MULTIPLIERS: Final = (
    np.random.default_rng(2).integers(1, 1 << 63, MAX_BLOCK_TOKENS, np.uint64) * _MIX
)
"""One for each token of the largest block there may be."""


class SampledRequest(NamedTuple):
    """One request: its time, its tokens, its whole blocks' number, tokens and bytes, and the
    sampled ones of them."""

    at_s: float
    tokens: int
    num_blocks: int
    block_tokens: int
    block_bytes: int
    ids: Hashes


class Sample:
    """The newest requests. `smallest_blocks`: what the smallest tier holds, in blocks, so that the
    sample does not get too thin for it."""

    def __init__(
        self,
        smallest_bytes: int,
        max_blocks: int = MAX_BLOCKS,
        min_requests: int = MIN_REQUESTS,
    ) -> None:
        self.threshold = FULL
        self._smallest_bytes = smallest_bytes
        self._max_blocks = max_blocks
        self._min_requests = min_requests
        self._requests: deque[SampledRequest] = deque()
        self._num_blocks = 0
        self._num_forgotten = 0
        self._powers = self._inverses = np.ones(1, np.uint64)

    def asked(self, session: Session, tokens: bytes, conversation: str, now_s: float) -> None:
        """A prompt came."""
        spec = session.spec
        ids = self.hashes(session.namespace, tokens, 4 * spec.block_tokens)
        num_blocks = len(ids)
        if self.threshold < FULL:
            ids = self._thinned(ids)
        slot_bytes = slot_bytes_for(spec.block_bytes)
        asked = SampledRequest(
            now_s, len(tokens) // 4, num_blocks, spec.block_tokens, slot_bytes, ids
        )
        self._requests.append(asked)
        self._num_blocks += len(ids)
        if self._num_blocks > self._max_blocks:
            self._make_room(slot_bytes)

    def hinted(
        self, session: Session, conversation: str, stop: str, answer_tokens: int, now_s: float
    ) -> None:
        """Hints are not sampled."""

    def hashes(self, namespace: int, tokens: bytes, step: int) -> Hashes:
        """One for each block of `step` bytes, that depends on all before it: a polynomial of the
        blocks' own hashes modulo 2^64, all at once, then mixed."""
        num_blocks = len(tokens) // step
        width = "<u8" if step % 8 == 0 else "<u4"  # two tokens at a time where that goes
        words = np.frombuffer(tokens, width, num_blocks * step // int(width[2]))
        words = words.astype(np.uint64, copy=False).reshape(num_blocks, step // int(width[2]))
        own: Hashes = words @ _MULTIPLIERS[: words.shape[1]]
        if len(own) > len(self._powers):
            size = 2 * len(own)
            self._powers = _powers(_FACTOR, size)
            self._inverses = _powers(_INVERSE, size)
        own ^= own >> _HALF
        own *= self._inverses[: len(own)]
        summed = np.cumsum(own, dtype=np.uint64)
        found = (summed + np.uint64(namespace + 1)) * self._powers[: len(own)]
        found ^= found >> _HALF
        found *= _MIX
        found ^= found >> _HALF
        return found

    def report(self) -> dict[str, Any]:
        """What was sampled, thinned to one share, in few large fields."""
        requests = list(self._requests)
        parts = [self._thinned(asked.ids) for asked in requests]
        return {
            "share": self.threshold / FULL,
            "forgotten": self._num_forgotten,
            "at_s": _packed([asked.at_s for asked in requests], "<f8"),
            "tokens": _packed([asked.tokens for asked in requests], "<u4"),
            "num_blocks": _packed([asked.num_blocks for asked in requests], "<u4"),
            "block_tokens": _packed([asked.block_tokens for asked in requests], "<u4"),
            "block_bytes": _packed([asked.block_bytes for asked in requests], "<u8"),
            "num_sampled": _packed([len(ids) for ids in parts], "<u4"),
            "ids": b"".join(ids.tobytes() for ids in parts),
        }

    def _thinned(self, ids: Hashes) -> Hashes:
        return ids[(ids >> _HALF) < self.threshold]

    def _make_room(self, slot_bytes: int) -> None:
        smallest_blocks = self._smallest_bytes // slot_bytes
        is_thin = self.threshold * smallest_blocks < 2 * MIN_TIER_BLOCKS * FULL
        if len(self._requests) < self._min_requests and not is_thin:
            self.threshold //= 2
        while self._num_blocks > self._max_blocks:
            self._num_blocks -= len(self._requests.popleft().ids)
            self._num_forgotten += 1


def _powers(factor: int, size: int) -> Hashes:
    """factor^0 … factor^(size-1), modulo 2^64."""
    powers = np.full(size, factor, np.uint64)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)


def _packed(values: Sequence[float], kind: str) -> bytes:
    return np.array(values, kind).tobytes()

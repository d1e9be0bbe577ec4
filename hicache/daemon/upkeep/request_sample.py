"""A sample of recent requests, from which `hicache stats --what-if` computes the hits that tiers of
other sizes would have had.

Blocks are sampled by a hash of themselves and all blocks before them (SHARDS: Waldspurger et al.,
2015): a block is in the sample at all of its uses or at none, so a cache scaled down by the sampled
share has the hit rate of the whole. Everything is sampled while it fits; the share is halved while
fewer than MIN_REQUESTS fit, as long as the smallest tier has about MIN_TIER_BLOCKS in the sample.
The simulation runs in the command's process, not here.

Memory: 8 bytes per sampled block, 4 MiB at most. Used from the daemon's loop only, after a reply
was sent: about 30 µs for a prompt of 8,192 tokens.
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
"""The share as a threshold for 32 bits of a block's hash; this one samples all."""

Hashes = npt.NDArray[np.uint64]
_FACTOR: Final = 0x9E3779B97F4A7C15
_INVERSE: Final = pow(_FACTOR, -1, 1 << 64)
_MIX: Final = np.uint64(0xD6E8FEB86659FD93)
_HALF: Final = np.uint64(32)
_MULTIPLIERS: Final = (
    np.random.default_rng(2).integers(1, 1 << 63, MAX_BLOCK_TOKENS, np.uint64) * _MIX
)
"""One for each token of the largest block."""


class SampledRequest(NamedTuple):
    """One request: its time and tokens; the number, tokens and bytes of its whole blocks; and the
    hashes of the sampled ones."""

    at_s: float
    tokens: int
    num_blocks: int
    block_tokens: int
    block_bytes: int
    ids: Hashes


class Sample:
    """The newest requests. `smallest_bytes`: the smallest tier's capacity, which limits how small
    the share may become."""

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
        """See Observer."""
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
        """See Observer; hints are not sampled."""

    def hashes(self, namespace: int, tokens: bytes, step: int) -> Hashes:
        """A hash for each block of `step` bytes that depends on all blocks before it: a polynomial
        of the blocks' hashes modulo 2^64, vectorised, then mixed."""
        num_blocks = len(tokens) // step
        width = "<u8" if step % 8 == 0 else "<u4"  # two tokens at a time if possible
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
        """The sample, thinned to one share, in a few large fields."""
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

"""A codec that exists only here: bytes are inverted and end in a seal, so that a value is longer
than its block and nothing reads it as one by mistake."""

from __future__ import annotations

import numpy as np
import xxhash

from hicache.tiers.errors import TierCorrupt
from hicache.transfer.media.codec import Bytes

SEAL_BYTES = 64


class SealedCodec:
    """See Codec."""

    def stored_bytes(self, block_bytes: int) -> int:
        return block_bytes + SEAL_BYTES

    def block_bytes(self, stored_bytes: int) -> int:
        return stored_bytes - SEAL_BYTES

    def encode(self, block: Bytes) -> Bytes:
        return np.concatenate([~block, _seal(block)])

    def buffer(self, block: Bytes) -> Bytes:
        return np.empty(self.stored_bytes(block.nbytes), np.uint8)

    def decode(self, stored: Bytes, block: Bytes) -> None:
        np.invert(stored[:-SEAL_BYTES], out=block)
        if not np.array_equal(stored[-SEAL_BYTES:], _seal(block)):
            raise TierCorrupt("the seal is broken")


def _seal(block: Bytes) -> Bytes:
    return np.frombuffer(xxhash.xxh3_128_digest(block.data) * 4, np.uint8)

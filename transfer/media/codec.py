"""How a tier encodes a block's bytes. The near tier's slots always hold plain blocks, since clients
map them; encoded blocks are only in their tier's slots, whose size follows from `stored_bytes`.

The daemon calls `stored_bytes`, to size slots; the worker encodes and decodes, from several threads
in parallel. A codec's module is loaded by both, so it must import large libraries only when used.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Codec(Protocol):
    """Encodes blocks of one size to values of one size, and back. Without state."""

    def stored_bytes(self, block_bytes: int) -> int:
        """The length of the value of a block of `block_bytes`."""

    def block_bytes(self, stored_bytes: int) -> int:
        """The inverse of `stored_bytes`: a restart finds only the values."""

    def encode(self, block: Bytes) -> Bytes:
        """The value to store. May be `block` itself, which does not change until it is stored."""

    def buffer(self, block: Bytes) -> Bytes:
        """The buffer to read this block's value into: `block` itself if they are equally long."""

    def decode(self, stored: Bytes, block: Bytes) -> None:
        """Fill `block` from the value that was read into `buffer(block)`. Raises TierCorrupt when
        it is not a value of this codec."""


class PlainCodec:
    """Stores blocks unchanged, without a copy."""

    def stored_bytes(self, block_bytes: int) -> int:
        return block_bytes

    def block_bytes(self, stored_bytes: int) -> int:
        return stored_bytes

    def encode(self, block: Bytes) -> Bytes:
        return block

    def buffer(self, block: Bytes) -> Bytes:
        return block

    def decode(self, stored: Bytes, block: Bytes) -> None:
        pass


def codec_of(path: str) -> Codec:
    """The codec that a catalogue row names ("package.module:Class"), identity where it names
    none."""
    codec: Codec = resolve_name(path)() if path else PlainCodec()
    return codec

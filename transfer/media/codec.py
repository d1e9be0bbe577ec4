"""How a tier stores a block's bytes. Slots of the near tier always hold plain blocks, for clients
map them; what a codec makes of a block lies in its own tier's slots, whose size follows from it.

The daemon asks `stored_bytes`, to size slots; the worker encodes and decodes, from several threads
at once. A module that holds a codec is loaded by both, so it imports what is heavy when it is used.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Codec(Protocol):
    """Blocks of one size become values of one size, and back. Keeps no state."""

    def stored_bytes(self, block_bytes: int) -> int:
        """How long the value of a block of `block_bytes` is."""

    def block_bytes(self, stored_bytes: int) -> int:
        """The inverse of `stored_bytes`: a restart finds values and must know their blocks."""

    def encode(self, block: Bytes) -> Bytes:
        """The value to store. It may be `block` itself, which is not changed until it is stored."""

    def buffer(self, block: Bytes) -> Bytes:
        """Where the value of this block is to be read to: `block` itself where they are as long."""

    def decode(self, stored: Bytes, block: Bytes) -> None:
        """Fill `block` from the value that was read to `buffer(block)`. Raises TierCorrupt when it
        is not one of this codec's."""


class PlainCodec:
    """A block is stored as it is, and copied once."""

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

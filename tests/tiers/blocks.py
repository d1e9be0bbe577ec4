"""Made-up blocks for the tier tests: the identity follows from a number, and so do the bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache.tiers.disk_format import derive_key

NAMESPACE = bytes(range(32))


@dataclass(frozen=True, slots=True)
class Name:
    """An Identity."""

    namespace: bytes
    key: bytes
    parent: bytes
    tokens: bytes
    depth: int
    hits: int = 0


def name(
    number: int, *, namespace: bytes = NAMESPACE, parent: bytes = bytes(32), depth: int = 0
) -> Name:
    tokens = number.to_bytes(4, "little") * 16
    return Name(namespace, derive_key(namespace, parent, tokens), parent, tokens, depth)


def content(number: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, num_bytes, np.uint8)

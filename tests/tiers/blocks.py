"""Made-up blocks for the tier tests: the identity follows from a number, and so do the bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache.tiers.disk.disk_tier import DiskTier
from hicache.tiers.disk.format import derive_key
from hicache.tiers.restore_order import Scanned

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


@dataclass(frozen=True, slots=True)
class Row:
    """What a scan finds of a block."""

    namespace: bytes
    key: bytes
    parent: bytes
    tokens: bytes
    block_bytes: int
    hits: int = 0
    used_s: int = 0


def scanned(rows: Sequence[Row]) -> Scanned:
    """Rows of one namespace and size as a scan gives them."""
    return Scanned(
        rows[0].namespace,
        rows[0].block_bytes,
        len(rows[0].tokens),
        b"".join(row.key for row in rows),
        b"".join(row.parent for row in rows),
        b"".join(row.tokens for row in rows),
        np.array([row.hits for row in rows], np.uint32),
        np.array([row.used_s for row in rows], np.uint32),
    )


def rows_of(scans: Iterable[Scanned]) -> list[Row]:
    """The other way."""
    return [
        Row(
            some.namespace,
            some.keys[32 * at : 32 * at + 32],
            some.parents[32 * at : 32 * at + 32],
            some.tokens[some.step * at : some.step * (at + 1)],
            some.block_bytes,
            int(some.hits[at]),
            int(some.used_s[at]),
        )
        for some in scans
        for at in range(len(some))
    ]


def listed(tier: DiskTier) -> list[Row]:
    """What is stored, by key."""
    return sorted(rows_of(tier.scan()), key=lambda row: row.key)

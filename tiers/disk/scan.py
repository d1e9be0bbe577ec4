"""Reads the rows of an environment's `meta` in columns, without the blocks' bytes.

A million rows must be read within seconds, so only the checksum and the key are computed row by
row. All else is checked in arrays of a thousand rows. Called by `DiskTier.scan`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import lmdb
import numpy as np
import numpy.typing as npt
import xxhash

from hicache.tiers.block import PAGE_BYTES
from hicache.tiers.disk.environment import Environment, typed
from hicache.tiers.disk.format import CHECK_BYTES, FIELDS, MAGIC, refuse_format, unpack_use
from hicache.tiers.errors import TierDamaged
from hicache.tiers.restore_order import Scanned

CHUNK_ROWS = 1000
_FIXED_BYTES = FIELDS.itemsize
_START = {name: offset for name, (_, offset, *_) in (FIELDS.fields or {}).items()}
_NAMESPACE = slice(_START["namespace"], _START["namespace"] + 32)
_KEY = slice(_START["key"], _START["key"] + 32)
_PARENT = slice(_START["parent"], _START["parent"] + 32)
_TOKENS = slice(_FIXED_BYTES, -CHECK_BYTES)
_Table = npt.NDArray[np.void]


class Scan:
    """One pass over an environment. At its end `bad` holds the key and content of every invalid
    row."""

    def __init__(self, opened: Environment, slot_bytes: int) -> None:
        self.bad: list[tuple[bytes, bytes]] = []
        self._opened, self._slot_bytes = opened, slot_bytes

    def rows(self) -> Iterator[Scanned]:
        """All valid rows. Raises TierDamaged when keys do not rise: a damaged tree may have a cycle
        and show a page again and again."""
        last = b""
        waiting: dict[int, list[bytes]] = {}  # by length
        opened = self._opened
        with (
            typed("scan", opened.env.path()),
            opened.env.begin() as txn,
            txn.cursor(db=opened.meta) as cursor,
        ):
            has_uses = txn.stat(opened.usage)["entries"] > 0
            for key, packed in cursor:
                if key <= last:
                    raise TierDamaged("scan: the keys of its tree are out of order")
                last = key
                if not _is_whole(key, packed):
                    self.bad.append((key, packed))
                    continue
                alike = waiting.setdefault(len(packed), [])
                alike.append(packed)
                if len(alike) == CHUNK_ROWS:
                    yield from self._in_columns(waiting.pop(len(packed)), txn if has_uses else None)
            for alike in waiting.values():
                yield from self._in_columns(alike, txn if has_uses else None)

    def _in_columns(self, packed: list[bytes], txn: lmdb.Transaction | None) -> Iterator[Scanned]:
        """Rows of one length, grouped by namespace and block size."""
        step = len(packed[0]) - _FIXED_BYTES - CHECK_BYTES
        whole = np.dtype([("fixed", FIELDS), ("tokens", f"V{step}"), ("check", f"V{CHECK_BYTES}")])
        table = np.frombuffer(b"".join(packed), whole)
        fixed = table["fixed"]
        refuse_format(fixed["version"][fixed["magic"] == MAGIC])
        pages = -(-fixed["block_bytes"].astype(np.int64) // PAGE_BYTES)
        is_ours = (
            (fixed["magic"] == MAGIC)
            & (fixed["token_bytes"] == step)
            & (pages == self._slot_bytes // PAGE_BYTES)
            & (step >= 4 and step % 4 == 0)
        )
        if not is_ours.all():
            self.bad += [(packed[at][_KEY], packed[at]) for at in np.flatnonzero(~is_ours).tolist()]
            table = table[is_ours]
        while len(table):
            fixed = table["fixed"]
            is_alike = fixed["namespace"] == fixed["namespace"][0]
            is_alike &= fixed["block_bytes"] == fixed["block_bytes"][0]
            alike, table = table[is_alike], table[~is_alike]
            yield self._scanned(alike, step, txn)

    def _scanned(self, table: _Table, step: int, txn: lmdb.Transaction | None) -> Scanned:
        fixed = table["fixed"]
        keys = fixed["key"].tobytes()
        hits = fixed["hits"].astype(np.uint32)
        used_s = np.clip(np.nan_to_num(fixed["created_s"]), 0, 2**32 - 1).astype(np.uint32)
        if txn is not None:
            for at in range(len(table)):
                noted = txn.get(keys[32 * at : 32 * at + 32], db=self._opened.usage)
                use = unpack_use(None if noted is None else bytes(noted))
                if use is not None:
                    hits[at], used_s[at] = max(int(hits[at]), use[0]), use[1]
        return Scanned(
            fixed["namespace"][0].tobytes(),
            int(fixed["block_bytes"][0]),
            step,
            keys,
            fixed["parent"].tobytes(),
            table["tokens"].tobytes(),
            hits,
            used_s,
        )


def _is_whole(key: bytes, packed: bytes) -> bool:
    """Whether a row is long enough, matches its checksum, and belongs under this key."""
    if len(packed) < _FIXED_BYTES + CHECK_BYTES:
        return False
    if xxhash.xxh3_64_intdigest(packed[:-CHECK_BYTES]) != _number(packed[-CHECK_BYTES:]):
        return False
    named = packed[_NAMESPACE] + packed[_PARENT] + packed[_TOKENS]
    return key == packed[_KEY] == hashlib.blake2b(named, digest_size=32).digest()


def _number(packed: bytes) -> int:
    return int.from_bytes(packed, "little")

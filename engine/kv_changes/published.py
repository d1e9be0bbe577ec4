"""What has been published of each block: its tiers and its key.

Arrays by block id: `tiers` (a bit set), the block's key and its namespace, 38 bytes a block. A row
changes when its block is published, and when its id is freed. Keys are computed when first needed;
if a block has one, all blocks above it have one.

Owned by `hicache.engine.kv_changes.diff`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from hicache.engine.index.node import Node
from hicache.engine.requests.block_keys import ROOT_KEY, keys_along
from hicache.engine.residency.copies import Namespace
from hicache.tiers.block import Ids

Bits = npt.NDArray[np.uint8]
KEY_BYTES: Final = len(ROOT_KEY)
MAX_SCANNED: Final = 1 << 18
"""Ids scanned for one page, of all namespaces."""
_AT_A_TIME: Final = 256


class PublishedPage(msgspec.Struct, frozen=True):
    """Some of the published blocks: `keys`, 32 bytes each, and `tiers`, a bit set of one byte each.
    `next`: the next page's `after`, None at the end."""

    keys: bytes
    tiers: bytes
    next: int | None


class Gone(msgspec.Struct, frozen=True):
    """Blocks that no longer exist, and are published as held in `tiers`."""

    namespace: bytes
    tiers: Bits
    keys: npt.NDArray[np.uint8]


class PublishedBlocks:
    """`tiers` is read by `Changes`, and written only here."""

    def __init__(self) -> None:
        self.tiers: Bits = np.empty(0, np.uint8)
        self._has_key = np.empty(0, np.bool_)
        self._of = np.empty(0, np.int32)
        self._keys = np.empty((0, KEY_BYTES), np.uint8)
        self._digests: dict[int, bytes] = {}
        self._numbers: dict[bytes, int] = {}

    def grow(self, size: int) -> None:
        """Extend the arrays to `size` ids. New rows take no memory until they are used."""
        known = len(self.tiers)
        if size == known:
            return
        for name in ("tiers", "_has_key", "_of", "_keys"):
            old = getattr(self, name)
            new = np.zeros((size, *old.shape[1:]), old.dtype)
            new[:known] = old
            setattr(self, name, new)

    def note(self, blocks: Ids, digest: bytes, came: int, left: int) -> None:
        """Record that these were published as stored in `came` and removed from `left`. All had the
        same published tiers before."""
        self.tiers[blocks] = (int(self.tiers[blocks[0]]) | came) & ~left
        self._of[blocks] = self._number_of(digest)

    def drop(self, ids: Ids) -> Iterator[Gone]:
        """Clear the rows of freed ids. Returns the blocks among them that were published, in
        pieces."""
        if not len(ids):
            return
        published = ids[self.tiers[ids] != 0]
        for number in np.unique(self._of[published]).tolist():
            mine = published[self._of[published] == number]
            for start in range(0, len(mine), _AT_A_TIME):
                some = mine[start : start + _AT_A_TIME]
                yield Gone(self._digests[number], self.tiers[some], self._keys[some])
        self.tiers[ids] = 0
        self._has_key[ids] = False

    def page(self, digest: bytes, after: int, most: int) -> PublishedPage:
        """Published blocks of a namespace, from id `after` on, at most `most`. A page may be empty
        without being the last."""
        number = self._numbers.get(digest)
        if number is None or after >= len(self.tiers):
            return PublishedPage(b"", b"", None)
        end = min(after + MAX_SCANNED, len(self.tiers))
        is_held = (self.tiers[after:end] != 0) & (self._of[after:end] == number)
        found = np.flatnonzero(is_held)[:most] + after
        if len(found) == most:
            end = int(found[-1]) + 1
        keys, tiers = self._keys[found].tobytes(), self.tiers[found].tobytes()
        return PublishedPage(keys, tiers, end if end < len(self.tiers) else None)

    def forget_idle(self, busy: set[bytes]) -> list[bytes]:
        """Delete the namespaces without published blocks, except those in `busy`. Returns them."""
        held = set(np.unique(self._of[self.tiers != 0]).tolist())
        idle = [n for n, digest in self._digests.items() if n not in held and digest not in busy]
        digests = [self._digests.pop(number) for number in idle]
        for digest in digests:
            del self._numbers[digest]
        return digests

    def _number_of(self, digest: bytes) -> int:
        """This table's number for a namespace; the cache engine's may be used for another later."""
        number = self._numbers.get(digest)
        if number is None:
            number = next(n for n in range(len(self._digests) + 1) if n not in self._digests)
            self._numbers[digest] = number
            self._digests[number] = digest
        return number

    # --- keys -----------------------------------------------------------------------------------

    def key_before(self, node: Node, place: int) -> bytes:
        """The key of the block before this place of a node; that block must have one."""
        before = block_before(node, place)
        return ROOT_KEY if before is None else self._key_of(before)

    def keys_of(self, node: Node, place: int, blocks: Ids, namespace: Namespace) -> list[bytes]:
        """The keys of consecutive blocks of a node; missing ones are computed."""
        if self._has_key[blocks[-1]]:
            return split_keys(self._keys[blocks])
        before = block_before(node, place)
        if before is not None and not self._has_key[before]:
            self._key(node, node.block_ids()[:place], namespace)
        known = int(np.count_nonzero(self._has_key[blocks]))
        front = split_keys(self._keys[blocks[:known]])
        parent = front[-1] if front else self.key_before(node, place)
        symbols = node.symbols(namespace.step, place + known, place + len(blocks))
        keys = keys_along(namespace.digest, parent, symbols, namespace.step)
        self._keys[blocks[known:]] = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
        self._has_key[blocks[known:]] = True
        return front + keys

    def _key(self, node: Node, ids: Ids, namespace: Namespace) -> None:
        """Compute the keys of these first blocks of a node, and of all blocks above it."""
        path = [node]
        while (above := path[-1].parent) is not None and not above.is_root:
            if self._has_key[int(above.block_ids()[-1])]:
                break
            path.append(above)
        for part in reversed(path):
            mine = ids if part is node else part.block_ids()
            if len(mine):
                self.keys_of(part, 0, mine, namespace)

    def _key_of(self, block: int) -> bytes:
        key: bytes = self._keys[block].tobytes()
        return key


def block_before(node: Node, place: int) -> int | None:
    """The block before this place of a node, None at the root."""
    if not place:
        above = node.parent
        if above is None or above.is_root:
            return None
        node, place = above, len(above)
    span = node.span
    return int(span.start + place - 1 if isinstance(span, slice) else span[place - 1])


def split_keys(keys: npt.NDArray[np.uint8]) -> list[bytes]:
    """An array of key bytes as a list of keys."""
    packed = keys.tobytes()
    return [packed[start : start + KEY_BYTES] for start in range(0, len(packed), KEY_BYTES)]

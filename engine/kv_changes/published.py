"""What was told of each block: in which tiers it is held, and its key.

By block id, beside the table of blocks: `told` (a bit for each tier), the block's key and its
namespace, 38 bytes a block. A row changes when something is told of its block, and when the id is
given back. Keys are computed when they are first needed; whatever block has one, all above it have.

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
"""Ids looked at for one page, whoever's they are."""
_AT_A_TIME: Final = 256


class PublishedPage(msgspec.Struct, frozen=True):
    """Some of the blocks that were told as held: `keys`, 32 bytes each, and `tiers`, a byte with a
    bit for each tier. `next`: where the next page begins, None behind the last."""

    keys: bytes
    tiers: bytes
    next: int | None


class Gone(msgspec.Struct, frozen=True):
    """Blocks that are no more, and were told as held in `tiers`."""

    namespace: bytes
    tiers: Bits
    keys: npt.NDArray[np.uint8]


class Shadow:
    """`told` is read by `Changes`, and written here."""

    def __init__(self) -> None:
        self.told: Bits = np.empty(0, np.uint8)
        self._has_key = np.empty(0, np.bool_)
        self._of = np.empty(0, np.int32)
        self._keys = np.empty((0, KEY_BYTES), np.uint8)
        self._digests: dict[int, bytes] = {}
        self._numbers: dict[bytes, int] = {}

    def grow(self, size: int) -> None:
        """As many rows as there are ids. Zeros are not touched before they are used."""
        known = len(self.told)
        if size == known:
            return
        for name in ("told", "_has_key", "_of", "_keys"):
            old = getattr(self, name)
            new = np.zeros((size, *old.shape[1:]), old.dtype)
            new[:known] = old
            setattr(self, name, new)

    def note(self, blocks: Ids, digest: bytes, came: int, left: int) -> None:
        """It was told that these came to and left these tiers; all were told alike before."""
        self.told[blocks] = (int(self.told[blocks[0]]) | came) & ~left
        self._of[blocks] = self._number_of(digest)

    def drop(self, ids: Ids) -> Iterator[Gone]:
        """These ids were given back, whatever they name by now. What was told as held of them is
        gone, in pieces."""
        if not len(ids):
            return
        told = ids[self.told[ids] != 0]
        for number in np.unique(self._of[told]).tolist():
            mine = told[self._of[told] == number]
            for start in range(0, len(mine), _AT_A_TIME):
                some = mine[start : start + _AT_A_TIME]
                yield Gone(self._digests[number], self.told[some], self._keys[some])
        self.told[ids] = 0
        self._has_key[ids] = False

    def page(self, digest: bytes, after: int, most: int) -> PublishedPage:
        """What was told as held of a namespace, from id `after` on; at most so many blocks. May be
        empty and not the last."""
        number = self._numbers.get(digest)
        if number is None or after >= len(self.told):
            return PublishedPage(b"", b"", None)
        end = min(after + MAX_SCANNED, len(self.told))
        is_held = (self.told[after:end] != 0) & (self._of[after:end] == number)
        found = np.flatnonzero(is_held)[:most] + after
        if len(found) == most:
            end = int(found[-1]) + 1
        keys, tiers = self._keys[found].tobytes(), self.told[found].tobytes()
        return PublishedPage(keys, tiers, end if end < len(self.told) else None)

    def forget_idle(self, busy: set[bytes]) -> list[bytes]:
        """Forget the namespaces of which nothing is told as held, but for these. Returns them."""
        held = set(np.unique(self._of[self.told != 0]).tolist())
        idle = [n for n, digest in self._digests.items() if n not in held and digest not in busy]
        digests = [self._digests.pop(number) for number in idle]
        for digest in digests:
            del self._numbers[digest]
        return digests

    def _number_of(self, digest: bytes) -> int:
        """A number of its own: a namespace's number in the engine may be given to another."""
        number = self._numbers.get(digest)
        if number is None:
            number = next(n for n in range(len(self._digests) + 1) if n not in self._digests)
            self._numbers[digest] = number
            self._digests[number] = digest
        return number

    # --- keys -----------------------------------------------------------------------------------

    def key_before(self, node: Node, place: int) -> bytes:
        """The key of the block before this place of a node, which has one."""
        before = block_before(node, place)
        return ROOT_KEY if before is None else self._key_of(before)

    def keys_of(self, node: Node, place: int, blocks: Ids, namespace: Namespace) -> list[bytes]:
        """The keys of consecutive blocks of a node. Whatever has one, all above it have."""
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
        """Know the keys of these first blocks of a node, hence those of all above it."""
        path = [node]
        while (above := path[-1].parent) is not None and not above.is_root:
            if self._has_key[int(above.block_ids()[-1])]:
                break
            path.append(above)
        for due in reversed(path):
            mine = ids if due is node else due.block_ids()
            if len(mine):
                self.keys_of(due, 0, mine, namespace)

    def _key_of(self, block: int) -> bytes:
        key: bytes = self._keys[block].tobytes()
        return key


def block_before(node: Node, place: int) -> int | None:
    """The block before this place of a node, None before the first of all."""
    if not place:
        above = node.parent
        if above is None or above.is_root:
            return None
        node, place = above, len(above)
    span = node.span
    return int(span.start + place - 1 if isinstance(span, slice) else span[place - 1])


def split_keys(keys: npt.NDArray[np.uint8]) -> list[bytes]:
    """Rows of key bytes as keys."""
    packed = keys.tobytes()
    return [packed[start : start + KEY_BYTES] for start in range(0, len(packed), KEY_BYTES)]

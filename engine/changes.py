"""Which blocks came to be held in which tier, and which are gone: for somebody outside who keeps a
copy of the index.

Nothing is noted while nobody listens. Meanwhile a shadow of what was told stands beside the blocks'
tags, and what differs is told, so many blocks at a time:

    tags      dram     dram+disk   disk        -
    told      -        dram        dram+disk   disk
    to tell   stored   stored      removed     removed
              dram     disk        dram        disk

Whatever happened to a block between two looks comes down to one difference, so a backlog is never
larger than the index. Three things need care:

1. An id that was given back may name another block a moment later. It is told as gone before
   anything is told as stored, and its key (32 bytes a block, kept while somebody listens) is still
   the old one's.
2. Who listens builds a tree: a block is told after its ancestors.
3. Somebody joins later: everything that is held is told `again`. For the others that is no news.

Owned by the daemon's one loop; `take` is called once a tick.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from hicache.engine.identity import ROOT_KEY, keys_along
from hicache.engine.ids import ids_of
from hicache.engine.node import Node
from hicache.engine.residency import Namespace, Residency
from hicache.tiers.block import Ids

Bits = npt.NDArray[np.uint8]
KEY_BYTES: Final = len(ROOT_KEY)
_AT_A_TIME: Final = 512


class Stored(msgspec.Struct, frozen=True):
    """Consecutive blocks of one path can be read from `tier` now. `parent`: the key of the block
    before them, 32 zero bytes before a first one; `tokens`: their symbols."""

    namespace: bytes
    tier: str
    parent: bytes
    keys: list[bytes]
    tokens: bytes


class Removed(msgspec.Struct, frozen=True):
    """Blocks that cannot be read from `tier` any more."""

    namespace: bytes
    tier: str
    keys: list[bytes]


class _Gone(msgspec.Struct, frozen=True):
    """Blocks that are no more, and were told as held in `tiers`."""

    namespace: int
    tiers: Bits
    keys: npt.NDArray[np.uint8]


class Changes:
    """`listen` begins, `take` tells, `stop` ends and forgets."""

    def __init__(self, residency: Residency) -> None:
        self._house = residency
        self._digests: list[bytes] = []
        self._gone: deque[_Gone] = deque()
        self._forget()

    @property
    def is_listening(self) -> bool:
        return self._house.blocks.ids.given is not None

    def listen(self) -> None:
        """From now on; what is held already is told first, and told again if somebody listens."""
        if self.is_listening:
            self._grow()
            self._again |= self._told != 0
        else:
            self._house.blocks.ids.given = []

    def stop(self) -> None:
        """Nobody listens."""
        self._house.blocks.ids.given = None
        self._forget()

    def take(self, most: int) -> list[Stored | Removed]:
        """What is new of at most so many blocks; in this order. Empty: nothing is left to tell."""
        if not self.is_listening:
            return []
        self._grow()
        self._note_given()
        news: list[Stored | Removed] = []
        while self._gone and most > 0:
            gone = self._gone.popleft()
            news += self._removed(gone)
            most -= len(gone.keys)
        if self._gone:
            return news
        now = self._now()
        differs = (now != self._told) | self._again
        changed = np.flatnonzero(differs)[: max(most, 0)]
        house = self._house
        for number in np.unique(house.blocks.node[changed]).tolist():
            node = house.index.nodes[number]
            assert node is not None, "a block of no node has copies"
            for due in self._due(node, differs):
                if most <= 0:
                    return news
                ids = due.block_ids()
                places = np.flatnonzero(differs[ids])[:most].astype(np.int32)
                most -= len(places)
                news += self._differences(due, ids, places, now)
                told = ids[places]
                self._told[told] = now[told]
                self._again[told] = differs[told] = False
        return news

    def _due(self, node: Node, differs: npt.NDArray[np.bool_]) -> list[Node]:
        """The node, and before it its ancestors of which something is still to be told."""
        due = [node]
        above = node.parent
        while above is not None and not above.is_root and differs[above.span].any():
            due.append(above)
            above = above.parent
        due.reverse()
        return due

    def _differences(
        self, node: Node, ids: Ids, places: Ids, now: Bits
    ) -> Iterator[Stored | Removed]:
        """Of the blocks at these places of a node."""
        if not len(places):
            return
        namespace = self._house.namespace_of(node)
        self._key(node, ids[: int(places[-1]) + 1], namespace)
        blocks = ids[places]
        before, after = self._told[blocks], now[blocks]
        came = np.where(self._again[blocks], after, after & ~before)
        left = before & ~after
        is_cut = (np.diff(places) != 1) | (np.diff(came) != 0) | (np.diff(left) != 0)
        bounds = [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(places)]
        for first, last in pairwise(bounds):
            start = int(places[first])
            keys = [self._key_of(block) for block in blocks[first:last].tolist()]
            tokens = node.symbols(namespace.step, start, start + last - first)
            parent = self._key_before(node, ids, start)
            for name in self._names(int(left[first])):
                yield Removed(namespace.digest, name, keys)
            for name in self._names(int(came[first])):
                yield Stored(namespace.digest, name, parent, keys, tokens)
        self._of[blocks] = self._number_of(namespace.digest)

    def _key(self, node: Node, ids: Ids, namespace: Namespace) -> None:
        """Know the keys of these first blocks of a node, hence those of all above it."""
        path = [node]
        while (above := path[-1].parent) is not None and not above.is_root:
            if self._has_key[int(above.block_ids()[-1])]:
                break
            path.append(above)
        for due in reversed(path):
            mine = ids if due is node else due.block_ids()
            known = int(self._has_key[mine].sum())  # those in front
            if known < len(mine):
                symbols = due.symbols(namespace.step, known, len(mine))
                parent = self._key_before(due, mine, known)
                keys = keys_along(namespace.digest, parent, symbols, namespace.step)
                rows = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
                self._keys[mine[known:]] = rows
                self._has_key[mine[known:]] = True

    def _key_before(self, node: Node, ids: Ids, place: int) -> bytes:
        if place:
            return self._key_of(int(ids[place - 1]))
        above = node.parent
        if above is None or above.is_root:
            return ROOT_KEY
        return self._key_of(int(above.block_ids()[-1]))

    def _key_of(self, block: int) -> bytes:
        key: bytes = self._keys[block].tobytes()
        return key

    def _note_given(self) -> None:
        """Ids that were given back since the last look: what they named is gone."""
        given = self._house.blocks.ids.given
        assert given is not None
        for span in given:
            ids = ids_of(span)
            told = ids[self._told[ids] != 0]
            if len(told):
                self._note_gone(told)
            self._told[ids] = 0
            self._has_key[ids] = self._again[ids] = False
        given.clear()

    def _note_gone(self, ids: Ids) -> None:
        for number in np.unique(self._of[ids]).tolist():
            mine = ids[self._of[ids] == number]
            for start in range(0, len(mine), _AT_A_TIME):
                some = mine[start : start + _AT_A_TIME]
                self._gone.append(_Gone(number, self._told[some], self._keys[some]))

    def _removed(self, gone: _Gone) -> Iterator[Removed]:
        for tier, spec in enumerate(self._house.tiers):
            held = gone.keys[gone.tiers >> tier & 1 == 1]
            if len(held):
                keys = [row.tobytes() for row in held]
                yield Removed(self._digests[gone.namespace], spec.name, keys)

    def _names(self, tiers: int) -> list[str]:
        return [spec.name for tier, spec in enumerate(self._house.tiers) if tiers >> tier & 1]

    def _number_of(self, digest: bytes) -> int:
        """A namespace's number in the engine may be given to another."""
        if digest not in self._digests:
            self._digests.append(digest)
        return self._digests.index(digest)

    def _now(self) -> Bits:
        """The tiers that each block can be read from."""
        return (self._house.blocks.tags & 0xFF).astype(np.uint8)

    def _forget(self) -> None:
        self._gone.clear()
        self._digests.clear()
        self._told: Bits = np.empty(0, np.uint8)
        self._again = np.empty(0, np.bool_)
        self._has_key = np.empty(0, np.bool_)
        self._of = np.empty(0, np.int32)
        self._keys = np.empty((0, KEY_BYTES), np.uint8)

    def _grow(self) -> None:
        """As many rows as there are ids. Zeros are not touched before they are used."""
        size, known = len(self._house.blocks.tags), len(self._told)
        if size == known:
            return
        for name in ("_told", "_again", "_has_key", "_of", "_keys"):
            old = getattr(self, name)
            new = np.zeros((size, *old.shape[1:]), old.dtype)
            new[:known] = old
            setattr(self, name, new)

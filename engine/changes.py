"""Which blocks came to be held in which tier, and which are gone: for somebody outside who keeps a
copy of the index.

A shadow of what was told stands beside the blocks' tags, and what differs is told, so much at a
time:

    tags      dram     dram+disk   disk        -
    told      -        dram        dram+disk   disk
    to tell   stored   stored      removed     removed
              dram     disk        dram        disk

Whatever happened to a block between two looks comes down to one difference, so a backlog is never
larger than the index. Two things need care:

1. An id that was given back may name another block a moment later. It is told as gone before
   anything is told as stored, and its key (kept, 32 bytes a block) is still the old one's.
2. Who listens builds a tree: a block is told after its parent, where that is held.

Who comes later reads the shadow itself, page by page (`page`), while changes go on. Whatever is
told after its first page wins over the pages; a block of which nothing was told since stands in the
page of its id as it stood at the first. So what it knows in the end is what was told.

Owned by the daemon's one loop; `take` is called once a tick. Nothing is kept before `listen`.
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
from hicache.engine.node import Node
from hicache.engine.residency import Namespace, Residency
from hicache.tiers.block import Ids

Bits = npt.NDArray[np.uint8]
KEY_BYTES: Final = len(ROOT_KEY)
COPY_BYTES: Final = 64
"""What telling of one copy counts, besides its tokens: it is mostly the time for its key."""
MAX_SCANNED: Final = 1 << 18
"""Ids looked at for one page, whoever's they are."""
_AT_A_TIME: Final = 256
_NUM_TIERS: Final = np.array([bits.bit_count() for bits in range(256)], np.int64)


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


class Page(msgspec.Struct, frozen=True):
    """Some of the blocks that were told as held: `keys`, 32 bytes each, and `tiers`, a byte with a
    bit for each tier. `next`: where the next page begins, None behind the last."""

    keys: bytes
    tiers: bytes
    next: int | None


class _Gone(msgspec.Struct, frozen=True):
    """Blocks that are no more, and were told as held in `tiers`."""

    namespace: bytes
    tiers: Bits
    keys: npt.NDArray[np.uint8]


class Changes:
    """`listen` begins, `take` tells, `page` tells what has been told."""

    def __init__(self, residency: Residency) -> None:
        self._house = residency
        self._digests: dict[int, bytes] = {}
        self._numbers: dict[bytes, int] = {}
        self._gone: deque[_Gone] = deque()
        self._from = 0
        self._told: Bits = np.empty(0, np.uint8)
        self._has_key = np.empty(0, np.bool_)
        self._of = np.empty(0, np.int32)
        self._keys = np.empty((0, KEY_BYTES), np.uint8)

    @property
    def is_listening(self) -> bool:
        return self._house.blocks.ids.given is not None

    def listen(self) -> None:
        """From now on; what is held already is told first."""
        if not self.is_listening:
            self._house.blocks.ids.mark_given()

    def take(self, most_bytes: int) -> list[Stored | Removed]:
        """What is new, in this order; empty where nothing is left to tell. A copy counts COPY_BYTES
        and, where it came, its tokens; at least one block is told, whatever it counts."""
        if not self.is_listening:
            return []
        self._grow()
        self._note_given()
        news: list[Stored | Removed] = []
        left_bytes = most_bytes
        while self._gone and left_bytes > 0:
            gone = self._gone.popleft()
            news += self._removed(gone)
            left_bytes -= COPY_BYTES * int(_NUM_TIERS[gone.tiers].sum())
        if left_bytes > 0:
            news += self._changed(left_bytes)
        return news

    def num_pending(self) -> int:
        """Blocks of which something is still to be told. Looks at all of them."""
        if not self.is_listening:
            return 0
        self._grow()
        differing = int(np.count_nonzero(self._now() != self._told))
        return differing + sum(len(gone.keys) for gone in self._gone)

    def page(self, digest: bytes, after: int, most: int) -> Page:
        """What was told as held of a namespace, from id `after` on; at most so many blocks. May be
        empty and not the last."""
        number = self._numbers.get(digest)
        if number is None or after >= len(self._told):
            return Page(b"", b"", None)
        end = min(after + MAX_SCANNED, len(self._told))
        is_held = (self._told[after:end] != 0) & (self._of[after:end] == number)
        found = np.flatnonzero(is_held)[:most] + after
        if len(found) == most:
            end = int(found[-1]) + 1
        keys, tiers = self._keys[found].tobytes(), self._told[found].tobytes()
        return Page(keys, tiers, end if end < len(self._told) else None)

    def forget_idle(self) -> list[bytes]:
        """Forget the namespaces of which nothing is told as held, and nothing told as gone is
        waiting. Returns them."""
        busy = set(np.unique(self._of[self._told != 0]).tolist())
        busy |= {self._numbers[gone.namespace] for gone in self._gone}
        idle = [number for number in self._digests if number not in busy]
        digests = [self._digests.pop(number) for number in idle]
        for digest in digests:
            del self._numbers[digest]
        return digests

    # --- what changed ---------------------------------------------------------------------------

    def _changed(self, left_bytes: int) -> list[Stored | Removed]:
        """Of the blocks there are, so much. Goes on next time where it stopped: no block waits for
        ever behind others that keep changing."""
        house = self._house
        now = self._now()
        differs = now != self._told
        changed = np.flatnonzero(differs)
        most = left_bytes // COPY_BYTES + 1
        start = int(np.searchsorted(changed, self._from))
        some = np.concatenate((changed[start : start + most], changed[:start]))[:most]
        numbers, first = np.unique(house.blocks.node[some], return_index=True)
        news: list[Stored | Removed] = []
        for place in np.argsort(first).tolist():
            node = house.index.nodes[numbers[place]]
            assert node is not None, "a block of no node has copies"
            for due in self._due(node, now):
                if left_bytes <= 0:
                    self._from = int(some[first[place]])
                    return news
                ids = due.block_ids()
                places = np.flatnonzero(differs[ids]).astype(np.int32)
                places = places[: max(most, 1)]
                costs = self._costs(ids[places], now, self._house.namespace_of(due).step)
                ends = np.cumsum(costs)
                fit = int(np.searchsorted(ends, left_bytes, "right"))
                num_told = min(len(places), max(fit, 0 if news else 1))
                if num_told:
                    news += self._differences(due, ids, places[:num_told], now)
                    told = ids[places[:num_told]]
                    self._told[told] = now[told]
                    differs[told] = False
                    left_bytes -= int(ends[num_told - 1])
                if num_told < len(places):
                    self._from = int(some[first[place]])
                    return news
        self._from = int(some[-1]) + 1 if len(some) else 0
        return news

    def _costs(self, blocks: Ids, now: Bits, step: int) -> npt.NDArray[np.int64]:
        """What telling of each of these blocks counts."""
        before, after = self._told[blocks], now[blocks]
        num_came, num_left = _NUM_TIERS[after & ~before], _NUM_TIERS[before & ~after]
        costs: npt.NDArray[np.int64] = num_came * (COPY_BYTES + step) + num_left * COPY_BYTES
        return costs

    def _due(self, node: Node, now: Bits) -> list[Node]:
        """The node, and before it those of its ancestors that must be told first."""
        due = [node]
        above = node.parent
        while above is not None and not above.is_root:
            last = int(above.block_ids()[-1])
            if self._told[last] or not now[last]:
                break
            due.append(above)
            above = above.parent
        due.reverse()
        return due

    def _differences(
        self, node: Node, ids: Ids, places: Ids, now: Bits
    ) -> Iterator[Stored | Removed]:
        """Of the blocks at these places of a node, at least one."""
        namespace = self._house.namespace_of(node)
        self._key(node, ids[: int(places[-1]) + 1], namespace)
        blocks = ids[places]
        before, after = self._told[blocks], now[blocks]
        came, left = after & ~before, before & ~after
        is_cut = (np.diff(places) != 1) | (np.diff(came) != 0) | (np.diff(left) != 0)
        bounds = [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(places)]
        for first, last in pairwise(bounds):
            start = int(places[first])
            keys = _split(self._keys[blocks[first:last]])
            for name in self._names(int(left[first])):
                yield Removed(namespace.digest, name, keys)
            if came[first]:
                tokens = node.symbols(namespace.step, start, start + last - first)
                parent = self._key_before(node, ids, start)
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

    # --- what is gone ---------------------------------------------------------------------------

    def _note_given(self) -> None:
        """Ids that were given back since the last look: what they named is gone."""
        given = self._house.blocks.ids.given
        assert given is not None
        ids = np.flatnonzero(given)
        if not len(ids):
            return
        told = ids[self._told[ids] != 0]
        for number in np.unique(self._of[told]).tolist():
            mine = told[self._of[told] == number]
            for start in range(0, len(mine), _AT_A_TIME):
                some = mine[start : start + _AT_A_TIME]
                self._gone.append(_Gone(self._digests[number], self._told[some], self._keys[some]))
        self._told[ids] = 0
        self._has_key[ids] = False
        given[ids] = False

    def _removed(self, gone: _Gone) -> Iterator[Removed]:
        for tier, spec in enumerate(self._house.tiers):
            held = gone.keys[gone.tiers >> tier & 1 == 1]
            if len(held):
                yield Removed(gone.namespace, spec.name, _split(held))

    # --- the shadow -----------------------------------------------------------------------------

    def _names(self, tiers: int) -> list[str]:
        return [spec.name for tier, spec in enumerate(self._house.tiers) if tiers >> tier & 1]

    def _number_of(self, digest: bytes) -> int:
        """A number of its own: a namespace's number in the engine may be given to another."""
        number = self._numbers.get(digest)
        if number is None:
            number = next(n for n in range(len(self._digests) + 1) if n not in self._digests)
            self._numbers[digest] = number
            self._digests[number] = digest
        return number

    def _now(self) -> Bits:
        """The tiers that each block can be read from."""
        return self._house.blocks.tags.astype(np.uint8)

    def _grow(self) -> None:
        """As many rows as there are ids. Zeros are not touched before they are used."""
        size, known = len(self._house.blocks.tags), len(self._told)
        if size == known:
            return
        for name in ("_told", "_has_key", "_of", "_keys"):
            old = getattr(self, name)
            new = np.zeros((size, *old.shape[1:]), old.dtype)
            new[:known] = old
            setattr(self, name, new)


def _split(keys: npt.NDArray[np.uint8]) -> list[bytes]:
    """Rows of key bytes as keys."""
    packed = keys.tobytes()
    return [packed[start : start + KEY_BYTES] for start in range(0, len(packed), KEY_BYTES)]

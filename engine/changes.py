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
RUN_BYTES: Final = 512
"""What telling of consecutive blocks counts besides, however few they are."""
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


class _Run(msgspec.Struct, frozen=True):
    """Consecutive blocks of a node, from `place` on, that came to and left the same tiers."""

    node: Node
    place: int
    blocks: Ids
    came: int
    left: int


class Changes:
    """`listen` begins, `take` tells, `page` tells what has been told."""

    def __init__(self, residency: Residency) -> None:
        self._house = residency
        self._digests: dict[int, bytes] = {}
        self._numbers: dict[bytes, int] = {}
        self._gone: deque[_Gone] = deque()
        self._from = 0
        self._left_bytes = 0
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
        and, where it came, its tokens, a run of blocks RUN_BYTES; at least one block is told,
        whatever it counts."""
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

    def _changed(self, left_bytes: int) -> Iterator[Stored | Removed]:
        """Of the blocks there are, so much. Goes on next time where it stopped: no block waits for
        ever behind others that keep changing."""
        now = self._now()
        changed = np.flatnonzero(now != self._told)
        start = int(np.searchsorted(changed, self._from))
        most = left_bytes // COPY_BYTES + 1
        some = np.concatenate((changed[start : start + most], changed[:start]))[:most]
        self._left_bytes = left_bytes
        for run in self._runs(some, now):
            for due in self._due(run, now) if run.came else ():
                yield from self._tell_node(due, now)
            first = run.blocks[0]
            if self._left_bytes > 0 and self._told[first] != now[first]:  # it was not among those
                yield from self._tell_run(run)
            if self._left_bytes <= 0:
                rest = run.blocks[self._told[run.blocks] != now[run.blocks]]
                self._from = int(rest[0]) if len(rest) else int(run.blocks[-1]) + 1
                return
        self._from = int(some[-1]) + 1 if len(some) else 0

    def _runs(self, blocks: Ids, now: Bits) -> Iterator[_Run]:
        """These blocks, put together where they are consecutive and changed alike; node by node,
        as the nodes come first, and each from its front."""
        if not len(blocks):
            return
        table, nodes = self._house.blocks, self._house.index.nodes
        numbers = table.node[blocks]
        _, first, of = np.unique(numbers, return_index=True, return_inverse=True)
        depths = table.depth[blocks]
        order = np.lexsort((depths, first[of]))
        blocks, numbers, depths = blocks[order], numbers[order], depths[order]
        before, after = self._told[blocks], now[blocks]
        came, left = after & ~before, before & ~after
        is_cut = (np.diff(numbers) != 0) | (np.diff(depths) != 1)
        is_cut |= (np.diff(came) != 0) | (np.diff(left) != 0)
        starts = np.concatenate(([0], np.flatnonzero(is_cut) + 1))
        ends = np.append(starts[1:], len(blocks)).tolist()
        rows = zip(
            starts.tolist(),
            ends,
            numbers[starts].tolist(),
            depths[starts].tolist(),
            came[starts].tolist(),
            left[starts].tolist(),
            strict=True,
        )
        for start, end, number, depth, has_come, has_left in rows:
            node = nodes[number]
            assert node is not None, "a block of no node has copies"
            yield _Run(node, depth - node.depth, blocks[start:end], has_come, has_left)

    def _due(self, run: _Run, now: Bits) -> list[Node]:
        """The nodes of which something must be told before this run: those in front of it whose
        last block can be read and was not told of."""
        due: list[Node] = []
        node, place = run.node, run.place
        while not self._is_known(node, place, now):
            if not place:
                assert node.parent is not None
                node = node.parent
            due.append(node)
            place = 0
        due.reverse()
        return due

    def _is_known(self, node: Node, place: int, now: Bits) -> bool:
        """Whether the block before this place of a node was told of, or need not be."""
        before = _before(node, place)
        return before is None or bool(self._told[before]) or not now[before]

    def _tell_node(self, node: Node, now: Bits) -> Iterator[Stored | Removed]:
        ids = node.block_ids()
        for run in self._runs(ids[self._told[ids] != now[ids]], now):
            if self._left_bytes > 0:
                yield from self._tell_run(run)

    def _tell_run(self, run: _Run) -> Iterator[Stored | Removed]:
        """So much of it as may be told, and at least one block."""
        namespace = self._house.namespace_of(run.node)
        num_came, num_left = run.came.bit_count(), run.left.bit_count()
        cost_bytes = num_came * (COPY_BYTES + namespace.step) + num_left * COPY_BYTES
        room = max(1, (self._left_bytes - RUN_BYTES) // cost_bytes)
        blocks = run.blocks[:room]
        self._left_bytes -= RUN_BYTES + len(blocks) * cost_bytes
        end = run.place + len(blocks)
        keys = self._keys_of(run.node, run.place, blocks, namespace)
        for name in self._names(run.left):
            yield Removed(namespace.digest, name, keys)
        if run.came:
            tokens = run.node.symbols(namespace.step, run.place, end)
            before = _before(run.node, run.place)
            parent = ROOT_KEY if before is None else self._key_of(before)
            for name in self._names(run.came):
                yield Stored(namespace.digest, name, parent, keys, tokens)
        self._of[blocks] = self._number_of(namespace.digest)
        self._told[blocks] = (int(self._told[blocks[0]]) | run.came) & ~run.left

    # --- keys -----------------------------------------------------------------------------------

    def _keys_of(self, node: Node, place: int, blocks: Ids, namespace: Namespace) -> list[bytes]:
        """The keys of consecutive blocks of a node. Whatever has one, all above it have."""
        if self._has_key[blocks[-1]]:
            return _split(self._keys[blocks])
        before = _before(node, place)
        if before is not None and not self._has_key[before]:
            self._key(node, node.block_ids()[:place], namespace)
        known = int(np.count_nonzero(self._has_key[blocks]))
        front = _split(self._keys[blocks[:known]])
        parent = front[-1] if front else ROOT_KEY if before is None else self._key_of(before)
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
                self._keys_of(due, 0, mine, namespace)

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


def _before(node: Node, place: int) -> int | None:
    """The block before this place of a node, None before the first of all."""
    if not place:
        above = node.parent
        if above is None or above.is_root:
            return None
        node, place = above, len(above)
    return int(node.span.start + place - 1 if isinstance(node.span, slice) else node.span[place - 1])


def _split(keys: npt.NDArray[np.uint8]) -> list[bytes]:
    """Rows of key bytes as keys."""
    packed = keys.tobytes()
    return [packed[start : start + KEY_BYTES] for start in range(0, len(packed), KEY_BYTES)]

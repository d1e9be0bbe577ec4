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

1. An id that was given back may name another block a moment later. The block that it named is told
   as gone before anything is told as stored, by its key, which the shadow still has.
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

from hicache.engine.index.node import Node
from hicache.engine.kv_changes.published import (
    Bits,
    Gone,
    PublishedPage,
    Shadow,
    block_before,
    split_keys,
)
from hicache.engine.residency.copies import Residency
from hicache.tiers.block import Ids

COPY_BYTES: Final = 64
"""What telling of a copy that came counts, besides its tokens: mostly the time for its key."""
GONE_BYTES: Final = 16
"""Of one that left: its key is known."""
RUN_BYTES: Final = 512
"""What telling of consecutive blocks counts besides, however few they are."""
MAX_DROPPED: Final = 1 << 14
"""Ids at a time."""
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
        self._shadow = Shadow()
        self._gone: deque[Gone] = deque()
        self._from = 0
        self._left_bytes = 0

    @property
    def is_listening(self) -> bool:
        return self._house.blocks.ids.given is not None

    def listen(self) -> None:
        """From now on; what is held already is told first."""
        if not self.is_listening:
            self._house.blocks.ids.mark_given()

    def take(self, most_bytes: int) -> list[Stored | Removed]:
        """What is new, in this order; empty where nothing is left to tell. A copy that came
        counts COPY_BYTES and its tokens, one that left GONE_BYTES, a run of blocks RUN_BYTES; at
        least one block is told, whatever it counts."""
        given = self._house.blocks.ids.given
        if given is None:
            return []
        self._shadow.grow(len(given))
        news: list[Stored | Removed] = []
        left_bytes = most_bytes
        while left_bytes > 0:
            if not self._gone:
                self._drop_given(given)
            if not self._gone:
                break
            gone = self._gone.popleft()
            news += self._removed(gone)
            left_bytes -= GONE_BYTES * int(_NUM_TIERS[gone.tiers].sum())
        if left_bytes > 0:
            news += self._changed(left_bytes)
        return news

    def num_pending(self) -> int:
        """Blocks of which something is still to be told. Looks at all of them."""
        if not self.is_listening:
            return 0
        now = self._now()
        self._shadow.grow(len(now))
        differing = int(np.count_nonzero(now != self._shadow.told))
        return differing + sum(len(gone.keys) for gone in self._gone)

    def page(self, digest: bytes, after: int, most: int) -> PublishedPage:
        """What was told as held of a namespace, from id `after` on; at most so many blocks. May be
        empty and not the last."""
        return self._shadow.page(digest, after, most)

    def forget_idle(self) -> list[bytes]:
        """Forget the namespaces of which nothing is told as held, and nothing that is gone is still
        to be told. Returns them."""
        return self._shadow.forget_idle({gone.namespace for gone in self._gone})

    def _drop_given(self, given: npt.NDArray[np.bool_]) -> None:
        """Look at ids that were given back until some of them had been told of. Those that are left
        for later are looked at before anything is told as stored."""
        if not given.any():
            return
        for start in range(0, len(given), MAX_DROPPED):
            ids = np.flatnonzero(given[start : start + MAX_DROPPED]).astype(np.int32) + start
            given[ids] = False
            self._gone += self._shadow.drop(ids)
            if self._gone:
                return

    def _removed(self, gone: Gone) -> Iterator[Removed]:
        for tier, spec in enumerate(self._house.tiers):
            held = gone.keys[gone.tiers >> tier & 1 == 1]
            if len(held):
                yield Removed(gone.namespace, spec.name, split_keys(held))

    # --- what changed ---------------------------------------------------------------------------

    def _changed(self, left_bytes: int) -> Iterator[Stored | Removed]:
        """Of the blocks there are, so much. Goes on next time where it stopped: no block waits for
        ever behind others that keep changing."""
        now = self._now()
        changed = np.flatnonzero(now != self._shadow.told).astype(np.int32)
        start = int(np.searchsorted(changed, self._from))
        most = left_bytes // GONE_BYTES + 1
        some = np.concatenate((changed[start : start + most], changed[:start]))[:most]
        self._left_bytes = left_bytes
        for run in self._runs(some, now):
            for due in self._due(run, now) if run.came else ():
                yield from self._tell_node(due, now)
            first = run.blocks[0]
            was_among_those = self._shadow.told[first] == now[first]
            if self._left_bytes > 0 and not was_among_those:
                yield from self._tell_run(run)
            if self._left_bytes <= 0:
                rest = run.blocks[self._shadow.told[run.blocks] != now[run.blocks]]
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
        before, after = self._shadow.told[blocks], now[blocks]
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
        before = block_before(node, place)
        return before is None or bool(self._shadow.told[before]) or not now[before]

    def _tell_node(self, node: Node, now: Bits) -> Iterator[Stored | Removed]:
        ids = node.block_ids()
        for run in self._runs(ids[self._shadow.told[ids] != now[ids]], now):
            if self._left_bytes > 0:
                yield from self._tell_run(run)

    def _tell_run(self, run: _Run) -> Iterator[Stored | Removed]:
        """So much of it as may be told, and at least one block."""
        namespace = self._house.namespace_of(run.node)
        num_came, num_left = run.came.bit_count(), run.left.bit_count()
        cost_bytes = num_came * (COPY_BYTES + namespace.step) + num_left * GONE_BYTES
        room = max(1, (self._left_bytes - RUN_BYTES) // cost_bytes)
        blocks = run.blocks[:room]
        self._left_bytes -= RUN_BYTES + len(blocks) * cost_bytes
        end = run.place + len(blocks)
        keys = self._shadow.keys_of(run.node, run.place, blocks, namespace)
        for name in self._names(run.left):
            yield Removed(namespace.digest, name, keys)
        if run.came:
            tokens = run.node.symbols(namespace.step, run.place, end)
            parent = self._shadow.key_before(run.node, run.place)
            for name in self._names(run.came):
                yield Stored(namespace.digest, name, parent, keys, tokens)
        self._shadow.note(blocks, namespace.digest, run.came, run.left)

    def _names(self, tiers: int) -> list[str]:
        return [spec.name for tier, spec in enumerate(self._house.tiers) if tiers >> tier & 1]

    def _now(self) -> Bits:
        """The tiers that each block can be read from."""
        return self._house.blocks.tags.astype(np.uint8)

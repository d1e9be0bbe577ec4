"""Which blocks were stored in which tier, and which were removed: for subscribers that keep a copy
of the index.

The published tiers of each block are kept beside its tags; `take` publishes the differences, a
limited amount at a time:

    tags        dram     dram+disk   disk        -
    published   -        dram        dram+disk   disk
    to publish  stored   stored      removed     removed
                dram     disk        dram        disk

All changes of a block between two calls become one difference, so a backlog is never larger than
the index. Two rules:

1. A freed id may soon be another block's. The removal of the earlier block is published, with its
   key from the published table, before anything is published as stored.
2. Subscribers build a tree: a block is published after its parent, where that is held.

A subscriber that starts later reads the published table page by page (`page`) while changes
continue. Changes published after its first page override the pages; a block without such a change
is in the page of its id as it was at the first page. So at the end it knows all that was published.

Owned by the daemon's one loop; `take` is called once a tick. Nothing is recorded before `listen`.
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
    PublishedBlocks,
    PublishedPage,
    block_before,
    split_keys,
)
from hicache.engine.residency.copies import Residency
from hicache.tiers.block import Ids

COPY_BYTES: Final = 64
"""The cost of publishing a stored copy, besides its tokens: mostly the time to compute its key."""
GONE_BYTES: Final = 16
"""The cost of publishing one removed copy: its key is known."""
RUN_BYTES: Final = 512
"""The cost of each run of consecutive blocks, in addition."""
MAX_DROPPED: Final = 1 << 14
"""Freed ids checked at a time."""
_NUM_TIERS: Final = np.array([bits.bit_count() for bits in range(256)], np.int64)


class Stored(msgspec.Struct, frozen=True):
    """Consecutive blocks of one path that can now be read from `tier`. `parent`: the key of the
    block before them, 32 zero bytes at the root; `tokens`: their symbols."""

    namespace: bytes
    tier: str
    parent: bytes
    keys: list[bytes]
    tokens: bytes


class Removed(msgspec.Struct, frozen=True):
    """Blocks that can no longer be read from `tier`."""

    namespace: bytes
    tier: str
    keys: list[bytes]


class _Run(msgspec.Struct, frozen=True):
    """Consecutive blocks of a node, from `place` on, with the same changes: stored in the tiers
    `came`, removed from the tiers `left` (bit sets)."""

    node: Node
    place: int
    blocks: Ids
    came: int
    left: int


class Changes:
    """`listen` starts recording, `take` returns changes, `page` lists what has been published."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._published = PublishedBlocks()
        self._gone: deque[Gone] = deque()
        self._from = 0
        self._left_bytes = 0

    @property
    def is_listening(self) -> bool:
        return self._residency.blocks.ids.given is not None

    def listen(self) -> None:
        """Start recording; blocks held already are published first."""
        if not self.is_listening:
            self._residency.blocks.ids.mark_given()

    def take(self, most_bytes: int) -> list[Stored | Removed]:
        """The next changes, in order; empty when there are none. Their cost is at most
        `most_bytes`: COPY_BYTES and its tokens for a stored copy, GONE_BYTES for a removed one,
        RUN_BYTES for each run. At least one block is returned, whatever its cost."""
        given = self._residency.blocks.ids.given
        if given is None:
            return []
        self._published.grow(len(given))
        changes: list[Stored | Removed] = []
        left_bytes = most_bytes
        while left_bytes > 0:
            if not self._gone:
                self._drop_given(given)
            if not self._gone:
                break
            gone = self._gone.popleft()
            changes += self._removed(gone)
            left_bytes -= GONE_BYTES * int(_NUM_TIERS[gone.tiers].sum())
        if left_bytes > 0:
            changes += self._changed(left_bytes)
        return changes

    def num_pending(self) -> int:
        """The number of blocks with unpublished changes. Checks every block."""
        if not self.is_listening:
            return 0
        now = self._now()
        self._published.grow(len(now))
        differing = int(np.count_nonzero(now != self._published.tiers))
        return differing + sum(len(gone.keys) for gone in self._gone)

    def page(self, digest: bytes, after: int, most: int) -> PublishedPage:
        """See `PublishedBlocks.page`."""
        return self._published.page(digest, after, most)

    def forget_idle(self) -> list[bytes]:
        """Delete the namespaces without published blocks and without unpublished removals. Returns
        them."""
        return self._published.forget_idle({gone.namespace for gone in self._gone})

    def _drop_given(self, given: npt.NDArray[np.bool_]) -> None:
        """Check freed ids until one was published. The rest is checked before anything is published
        as stored."""
        if not given.any():
            return
        for start in range(0, len(given), MAX_DROPPED):
            ids = np.flatnonzero(given[start : start + MAX_DROPPED]).astype(np.int32) + start
            given[ids] = False
            self._gone += self._published.drop(ids)
            if self._gone:
                return

    def _removed(self, gone: Gone) -> Iterator[Removed]:
        for tier, spec in enumerate(self._residency.tiers):
            held = gone.keys[gone.tiers >> tier & 1 == 1]
            if len(held):
                yield Removed(gone.namespace, spec.name, split_keys(held))

    # --- what changed ---------------------------------------------------------------------------

    def _changed(self, left_bytes: int) -> Iterator[Stored | Removed]:
        """Changes of existing blocks, up to this cost. The next call continues where this one
        stopped, so that no block waits for ever behind others that keep changing."""
        now = self._now()
        changed = np.flatnonzero(now != self._published.tiers).astype(np.int32)
        start = int(np.searchsorted(changed, self._from))
        most = left_bytes // GONE_BYTES + 1
        some = np.concatenate((changed[start : start + most], changed[:start]))[:most]
        self._left_bytes = left_bytes
        for run in self._runs(some, now):
            for node in self._unpublished_above(run, now) if run.came else ():
                yield from self._publish_node(node, now)
            first = run.blocks[0]
            is_published = self._published.tiers[first] == now[first]
            if self._left_bytes > 0 and not is_published:
                yield from self._publish_run(run)
            if self._left_bytes <= 0:
                rest = run.blocks[self._published.tiers[run.blocks] != now[run.blocks]]
                self._from = int(rest[0]) if len(rest) else int(run.blocks[-1]) + 1
                return
        self._from = int(some[-1]) + 1 if len(some) else 0

    def _runs(self, blocks: Ids, now: Bits) -> Iterator[_Run]:
        """These blocks, grouped where they are consecutive with equal changes; node by node, in the
        order of each node's first block, and each from its front."""
        if not len(blocks):
            return
        table, nodes = self._residency.blocks, self._residency.index.nodes
        numbers = table.node[blocks]
        _, first, of = np.unique(numbers, return_index=True, return_inverse=True)
        depths = table.depth[blocks]
        order = np.lexsort((depths, first[of]))
        blocks, numbers, depths = blocks[order], numbers[order], depths[order]
        before, after = self._published.tiers[blocks], now[blocks]
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
            assert node is not None, "a block without a node has copies"
            yield _Run(node, depth - node.depth, blocks[start:end], has_come, has_left)

    def _unpublished_above(self, run: _Run, now: Bits) -> list[Node]:
        """The nodes to publish before this run, top first: those above it whose last block is held
        and not published."""
        nodes: list[Node] = []
        node, place = run.node, run.place
        while not self._is_published_before(node, place, now):
            if not place:
                assert node.parent is not None
                node = node.parent
            nodes.append(node)
            place = 0
        nodes.reverse()
        return nodes

    def _is_published_before(self, node: Node, place: int, now: Bits) -> bool:
        """Whether the block before this place of a node is published, or not held."""
        before = block_before(node, place)
        return before is None or bool(self._published.tiers[before]) or not now[before]

    def _publish_node(self, node: Node, now: Bits) -> Iterator[Stored | Removed]:
        ids = node.block_ids()
        for run in self._runs(ids[self._published.tiers[ids] != now[ids]], now):
            if self._left_bytes > 0:
                yield from self._publish_run(run)

    def _publish_run(self, run: _Run) -> Iterator[Stored | Removed]:
        """As much of a run as the limit allows, and at least one block."""
        namespace = self._residency.namespace_of(run.node)
        num_came, num_left = run.came.bit_count(), run.left.bit_count()
        cost_bytes = num_came * (COPY_BYTES + namespace.step) + num_left * GONE_BYTES
        room = max(1, (self._left_bytes - RUN_BYTES) // cost_bytes)
        blocks = run.blocks[:room]
        self._left_bytes -= RUN_BYTES + len(blocks) * cost_bytes
        end = run.place + len(blocks)
        keys = self._published.keys_of(run.node, run.place, blocks, namespace)
        for name in self._names(run.left):
            yield Removed(namespace.digest, name, keys)
        if run.came:
            tokens = run.node.symbols(namespace.step, run.place, end)
            parent = self._published.key_before(run.node, run.place)
            for name in self._names(run.came):
                yield Stored(namespace.digest, name, parent, keys, tokens)
        self._published.note(blocks, namespace.digest, run.came, run.left)

    def _names(self, tiers: int) -> list[str]:
        return [spec.name for tier, spec in enumerate(self._residency.tiers) if tiers >> tier & 1]

    def _now(self) -> Bits:
        """The tiers that each block can be read from now."""
        return self._residency.blocks.tags.astype(np.uint8)

"""Restores a persistent tier's blocks into the index, after a restart of the daemon or of the
tier's worker, while requests are served.

Rows come in parts: chains of consecutive blocks, each below an earlier row (`StoredRows`). A chain
is added as one node for each stretch with the same last use:

    rows     a b c d   (below the root)        x y   (below b)
    nodes    a ── b ── c ── d                        x ── y

A row's number is mapped to its block. That block may have been removed since (corrupt, for example)
and its id reused: `_row_of` shows that. Blocks that the index has already (stored since) gain the
persistent copy. A row of another block size, without its parent or without room has no place: it is
deleted from the tier. Owned by the daemon's one loop.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hicache.engine.index.node import Node
from hicache.engine.index.radix import Path
from hicache.engine.requests.block_keys import keys_along
from hicache.engine.residency.block_ids import ids_along
from hicache.engine.residency.blocks import CopyState
from hicache.engine.residency.copies import Namespace, Residency
from hicache.tiers.block import Counts, Ids, StoredRows

ROOT_ROW = -1
_NO_BLOCK = -1
_NO_CUTS = np.empty(0, np.int64)
_Seconds = npt.NDArray[np.float64]


class Restoration:
    """The rows of one tier, from its worker's start on."""

    def __init__(self, residency: Residency, tier: int) -> None:
        self.residency = residency
        self.tier = tier
        self.cleared: set[bytes] = set()
        """Digests of namespaces that were cleared meanwhile, or while the worker was down: their
        rows are deleted."""
        self._block_of = np.empty(0, np.int32)  # by row
        self._row_of = np.empty(0, np.int32)  # by block

    def add(
        self, namespace: Namespace, rows: StoredRows, now_s: float, zero_s: float
    ) -> list[bytes]:
        """Add rows to the namespace's tree. Returns the keys of rows without a place."""
        self._make_room_for(rows.first + len(rows))
        is_fitting = (
            rows.block_bytes == namespace.block_bytes
            and rows.step == namespace.step
            and namespace.digest not in self.cleared
        )
        homeless: list[bytes] = []
        came: list[Ids] = []
        at = 0
        for number, length in enumerate(rows.lengths.tolist()):
            end = at + length
            tokens = rows.tokens[at * rows.step : end * rows.step]
            parent = self._parent(namespace, int(rows.parents[number])) if is_fitting else None
            count = 0
            if parent is not None:
                used_s = rows.used_s[at:end] - zero_s
                ids, gaining = self._hang(
                    namespace, parent, tokens, rows.hits[at:end], np.minimum(used_s, now_s)
                )
                count = len(ids)
                came.append(gaining)
                self._remember(rows.first + at, ids)
            if count < length:
                above = rows.parent_keys[32 * number : 32 * number + 32]
                homeless += keys_along(rows.namespace, above, tokens, rows.step)[count:]
            at = end
        if came:
            self.residency.settle(np.concatenate(came))
        return homeless

    def _make_room_for(self, num_rows: int) -> None:
        num_blocks = self.residency.blocks.ids.size
        if num_rows > len(self._block_of):
            more = max(num_rows, 2 * len(self._block_of)) - len(self._block_of)
            self._block_of = np.append(self._block_of, np.full(more, _NO_BLOCK, np.int32))
        self._grow_row_of(num_blocks)

    def _grow_row_of(self, num_blocks: int) -> None:
        if num_blocks > len(self._row_of):
            more = num_blocks - len(self._row_of)
            self._row_of = np.append(self._row_of, np.full(more, ROOT_ROW, np.int32))

    def _remember(self, first: int, ids: Ids) -> None:
        self._grow_row_of(self.residency.blocks.ids.size)
        self._block_of[first : first + len(ids)] = ids
        self._row_of[ids] = np.arange(first, first + len(ids), dtype=np.int32)

    def _parent(self, namespace: Namespace, row: int) -> Node | None:
        """The node that ends with a row's block, split there if needed; None if it was removed."""
        if row == ROOT_ROW:
            return namespace.root
        if not 0 <= row < len(self._block_of):
            return None
        residency = self.residency
        block = int(self._block_of[row])
        is_there = block != _NO_BLOCK and self._row_of[block] == row
        if not is_there or not residency.blocks.tags[block] >> self.tier & 1:
            return None
        node = residency.index.node_of(block)
        if node.namespace != namespace.number:
            return None
        depth = int(residency.blocks.depth[block]) + 1
        if depth < node.depth + len(node):
            node = residency.index.split(node, depth - node.depth, namespace.step)
        return node

    def _hang(
        self,
        namespace: Namespace,
        parent: Node,
        tokens: bytes,
        hits: Counts,
        used_s: _Seconds,
    ) -> tuple[Ids, Ids]:
        """Add a chain below a node. Returns the ids of the blocks that found room, from the chain's
        front, and of those that gained their persistent copy."""
        residency, step, tier = self.residency, namespace.step, self.tier
        index, blocks = residency.index, residency.blocks
        count, depth = len(hits), parent.depth + len(parent)
        index.split_stem(parent, step)
        found = index.match(parent, tokens, step)
        num_known = found.num_blocks
        if not num_known:  # nearly always
            return self._extend(namespace, parent, tokens, hits, used_s)
        path = Path(index.path_to(parent) + found.nodes, found.partial, depth + num_known)
        known = ids_along(path.spans(depth, depth + num_known))
        is_absent = blocks.state[tier][known] == CopyState.ABSENT
        wanted = int(np.count_nonzero(is_absent)) + count - num_known
        slots = residency.pools[tier].allocate(namespace.slot_bytes[tier], wanted)
        lacking = np.concatenate((is_absent, np.ones(count - num_known, bool)))
        fitting = int(np.searchsorted(np.cumsum(lacking), len(slots), side="right"))
        lacking = lacking[:fitting]
        ids = known[:fitting]
        if fitting > num_known:
            symbols = tokens[num_known * step : fitting * step]
            node = index.extend(namespace.root, path, symbols, step)
            ids = np.concatenate((ids, node.block_ids()))
            self._date(node, used_s[num_known:fitting], step)
        gaining = ids[lacking]
        noted = blocks.noted_hits[tier][gaining] = hits[:fitting][lacking]
        blocks.hits[gaining] = np.maximum(blocks.hits[gaining], noted)
        blocks.fill(tier, gaining, slots)
        blocks.change(tier, gaining, CopyState.READY)
        return ids, gaining

    def _extend(
        self, namespace: Namespace, parent: Node, tokens: bytes, hits: Counts, used_s: _Seconds
    ) -> tuple[Ids, Ids]:
        """As `_hang`, for a chain without known blocks."""
        residency, step, tier = self.residency, namespace.step, self.tier
        slots = residency.pools[tier].allocate(namespace.slot_bytes[tier], len(hits))
        count = len(slots)
        if not count:
            return slots, slots
        path = Path([] if parent.is_root else [parent], 0, parent.depth + len(parent))
        node = residency.index.extend(namespace.root, path, tokens[: count * step], step)
        span, blocks = node.span, residency.blocks
        blocks.hits[span] = blocks.noted_hits[tier][span] = hits[:count]
        blocks.fill(tier, span, slots)
        blocks.change(tier, span, CopyState.READY)
        ids = node.block_ids()
        self._date(node, used_s[:count], step)
        return ids, ids

    def _date(self, node: Node, used_s: _Seconds, step: int) -> None:
        """Set a new node's time of last use, splitting it where its blocks differ."""
        cuts = np.flatnonzero(np.diff(used_s)) + 1 if used_s[0] != used_s[-1] else _NO_CUTS
        done = 0
        for cut in cuts.tolist():
            upper = self.residency.index.split(node, cut - done, step)
            upper.touched_s = float(used_s[done])
            done = cut
        node.touched_s = float(used_s[done])

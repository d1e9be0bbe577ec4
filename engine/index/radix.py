"""The radix index: which blocks of a prompt are known, and which tiers they can be read from.

A path-compressed tree per namespace. A node is a run of blocks in the same tiers, tagged with a bit
set of them. A block's symbol is its tokens, or a hash of them: the tree only compares bytes.

    root ─┬─ [b0 … b63 | dram+disk] ─┬─ [b64 … b71 | hbm]
          │                          └─ [b64'… b90'| disk]
          └─ [c0 … c511 | disk]

Matching never changes the tree. When part of a run moves, the run is split: the node object stays
the lower part, so a leaf stays the same object. Equal neighbours are merged. Symbols are `bytes`
compared by offset with `startswith`, a whole stem of nodes at a time; slicing the query per node
would make matching superlinear. Owned by the daemon's one loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np

from hicache.engine.index.node import SPARE_SHARE, Node, Stem, depth_of
from hicache.engine.policies.hazard.ghost import Mark
from hicache.engine.residency.block_ids import Span, cut_at, ids_along, joined, part_of, size_of
from hicache.engine.residency.blocks import LEAVING_SHIFT, BlockTable
from hicache.tiers.block import Ids

MAX_STEM_BYTES: Final = 256 << 10
"""Stems are not joined beyond this length, which bounds what a change copies."""

MAX_CHILDREN: Final = 2
"""Within a stem. A node with more children ends its stem: there a lookup of the next block is
faster than a comparison that finds where two stems differ."""

_NO_STEM: Final = Stem(b"", [])
_NO_BLOCKS: Final = slice(0, 0)


class Path(msgspec.Struct):
    """The longest known prefix of a query: whole nodes, or `partial` blocks of the last one if not
    0. `num_blocks` counts all matched blocks, readable or not."""

    nodes: list[Node] = msgspec.field(default_factory=list)
    partial: int = 0
    num_blocks: int = 0

    def ids(self) -> Ids:
        """Block ids along the path, shape [num_blocks]."""
        return ids_along(self.spans(0, self.num_blocks))

    def spans(self, first: int, last: int) -> list[Span]:
        """Blocks first … last-1 of the path, as indices into the arrays."""
        nodes = self.nodes
        begin, end = 0, len(nodes)
        while end and nodes[end - 1].depth >= last:
            end -= 1
        while begin < end and nodes[begin].depth + nodes[begin].num_blocks <= first:
            begin += 1
        spans = [node.span for node in nodes[begin:end]]
        if spans and nodes[end - 1].depth + nodes[end - 1].num_blocks > last:
            spans[-1] = part_of(spans[-1], 0, last - nodes[end - 1].depth)
        if spans and nodes[begin].depth < first:
            spans[0] = part_of(spans[0], first - nodes[begin].depth, size_of(spans[0]))
        return spans


class Index:
    """All namespaces' trees over one BlockTable."""

    def __init__(self, blocks: BlockTable) -> None:
        self.blocks = blocks
        self.nodes: list[Node | None] = []
        self._free_numbers: list[int] = []
        self.num_nodes = 0
        self.num_blocks: dict[int, int] = {}  # by namespace; counting a large tree is slow

    def add_root(self, namespace: int) -> Node:
        """A new, empty tree."""
        self.num_blocks[namespace] = 0
        root = self._new_node(namespace, None, slice(0, 0), 0, 0)
        root.stem = Stem(b"", [root])
        return root

    def match(self, root: Node, tokens: bytes, step: int) -> Path:
        """The longest known prefix of whole blocks (`step` symbol bytes each), below a root or the
        last node of a stem (`split_stem`). Changes nothing."""
        nodes: list[Node] = []
        children = root.children
        position = 0
        while (child := children.get(tokens[position : position + step])) is not None:
            stem = child.stem  # `child` is its first node: else its parent would be in it too
            if not stem.spare_bytes and tokens.startswith(stem.symbols, position):
                nodes += stem.nodes
                position += len(stem.symbols)
            else:
                common = _common_blocks(stem.symbols, tokens, position, step)
                common = min(common, stem.num_bytes // step)
                position += common * step
                end = child.depth + common
                nodes += stem.nodes[: bisect_left(stem.nodes, end, key=depth_of)]
                partial = end - nodes[-1].depth
                if partial < nodes[-1].num_blocks:
                    return Path(nodes, partial, position // step)
            children = nodes[-1].children
        return Path(nodes, 0, position // step)

    def extend(self, root: Node, path: Path, symbols: bytes, step: int) -> Node:
        """Append new blocks (without copies yet) to a path. Returns the new node, a child of the
        path's last node."""
        self.cut(path, step)
        parent = path.nodes[-1] if path.nodes else root
        count, rest = divmod(len(symbols), step)
        assert count
        assert not rest
        first = symbols[:step]
        assert first not in parent.children
        depth = path.num_blocks
        span = self.blocks.allocate(count)
        node = self._new_node(root.namespace, parent, span, count, depth)
        node.stem = Stem(symbols, [node])
        self.blocks.place(span, node.number, depth)
        self.num_blocks[root.namespace] += count
        parent.add_child(first, node)
        if len(parent.children) > MAX_CHILDREN:
            self.split_stem(parent, step)
        path.nodes.append(node)
        path.num_blocks += count
        return node

    def cut(self, path: Path, step: int) -> None:
        """Make the path end at a node's end: split its last node where that is partial."""
        if path.partial:
            path.nodes[-1] = self.split(path.nodes[-1], path.partial, step)
            path.partial = 0

    def split(self, node: Node, count: int, step: int) -> Node:
        """Move the first `count` blocks into a new parent, which is returned.

        Leases, moves and states refer to block ids, so a split does not affect them.
        """
        assert 0 < count < len(node)
        parent = node.parent
        assert parent is not None
        span, rest = cut_at(node.span, count)
        upper = self._new_node(node.namespace, parent, span, count, node.depth)
        upper.tiers, upper.leaving, upper.staying = node.tiers, node.leaving, node.staying
        upper.touched_s, upper.kind, upper.uses = node.touched_s, node.kind, node.uses
        upper.run = node.run
        parent.children[node.symbols(step, 0, 1)] = upper
        node.parent = upper
        node.span = rest
        node.num_blocks -= count
        upper.stem = node.stem
        upper.stem.nodes.insert(upper.stem.nodes.index(node), upper)
        node.depth += count
        upper.add_child(node.symbols(step, 0, 1), node)
        for tier in range(len(self.blocks.tiers)):
            upper.count_holding(tier, node.staying >> tier & 1)
        self.blocks.node[upper.span] = upper.number
        return upper

    def try_merge(self, node: Node, step: int) -> Node | None:
        """Merge a node's parent into it when their attributes are equal and it is the only child.
        Returns the removed parent, or None."""
        parent = node.parent
        if (
            parent is None
            or parent.parent is None
            or len(parent.children) != 1
            or parent.tiers != node.tiers
            or parent.leaving != node.leaving
            or parent.touched_s != node.touched_s
            or parent.kind != node.kind
            or parent.uses != node.uses
            or not self._try_join(parent.stem, node.stem)
        ):
            return None
        self.blocks.node[parent.span] = node.number
        node.span = joined(parent.span, node.span)
        node.num_blocks += parent.num_blocks
        node.depth = parent.depth
        node.parent = parent.parent
        node.stem.nodes.remove(parent)
        parent.parent.children[node.symbols(step, 0, 1)] = node
        self._drop(parent)
        return parent

    def mark(self, nodes: Sequence[Node], marks: Sequence[Mark], step: int) -> bool:
        """Set kind, uses and run of the nodes of one path: each of `marks` is (end, kind, uses,
        run) and applies up to block `end`. Nodes are split where kinds differ. Returns whether any
        was split, which makes paths of these nodes stale."""
        position = 0
        is_stale = False
        for node in nodes:
            last = node.depth + node.num_blocks
            while position < len(marks) and marks[position][0] <= node.depth:
                position += 1
            while position < len(marks):
                end, kind, uses, run = marks[position]
                if end >= last:
                    node.kind, node.uses, node.run = kind, uses, run
                    break
                if position + 1 < len(marks) and marks[position + 1][1] != kind:
                    upper = self.split(node, end - node.depth, step)
                    upper.kind, upper.uses, upper.run = kind, uses, run
                    is_stale = True
                node.kind, node.uses, node.run = kind, uses, run
                position += 1
        return is_stale

    def join(self, nodes: Sequence[Node]) -> None:
        """Join the stems along a path, as far as allowed, to make its next match faster."""
        start = 0
        while start < len(nodes):
            stem = nodes[start].stem
            end = start + len(stem.nodes)
            if end >= len(nodes):
                return
            if nodes[end - 1] is not stem.nodes[-1]:  # the path leaves this stem half-way
                end = start + 1
                while nodes[end].stem is stem:
                    end += 1
            elif len(nodes[end - 1].children) <= MAX_CHILDREN and self._try_join(
                stem, nodes[end].stem
            ):
                continue
            start = end

    def _try_join(self, stem: Stem, below: Stem) -> bool:
        """Append stem `below` to the one that ends at its parent. Returns False, and changes
        nothing, if the result would be too long."""
        if stem is below:
            return True
        if stem.num_bytes + below.num_bytes > MAX_STEM_BYTES:
            return False
        stem.compact()
        stem.symbols += below.symbols
        stem.spare_bytes = below.spare_bytes
        stem.nodes += below.nodes
        for node in below.nodes:
            node.stem = stem
        return True

    def split_stem(self, node: Node, step: int) -> None:
        """End a stem with this node; the nodes after it become another stem."""
        stem = node.stem
        if node is stem.nodes[-1]:
            return
        stem.compact()
        kept = stem.nodes.index(node) + 1
        num_bytes = (node.depth + node.num_blocks - stem.nodes[0].depth) * step
        below = Stem(stem.symbols[num_bytes:], stem.nodes[kept:])
        for lower in below.nodes:
            lower.stem = below
        stem.symbols = stem.symbols[:num_bytes]
        del stem.nodes[kept:]

    def set_residency(self, node: Node, tiers: int, leaving: int) -> None:
        """Tag a node, and update its parent's counts."""
        before = node.staying
        node.tiers, node.leaving, node.staying = tiers, leaving, tiers & ~leaving
        changed = before ^ node.staying
        if changed and node.parent is not None:
            for tier in range(len(self.blocks.tiers)):
                if changed >> tier & 1:
                    node.parent.count_holding(tier, 1 if node.staying >> tier & 1 else -1)

    def retag(self, node: Node, step: int) -> list[Node]:
        """Set a node's tags from its blocks, splitting it where they differ. Returns the resulting
        nodes, top first; the last is `node` itself."""
        tags = self.blocks.tags[node.span]
        pieces: list[Node] = []
        if (tags != tags[0]).any():
            cuts = np.flatnonzero(tags[1:] != tags[:-1]) + 1
            done = 0
            for cut in cuts.tolist():
                pieces.append(self.split(node, cut - done, step))
                done = cut
        pieces.append(node)
        for piece in pieces:
            tag = int(tags[piece.depth - pieces[0].depth])
            self.set_residency(piece, tag & 0xFF, tag >> LEAVING_SHIFT)
        return pieces

    def trim(self, node: Node, count: int, step: int) -> Span:
        """Remove the last `count` blocks, but not all, of a childless node. Returns them: the
        caller must free them."""
        kept = node.num_blocks - count
        assert 0 < kept < node.num_blocks
        assert not node.children
        node.num_blocks = kept
        self.num_blocks[node.namespace] -= count
        node.stem.shorten(count * step)
        node.span, gone = cut_at(node.span, kept)
        return gone

    def remove(self, node: Node, step: int) -> Node:
        """Remove a childless node and its blocks, which have no copy left. Returns its parent."""
        parent = node.parent
        assert parent is not None
        assert not node.tiers
        self.blocks.free(node.span)
        self.unlink([node], step)
        return parent

    def unlink(self, leaves: list[Node], step: int) -> None:
        """Remove childless nodes, whose blocks are freed already, from the tree. Empties the
        list."""
        while leaves:
            node = leaves.pop()
            parent, stem = node.parent, node.stem
            assert parent is not None
            assert not node.children
            if stem.nodes[0] is node:  # it is its stem's only node
                del parent.children[stem.symbols[:step]]
            else:
                del parent.children[node.symbols(step, 0, 1)]
                stem.nodes.pop()
                stem.shorten(node.num_blocks * step)
            self.num_blocks[node.namespace] -= node.num_blocks
            self._drop(node)

    def node_of(self, block: int) -> Node:
        """The node that contains a block."""
        node = self.nodes[int(self.blocks.node[block])]
        assert node is not None, self.blocks.story(block)
        return node

    def nodes_of(self, ids: Ids) -> list[Node]:
        """The distinct nodes that contain these blocks."""
        numbers = self.blocks.node[ids]
        if len(numbers) and (numbers == numbers[0]).all():
            return [self.node_of(int(ids[0]))]
        found = (self.nodes[number] for number in np.unique(numbers).tolist())
        return [node for node in found if node is not None]

    def path_to(self, node: Node) -> list[Node]:
        """The nodes from the root's child down to this one."""
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        return path

    def subtree(self, node: Node) -> Iterator[Node]:
        """A node and everything below it."""
        stack = [node]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _new_node(
        self, namespace: int, parent: Node | None, span: Span, size: int, depth: int
    ) -> Node:
        number = self._free_numbers.pop() if self._free_numbers else len(self.nodes)
        node = Node(number, namespace, parent, span, size, depth)
        if number == len(self.nodes):
            self.nodes.append(node)
        else:
            self.nodes[number] = node
        self.num_nodes += 1
        return node

    def _drop(self, node: Node) -> None:
        self.nodes[node.number] = None
        self._free_numbers.append(node.number)
        self.num_nodes -= 1
        node.parent = None
        node.stem = _NO_STEM  # a remaining reference to the node must not keep its symbols alive
        node.span, node.num_blocks = _NO_BLOCKS, 0
        node.tiers = node.leaving = node.staying = 0

    def validate(self, root: Node, step: int) -> int:
        """Check a tree's invariants. Returns its number of blocks."""
        num_blocks = 0
        for node in self.subtree(root):
            assert self.nodes[node.number] is node
            for key, child in node.children.items():
                assert child.parent is node
                assert child.symbols(step, 0, 1) == key
                assert child.depth == node.depth + len(node)
            for tier in range(len(self.blocks.tiers)):
                holds = sum(child.staying >> tier & 1 for child in node.children.values())
                assert node.holding[tier] == holds, (node.number, tier)
            self._validate_stem(node.stem, step)
            if node.is_root:
                continue
            ids = node.block_ids()
            num_blocks += len(ids)
            assert 0 < len(ids) == node.num_blocks
            assert (np.arange(len(self.blocks.tags), dtype=np.int32)[node.span] == ids).all()
            assert len(node.symbols(step, 0, len(node))) == len(ids) * step
            assert node in node.stem.nodes
            assert (self.blocks.node[ids] == node.number).all()
            depths = np.arange(node.depth, node.depth + len(ids))
            assert (self.blocks.depth[ids] == depths).all()
            tag = node.tiers | node.leaving << LEAVING_SHIFT
            assert node.staying == node.tiers & ~node.leaving
            assert (self.blocks.tags[ids] == tag).all(), (node.number, tag, self.blocks.tags[ids])
            if not node.children:
                for first in (0, len(ids) // 2, len(ids) - 1):
                    is_pinned = self.blocks.is_pinned(ids[first:])
                    assert self.blocks.is_tail_pinned(node.span, first) == is_pinned
        assert self.num_blocks[root.namespace] == num_blocks
        return num_blocks

    def _validate_stem(self, stem: Stem, step: int) -> None:
        """Check that a stem is a chain of nodes with all their symbols."""
        assert stem.num_bytes == sum(map(len, stem.nodes)) * step
        assert 0 <= stem.spare_bytes <= SPARE_SHARE * len(stem.symbols)
        assert all(node.stem is stem for node in stem.nodes)
        for above, node in pairwise(stem.nodes):
            assert node.parent is above
            assert len(above.children) <= MAX_CHILDREN


def _common_blocks(edge: bytes, tokens: bytes, position: int, step: int) -> int:
    """How many whole blocks `edge` and `tokens` from `position` have in common: at least 1, not
    all."""
    query = memoryview(tokens)[position:]  # its slices copy nothing
    low, high = 1, min(len(edge), len(query)) // step
    if edge.startswith(query[: high * step]):  # a query that ends within the edge
        return high
    while low < high:  # low blocks agree; more than high cannot
        middle = (low + high + 1) // 2
        if edge.startswith(query[low * step : middle * step], low * step):
            low = middle
        else:
            high = middle - 1
    return low

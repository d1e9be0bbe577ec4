"""The radix index: which blocks of a prompt are known, and in which tiers they can be read.

A path-compressed tree per namespace. A node is a run of blocks with the same residency, tagged
with it (a bit set of tiers). Symbols are a block's tokens (or a hash): the tree compares bytes and
does not care which.

    root ─┬─ [b0 … b63 | dram+disk] ─┬─ [b64 … b71 | hbm]
          │                          └─ [b64'… b90'| disk]
          └─ [c0 … c511 | disk]

Matching never changes the tree. A run that moves in part is split: the node object stays the lower
part, so what hangs on a leaf still hangs on a leaf. Neighbours that became equal are merged.
Symbols are `bytes` walked by offset with `startswith`, a whole stem of nodes at a time; slicing the
query per node is what makes other trees superlinear. Owned by the daemon's one loop.
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
"""Stems are not joined past this length, so a change copies at most so much."""

MAX_WAYS: Final = 2
"""A stem goes on below a node with at most so many children: where more ways part, looking the next
block up is faster than finding where two stems part."""

_NO_STEM: Final = Stem(b"", [])
_NO_BLOCKS: Final = slice(0, 0)


class Path(msgspec.Struct):
    """The longest known prefix of a query: whole nodes, the last perhaps only `partial` blocks in.

    `num_blocks` counts all matched blocks, readable or not.
    """

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
        self.num_blocks: dict[int, int] = {}  # by namespace: asked often, and a tree may be large

    def add_root(self, namespace: int) -> Node:
        """A new, empty tree."""
        self.num_blocks[namespace] = 0
        root = self._new_node(namespace, None, slice(0, 0), 0, 0)
        root.stem = Stem(b"", [root])
        return root

    def match(self, root: Node, tokens: bytes, step: int) -> Path:
        """The longest known prefix of whole blocks (`step` symbol bytes each), from a root or from
        the last node of a stem (`part`) on. Changes nothing."""
        nodes: list[Node] = []
        children = root.children
        position = 0
        while (child := children.get(tokens[position : position + step])) is not None:
            stem = child.stem  # it is the first of its stem: its parent would be in it too
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
        """Append new blocks (no copies yet) after a path that ends before them.

        Returns the new node, a child of the path's end.
        """
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
        parent.adopt(first, node)
        if len(parent.children) > MAX_WAYS:
            self.part(parent, step)
        path.nodes.append(node)
        path.num_blocks += count
        return node

    def cut(self, path: Path, step: int) -> None:
        """Make the path end at a node's end, splitting the last node where it is partial."""
        if path.partial:
            path.nodes[-1] = self.split(path.nodes[-1], path.partial, step)
            path.partial = 0

    def split(self, node: Node, count: int, step: int) -> Node:
        """Cut the first `count` blocks off into a new parent, which is returned.

        Leases, moves and states hang on block ids and notice nothing.
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
        upper.adopt(node.symbols(step, 0, 1), node)
        for tier in range(len(self.blocks.tiers)):
            upper.hold(tier, node.staying >> tier & 1)
        self.blocks.node[upper.span] = upper.number
        return upper

    def try_merge(self, node: Node, step: int) -> Node | None:
        """Merge a node's parent into it when nothing tells them apart. Returns the dead parent."""
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
        """Tell the nodes of one path their kind, uses and run: each of `marks` holds up to a block,
        (end, kind, uses, run). Nodes are split where kinds differ: whether any was, so that a path
        of them is stale."""
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
        """Bring a path's symbols together in as few stems as may be: it will be asked for again."""
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
            elif len(nodes[end - 1].children) <= MAX_WAYS and self._try_join(stem, nodes[end].stem):
                continue
            start = end

    def _try_join(self, stem: Stem, below: Stem) -> bool:
        """Append a stem to the one that it hangs from the end of. False if that is too long."""
        if stem is below:
            return True
        if stem.num_bytes + below.num_bytes > MAX_STEM_BYTES:
            return False
        stem.tidy()
        stem.symbols += below.symbols
        stem.spare_bytes = below.spare_bytes
        stem.nodes += below.nodes
        for node in below.nodes:
            node.stem = stem
        return True

    def part(self, node: Node, step: int) -> None:
        """End a stem with this node; what followed becomes a stem of its own."""
        stem = node.stem
        if node is stem.nodes[-1]:
            return
        stem.tidy()
        kept = stem.nodes.index(node) + 1
        num_bytes = (node.depth + node.num_blocks - stem.nodes[0].depth) * step
        below = Stem(stem.symbols[num_bytes:], stem.nodes[kept:])
        for lower in below.nodes:
            lower.stem = below
        stem.symbols = stem.symbols[:num_bytes]
        del stem.nodes[kept:]

    def set_residency(self, node: Node, tiers: int, leaving: int) -> None:
        """Tag a node; its parent's counts follow."""
        before = node.staying
        node.tiers, node.leaving, node.staying = tiers, leaving, tiers & ~leaving
        changed = before ^ node.staying
        if changed and node.parent is not None:
            for tier in range(len(self.blocks.tiers)):
                if changed >> tier & 1:
                    node.parent.hold(tier, 1 if node.staying >> tier & 1 else -1)

    def retag(self, node: Node, step: int) -> list[Node]:
        """Bring a node's tags in line with its blocks, splitting where they differ.

        Returns the resulting nodes, top first; the last is `node` itself.
        """
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
        """Cut the last `count` blocks, not all, off a childless node. Returns them; they are the
        caller's to forget."""
        kept = node.num_blocks - count
        assert 0 < kept < node.num_blocks
        assert not node.children
        node.num_blocks = kept
        self.num_blocks[node.namespace] -= count
        node.stem.shorten(count * step)
        node.span, gone = cut_at(node.span, kept)
        return gone

    def remove(self, node: Node, step: int) -> Node:
        """Forget a childless node and its blocks, which have no copy left. Returns its parent."""
        parent = node.parent
        assert parent is not None
        assert not node.tiers
        self.blocks.free(node.span)
        self.unlink([node], step)
        return parent

    def unlink(self, leaves: list[Node], step: int) -> None:
        """Take childless nodes, whose blocks are no more, out of the tree and out of the list: each
        is let go of while it is at hand."""
        while leaves:
            node = leaves.pop()
            parent, stem = node.parent, node.stem
            assert parent is not None
            assert not node.children
            if stem.nodes[0] is node:  # its stem goes with it
                del parent.children[stem.symbols[:step]]
            else:
                del parent.children[node.symbols(step, 0, 1)]
                stem.nodes.pop()
                stem.shorten(node.num_blocks * step)
            self.num_blocks[node.namespace] -= node.num_blocks
            self._drop(node)

    def node_of(self, block: int) -> Node:
        """The node that holds a block now."""
        node = self.nodes[int(self.blocks.node[block])]
        assert node is not None, self.blocks.story(block)
        return node

    def nodes_of(self, ids: Ids) -> list[Node]:
        """The distinct nodes holding these blocks."""
        numbers = self.blocks.node[ids]
        if len(numbers) and (numbers == numbers[0]).all():
            return [self.node_of(int(ids[0]))]
        found = (self.nodes[number] for number in np.unique(numbers).tolist())
        return [node for node in found if node is not None]

    def path_to(self, node: Node) -> list[Node]:
        """The nodes from below the root down to this one."""
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
        node.stem = _NO_STEM  # who still knows the node must not keep its symbols alive
        node.span, node.num_blocks = _NO_BLOCKS, 0
        node.tiers = node.leaving = node.staying = 0

    def validate(self, root: Node, step: int) -> int:
        """Check a tree from the ground. Returns its number of blocks."""
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
        """A chain of nodes with all their symbols, that goes on where few ways part."""
        assert stem.num_bytes == sum(map(len, stem.nodes)) * step
        assert 0 <= stem.spare_bytes <= SPARE_SHARE * len(stem.symbols)
        assert all(node.stem is stem for node in stem.nodes)
        for above, node in pairwise(stem.nodes):
            assert node.parent is above
            assert len(above.children) <= MAX_WAYS


def _common_blocks(edge: bytes, tokens: bytes, position: int, step: int) -> int:
    """How many whole blocks of `edge` stand in `tokens` at `position`: at least 1, not all."""
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

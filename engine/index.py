"""The radix index: which blocks of a prompt are known, and in which tiers they can be read.

A path-compressed tree per namespace. A node is a run of blocks with the same residency, tagged
with it (a bit set of tiers). Symbols are a block's tokens (or a hash): the tree compares bytes and
does not care which.

    root ─┬─ [b0 … b63 | dram+disk] ─┬─ [b64 … b71 | hbm]
          │                          └─ [b64'… b90'| disk]
          └─ [c0 … c511 | disk]

Matching never changes the tree. A run that moves in part is split: the node object stays the lower
part, so what hangs on a leaf still hangs on a leaf. Neighbours that became equal are merged.
Edges are `bytes` walked by offset with `startswith`; slicing the query per node is what makes
other trees superlinear. Owned by the daemon's one loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from hicache.engine.blocks import LEAVING_SHIFT, BlockTable
from hicache.engine.ids import Span, ids_of, joined, part_of, size_of
from hicache.tiers.block import Ids

ID_BYTES: Final = 4
MAX_EDGE_BYTES: Final = 256 << 10
"""Nodes are not merged past this length, so a merge or a split copies at most so much."""


class Node:
    """A run of blocks. `edge` holds their symbols, `ids` their block ids (int32, as bytes), `span`
    the same ids as an index into the arrays.

    `tiers`, `leaving`: bit sets, as in BlockTable.tags; `staying` is tiers without leaving.
    `holding[t]` counts children that stay in tier t: a node is a leaf of t when it stays in t and
    no child does. `queued`: the policies that have it as a candidate. `kind`, `uses`: what the
    history knows of it (`History.marks`); both stay 0 where no policy asks.
    """

    __slots__ = (
        "children",
        "depth",
        "edge",
        "holding",
        "ids",
        "kind",
        "leaving",
        "namespace",
        "num_blocks",
        "number",
        "parent",
        "queued",
        "span",
        "staying",
        "tiers",
        "touched_s",
        "uses",
    )

    def __init__(
        self,
        number: int,
        namespace: int,
        parent: Node | None,
        edge: bytes,
        ids: bytes,
        span: Span,
        depth: int,
    ) -> None:
        self.number = number
        self.namespace = namespace
        self.parent = parent
        self.edge = edge
        self.ids = ids
        self.span = span
        self.num_blocks = len(ids) // ID_BYTES
        self.depth = depth
        self.children: dict[bytes, Node] = {}
        self.tiers = self.leaving = self.staying = 0
        self.holding = [0] * 8
        self.queued = 0
        self.touched_s = 0.0
        self.kind = self.uses = 0

    def __len__(self) -> int:
        return self.num_blocks

    def block_ids(self) -> Ids:
        """The node's block ids, shape [len(self)], read-only."""
        return np.frombuffer(self.ids, np.int32)

    @property
    def is_root(self) -> bool:
        return self.parent is None


@dataclass(slots=True)
class Path:
    """The longest known prefix of a query: whole nodes, the last perhaps only `partial` blocks in.

    `num_blocks` counts all matched blocks, readable or not.
    """

    nodes: list[Node] = field(default_factory=list)
    partial: int = 0
    num_blocks: int = 0

    def ids(self) -> Ids:
        """Block ids along the path, shape [num_blocks]."""
        ids = b"".join([node.ids for node in self.nodes])
        return np.frombuffer(ids, np.int32)[: self.num_blocks]

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

    def add_root(self, namespace: int) -> Node:
        """A new, empty tree."""
        return self._new_node(namespace, None, b"", b"", slice(0, 0), 0)

    def match(self, root: Node, tokens: bytes, step: int) -> Path:
        """The longest known prefix of whole blocks (`step` symbol bytes each). Changes nothing."""
        nodes: list[Node] = []
        node = root
        position = 0
        while True:
            child = node.children.get(tokens[position : position + step])
            if child is None:
                return Path(nodes, 0, position // step)
            nodes.append(child)
            edge = child.edge
            if not tokens.startswith(edge, position):
                partial = _common_blocks(edge, tokens, position, step)
                return Path(nodes, partial, position // step + partial)
            position += len(edge)
            node = child

    def extend(self, root: Node, path: Path, tokens: bytes, step: int, count: int) -> Node:
        """Append `count` new blocks (no copies yet) after a path that ends before them.

        `tokens` is the whole query. Returns the new node, a child of the path's end.
        """
        self.cut(path, step)
        parent = path.nodes[-1] if path.nodes else root
        start = path.num_blocks * step
        edge = tokens[start : start + count * step]
        assert len(edge) == count * step
        assert edge[:step] not in parent.children
        depth = path.num_blocks
        span = self.blocks.allocate(count)
        ids = ids_of(span).tobytes()
        node = self._new_node(root.namespace, parent, edge, ids, span, depth)
        self.blocks.node[span] = node.number
        self.blocks.depth[span] = np.arange(depth, depth + count, dtype=np.int32)
        parent.children[edge[:step]] = node
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
        assert node.parent is not None
        upper = self._new_node(
            node.namespace,
            node.parent,
            node.edge[: count * step],
            node.ids[: count * ID_BYTES],
            part_of(node.span, 0, count),
            node.depth,
        )
        upper.tiers, upper.leaving, upper.staying = node.tiers, node.leaving, node.staying
        upper.touched_s, upper.kind, upper.uses = node.touched_s, node.kind, node.uses
        node.parent.children[upper.edge[:step]] = upper
        node.parent = upper
        node.edge = node.edge[count * step :]
        node.span = part_of(node.span, count, node.num_blocks)
        node.ids = node.ids[count * ID_BYTES :]
        node.num_blocks -= count
        node.depth += count
        upper.children[node.edge[:step]] = node
        staying = node.staying
        for tier in range(len(self.blocks.tiers)):
            upper.holding[tier] = staying >> tier & 1
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
            or len(parent.edge) + len(node.edge) > MAX_EDGE_BYTES
        ):
            return None
        self.blocks.node[parent.span] = node.number
        node.edge = parent.edge + node.edge
        node.ids = parent.ids + node.ids
        node.span = joined(parent.span, node.span)
        node.num_blocks += parent.num_blocks
        node.depth = parent.depth
        node.parent = parent.parent
        parent.parent.children[node.edge[:step]] = node
        self._drop(parent)
        return parent

    def mark(self, nodes: Sequence[Node], marks: Sequence[tuple[int, int, int]], step: int) -> None:
        """Tell the nodes of one path their kind and uses: each of `marks` holds up to a block,
        (end, kind, uses). Nodes are split where kinds differ; so a path that had them is stale."""
        position = 0
        for node in nodes:
            last = node.depth + node.num_blocks
            while position < len(marks) and marks[position][0] <= node.depth:
                position += 1
            while position < len(marks):
                end, kind, uses = marks[position]
                if end >= last:
                    node.kind, node.uses = kind, uses
                    break
                if position + 1 < len(marks) and marks[position + 1][1] != kind:
                    upper = self.split(node, end - node.depth, step)
                    upper.kind, upper.uses = kind, uses
                node.kind, node.uses = kind, uses
                position += 1

    def set_residency(self, node: Node, tiers: int, leaving: int) -> None:
        """Tag a node; its parent's counts follow."""
        before = node.staying
        node.tiers, node.leaving, node.staying = tiers, leaving, tiers & ~leaving
        changed = before ^ node.staying
        if changed and node.parent is not None:
            holding = node.parent.holding
            for tier in range(len(self.blocks.tiers)):
                if changed >> tier & 1:
                    holding[tier] += 1 if node.staying >> tier & 1 else -1

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
        """Cut the last `count` blocks, not all, off a childless node. Returns their ids, which are
        the caller's to forget."""
        kept = len(node) - count
        assert kept > 0
        assert not node.children
        span = part_of(node.span, kept, len(node))
        node.span = part_of(node.span, 0, kept)
        node.edge = node.edge[: kept * step]
        node.ids = node.ids[: kept * ID_BYTES]
        node.num_blocks = kept
        return span

    def remove(self, node: Node, step: int) -> Node:
        """Forget a childless node and its blocks, which have no copy left. Returns its parent."""
        self.blocks.free(node.span)
        return self.unlink(node, step)

    def unlink(self, node: Node, step: int) -> Node:
        """Take a childless node without residency out of the tree. Returns its parent."""
        parent = node.parent
        assert parent is not None
        assert not node.children
        assert not node.tiers
        del parent.children[node.edge[:step]]
        self._drop(node)
        return parent

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
        self,
        namespace: int,
        parent: Node | None,
        edge: bytes,
        ids: bytes,
        span: Span,
        depth: int,
    ) -> Node:
        number = self._free_numbers.pop() if self._free_numbers else len(self.nodes)
        node = Node(number, namespace, parent, edge, ids, span, depth)
        if number == len(self.nodes):
            self.nodes.append(node)
        else:
            self.nodes[number] = node
        self.num_nodes += 1
        return node

    def _drop(self, node: Node) -> None:
        self.nodes[node.number] = None
        self._free_numbers.append(node.number)
        node.parent = None
        node.ids = node.edge = b""
        node.tiers = node.leaving = node.staying = 0
        self.num_nodes -= 1

    def validate(self, root: Node, step: int) -> int:
        """Check a tree from the ground. Returns its number of blocks."""
        num_blocks = 0
        for node in self.subtree(root):
            assert self.nodes[node.number] is node
            for key, child in node.children.items():
                assert child.parent is node
                assert child.edge[:step] == key
                assert child.depth == node.depth + len(node)
            for tier in range(len(self.blocks.tiers)):
                holds = sum(child.staying >> tier & 1 for child in node.children.values())
                assert node.holding[tier] == holds, (node.number, tier)
            if node.is_root:
                continue
            ids = node.block_ids()
            num_blocks += len(ids)
            assert 0 < len(ids) == node.num_blocks
            assert (np.arange(len(self.blocks.tags), dtype=np.int32)[node.span] == ids).all()
            assert len(node.edge) == len(ids) * step
            assert (self.blocks.node[ids] == node.number).all()
            depths = np.arange(node.depth, node.depth + len(ids))
            assert (self.blocks.depth[ids] == depths).all()
            tag = node.tiers | node.leaving << LEAVING_SHIFT
            assert node.staying == node.tiers & ~node.leaving
            assert (self.blocks.tags[ids] == tag).all(), (node.number, tag, self.blocks.tags[ids])
        return num_blocks


def _common_blocks(edge: bytes, tokens: bytes, position: int, step: int) -> int:
    """How many whole blocks of `edge` stand in `tokens` at `position`: at least 1, not all."""
    low, high = 1, min(len(edge), len(tokens) - position) // step
    while low < high:  # low blocks agree; more than high cannot
        middle = (low + high + 1) // 2
        if tokens.startswith(edge[low * step : middle * step], position + low * step):
            low = middle
        else:
            high = middle - 1
    return low

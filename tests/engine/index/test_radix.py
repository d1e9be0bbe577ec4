"""The radix index against a dict from whole prefixes to residency, at several page sizes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hicache.engine.index import radix as index_module
from hicache.engine.index.node import Node
from hicache.engine.index.radix import Index, Path
from hicache.engine.residency.block_ids import Span, ids_of
from hicache.engine.residency.blocks import LEAVING_SHIFT, BlockTable, CopyState
from hicache.tiers.block import Ids, TierSpec, TierTraits
from hicache.tiers.pool import SlotPool

TIERS = ("hbm", "dram", "disk")


@dataclass
class Tree:
    """One index with one namespace, and ways to fill it without the rest of the engine."""

    block_tokens: int = 1
    index: Index = field(init=False)
    root: Node = field(init=False)

    def __post_init__(self) -> None:
        tiers = [TierSpec(name, 1 << 30, TierTraits(mapped=True)) for name in TIERS]
        pools = [SlotPool(1 << 20, 4096) for _ in tiers]
        self.index = Index(BlockTable(tiers, pools))
        self.root = self.index.add_root(0)

    @property
    def step(self) -> int:
        return self.block_tokens * 4

    def tokens(self, *blocks: int) -> bytes:
        """Blocks that differ in their last token only: the hardest to tell apart."""
        rows = np.zeros((len(blocks), self.block_tokens), "<u4")
        rows[:, -1] = blocks
        return rows.tobytes()

    def match(self, *blocks: int) -> Path:
        return self.index.match(self.root, self.tokens(*blocks), self.step)

    def add(self, *blocks: int, tag: int = 1) -> Node | None:
        """Store what is missing of a path. Returns the new node."""
        path = self.match(*blocks)
        if path.num_blocks == len(blocks):
            return None
        symbols = self.tokens(*blocks)[path.num_blocks * self.step :]
        node = self.index.extend(self.root, path, symbols, self.step)
        self.tag(node.block_ids(), tag)
        self.index.retag(node, self.step)
        return node

    def tag(self, ids: Ids, tag: int) -> None:
        """Bring copies to where the tag says they are: bits of tiers, leaving bits above."""
        blocks = self.index.blocks
        for tier in range(len(TIERS)):
            wanted = CopyState.ABSENT
            if tag >> tier & 1:
                leaving = tag >> (tier + LEAVING_SHIFT) & 1
                wanted = CopyState.DRAINING if leaving else CopyState.READY
            for block in ids.tolist():
                self._bring(tier, np.array([block], np.int32), wanted)
        assert (blocks.tags[ids] == tag).all()

    def _bring(self, tier: int, ids: Ids, wanted: CopyState) -> None:
        ways = {
            (CopyState.ABSENT, CopyState.READY): (CopyState.FILLING, CopyState.READY),
            (CopyState.ABSENT, CopyState.DRAINING): (
                CopyState.FILLING,
                CopyState.READY,
                CopyState.DRAINING,
            ),
            (CopyState.READY, CopyState.ABSENT): (CopyState.DRAINING, CopyState.ABSENT),
        }
        state = CopyState(int(self.index.blocks.state[tier][ids[0]]))
        if state != wanted:
            for step in ways.get((state, wanted), (wanted,)):
                self.index.blocks.change(tier, ids, step)

    def shape(self) -> list[tuple[int, int, int]]:
        """(depth, blocks, tiers) of every node, by depth."""
        nodes = [n for n in self.index.subtree(self.root) if not n.is_root]
        return sorted((n.depth, len(n), n.tiers) for n in nodes)

    def validate(self) -> int:
        self.index.blocks.validate()
        return self.index.validate(self.root, self.step)


@pytest.mark.parametrize("block_tokens", [1, 3, 16])
@pytest.mark.parametrize(
    ("query", "hit"),
    [
        ((), 0),
        ((9,), 0),
        ((1,), 1),
        ((1, 2, 3), 3),
        ((1, 2, 3, 4), 4),
        ((1, 2, 3, 4, 5), 5),
        ((1, 2, 3, 4, 5, 6), 5),
        ((1, 2, 9, 9, 9, 9), 2),
        ((1, 2, 3, 7, 8), 5),
        ((1, 2, 3, 7, 9), 4),
        ((2, 3), 0),
    ],
)
def test_longest_prefix(block_tokens: int, query: tuple[int, ...], hit: int) -> None:
    tree = Tree(block_tokens)
    tree.add(1, 2, 3, 4, 5)
    tree.add(1, 2, 3, 7, 8)
    path = tree.match(*query)
    assert path.num_blocks == hit
    assert len(path.ids()) == hit
    assert (tree.index.blocks.depth[path.ids()] == np.arange(hit)).all()


def test_a_part_of_a_block_is_no_hit() -> None:
    tree = Tree(16)
    tree.add(1, 2, 3)
    tokens = tree.tokens(1, 2, 3)
    for length in range(0, len(tokens), 4):
        path = tree.index.match(tree.root, tokens[:length], tree.step)
        assert path.num_blocks == length // tree.step


def test_splitting_keeps_the_object_as_the_lower_part() -> None:
    tree = Tree()
    node = tree.add(1, 2, 3, 4)
    assert node is not None
    ids = node.block_ids().tolist()
    upper = tree.index.split(node, 1, tree.step)
    assert node.parent is upper
    assert upper.block_ids().tolist() + node.block_ids().tolist() == ids
    assert [tree.index.node_of(block) for block in ids] == [upper, node, node, node]
    assert tree.shape() == [(0, 1, 1), (1, 3, 1)]
    assert tree.validate() == 4


def test_equal_neighbours_merge_into_the_lower_one() -> None:
    tree = Tree()
    node = tree.add(1, 2, 3, 4)
    assert node is not None
    upper = tree.index.split(node, 2, tree.step)
    assert tree.index.try_merge(node, tree.step) is upper
    assert upper.parent is None
    assert tree.shape() == [(0, 4, 1)]
    assert tree.validate() == 4


@pytest.mark.parametrize("difference", ["tiers", "leaving", "touched", "fork", "length", "root"])
def test_unequal_neighbours_do_not_merge(difference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Tree()
    node = tree.add(1, 2, 3, 4)
    assert node is not None
    if difference != "root":
        tree.index.split(node, 2, tree.step)
    if difference == "tiers":
        tree.tag(node.block_ids(), 3)
        tree.index.retag(node, tree.step)
    elif difference == "leaving":
        tree.tag(node.block_ids(), 1 | 1 << LEAVING_SHIFT)
        tree.index.retag(node, tree.step)
    elif difference == "touched":
        node.touched_s = 7.0
    elif difference == "fork":
        tree.add(1, 2, 9)
    elif difference == "length":
        tree = Tree()
        tree.add(1, 2)
        node = tree.add(1, 2, 3, 4)
        assert node is not None
        monkeypatch.setattr(index_module, "MAX_STEM_BYTES", 3 * tree.step)
    before = tree.shape()
    assert tree.index.try_merge(node, tree.step) is None
    assert tree.shape() == before
    tree.validate()


def test_retag_splits_where_residency_differs() -> None:
    tree = Tree(3)
    node = tree.add(1, 2, 3, 4, 5, 6)
    assert node is not None
    ids = node.block_ids()
    tree.tag(ids[1:3], 3)
    tree.tag(ids[5:], 4)
    pieces = tree.index.retag(node, tree.step)
    assert [(len(piece), piece.tiers) for piece in pieces] == [(1, 1), (2, 3), (2, 1), (1, 4)]
    assert pieces[-1] is node
    assert [piece.holding[:3] for piece in pieces] == [[1, 1, 0], [1, 0, 0], [0, 0, 1], [0, 0, 0]]
    assert tree.validate() == 6


def test_removing_a_leaf_frees_its_blocks_and_numbers() -> None:
    tree = Tree()
    tree.add(1, 2)
    leaf = tree.add(1, 2, 3, 4)
    assert leaf is not None
    number = leaf.number
    tree.tag(leaf.block_ids(), 0)
    tree.index.retag(leaf, tree.step)
    parent = tree.index.remove(leaf, tree.step)
    assert parent.block_ids().tolist() == tree.match(1, 2, 3, 4).ids().tolist()
    again = tree.add(5)
    assert again is not None
    assert again.number == number
    assert tree.validate() == 3


def test_nodes_of_names_each_node_once() -> None:
    tree = Tree()
    tree.add(1, 2, 3)
    tree.add(1, 2, 7)
    ids = np.concatenate([tree.match(1, 2, 3).ids(), tree.match(1, 2, 7).ids()])
    assert len(tree.index.nodes_of(ids)) == 3
    assert tree.index.nodes_of(ids[:0]) == []


@given(
    st.sampled_from([1, 3, 16]),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=12),
    st.lists(st.lists(st.integers(0, 3), max_size=10), min_size=1, max_size=12),
)
def test_matching_changes_nothing_and_finds_the_longest_prefix(
    block_tokens: int, stored: list[list[int]], asked: list[list[int]]
) -> None:
    tree = Tree(block_tokens)
    known: set[tuple[int, ...]] = set()
    for path in stored:
        tree.add(*path)
        known.update(tuple(path[:size]) for size in range(1, len(path) + 1))
    shape, num_nodes = tree.shape(), tree.index.num_nodes
    for query in asked:
        hit = max(n for n in range(len(query) + 1) if n == 0 or tuple(query[:n]) in known)
        assert tree.match(*query).num_blocks == hit
    assert (tree.shape(), tree.index.num_nodes) == (shape, num_nodes)
    assert tree.validate() == len(known)


paths = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)
tags = st.sampled_from([1, 2, 3, 4, 6, 7, 1 | 1 << LEAVING_SHIFT, 3 | 2 << LEAVING_SHIFT])


class IndexMachine(RuleBasedStateMachine):
    """Every operation in any order. The model: prefix → (block id, tag)."""

    block_tokens = 1

    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree(self.block_tokens)
        self.model: dict[tuple[int, ...], tuple[int, int]] = {}
        self.pins: Counter[int] = Counter()
        self.pinned: list[Span] = []

    def nodes(self) -> list[Node]:
        return [n for n in self.tree.index.subtree(self.tree.root) if not n.is_root]

    @rule(path=paths, tag=tags)
    def extend(self, path: tuple[int, ...], tag: int) -> None:
        self.tree.add(*path, tag=tag)
        ids = self.tree.match(*path).ids().tolist()
        assert len(ids) == len(path)
        for size, block in enumerate(ids, 1):
            self.model.setdefault(path[:size], (block, tag))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def split(self, data: st.DataObject) -> None:
        nodes = [node for node in self.nodes() if len(node) > 1]
        if nodes:
            node = nodes[data.draw(st.integers(0, len(nodes) - 1))]
            cut = data.draw(st.integers(1, len(node) - 1))
            self.tree.index.split(node, cut, self.tree.step)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def merge(self, data: st.DataObject) -> None:
        nodes = self.nodes()
        self.tree.index.try_merge(nodes[data.draw(st.integers(0, len(nodes) - 1))], self.tree.step)

    @rule(path=paths)
    def join(self, path: tuple[int, ...]) -> None:
        found = self.tree.match(*path)
        self.tree.index.cut(found, self.tree.step)
        self.tree.index.join(found.nodes)

    @precondition(lambda self: self.model)
    @rule(path=paths, first=st.integers(0, 7))
    def pin(self, path: tuple[int, ...], first: int) -> None:
        found = self.tree.match(*path)
        first = min(first, found.num_blocks)
        for span in found.spans(first, found.num_blocks):
            self.tree.index.blocks.pin(span)
            self.pins.update(ids_of(span).tolist())
            self.pinned.append(span)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        span = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.tree.index.blocks.unpin(span)
        self.pins -= Counter(ids_of(span).tolist())

    @precondition(lambda self: self.model)
    @rule(path=paths, first=st.integers(0, 7), tag=tags)
    def retag(self, path: tuple[int, ...], first: int, tag: int) -> None:
        ids = self.tree.match(*path).ids()[first:]
        self.tree.tag(ids, tag)
        for node in self.tree.index.nodes_of(ids):
            self.tree.index.retag(node, self.tree.step)
        for size in range(first + 1, first + 1 + len(ids)):
            self.model[path[:size]] = (self.model[path[:size]][0], tag)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), tag=st.sampled_from([1, 2]))
    def touch(self, data: st.DataObject, tag: int) -> None:
        nodes = self.nodes()
        nodes[data.draw(st.integers(0, len(nodes) - 1))].touched_s = float(tag)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        leaves = [node for node in self.nodes() if not node.children]
        node = leaves[data.draw(st.integers(0, len(leaves) - 1))]
        gone = set(node.block_ids().tolist())
        if gone & self.pins.keys():
            return
        self.tree.tag(node.block_ids(), 0)
        self.tree.index.retag(node, self.tree.step)
        self.tree.index.remove(node, self.tree.step)
        self.model = {k: v for k, v in self.model.items() if v[0] not in gone}

    @rule(query=st.lists(st.integers(0, 3), max_size=9))
    def match(self, query: list[int]) -> None:
        before = self.tree.shape()
        path = self.tree.match(*query)
        expected = []
        for size in range(1, len(query) + 1):
            if tuple(query[:size]) not in self.model:
                break
            expected.append(self.model[tuple(query[:size])][0])
        assert path.ids().tolist() == expected
        assert self.tree.shape() == before

    @invariant()
    def holds(self) -> None:
        assert self.tree.validate() == len(self.model)
        blocks = self.tree.index.blocks
        assert len(blocks) == len(self.model)
        assert self.tree.index.num_nodes == len(self.nodes()) + 1
        for block, tag in self.model.values():
            assert int(blocks.tags[block]) == tag
            assert int(blocks.leases[block]) == self.pins[block]


class ThreeTokenBlocks(IndexMachine):
    block_tokens = 3


class SixteenTokenBlocks(IndexMachine):
    block_tokens = 16


MACHINES = [IndexMachine, ThreeTokenBlocks, SixteenTokenBlocks]


@pytest.mark.parametrize("machine", MACHINES)
def test_random_operations(machine: type[IndexMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=30))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", MACHINES)
def test_long_random_operations(machine: type[IndexMachine]) -> None:
    """Some 17,000 steps each."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=400,
            stateful_step_count=50,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_stem_holds_a_conversation_and_its_second_tries() -> None:
    """Turn after turn, each asked for before the next: one stem, whatever branches off once."""
    tree = Tree()
    turns = [1, 2, 3, 4, 5, 6]
    for size in range(1, len(turns) + 1):
        tree.add(*turns[:size])
        tree.index.join(tree.match(*turns[:size]).nodes)
        tree.add(*turns[:size], 90 + size)
    path = tree.match(*turns, 7)
    assert (len(path.nodes), path.num_blocks) == (6, 6)
    assert len({id(node.stem) for node in path.nodes}) == 1
    assert tree.match(1, 2, 3, 93, 9).num_blocks == 4
    tree.add(1, 2, 3, 50)  # a third way: the stem ends there
    path = tree.match(*turns)
    assert [len(node.stem.nodes) for node in path.nodes] == [3, 3, 3, 3, 3, 3]
    tree.index.join(path.nodes)
    assert [len(node.stem.nodes) for node in path.nodes] == [3, 3, 3, 3, 3, 3]
    tree.validate()


@pytest.mark.parametrize("kept", range(1, 8))
@pytest.mark.parametrize("again", [(), (50, 51), (6, 7, 8)])
def test_what_was_trimmed_is_no_hit_and_can_be_stored_anew(
    kept: int, again: tuple[int, ...]
) -> None:
    """The symbols of what is gone may stand in the stem for a while. Trimmed in two steps."""
    tree = Tree(block_tokens=2)
    whole = tuple(range(1, 9))
    node = tree.add(*whole)
    assert node is not None
    for count in filter(None, (1, 7 - kept)):
        gone = node.block_ids()[-count:]
        tree.tag(gone, 0)
        tree.index.trim(node, count, tree.step)
        tree.index.blocks.free(gone)
        assert tree.match(*whole).num_blocks == len(node)
        tree.validate()
    assert tree.match(*whole, 9).num_blocks == kept
    query = (*whole[:kept], *again, 60)
    tree.add(*query)
    path = tree.match(*query)
    assert path.num_blocks == len(query)
    tree.index.join(path.nodes)
    if len(path.nodes[-1]) > 1:
        tree.index.split(path.nodes[-1], 1, tree.step)
    assert tree.match(*query).num_blocks == len(query)
    assert tree.match(*whole).num_blocks >= kept
    tree.validate()

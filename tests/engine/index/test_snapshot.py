"""Pages of the index: put together they are the index, and to ask for one changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, run_state_machine_as_test

from hicache.engine import plan as p
from hicache.engine.index.node import Node
from hicache.engine.index.snapshot import MAX_FIRST_TOKENS, TreePage, TreeRun, page
from hicache.engine.residency.candidates import DISMISSED_S
from hicache.engine.residency.copies import Residency
from hicache.tiers.block import PAGE_BYTES
from tests.engine.index.tree_picture import portrait
from tests.engine.test_core_stateful import (
    EngineMachine,
    OneTierMachine,
    TwoSizesInSlabsMachine,
    TwoSizesMachine,
)
from tests.engine.test_races import END
from tests.engine.world import BLOCK_BYTES, BLOCK_TOKENS, DIGEST, MAPPED, World, tokens_of

A = tokens_of(1, 2, 3)


def nodes_of(residency: Residency) -> list[Node]:
    """All but the roots, found by walking the trees."""
    below = [node for space in residency.namespaces for node in residency.index.subtree(space.root)]
    return [node for node in below if not node.is_root]


def told(residency: Residency, node: Node, now_s: float) -> dict[str, Any]:
    """What has to be said of a node."""
    assert node.parent is not None
    space = residency.namespaces[node.namespace]
    return {
        "number": node.number,
        "parent": None if node.parent.is_root else node.parent.number,
        "digest": space.digest,
        "depth": node.depth,
        "blocks": len(node.block_ids()),
        "tiers": node.tiers,
        "leaving": node.leaving,
        "idle_s": None if node.touched_s == DISMISSED_S else max(0.0, now_s - node.touched_s),
        "is_leased": residency.blocks.is_pinned(node.block_ids()),
        "tokens": node.symbols(space.step, 0, 1)[: 4 * MAX_FIRST_TOKENS],
    }


def read(residency: Residency, run: TreeRun, found: TreePage) -> dict[str, Any]:
    """The same of what a page says."""
    fields = {name: getattr(run, name) for name in run.__struct_fields__ if name != "namespace"}
    return {**fields, "digest": residency.namespaces[found.namespaces[run.namespace]].digest}


def pages(residency: Residency, most: int, now_s: float, **more: Any) -> list[TreePage]:
    found = [page(residency, 0, most, now_s, **more)]
    while (after := found[-1].next) is not None:
        found.append(page(residency, after, most, now_s, **more))
    return found


def all_of(residency: Residency, most: int, now_s: float, **more: Any) -> list[dict[str, Any]]:
    return [
        read(residency, run, found)
        for found in pages(residency, most, now_s, **more)
        for run in found.runs
    ]


class Looking:
    """Mixed into a machine: after every step all pages are the index. One reading goes on over
    many steps, a page at a time: what stays as it is meanwhile is in it, as it is."""

    world: World
    num_looks = 0
    reading: dict[int, dict[str, Any]]
    unchanged: dict[int, tuple[Node, dict[str, Any]]]
    after: int | None = None

    @invariant()
    def looks(self) -> None:
        residency, now_s = self.world.engine.residency, self.world.now_s
        self.num_looks += 1
        most = self.num_looks % 7 + 1
        before = portrait(self.world.engine) if self.num_looks % 10 == 0 else None
        found = all_of(residency, most, now_s)
        assert before is None or portrait(self.world.engine) == before
        expected = [told(residency, node, now_s) for node in nodes_of(residency)]
        assert found == sorted(expected, key=lambda row: row["number"])
        assert [row for row in found if row["digest"] == DIGEST] == all_of(
            residency, most, now_s, namespace=DIGEST
        )
        self.go_on(residency, now_s)

    def go_on(self, residency: Residency, now_s: float) -> None:
        now = {node.number: (node, told(residency, node, 0.0)) for node in nodes_of(residency)}
        if self.after is None:
            self.reading, self.unchanged, self.after = {}, now, 0
        kept = {n: row for n, row in self.unchanged.items() if n in now and now[n][0] is row[0]}
        self.unchanged = {n: row for n, row in kept.items() if now[n][1] == row[1]}
        found = page(residency, self.after, 3, 0.0)
        self.reading |= {run.number: read(residency, run, found) for run in found.runs}
        self.after = found.next
        if self.after is None:
            for number, (_, row) in self.unchanged.items():
                assert self.reading[number] == row


@pytest.mark.parametrize(
    "machine", [EngineMachine, OneTierMachine, TwoSizesMachine, TwoSizesInSlabsMachine]
)
def test_random_histories(machine: type[EngineMachine]) -> None:
    looking = type(f"Looking{machine.__name__}", (Looking, machine), {})
    run_state_machine_as_test(looking, settings=settings(max_examples=6, stateful_step_count=30))


@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), max_size=12),
    st.integers(1, 40),
    st.integers(0, 50),
)
def test_any_size_of_page_and_any_beginning(
    prompts: list[list[int]], most: int, after: int
) -> None:
    """Two namespaces, the second with every other prompt; nothing beyond the end."""
    w = World((("dram", 400, MAPPED),))
    w.open(b"m" * 32, BLOCK_BYTES)
    for number, prompt in enumerate(prompts):
        w.store(tokens_of(*prompt), namespace=number % 2)
    residency = w.engine.residency
    expected = sorted(
        (told(residency, n, w.now_s) for n in nodes_of(residency)), key=lambda r: r["number"]
    )
    assert all_of(residency, most, w.now_s) == expected
    assert all_of(residency, most, w.now_s, namespace=b"m" * 5) == [
        row for row in expected if row["digest"] == b"m" * 32
    ]
    assert all_of(residency, most, w.now_s, namespace=b"x") == []
    found = page(residency, after, most, w.now_s)
    assert [run.number for run in found.runs] == [
        row["number"] for row in expected if after <= row["number"] < after + most
    ]
    assert found.end == len(residency.index.nodes)
    assert found.next == (after + most if after + most < found.end else None)


def test_a_namespace_without_blocks_is_met_by_its_root() -> None:
    w = World()
    w.open(b"m" * 32, BLOCK_BYTES)
    (found,) = pages(w.engine.residency, 10, w.now_s)
    assert (found.runs, found.namespaces) == ([], [0, 1])
    (found,) = pages(w.engine.residency, 10, w.now_s, namespace=b"m")
    assert (found.runs, found.namespaces) == ([], [1])


def test_gaps_of_nodes_that_are_no_more() -> None:
    """A page with nothing in it is not the last one."""
    w = World((("dram", 64, MAPPED),))
    for number in range(1, 9):
        w.store(tokens_of(number))
    w.do(p.Clear(0, w.now_s))
    w.store(A)
    found = pages(w.engine.residency, 2, w.now_s)
    assert [len(one.runs) for one in found].count(0) >= 3
    assert sum(run.blocks for one in found for run in one.runs) == 3


def test_what_nobody_is_expected_to_ask_for_again() -> None:
    w = World((("dram", 64, MAPPED),))
    w.store(A)
    (run,) = page(w.engine.residency, 0, 10, w.now_s + 2.5).runs
    assert run.idle_s == 2.5
    w.do(p.Hint(0, A, w.now_s, ended="conversation"))
    (run,) = page(w.engine.residency, 0, 10, w.now_s).runs
    assert run.idle_s is None


def test_a_clock_that_is_behind_makes_nothing_younger_than_now() -> None:
    w = World()
    w.store(A)
    (run,) = page(w.engine.residency, 0, 10, 0.0).runs
    assert run.idle_s == 0.0


def test_a_lease_shows_on_what_it_holds_and_on_nothing_else() -> None:
    """Two prompts with the same beginning. The first is leased behind that beginning."""
    w = World((("dram", 64, MAPPED),))
    for tail in (3, 4):
        w.store(tokens_of(1, 2, tail))
    w.now_s += 1
    question = p.MatchPrompt(0, tokens_of(1, 2, 3) + END, 1, w.now_s, 100.0, skip_blocks=2)
    lease = w.do(question).lease
    rows = {(run.depth, run.tokens[:4]): run for run in page(w.engine.residency, 0, 9, 0.0).runs}
    is_leased = {key[1][0]: run.is_leased for key, run in rows.items()}
    assert is_leased == {1: False, 3: True, 4: False}
    w.release(lease)
    assert not any(run.is_leased for run in page(w.engine.residency, 0, 9, 0.0).runs)


@pytest.mark.parametrize("is_odd", [False, True])
def test_a_lease_shows_on_a_node_in_which_it_ends(is_odd: bool) -> None:
    """As where a prompt ends, or where the part worth reloading does; also where the node's ids are
    no range."""
    w = World((("dram", 64, MAPPED),))
    w.store(tokens_of(1, 2, 3, 4))
    w.store(tokens_of(1, 9))
    residency = w.engine.residency
    (node,) = (n for n in nodes_of(residency) if n.depth == 1 and len(n) == 3)
    if is_odd:
        node.span = node.block_ids()
    (first, middle, last) = node.block_ids().tolist()
    for held, is_leased in ((slice(first, middle), True), (slice(0, first), False)):
        with residency.pinned([held]):
            runs = {run.number: run.is_leased for run in page(residency, 0, 9, 0.0).runs}
        assert runs[node.number] == is_leased
    assert (middle, last) == (first + 1, first + 2)


def test_no_more_than_a_few_tokens_and_none_where_they_are_not_wanted() -> None:
    w = World()
    number = w.do(p.OpenNamespace(b"m" * 32, 20, PAGE_BYTES))
    tokens = bytes(range(80))
    w.do(p.Put(number, tokens, 0, 1, 1, w.now_s, 100.0))
    w.store(A)
    runs = page(w.engine.residency, 0, 10, w.now_s).runs
    assert sorted(run.tokens for run in runs) == sorted([A[: 4 * BLOCK_TOKENS], tokens[:32]])
    assert {run.tiers for run in runs if run.tokens == tokens[:32]} == {0}, "it is being written"
    hidden = page(w.engine.residency, 0, 10, w.now_s, with_tokens=False).runs
    assert [run.tokens for run in hidden] == [b"", b""]


def test_beyond_the_end() -> None:
    w = World()
    w.store(A)
    for after in (2, 3, 2**63 - 1):
        found = page(w.engine.residency, after, 512, w.now_s)
        assert (found.runs, found.namespaces, found.next, found.end) == ([], [], None, 2)

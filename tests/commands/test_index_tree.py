"""Branches put together from pages, beside a dict of all prefixes; and pages that do not agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.commands.index_tree import Branch, Sum, TreeForest, TreeReader, Trunk, Unreadable, sort
from hicache.commands.tree_drawing import draw
from hicache.engine.index.snapshot import TreeRun, page
from hicache.engine.residency.copies import Residency
from hicache.protocol.messages import pack, unpack
from tests.engine.world import BLOCK_BYTES, BLOCK_TOKENS, World, tokens_of

DIGEST = "ab" * 32
SPACE = {
    "digest": DIGEST,
    "name": "llama",
    "block_tokens": 4,
    "block_bytes": 1000,
    "slot_bytes": 4096,
}
TIERS = ["dram", "disk"]

Prefix = tuple[int, ...]


def answer(runs: list[TreeRun], **changes: Any) -> dict[str, Any]:
    """A page as it comes over the wire."""
    fields = {
        "epoch": "e1",
        "tiers": TIERS,
        "namespaces": [SPACE],
        "nodes": runs,
        "next": None,
        "end": 100,
    }
    return unpack(pack({**fields, **changes}), 65536)


def run(number: int, parent: int | None, depth: int, blocks: int, **changes: Any) -> TreeRun:
    fields: dict[str, Any] = {
        "namespace": 0,
        "tiers": 1,
        "leaving": 0,
        "idle_s": 1.0,
        "is_leased": False,
        "tokens": b"",
    }
    return TreeRun(number, parent, depth=depth, blocks=blocks, **{**fields, **changes})


def read(*replies: dict[str, Any]) -> TreeForest:
    reading = TreeReader()
    for reply in replies:
        reading.take(reply)
    assert reading.after is None
    return reading.forest()


def one(*runs: TreeRun) -> Trunk:
    (trunk,) = read(answer(list(runs))).trunks
    return trunk


# --- beside a model -----------------------------------------------------------------------------


def prefixes_of(server: Residency, number: int) -> dict[Prefix, int]:
    """Every known prefix of a namespace, and the tiers that its last block is in."""
    space = server.namespaces[number]
    found: dict[Prefix, int] = {}
    pending: list[tuple[Any, Prefix]] = [(space.root, ())]
    while pending:
        node, prefix = pending.pop()
        for at in range(len(node)):
            symbol = node.symbols(space.step, at, at + 1)
            prefix = (*prefix, int.from_bytes(symbol[:4], "little"))
            found[prefix] = int(server.blocks.tags[node.block_ids()[at]]) & 0xFF
        pending.extend((child, prefix) for child in node.children.values())
    return found


def expected(prefixes: dict[Prefix, int], num_tiers: int) -> list[tuple[Any, ...]]:
    """The branches, from the prefixes alone: one begins where the prefix above forks."""
    children: dict[Prefix, list[Prefix]] = {}
    for prefix in prefixes:
        children.setdefault(prefix[:-1], []).append(prefix)
    rows = []
    for prefix in prefixes:
        above = prefix[:-1]
        if above and len(children[above]) == 1:
            continue
        end = prefix
        while len(children.get(end, ())) == 1:
            (end,) = children[end]
        below = {one: tiers for one, tiers in prefixes.items() if one[: len(prefix)] == prefix}
        own = {one: tiers for one, tiers in below.items() if len(one) <= len(end)}
        rows.append(
            (
                prefix[-1],
                len(above),
                len(end) - len(above),
                sum(one not in children for one in below),
                summed(own, num_tiers),
                summed(below, num_tiers),
            )
        )
    return sorted(rows)


def summed(prefixes: dict[Prefix, int], num_tiers: int) -> tuple[int, ...]:
    """Blocks that can be read, then those in each tier."""
    per_tier = [sum(tiers >> t & 1 for tiers in prefixes.values()) for t in range(num_tiers)]
    return (sum(tiers > 0 for tiers in prefixes.values()), *per_tier)


def counts(total: Sum) -> tuple[int, ...]:
    return (total.blocks, *total.per_tier)


def rows_of(trunk: Trunk) -> list[tuple[Any, ...]]:
    return sorted(
        (b.tokens[0], b.depth, b.blocks, b.ends, counts(b.own), counts(b.all))
        for b in trunk.branches
    )


def answers(w: World, most: int) -> Iterator[dict[str, Any]]:
    server = w.engine.residency
    after: int | None = 0
    while after is not None:
        found = page(server, after, most, w.now_s)
        spaces = [server.namespaces[number] for number in found.namespaces]
        named = [
            {**SPACE, "digest": s.digest.hex(), "block_tokens": s.block_tokens} for s in spaces
        ]
        tiers = [tier.name for tier in server.tiers]
        yield answer(found.runs, tiers=tiers, namespaces=named, next=found.next, end=found.end)
        after = found.next


@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=5), max_size=10),
    st.integers(1, 9),
    st.sampled_from(["bytes", "recent", "branches"]),
)
def test_the_branches_are_those_of_the_prefixes(
    prompts: list[list[int]], most: int, order: Any
) -> None:
    """Three small tiers that push blocks down, two namespaces; the last put is still being written.
    Whatever the order, it is of the same branches."""
    w = World()
    w.open(b"m" * 32, BLOCK_BYTES)
    for number, prompt in enumerate(prompts):
        w.store(tokens_of(*prompt), namespace=number % 2)
        if number % 3 == 0:
            w.finish_all()
    w.put(tokens_of(3, 3, 3, 3))
    server = w.engine.residency
    forest = read(*answers(w, most))
    assert forest.num_loose == 0
    assert len(forest.trunks) == 2
    sort(forest, order)
    for trunk in forest.trunks:
        number = next(n.number for n in server.namespaces if n.digest.hex() == trunk.space.digest)
        prefixes = prefixes_of(server, number)
        assert rows_of(trunk) == expected(prefixes, len(server.tiers))
        assert counts(trunk.all) == summed(prefixes, len(server.tiers))
        assert trunk.ends == sum(not b.children for b in trunk.branches)
        below = trunk.children + [child for b in trunk.branches for child in b.children]
        assert {id(b) for b in below} == {id(b) for b in trunk.branches}
        assert all(b.blocks * BLOCK_TOKENS > 0 for b in trunk.branches)
    assert list(draw(forest, 3, 8, None))


# --- pages that do not agree ---------------------------------------------------------------------


def test_a_chain_is_one_branch_of_the_youngest_age() -> None:
    trunk = one(
        run(5, 9, 2, 3, tiers=2, idle_s=7.0, tokens=bytes([2, 0, 0, 0])),
        run(9, None, 0, 2, tiers=3, idle_s=None, tokens=bytes([1, 0, 0, 0]), is_leased=True),
    )
    (branch,) = trunk.branches
    assert (branch.number, branch.blocks, branch.nodes, branch.tokens) == (5, 5, 2, [1])
    assert (branch.idle_s, branch.is_leased, branch.ends) == (7.0, True, 1)
    assert counts(branch.all) == counts(trunk.all) == (5, 2, 5)


def test_nobody_is_expected_to_ask_again_only_where_that_holds_for_all() -> None:
    trunk = one(run(1, None, 0, 1, idle_s=None), run(2, None, 0, 1, idle_s=None))
    assert trunk.idle_s is None
    trunk = one(run(1, None, 0, 1, idle_s=None), run(2, None, 0, 1, idle_s=3.0))
    assert trunk.idle_s == 3.0


@pytest.mark.parametrize(
    "above",
    [
        pytest.param([], id="gone before it was read"),
        pytest.param([run(1, None, 0, 4)], id="longer by now"),
        pytest.param([run(1, None, 0, 2)], id="shorter by now"),
        pytest.param([run(1, None, 0, 3, namespace=1)], id="of another namespace by now"),
    ],
)
def test_an_orphan_hangs_in_its_namespace(above: list[TreeRun]) -> None:
    other = {**SPACE, "digest": "cd" * 32}
    forest = read(answer([*above, run(2, 1, 3, 5)], namespaces=[SPACE, other]))
    branch = next(b for b in forest.trunks[0].branches if b.number == 2)
    assert branch.parent is None
    assert branch in forest.trunks[0].children
    assert forest.num_loose == 1
    assert sum(trunk.all.blocks for trunk in forest.trunks) == 5 + sum(r.blocks for r in above)


def test_a_number_that_comes_twice_counts_once() -> None:
    first = answer([run(1, None, 0, 2), run(2, None, 0, 3)], next=5)
    again = answer([run(2, None, 0, 4, tiers=2)])
    (trunk,) = read(first, again).trunks
    assert counts(trunk.all) == (6, 2, 4)


def test_its_own_parent() -> None:
    """What no daemon says; nothing goes round in circles for it."""
    forest = read(answer([run(1, 1, 0, 2), run(2, 3, 1, 1), run(3, 2, 2, 1), run(4, None, 0, 0)]))
    assert sum(len(trunk.branches) for trunk in forest.trunks) == 2
    assert forest.num_loose == 1


@pytest.mark.parametrize(
    "reply",
    [
        {},
        answer([], nodes=7),
        answer([], nodes=[[1, 2, 3]]),
        answer([run(1, None, 0, 1, namespace=1)]),
        answer([run(1, None, 0, 1, namespace=-2)]),
        answer([], next="more"),
        answer([], namespaces=[{"digest": 7}]),
        answer([], next=0),
    ],
)
def test_what_is_no_page(reply: dict[str, Any]) -> None:
    with pytest.raises(Unreadable):
        read(reply)


def test_pages_that_do_not_go_on() -> None:
    with pytest.raises(Unreadable, match="do not follow"):
        read(answer([], next=5), answer([], next=5))


def test_a_daemon_that_was_started_again() -> None:
    with pytest.raises(Unreadable, match="started again"):
        read(answer([], next=5), answer([], epoch="e2"))


def test_what_a_newer_daemon_adds_is_ignored() -> None:
    row = [1, None, 0, 0, 2, 1, 0, 1.5, False, b"", "new", {"newer": 1}]
    reply = answer([], nodes=[row], namespaces=[{**SPACE, "colour": "red"}], more_to_come=1)
    (trunk,) = read(reply).trunks
    assert counts(trunk.all) == (2, 2, 0)


def test_orders() -> None:
    """1 holds most, 2 was used last, 3 parts most often."""
    runs = [
        run(1, None, 0, 9, idle_s=5.0),
        run(2, None, 0, 2, idle_s=1.0),
        run(3, None, 0, 1, idle_s=9.0),
        run(4, 3, 1, 1, idle_s=9.0),
        run(5, 3, 1, 1, idle_s=9.0),
        run(6, None, 0, 2, tiers=3, idle_s=None),
    ]
    forest = read(answer(runs))
    firsts = {}
    for order in ("bytes", "recent", "branches"):
        sort(forest, order)
        firsts[order] = [branch.number for branch in forest.trunks[0].children]
    assert firsts == {"bytes": [1, 3, 6, 2], "recent": [2, 1, 3, 6], "branches": [3, 1, 2, 6]}


def test_a_hundred_thousand_nodes_each_below_the_other() -> None:
    """A conversation with a second try at every turn: no recursion, neither in putting it together
    nor in drawing it, nor in letting go of it."""
    reading = TreeReader()
    num_turns = 50_000
    for first in range(0, num_turns, 250):
        turns = range(first, first + 250)
        spine = [run(2 * t, 2 * t - 2 if t else None, t, 1) for t in turns]
        tries = [run(2 * t + 1, 2 * t - 2 if t else None, t, 1, tiers=2) for t in turns]
        after = None if first + 250 == num_turns else 2 * first + 500
        reading.take(answer([*spine, *tries], next=after))
    forest = reading.forest()
    (trunk,) = forest.trunks
    assert counts(trunk.all) == (2 * num_turns, num_turns, num_turns)
    assert len(trunk.branches) == 2 * num_turns
    assert trunk.ends == num_turns + 1
    deepest: Branch | None = trunk.branches[-1]
    levels = 0
    while deepest is not None:
        deepest, levels = deepest.parent, levels + 1
    assert levels == num_turns
    sort(forest, "bytes")
    lines = list(draw(forest, 4, 1, None))
    assert len(lines) == 1 + 4 + 4
    assert lines[-1] == "└─ … and 1 more branch, 4.0 KiB"
    del forest, trunk, reading

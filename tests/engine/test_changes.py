"""What is told of the index, taken piece by piece, is the index: whatever happens meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from hicache.engine.changes import Changes, Removed, Stored
from tests.engine.test_core_stateful import (
    EngineMachine,
    OneTierMachine,
    TwoSizesInSlabsMachine,
    TwoSizesMachine,
)
from tests.engine.test_races import world
from tests.engine.world import DIGEST, ROOT, STEP, World, keys_of, tokens_of

ALL = 1 << 20
Held = dict[bytes, set[str]]


class Listener:
    """Somebody who knows only what was told since it joined."""

    def __init__(self) -> None:
        self.held: Held = {}
        self.heard: set[bytes] = {ROOT}

    def take(self, news: list[Stored | Removed], w: World) -> None:
        there = held_by(w)
        for item in news:
            if isinstance(item, Stored):
                assert item.parent in self.heard or item.parent not in there, "before its parent"
                self.heard.update(item.keys)
                for key in item.keys:
                    self.held.setdefault(key, set()).add(item.tier)
            else:
                for key in item.keys:
                    tiers = self.held.get(key, set())
                    tiers.discard(item.tier)
                    if not tiers:
                        self.held.pop(key, None)


def held_by(w: World) -> Held:
    """What can be read from where, by the index itself."""
    house = w.engine.residency
    held: Held = {}
    for namespace in house.namespaces:
        stack = [(namespace.root, b"")]
        while stack:
            node, above = stack.pop()
            tokens = above + node.symbols(namespace.step, 0, len(node))
            stack += [(child, tokens) for child in node.children.values()]
            keys = keys_of(tokens, namespace.digest)[node.depth :]
            for key, block in zip(keys, node.block_ids().tolist(), strict=True):
                tag = int(house.blocks.tags[block])
                tiers = {t.name for n, t in enumerate(house.tiers) if tag >> n & 1}
                if tiers:
                    held[key] = tiers
    return held


class Listening:
    """Mixed into a machine: listeners join and leave, and are told a little at a time."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.listeners: list[Listener] = []
        self.join()

    @property
    def changes(self) -> Changes:
        return self.world.engine.changes

    @rule()
    def join(self) -> None:
        self.changes.listen()
        self.listeners.append(Listener())

    @rule()
    def leave(self) -> None:
        self.changes.stop()
        self.listeners = []
        assert self.changes.take(ALL) == []

    @rule(most=st.integers(1, 9))
    def hear(self, most: int) -> None:
        news = self.changes.take(most)
        for listener in self.listeners:
            listener.take(news, self.world)

    @invariant()
    def all_of_them_know(self) -> None:
        """Once in a while everything is told."""
        if self.listeners and self.world.now_s % 3 == 0:
            news = self.changes.take(ALL)
            for listener in self.listeners:
                listener.take(news, self.world)
                assert listener.held == held_by(self.world)
            assert self.changes.take(ALL) == []


MACHINES = (EngineMachine, OneTierMachine, TwoSizesMachine, TwoSizesInSlabsMachine)


@pytest.mark.thorough
@pytest.mark.parametrize("machine", MACHINES)
def test_random_histories(machine: type[EngineMachine]) -> None:
    listening = type(f"Listening{machine.__name__}", (Listening, machine), {})
    run_state_machine_as_test(listening, settings=settings(max_examples=10, stateful_step_count=40))


def all_of(w: World, most: int = ALL) -> list[Stored | Removed]:
    """Taken in pieces of at most so many blocks."""
    news: list[Stored | Removed] = []
    while some := w.engine.changes.take(most):
        news += some
    return news


def test_nothing_is_noted_while_nobody_listens() -> None:
    w = world()
    w.store(tokens_of(1, 2))
    assert w.engine.residency.blocks.ids.given is None
    assert all_of(w) == []


def test_a_prompt_is_told_in_the_order_of_its_blocks() -> None:
    """Consecutive blocks that changed alike are one piece of news."""
    w = world()
    w.engine.changes.listen()
    tokens = tokens_of(1, 2, 3)
    w.store(tokens, durable=True)
    w.finish_all()
    by_tier: dict[str, list[Any]] = {}
    for item in all_of(w):
        assert isinstance(item, Stored)
        by_tier.setdefault(item.tier, []).append(item)
    (on_disk,) = by_tier["disk"]
    assert on_disk == Stored(DIGEST, "disk", ROOT, keys_of(tokens), tokens)


def test_a_long_node_is_told_in_pieces() -> None:
    w = World((("dram", 64, True, False),))
    tokens = tokens_of(*range(50))
    w.store(tokens)
    w.engine.changes.listen()
    news = w.engine.changes.take(20)
    assert news == [Stored(DIGEST, "dram", ROOT, keys_of(tokens)[:20], tokens[: 20 * STEP])]
    listener = Listener()
    listener.take(news + all_of(w, 20), w)
    assert listener.held == held_by(w)


def test_an_id_that_names_another_block_before_anybody_looked() -> None:
    """Both were known by the same id: the old one is told as gone, the new one as stored."""
    w = World((("dram", 2, True, False),))
    w.engine.changes.listen()
    listener = Listener()
    for number in range(6):
        w.store(tokens_of(number, 7))
        if number != 3:
            listener.take(all_of(w), w)
            assert listener.held == held_by(w)


def test_who_joins_is_told_all_and_for_the_others_it_is_no_news() -> None:
    """Ancestors first, also where the upper part of a node that was split is the younger node."""
    w = world()
    first, second = Listener(), Listener()
    w.engine.changes.listen()
    w.store(tokens_of(1, 2, 3))
    w.store(tokens_of(1, 9))
    w.finish_all()
    first.take(all_of(w), w)
    w.engine.changes.listen()
    news = w.engine.changes.take(1) + all_of(w)
    first.take(news, w)
    second.take(news, w)
    assert first.held == second.held == held_by(w)
    assert len(second.held) == 4

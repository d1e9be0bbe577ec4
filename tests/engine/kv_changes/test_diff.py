"""What is told of the index, taken piece by piece, is the index: whatever happens meanwhile, and
also for whoever comes later and reads pages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from hicache.engine import plan as p
from hicache.engine.kv_changes.diff import COPY_BYTES, RUN_BYTES, Changes, Removed, Stored
from tests.engine.test_core_stateful import (
    EngineMachine,
    OneTierMachine,
    TwoSizesInSlabsMachine,
    TwoSizesMachine,
)
from tests.engine.test_races import world
from tests.engine.world import (
    BLOCK_BYTES,
    DIGEST,
    MAPPED,
    ON_DISK,
    ROOT,
    STEP,
    World,
    keys_of,
    tokens_of,
)

ALL = 1 << 30
ONE = COPY_BYTES + STEP
Held = dict[bytes, set[str]]
News = list[Stored | Removed]


class Listener:
    """A subscriber that knows only changes since it joined. One that was there from the start is
    told nothing twice, and of a block's parent before the block."""

    def __init__(self, was_there: bool = True) -> None:
        self.held: Held = {}
        self.was_there = was_there

    def take(self, news: News, there: Held) -> None:
        for item in news:
            if isinstance(item, Stored):
                knows_parent = item.parent in self.held or item.parent not in there
                assert knows_parent or not self.was_there, "before its parent"
                for key in item.keys:
                    tiers = self.held.setdefault(key, set())
                    assert item.tier not in tiers or not self.was_there, "told twice"
                    tiers.add(item.tier)
            else:
                for key in item.keys:
                    tiers = self.held.get(key, set())
                    assert item.tier in tiers or not self.was_there, "it was not there"
                    tiers.discard(item.tier)
                    if not tiers:
                        self.held.pop(key, None)


class LateListener(Listener):
    """A subscriber that reads pages, and applies the changes since the first of them."""

    def __init__(self) -> None:
        super().__init__(was_there=False)
        self.since: News = []
        self.after: int | None = 0

    def read(self, changes: Changes, w: World, most: int) -> None:
        """One page more, of all namespaces."""
        if self.after is None:
            return
        names = [tier.name for tier in w.engine.residency.tiers]
        pages = [changes.page(digest, self.after, most) for digest in w.digests.values()]
        further = [page.next for page in pages if page.next is not None]
        # Each namespace has a cursor of its own; the nearest makes some read twice.
        for page in pages:
            for place, bits in enumerate(page.tiers):
                key = page.keys[place * 32 : (place + 1) * 32]
                self.held[key] = {name for n, name in enumerate(names) if bits >> n & 1}
        self.after = min(further, default=None)
        if self.after is None:
            news, self.since = self.since, []
            super().take(news, {})

    def take(self, news: News, there: Held) -> None:
        if self.after is None:
            super().take(news, there)
        else:
            self.since += news


def held_by(w: World) -> Held:
    """What can be read from where, by the index itself."""
    residency = w.engine.residency
    held: Held = {}
    for namespace in residency.namespaces:
        stack = [(namespace.root, b"")]
        while stack:
            node, above = stack.pop()
            tokens = above + node.symbols(namespace.step, 0, len(node))
            stack += [(child, tokens) for child in node.children.values()]
            keys = keys_of(tokens, namespace.digest)[node.depth :]
            for key, block in zip(keys, node.block_ids().tolist(), strict=True):
                tag = int(residency.blocks.tags[block])
                tiers = {t.name for n, t in enumerate(residency.tiers) if tag >> n & 1}
                if tiers:
                    held[key] = tiers
    return held


class Listening:
    """Mixed into a machine: some listen from the beginning, others join by pages, and all are told
    a little at a time."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.changes.listen()
        self.listeners: list[Listener] = [Listener()]

    @property
    def changes(self) -> Changes:
        return self.world.engine.changes

    @rule()
    def join(self) -> None:
        self.listeners.append(LateListener())

    @precondition(lambda self: len(self.listeners) > 1)
    @rule(most=st.integers(1, 5), who=st.integers(1, 20))
    def read_a_page(self, most: int, who: int) -> None:
        listener = self.listeners[1 + who % (len(self.listeners) - 1)]
        assert isinstance(listener, LateListener)
        listener.read(self.changes, self.world, most)

    @rule(most=st.integers(1, 9))
    def hear(self, most: int) -> None:
        self._tell(most * (ONE + RUN_BYTES) // 2)

    @rule()
    def forget_idle(self) -> None:
        self.changes.forget_idle()

    @invariant()
    def all_of_them_know(self) -> None:
        """Once in a while everything is told."""
        if self.world.now_s % 3 == 0:
            while self._tell(ALL):
                pass
            there = held_by(self.world)
            for listener in self.listeners:
                if not isinstance(listener, LateListener) or listener.after is None:
                    assert listener.held == there
            assert self.changes.num_pending() == 0

    def teardown(self) -> None:
        """Who is still reading reads to the end."""
        while self._tell(ALL):
            pass
        for listener in self.listeners:
            while isinstance(listener, LateListener) and listener.after is not None:
                listener.read(self.changes, self.world, 3)
            assert listener.held == held_by(self.world)
        super().teardown()  # type: ignore[misc]

    def _tell(self, most_bytes: int) -> News:
        news = self.changes.take(most_bytes)
        there = held_by(self.world)
        for listener in self.listeners:
            listener.take(news, there)
        return news


MACHINES = (EngineMachine, OneTierMachine, TwoSizesMachine, TwoSizesInSlabsMachine)


@pytest.mark.thorough
@pytest.mark.parametrize("machine", MACHINES)
def test_random_histories(machine: type[EngineMachine]) -> None:
    listening = type(f"Listening{machine.__name__}", (Listening, machine), {})
    run_state_machine_as_test(listening, settings=settings(max_examples=10, stateful_step_count=40))


def all_of(w: World, most_bytes: int = ALL) -> News:
    """All changes, taken in pieces of at most `most_bytes`."""
    news: News = []
    while some := w.engine.changes.take(most_bytes):
        news += some
    return news


def listened(w: World) -> Listener:
    w.engine.changes.listen()
    return Listener()


def test_nothing_is_noted_while_nobody_listens() -> None:
    w = world()
    w.store(tokens_of(1, 2))
    assert w.engine.residency.blocks.ids.given is None
    assert all_of(w) == []
    assert w.engine.changes.num_pending() == 0


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
    """No more than was asked for, tokens included, and at least one block."""
    w = World((("dram", 64, MAPPED),))
    tokens = tokens_of(*range(50))
    w.store(tokens)
    listener = listened(w)
    news = w.engine.changes.take(RUN_BYTES + 20 * ONE)
    assert news == [Stored(DIGEST, "dram", ROOT, keys_of(tokens)[:20], tokens[: 20 * STEP])]
    assert w.engine.changes.num_pending() == 30
    (one,) = w.engine.changes.take(1)
    assert len(one.keys) == 1
    listener.take([*news, one, *all_of(w, 20 * ONE)], held_by(w))
    assert listener.held == held_by(w)


def test_a_block_that_keeps_changing_does_not_hold_up_the_others() -> None:
    """Each time one block is told; the first changes again before the others were."""
    w = World((("dram", 64, MAPPED), ("disk", 64, ON_DISK)))
    listener = listened(w)
    for number in range(8):
        w.store(tokens_of(number))
    listener.take(all_of(w), held_by(w))
    w.do(p.Flush(w.now_s))
    w.finish_all()
    blocks = w.engine.residency.blocks
    first = int(blocks.live_ids()[0])
    told: set[bytes] = set()
    for _ in range(20):
        told.update(key for item in w.engine.changes.take(1) for key in item.keys)
        blocks.tags[first] ^= 1
    blocks.tags[first] |= 1
    assert len(told) == 8


def test_a_parent_with_a_greater_id_is_told_first() -> None:
    w = World((("dram", 2, MAPPED),))
    parent, path = tokens_of(1), tokens_of(1, 2)
    for tokens in (tokens_of(5), parent, tokens_of(6)):
        w.store(tokens)
        w.match(parent)
    w.store(path)
    residency = w.engine.residency
    ids = residency.index.match(residency.namespaces[0].root, path, STEP).ids().tolist()
    assert ids[0] > ids[1]
    listener = listened(w)
    news = all_of(w, 1)
    assert [item.keys for item in news] == [[key] for key in keys_of(path)]
    listener.take(news, held_by(w))
    assert listener.held == held_by(w)


def test_an_id_that_names_another_block_before_anybody_looked() -> None:
    """Both were known by the same id: the old one is told as gone, the new one as stored."""
    w = World((("dram", 2, MAPPED),))
    listener = listened(w)
    for number in range(6):
        w.store(tokens_of(number, 7))
        if number != 3:
            listener.take(all_of(w), held_by(w))
            assert listener.held == held_by(w)


def test_a_block_that_comes_back_under_an_id_that_was_paged_already() -> None:
    """Between two pages a block goes and comes back under a smaller id. It stands in no page; it
    was told since the first, though, and that counts."""
    w = World((("dram", 4, MAPPED),))
    w.engine.changes.listen()
    one, other = tokens_of(1), tokens_of(2)
    w.store(one)
    w.store(other)
    all_of(w)
    late = LateListener()
    late.read(w.engine.changes, w, 1)
    assert set(late.held) == set(keys_of(one))
    assert late.after is not None
    w.do(p.Clear(0, w.now_s))
    w.store(other)
    late.take(all_of(w), held_by(w))
    late.read(w.engine.changes, w, 100)
    assert late.after is None
    assert late.held == held_by(w) == {keys_of(other)[0]: {"dram"}}


def test_a_page_is_what_was_told_and_not_what_is_there() -> None:
    w = World((("dram", 4, MAPPED),))
    w.engine.changes.listen()
    w.store(tokens_of(1, 2))
    assert w.engine.changes.page(DIGEST, 0, 10).keys == b""
    news = all_of(w)
    page = w.engine.changes.page(DIGEST, 0, 10)
    assert page.keys == b"".join(keys_of(tokens_of(1, 2)))
    assert page.next is None
    w.do(p.Clear(0, w.now_s))
    assert w.engine.changes.page(DIGEST, 0, 10) == page
    assert w.engine.changes.page(DIGEST, 1 << 62, 10).next is None
    assert w.engine.changes.page(b"x" * 32, 0, 10).keys == b""
    assert {type(item) for item in news} == {Stored}


def test_a_page_is_of_one_namespace() -> None:
    w = World((("dram", 8, MAPPED),))
    w.engine.changes.listen()
    other = w.open(b"o" * 32, BLOCK_BYTES)
    w.store(tokens_of(1))
    w.store(tokens_of(1, 2), namespace=other)
    w.store(tokens_of(3))
    all_of(w)
    mine = w.engine.changes.page(DIGEST, 0, 10).keys
    assert mine == b"".join(keys_of(tokens_of(1)) + keys_of(tokens_of(3)))
    others = w.engine.changes.page(b"o" * 32, 0, 10).keys
    assert others == b"".join(keys_of(tokens_of(1, 2), b"o" * 32))


def test_a_hole_that_is_filled_again() -> None:
    """Some keys of a run are known from before, when only a block behind them could be read."""
    w = World((("dram", 8, MAPPED),))
    tokens = tokens_of(1, 2, 3)
    w.store(tokens)
    w.engine.changes.listen()
    tags = w.engine.residency.blocks.tags
    for readable in ([0, 1, 0], [0, 0, 0]):
        tags[:3] = readable
        assert len(all_of(w)) == 1
    tags[:3] = 1
    assert all_of(w) == [Stored(DIGEST, "dram", ROOT, keys_of(tokens), tokens)]


def test_a_namespace_of_which_nothing_is_held_is_forgotten() -> None:
    w = world()
    w.engine.changes.listen()
    w.store(tokens_of(1))
    all_of(w)
    assert w.engine.changes.forget_idle() == []
    w.do(p.Clear(0, w.now_s))
    assert w.engine.changes.forget_idle() == [], "that it is gone was not told"
    all_of(w)
    assert w.engine.changes.forget_idle() == [DIGEST]
    w.store(tokens_of(1))
    assert len(all_of(w)) == 1

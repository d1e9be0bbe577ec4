"""A namespace is cleared step by step: all blocks are removed except held ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.engine import plan as p
from hicache.engine.requests import clear as clearing
from tests.engine.world import DIGEST, MAPPED, ON_DISK, World, tokens_of

END = tokens_of(99)
OTHER = b"o" * 32
A, B, C = tokens_of(1, 2, 3), tokens_of(1, 2, 4), tokens_of(1, 5)
ROOMY = (("dram", 64, MAPPED), ("disk", 256, ON_DISK))


def clear(w: World, most_blocks: int = 2**62, namespace: int = 0) -> int:
    """All steps of one clearing, moves ending whenever it waits. Returns the blocks."""
    done = w.do(p.Clear(namespace, w.now_s, most_blocks))
    num_blocks = done.blocks
    for _ in range(1000):
        if done.is_over:
            return num_blocks
        if done.is_waiting:
            w.finish_all()
        done = w.do(p.Clear(namespace, w.now_s, most_blocks, begins=False))
        num_blocks += done.blocks
    raise AssertionError("it never ends")


def begin(w: World, most_blocks: int = 2**62) -> p.Cleared:
    """The same up to where it waits: records are being deleted, mostly."""
    done = w.do(p.Clear(0, w.now_s, most_blocks))
    while not (done.is_over or done.is_waiting):
        done = w.do(p.Clear(0, w.now_s, most_blocks, begins=False))
    return done


def go_on(w: World) -> p.Cleared:
    return w.do(p.Clear(0, w.now_s, begins=False))


def clear_on(w: World) -> p.Cleared:
    """What has begun, to its end."""
    done = go_on(w)
    while not done.is_over:
        w.finish_all()
        done = go_on(w)
    return done


def hit(w: World, tokens: bytes, namespace: int = 0) -> int:
    matched = w.match(tokens + END, namespace=namespace)
    if matched.lease:
        w.release(matched.lease)
    return matched.hit_blocks


@pytest.mark.parametrize("is_on_disk", [True, False])
@pytest.mark.parametrize("most_blocks", [1, 2, 100])
def test_what_branches_is_forgotten_down_to_its_root(is_on_disk: bool, most_blocks: int) -> None:
    """Records are there until they are deleted, and keep nothing above them."""
    w = World(ROOMY)
    for tokens in (A, B, C):
        w.store(tokens, durable=is_on_disk)
        w.finish_all()
    assert clear(w, most_blocks) == 5
    assert [hit(w, tokens) for tokens in (A, B, C)] == [0, 0, 0]
    w.finish_all()
    assert not w.rows
    assert w.engine.residency.index.num_nodes == 1
    assert all(pool.used_bytes == 0 for pool in w.engine.residency.pools)


def test_records_go_in_an_order_that_leaves_whole_prefixes() -> None:
    """Whenever the daemon dies, no record is left without those above it."""
    w = World(ROOMY)
    for tokens in (A, B, C, tokens_of(7, 8, 9)):
        w.store(tokens, durable=True)
        w.finish_all()
    begin(w)
    for move in w.moving("disk", None):
        w.finish(move)
        parents = {row.parent for row in w.rows.values()} - {bytes(32)}
        assert parents <= set(w.rows)


PATHS = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@given(
    prompts=st.lists(st.tuples(PATHS, st.booleans()), min_size=1, max_size=8),
    held=st.none() | st.integers(0, 7),
    most_blocks=st.integers(1, 8),
    data=st.data(),
)
def test_all_but_what_somebody_holds(
    prompts: list[tuple[list[int], bool]], held: int | None, most_blocks: int, data: st.DataObject
) -> None:
    """Against a set of prefixes: in the end the leased one is there, and nothing else. Moves end or
    do not end meanwhile; another namespace keeps what it has."""
    w = World(ROOMY)
    other = w.open(OTHER, 4096)
    w.store(A, namespace=other)
    for path, is_durable in prompts:
        w.store(tokens_of(*path), is_durable)
        if data.draw(st.booleans()):
            w.finish_all()
    leased: list[int] = []
    if held is not None:
        leased = prompts[held % len(prompts)][0]
        assert w.match(tokens_of(*leased) + END).lease
    clear(w, most_blocks)
    w.finish_all()
    for path, _ in prompts:
        known = 0
        while known < min(len(path), len(leased)) and path[known] == leased[known]:
            known += 1
        assert hit(w, tokens_of(*path)) == known
    assert len(w.engine.residency.blocks) == len(leased) + 3
    assert hit(w, A, other) == 3


def test_what_is_on_its_way_goes_when_it_has_come() -> None:
    """1. A is being written to disk. 2. It is cleared, and waits. 3. The copy ends: A goes."""
    w = World(ROOMY)
    w.store(A, durable=True)
    assert w.in_flight
    assert w.do(p.Clear(0, w.now_s)) == p.Cleared(0, is_over=False, is_waiting=True)
    w.finish_all()
    assert go_on(w) == p.Cleared(3, is_over=False, is_waiting=True)
    w.finish_all()
    assert go_on(w) == p.Cleared(0, is_over=True, is_waiting=False, is_complete=True)
    assert not w.rows


def test_it_is_over_when_the_last_record_is_deleted() -> None:
    """Who is told that it is complete may kill whom he likes."""
    w = World(ROOMY)
    w.store(A, durable=True)
    w.finish_all()
    begin(w)
    first, *others = w.moving("disk", None)
    w.finish(*others)
    assert not go_on(w).is_over
    w.finish(first)
    assert not w.rows
    assert go_on(w).is_complete


def test_the_disk_dies_while_records_are_deleted() -> None:
    """1. A is cleared. 2. The disk's worker dies before it has deleted anything. 3. The next one
    tells of A: that is removed. Who cleared was not told that all is gone."""
    w = World(ROOMY)
    w.store(A, durable=True)
    w.finish_all()
    begin(w)
    w.lose("disk")
    assert go_on(w) == p.Cleared(0, is_over=True, is_waiting=False, is_complete=False)
    w.begin_recovery("disk")
    while w.tell_more():
        pass
    w.finish_all()
    assert hit(w, A) == 0
    assert not w.rows


def test_a_disk_that_deletes_nothing_is_tried_again() -> None:
    """1. A is cleared. 2. No record is deleted: A is there. 3. It is tried again, and goes."""
    w = World(ROOMY)
    w.store(A, durable=True)
    w.finish_all()
    begin(w)
    w.finish(*w.moving("disk", None), ok=False)
    assert clear_on(w).is_complete
    assert hit(w, A) == 0
    assert not w.rows


def test_a_disk_that_will_not_delete_is_not_tried_for_ever() -> None:
    w = World(ROOMY)
    w.store(A, durable=True)
    w.finish_all()
    done = begin(w)
    for _ in range(3 * clearing.MAX_PASSES):
        w.finish(*w.moving("disk", None), ok=False)
        if done.is_over:
            break
        done = go_on(w)
    assert done == p.Cleared(0, is_over=True, is_waiting=False, is_complete=False)


def test_a_copy_that_never_ends_is_not_waited_for_for_ever() -> None:
    w = World(ROOMY)
    w.store(A, durable=True)
    steps = [w.do(p.Clear(0, w.now_s, begins=n == 0)) for n in range(clearing.MAX_PASSES)]
    assert [step.is_over for step in steps] == [*[False] * (len(steps) - 1), True]
    assert not steps[-1].is_complete
    assert hit(w, A) == 3


def test_no_more_records_are_deleted_at_a_time_than_the_disk_should_have_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full queue refused moves, and their blocks stayed."""
    monkeypatch.setattr(clearing, "MAX_MOVES", 4)
    w = World(ROOMY)
    for number in range(1, 13):
        w.store(tokens_of(number), durable=True)
        w.finish_all()
    done = w.do(p.Clear(0, w.now_s, 1))
    while not done.is_waiting:
        done = w.do(p.Clear(0, w.now_s, 1, begins=False))
    assert len(w.in_flight) == 4
    assert clear(w, 1) == 8
    w.finish_all()
    assert not w.rows


def test_a_record_that_is_not_deleted_is_found_no_more_and_goes_as_a_leaf() -> None:
    """1. A is cleared. 2. Its last record is not deleted, the others are. 3. Nothing finds it, a
    prompt that is stored anew is whole, and another clearing takes what is left."""
    w = World(ROOMY)
    w.store(A, durable=True)
    w.finish_all()
    begin(w)
    last, *others = w.moving("disk", None)
    w.finish(last, ok=False)
    w.finish(*others)
    assert hit(w, A) == 0
    w.store(A)
    assert hit(w, A) == 3
    clear(w)
    w.finish_all()
    assert hit(w, A) == 0
    assert not w.rows


@pytest.mark.parametrize("is_telling", [True, False])
def test_cleared_while_the_disk_was_away(is_telling: bool) -> None:
    """1. The disk's worker is gone, or tells what it holds. 2. All is cleared. 3. What is told of
    it comes too late, and is removed; what was stored after that stays."""
    w = World(ROOMY)
    w.store(A, durable=True)
    w.finish_all()
    w.lose("disk")
    if is_telling:
        w.begin_recovery("disk")
    clear(w)
    w.store(C)
    if not is_telling:
        w.begin_recovery("disk")
    while w.tell_more():
        pass
    w.finish_all()
    assert (hit(w, A), hit(w, C)) == (1, 2)
    assert not w.rows


def test_who_gets_the_number_of_a_namespace_is_not_cleared_for_it() -> None:
    """1. A namespace is being cleared. 2. It is empty, and forgotten for another one. 3. What goes
    on with its number is over."""
    w = World(ROOMY)
    w.store(A)
    w.do(p.Clear(0, w.now_s, 1))
    clear(w)
    w.do(p.Clear(0, w.now_s, 0))
    number = w.do(p.OpenNamespace(OTHER, 2, 4096, instead_of=0))
    w.digests[number] = OTHER
    w.store(A)
    done = w.do(p.Clear(number, w.now_s, begins=False))
    assert done == p.Cleared(0, is_over=True, is_waiting=False, is_complete=True)
    assert hit(w, A) == 3
    assert DIGEST not in w.digests.values()

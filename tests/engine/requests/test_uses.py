"""What was used is told to the durable tier, once, and is known again after a restart."""

from __future__ import annotations

from hicache.engine import plan as p
from hicache.engine.settings import EngineSettings
from tests.engine.world import (
    BLOCK_BYTES,
    MAPPED,
    ON_DISK,
    ROOT,
    ZERO_S,
    World,
    keys_of,
    row,
    tokens_of,
)

TIERS = (("dram", 8, MAPPED), ("disk", 4, ON_DISK))


def world() -> World:
    return World(TIERS, EngineSettings(write_policy="write_through"))


def hit(w: World, *blocks: int) -> None:
    w.release(w.match(tokens_of(*blocks, 99)).lease)


def taken(w: World, limit: int = 100, again: bool = True) -> dict[bytes, p.Use]:
    return {use.key: use for use in w.do(p.TakeUses("disk", limit, again))}


def test_uses_are_told_once() -> None:
    w = world()
    w.store(tokens_of(1, 2))
    w.store(tokens_of(3))
    w.finish_all()
    assert taken(w) == {}, "nobody has used them"
    hit(w, 1, 2)
    hit(w, 1)
    one, two = keys_of(tokens_of(1, 2))
    uses = taken(w)
    assert {key: use.hits for key, use in uses.items()} == {one: 2, two: 1}
    assert uses[one].used_s > uses[two].used_s
    assert uses[one].slot_bytes == BLOCK_BYTES
    assert taken(w) == {}
    hit(w, 3)
    assert {use.hits for use in taken(w).values()} == {1}


def test_they_are_told_some_at_a_time() -> None:
    w = world()
    w.store(tokens_of(1, 2, 3))
    w.finish_all()
    hit(w, 1, 2, 3)
    parts = [taken(w, 2, again=number == 0) for number in range(3)]
    assert [len(part) for part in parts] == [2, 1, 0]


def test_hits_that_were_written_with_the_block_are_known_there() -> None:
    w = World(TIERS)
    w.store(tokens_of(1))
    hit(w, 1)
    while w.do(p.Flush(w.now_s)):
        w.finish_all()
    assert [header.hits for header in w.rows.values()] == [1]
    assert taken(w) == {}


def test_nothing_is_told_to_a_tier_that_is_down_or_not_known_yet() -> None:
    w = world()
    w.store(tokens_of(1))
    w.finish_all()
    hit(w, 1)
    w.lose("disk")
    assert taken(w) == {}
    w.begin_recovery("disk")
    assert taken(w) == {}
    while w.tell_more():
        pass
    assert len(taken(w)) == 1


def test_the_order_of_use_outlives_a_restart() -> None:
    """Blocks are told with their uses: when room is needed the one used longest ago goes first,
    whatever the order in which they were told."""
    w = World(TIERS)
    rows = []
    for number, used_s in enumerate((30, 10, 40, 20)):
        tokens = tokens_of(number)
        (key,) = keys_of(tokens)
        rows.append(row(key, ROOT, tokens, hits=number, used_s=ZERO_S + used_s))
    w.now_s = 100.0
    assert w.restore(rows) == []
    gone: list[int] = []
    for new in range(50, 60):
        w.store(tokens_of(new))
        while w.do(p.Flush(w.now_s)):
            w.finish_all()
        gone += [n for n in range(4) if n not in gone and not w.tiers_of(tokens_of(n))]
    assert gone == [1, 3, 0, 2]


def test_hits_are_counted_on_after_a_restart() -> None:
    w = world()
    (key,) = keys_of(tokens_of(1))
    w.restore([row(key, ROOT, tokens_of(1), hits=3)])
    assert taken(w) == {}
    hit(w, 1)
    assert [use.hits for use in taken(w).values()] == [4]


def test_a_clock_that_was_set_back_makes_nothing_younger_than_now() -> None:
    w = world()
    (key,) = keys_of(tokens_of(1))
    w.restore([row(key, ROOT, tokens_of(1), used_s=ZERO_S + 10**6)])
    node = w.engine.residency.index.node_of(0)
    assert node.touched_s == w.now_s


def test_what_is_cleared_while_rows_are_told_stays_cleared() -> None:
    """The rest of the namespace is told afterwards: it comes too late, and is removed."""
    w = World((("dram", 8, MAPPED), ("disk", 32, ON_DISK)))
    for number in range(8):
        w.store(tokens_of(number, number))
    while w.do(p.Flush(w.now_s)):
        w.finish_all()
    w.lose("disk")
    w.lose("dram")
    w.recover("dram")
    w.begin_recovery("disk")
    w.tell_more()
    w.do(p.Clear(0, w.now_s))
    while w.tell_more():
        pass
    w.finish_all()
    assert w.rows == {}
    assert not any(w.tiers_of(tokens_of(number)) for number in range(8))

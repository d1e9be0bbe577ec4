"""Several namespaces in one engine: no hit crosses, and blocks of several sizes share the tiers."""

from __future__ import annotations

import pytest

from hicache.engine import plan as p
from hicache.engine.planner.planner import PlannerSettings
from hicache.engine.settings import EngineSettings
from hicache.tiers.block import PAGE_BYTES
from tests.engine.world import (
    BLOCK_BYTES,
    MAPPED,
    ON_DISK,
    THREE_TIERS,
    World,
    keys_of,
    row,
    tokens_of,
)

pytestmark = pytest.mark.thorough

END = tokens_of(99)
OTHER = b"o" * 32
THIRD = b"t" * 32


def world(tiers: object = THREE_TIERS, slab_bytes: int = BLOCK_BYTES) -> World:
    settings = EngineSettings(planner=PlannerSettings(mode="always_reload"))
    return World(tiers, settings, slab_bytes)  # type: ignore[arg-type]


def used(w: World, tier: str) -> int:
    residency = w.engine.residency
    return residency.pools[residency.number_of(tier)].used_bytes


def test_the_same_digest_is_the_same_namespace() -> None:
    w = world()
    number = w.open(OTHER, 2 * BLOCK_BYTES)
    assert w.open(OTHER, 2 * BLOCK_BYTES) == number != w.namespace


def test_a_block_takes_in_each_tier_what_was_said_of_it() -> None:
    """1. Blocks of two pages are kept as one page on disk. 2. They are written, and leave memory.
    3. They are read back: each side of a move names the size of its own slot."""
    w = world((("dram", 4, MAPPED), ("disk", 2, ON_DISK)))
    other = w.open(OTHER, 2 * BLOCK_BYTES, (2 * BLOCK_BYTES, BLOCK_BYTES))
    a = tokens_of(1, 2)
    w.store(a, durable=True, namespace=other)
    assert {(m.src_slot_bytes, m.dst_slot_bytes) for m in w.in_flight.values()} == {
        (2 * BLOCK_BYTES, BLOCK_BYTES)
    }
    w.finish_all()
    assert used(w, "dram") == 4 * BLOCK_BYTES
    assert used(w, "disk") == 2 * BLOCK_BYTES
    w.store(tokens_of(3))  # of the other namespace, whose blocks take one page anywhere
    assert used(w, "dram") < 4 * BLOCK_BYTES
    w.do(p.Release(w.match(tokens_of(3) + END).lease, w.now_s))
    matched = w.match(a + END, namespace=other)
    fetched = w.fetch(matched.lease)
    w.finish_all()
    runs = [*fetched.ready, *w.arrived.get(matched.lease, [])]
    assert w.read(0, runs, a, other) == 2
    (use, *_) = w.do(p.TakeUses("disk", 10, again=True))
    assert use.slot_bytes == BLOCK_BYTES


def test_the_same_tokens_never_hit_across_namespaces() -> None:
    w = world()
    other = w.open(OTHER, BLOCK_BYTES)
    a = tokens_of(1, 2)
    w.store(a)
    assert w.match(a + END, namespace=other).hit_blocks == 0
    w.store(a, namespace=other)
    w.finish_all()
    for namespace in (0, other):
        lease = w.match(a + END, namespace=namespace).lease
        fetched = w.fetch(lease)
        w.finish_all()
        runs = [*fetched.ready, *w.arrived.get(lease, [])]
        assert w.read(0, runs, a, namespace) == 2


def test_nor_after_a_restart_from_disk() -> None:
    w = world((("dram", 4, MAPPED), ("disk", 20, ON_DISK)))
    other = w.open(OTHER, 2 * BLOCK_BYTES)
    w.store(tokens_of(1, 2))
    w.store(tokens_of(3), namespace=other)
    while w.do(p.Flush(w.now_s)):
        w.finish_all()
    for tier in ("dram", "disk"):
        w.lose(tier)
        w.recover(tier)
    assert w.tiers_of(tokens_of(1, 2)) == ["disk", "disk"]
    assert w.tiers_of(tokens_of(3), other) == ["disk"]
    assert w.tiers_of(tokens_of(3)) == []
    assert w.tiers_of(tokens_of(1), other) == []
    assert set(w.rows) == {*keys_of(tokens_of(1, 2)), *keys_of(tokens_of(3), OTHER)}


def test_rows_of_another_block_size_are_sent_away() -> None:
    w = world()
    w.store(tokens_of(1))
    stranger = row(keys_of(tokens_of(5))[0], bytes(32), tokens_of(5), 3 * BLOCK_BYTES)
    assert w.restore([stranger]) == [stranger.key]


def test_clearing_one_leaves_the_other() -> None:
    w = world()
    other = w.open(OTHER, BLOCK_BYTES)
    w.store(tokens_of(1))
    w.store(tokens_of(1), namespace=other)
    assert w.do(p.Clear(0, w.now_s)).blocks == 1
    assert w.tiers_of(tokens_of(1)) == []
    assert w.tiers_of(tokens_of(1), other) == ["hbm"]


def test_sizes_are_rounded_up_to_pages_and_counted_so() -> None:
    w = world()
    other = w.open(OTHER, BLOCK_BYTES + 1)
    w.store(tokens_of(1), namespace=other)
    assert used(w, "hbm") == 2 * PAGE_BYTES


@pytest.mark.parametrize("pages", [2, 3])
def test_a_size_that_comes_second_gets_room(pages: int) -> None:
    """The first namespace fills every tier; the second comes with larger blocks, one at a time."""
    w = world()
    for prompt in range(40):
        w.store(tokens_of(prompt))
        w.finish_all()
    large = w.open(OTHER, pages * BLOCK_BYTES)
    for _ in range(10):
        if w.store(tokens_of(1), namespace=large).ticket:
            break
        w.finish_all()
    assert w.match(tokens_of(1) + END, namespace=large).hit_blocks == 1


def test_a_size_that_comes_second_gets_room_while_the_first_goes_on() -> None:
    """As before, but the first namespace stores a block between any two tries of the second."""
    w = world((("dram", 16, MAPPED), ("disk", 40, ON_DISK)), slab_bytes=4 * BLOCK_BYTES)
    for prompt in range(60):
        w.store(tokens_of(prompt))
        w.finish_all()
    large = w.open(OTHER, 3 * BLOCK_BYTES)
    placed = 0
    for turn in range(40):
        placed += bool(w.store(tokens_of(turn), namespace=large).ticket)
        w.store(tokens_of(1000 + turn))
        w.finish_all()
    assert placed >= 4


def test_three_sizes_take_turns_and_capacities_hold() -> None:
    w = world()
    spaces = [0, w.open(OTHER, 2 * BLOCK_BYTES), w.open(THIRD, 3 * BLOCK_BYTES)]
    stored = [0, 0, 0]
    for turn in range(60):
        which = turn // 5 % 3
        stored[which] += bool(w.store(tokens_of(turn), namespace=spaces[which]).ticket)
        w.finish_all()
        for tier, pool in zip(("hbm", "dram", "disk"), w.engine.residency.pools, strict=True):
            assert used(w, tier) <= pool.capacity_bytes
    assert min(stored) >= 5


def test_a_block_larger_than_any_tier_is_refused() -> None:
    w = world()
    huge = w.open(OTHER, 100 * BLOCK_BYTES)
    placed = w.store(tokens_of(1), namespace=huge)
    assert (placed.ticket, placed.refused) == (0, 1)
    assert w.store(tokens_of(1)).ticket


def test_a_refused_giant_moves_nobody() -> None:
    """A block that fits no tier must not empty the tiers in the attempt."""
    w = world((("hbm", 6, MAPPED), ("dram", 8, MAPPED), ("disk", 20, ON_DISK)))
    w.store(tokens_of(1, 2))
    huge = w.open(OTHER, 100 * BLOCK_BYTES)
    for _ in range(3):
        w.store(tokens_of(1), namespace=huge)
        w.finish_all()
    assert w.tiers_of(tokens_of(1, 2)) == ["hbm", "hbm"]


def test_a_second_size_gets_room_where_slabs_hold_many_slots() -> None:
    """One slab holds 16 blocks of the first size, touched in a random order: the coldest leaves are
    scattered over the slabs. Each try gives up some of them, and still places nothing."""
    w = world((("dram", 128, MAPPED),), slab_bytes=16 * BLOCK_BYTES)
    order = [n * 37 % 128 for n in range(128)]
    for n in range(128):
        w.store(tokens_of(n))
    for n in order:
        w.match(tokens_of(n))
    large = w.open(OTHER, 3 * BLOCK_BYTES)
    placed = 0
    for turn in range(10):
        placed += bool(w.store(tokens_of(turn), namespace=large).ticket)
        w.store(tokens_of(1000 + turn))
    assert placed >= 5


# --- many namespaces, one after another -------------------------------------------------------


def test_an_idle_namespace_gives_its_number_to_a_new_one() -> None:
    """Nothing of the old one is left in the new: no block, no estimate. The old one may come back
    under another number."""
    w = world()
    other = w.open(OTHER, 2 * BLOCK_BYTES)
    w.store(tokens_of(1, 2), namespace=other)
    w.do(p.Observe(other, 1, 100.0, 5000.0, 1.0))
    w.finish_all()
    w.do(p.Clear(other, w.now_s))
    w.finish_all()
    assert w.engine.idle_namespace({0}) == other
    assert w.do(p.OpenNamespace(THIRD, 2, BLOCK_BYTES, instead_of=other)) == other
    w.digests[other] = THIRD
    assert not w.engine.knows(OTHER)
    assert not w.engine.prefill[other].num_observed
    assert w.match(tokens_of(1, 2) + END, namespace=other).hit_blocks == 0
    w.store(tokens_of(1, 2), namespace=other)
    matched = w.match(tokens_of(1, 2) + END, namespace=other)
    assert w.read(0, w.fetch(matched.lease).ready, tokens_of(1, 2), other) == 2
    again = w.open(OTHER, 2 * BLOCK_BYTES)
    assert again not in (0, other)
    assert w.match(tokens_of(1, 2) + END, namespace=again).hit_blocks == 0


def test_a_namespace_is_not_idle_while_anything_of_it_is_held() -> None:
    """A ticket, blocks, a lease, records being deleted: each keeps its number."""
    w = world()
    a = tokens_of(1, 2)
    assert w.engine.idle_namespace({0}) is None
    assert w.engine.idle_namespace(set()) == 0
    placed = w.put(a)
    assert w.engine.idle_namespace(set()) is None
    w.write(a, placed)
    w.commit(placed, durable=True)
    assert w.engine.idle_namespace(set()) is None
    lease = w.match(a + END).lease
    w.finish_all()
    assert w.do(p.Clear(0, w.now_s)).blocks == 0
    w.release(lease)
    w.do(p.Clear(0, w.now_s))
    assert w.moving("disk", None)
    assert w.engine.idle_namespace(set()) is None
    w.finish_all()
    assert w.engine.idle_namespace(set()) == 0


def test_ten_thousand_namespaces_take_no_more_room_than_one() -> None:
    w = world()
    nodes = w.engine.residency.index.num_nodes
    for number in range(10_000):
        idle = w.engine.idle_namespace(())
        assert idle == 0
        digest = number.to_bytes(32, "big")
        assert w.engine.handle(p.OpenNamespace(digest, 2, BLOCK_BYTES, idle)).answer == 0
    assert len(w.engine.residency.namespaces) == len(w.engine.prefill) == 1
    assert w.engine.residency.index.num_nodes == nodes
    w.engine.validate()

"""Slabs emptied for a second block size; one test per race in placement/slab_evacuation.py."""

from __future__ import annotations

import pytest

from hicache.engine import plan as p
from hicache.engine.placement.slab_evacuation import KEEP_S
from hicache.engine.planner.planner import PlannerSettings
from hicache.engine.settings import EngineSettings
from hicache.tiers.block import SlabClearing
from tests.engine.world import BLOCK_BYTES, MAPPED, ON_DISK, World, tokens_of

pytestmark = pytest.mark.thorough

END = tokens_of(99999)
OTHER = b"o" * 32
SLAB = 4
"""Blocks of the first size to a slab; one of the second, of three pages, fits in."""

DRAM = (("dram", 16, MAPPED),)
DRAM_DISK = (("dram", 16, MAPPED), ("disk", 64, ON_DISK))
HBM_DRAM = (("hbm", 16, MAPPED), ("dram", 32, MAPPED))
THREE = (("hbm", 16, MAPPED), ("dram", 16, MAPPED), ("disk", 64, ON_DISK))


def world(tiers: object) -> tuple[World, int]:
    settings = EngineSettings(planner=PlannerSettings(mode="always_reload"))
    w = World(tiers, settings, SLAB * BLOCK_BYTES)  # type: ignore[arg-type]
    return w, w.open(OTHER, 3 * BLOCK_BYTES)


def filled(tiers: object, num_prompts: int) -> tuple[World, int]:
    """The first size fills the tiers, one block to a prompt, used in an order that strews the
    coldest over all slabs."""
    w, large = world(tiers)
    for number in range(num_prompts):
        w.store(tokens_of(number))
        w.finish_all()
    for turn in range(num_prompts):
        w.do(p.Release(w.match(tokens_of(turn * 7 % num_prompts) + END).lease, w.now_s))
    w.finish_all()
    return w, large


def clearing(w: World, tier: str) -> SlabClearing | None:
    residency = w.engine.residency
    return residency.pools[residency.number_of(tier)].clearing


def known(w: World, count: int) -> int:
    return sum(bool(w.tiers_of(tokens_of(number))) for number in range(count))


def test_one_slab_is_emptied_and_no_more() -> None:
    w, large = filled(DRAM, 16)
    assert w.store(tokens_of(1), namespace=large).ticket
    assert known(w, 16) == 16 - SLAB


def test_what_hangs_below_goes_too_so_the_cheapest_slab_is_taken() -> None:
    """A prompt fills all slabs: only the last one holds nobody's prefix."""
    w, large = world(DRAM)
    prompt = tokens_of(*range(16))
    w.store(prompt)
    assert w.store(tokens_of(1), namespace=large).ticket
    assert w.tiers_of(prompt) == ["dram"] * 12
    assert w.match(prompt + END).hit_blocks == 12


def test_copies_go_to_the_disk_below_and_nothing_is_lost() -> None:
    w, large = filled(DRAM_DISK, 16)
    placed = w.store(tokens_of(1), namespace=large)
    assert (placed.ticket, placed.room_coming) == (0, True)
    assert clearing(w, "dram")
    w.finish_all()
    assert w.store(tokens_of(1), namespace=large).ticket
    assert known(w, 16) == 16


def test_three_tiers_each_give_a_slab() -> None:
    w, large = filled(THREE, 90)
    assert known(w, 90) >= 60
    placed = 0
    for turn in range(30):
        placed += bool(w.store(tokens_of(turn), namespace=large).ticket)
        w.finish_all()
    assert placed >= 10
    assert sum("disk" in w.tiers_of(tokens_of(n), large) for n in range(30)) >= 1


def test_a_leased_slab_is_not_chosen() -> None:
    w, large = filled(DRAM, 16)
    residency = w.engine.residency
    slab_of = {n: int(residency.blocks.slot[0][_block(w, n)]) // SLAB for n in range(16)}
    held = [next(n for n in range(16) if slab_of[n] == slab) for slab in (0, 1, 3)]
    leases = [w.match(tokens_of(n) + END).lease for n in held]
    assert w.store(tokens_of(1), namespace=large).ticket
    gone = [n for n in range(16) if not w.tiers_of(tokens_of(n))]
    assert {slab_of[n] for n in gone} == {2}
    for lease in leases:
        assert sum(len(run.slots) for run in w.fetch(lease).ready) == 1


def test_where_every_slab_holds_a_leased_block_the_second_size_is_refused() -> None:
    w, large = filled(DRAM, 16)
    for number in range(16):
        w.match(tokens_of(number) + END)
    placed = w.store(tokens_of(1), namespace=large)
    assert (placed.ticket, placed.room_coming) == (0, False)
    assert known(w, 16) == 16


def test_slots_being_written_make_a_slab_stay() -> None:
    w, large = world(DRAM)
    w.store(tokens_of(*range(12)))
    writing = w.put(tokens_of(*range(12), 50, 51, 52, 53))
    assert len(writing.slots) == 4
    w.store(tokens_of(1), namespace=large)
    assert clearing(w, "dram") is None
    w.write(tokens_of(*range(12), 50, 51, 52, 53), writing)
    assert w.commit(writing) == 4


def test_asked_for_while_it_leaves() -> None:
    """Race 2: the match wins, the slab is opened again, and the second size tries once more."""
    w, large = filled(DRAM_DISK, 16)
    w.store(tokens_of(1), namespace=large)
    block = w.in_flight[w.moving("dram", "disk")[0]].block
    number = next(n for n in range(16) if _block(w, n) == block)
    lease = w.match(tokens_of(number) + END).lease
    w.finish(*w.moving("dram", "disk")[:1])
    assert clearing(w, "dram") is None
    assert w.read(0, w.fetch(lease).ready, tokens_of(number)) == 1
    w.finish_all()
    w.release(lease)
    for _ in range(3):
        if w.store(tokens_of(1), namespace=large).ticket:
            break
        w.finish_all()
    assert w.match(tokens_of(1) + END, namespace=large).hit_blocks == 1
    assert known(w, 16) == 16


def test_a_copy_down_fails() -> None:
    w, large = filled(DRAM_DISK, 16)
    w.store(tokens_of(1), namespace=large)
    w.finish(w.moving("dram", "disk")[0], ok=False)
    assert clearing(w, "dram") is None
    assert known(w, 16) == 16


def test_the_tier_below_dies_while_a_slab_is_emptied() -> None:
    w, large = filled(DRAM_DISK, 16)
    w.store(tokens_of(1), namespace=large)
    w.lose("disk")
    assert clearing(w, "dram") is None
    assert w.store(tokens_of(1), namespace=large).ticket
    assert known(w, 16) == 16 - SLAB


def test_copies_move_down_where_the_tier_below_is_not_durable() -> None:
    w, large = filled(HBM_DRAM, 16)
    for number in range(2):
        w.store(tokens_of(number), namespace=large)
        w.finish_all()
    assert known(w, 16) == 16
    assert w.tiers_of(tokens_of(1), large)


def test_the_old_size_goes_on_and_gets_nothing_of_the_slab_being_emptied() -> None:
    """Race 4."""
    w, large = filled(DRAM_DISK, 16)
    w.store(tokens_of(1), namespace=large)
    closed = clearing(w, "dram")
    assert closed is not None
    leaving = w.moving("dram", "disk")
    for number in range(100, 106):
        w.store(tokens_of(number))
        w.finish(*[n for n in w.in_flight if n not in leaving])
    stored = [n for n in range(100, 106) if "dram" in "".join(w.tiers_of(tokens_of(n)))]
    assert len(stored) >= 3
    slots = [int(w.engine.residency.blocks.slot[0][_block(w, n)]) for n in stored]
    assert not any(closed.first_page <= slot < closed.end_page for slot in slots)
    w.finish(*leaving)
    w.store(tokens_of(107))
    assert clearing(w, "dram") == closed
    assert w.store(tokens_of(1), namespace=large).ticket
    assert clearing(w, "dram") is None


def test_a_slab_nobody_comes_for_is_anybodys() -> None:
    """Race 5."""
    w, large = filled(DRAM_DISK, 16)
    w.store(tokens_of(1), namespace=large)
    w.finish_all()
    assert clearing(w, "dram")
    w.do(p.Tick(w.now_s))
    assert clearing(w, "dram")
    w.now_s += KEEP_S
    w.do(p.Tick(w.now_s))
    assert clearing(w, "dram") is None
    for number in range(200, 204):
        assert w.store(tokens_of(number)).ticket


def test_the_old_size_gets_its_room_back() -> None:
    """The second model comes, fills half, and is not heard of again."""
    w, large = filled(DRAM, 16)
    for number in range(2):
        assert w.store(tokens_of(number), namespace=large).ticket
    for number in range(300, 340):
        w.store(tokens_of(number))
    assert not any(w.tiers_of(tokens_of(n), large) for n in range(2))
    assert sum(bool(w.tiers_of(tokens_of(n))) for n in range(300, 340)) >= 15


def _block(w: World, number: int) -> int:
    residency = w.engine.residency
    root = residency.namespaces[0].root
    return int(residency.index.match(root, tokens_of(number), len(tokens_of(number))).ids()[0])

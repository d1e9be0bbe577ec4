"""Room given up because the machine is short of memory: what goes, what stays, what comes back."""

from __future__ import annotations

import pytest

from hicache.engine import plan as p
from hicache.engine.placement.shedding import Wanted, weigh
from tests.engine.placement.test_slab_evacuation import (
    DRAM,
    DRAM_DISK,
    END,
    SLAB,
    THREE,
    filled,
    known,
    world,
)
from tests.engine.world import World, tokens_of

pytestmark = pytest.mark.thorough


ENOUGH = Wanted(0, False, False, None)


@pytest.mark.parametrize(
    ("looks", "wanted"),
    [
        ([(100, 100)], ENOUGH),
        ([(99, 100)], Wanted(1, False, False, 0)),
        ([(79, 100)], Wanted(3, False, False, 0)),
        ([(50, 100)], Wanted(5, False, False, 0)),
        ([(49, 100)], Wanted(6, True, False, 0)),
        ([(160, 100)], ENOUGH),
        ([(161, 100)], Wanted(0, False, True, None)),
        ([(900, 100), (95, 100), (180, 200)], Wanted(2, False, False, 2)),
        ([(900, 100), (120, 100)], ENOUGH),
        ([], Wanted(0, False, True, None)),
    ],
)
def test_the_tightest_look_decides(looks: list[tuple[int, int]], wanted: Wanted) -> None:
    """With slabs of 10 bytes."""
    assert weigh(looks, 10) == wanted


def room(w: World) -> tuple[int, int]:
    """Slabs of the dram tier in use as room, and withheld."""
    residency = w.engine.residency
    pool = residency.pools[residency.number_of("dram")]
    return pool.capacity_bytes // pool.slab_bytes, len(pool.withheld)


def shed(w: World, num_slabs: int, in_haste: bool = False) -> int:
    return len(w.do(p.Shed("dram", num_slabs, in_haste)))


def test_free_slabs_go_first_and_nothing_is_forgotten() -> None:
    w, _ = world(DRAM)
    assert w.store(tokens_of(1)).ticket
    assert shed(w, 3) == 3
    assert room(w) == (1, 3)
    assert w.tiers_of(tokens_of(1)) == ["dram"]


def test_what_a_slower_tier_takes_is_written_before_its_slab_goes() -> None:
    w, _ = filled(DRAM_DISK, 14)
    before = room(w)[1]
    while room(w)[1] < 3:
        shed(w, 3 - room(w)[1])
        w.finish_all()
    assert before == 0
    assert known(w, 14) == 14, "all of them are held somewhere"
    assert sum(w.tiers_of(tokens_of(n)) == ["disk"] for n in range(14)) >= 14 - SLAB


def test_a_lone_tier_forgets() -> None:
    w, _ = filled(DRAM, 16)
    assert shed(w, 1) == 1
    assert room(w) == (3, 1)
    assert known(w, 16) == 16 - SLAB
    assert w.store(tokens_of(50)).ticket, "the rest is room as before"
    w.finish_all()


def test_in_haste_nothing_waits_for_a_slower_tier() -> None:
    """Several slabs within one call, and no copy to the disk is begun for them."""
    w, _ = filled(DRAM_DISK, 14)
    moving = len(w.moving("dram", "disk"))
    assert shed(w, 3, in_haste=True) == 3
    assert len(w.moving("dram", "disk")) <= moving
    assert room(w) == (1, 3)


@pytest.mark.parametrize("in_haste", [False, True])
def test_leased_slabs_stay(in_haste: bool) -> None:
    w, _ = filled(DRAM, 16)
    leases = [w.match(tokens_of(number) + END).lease for number in range(16)]
    assert all(leases)
    assert shed(w, 4, in_haste) == 0
    assert known(w, 16) == 16
    for lease in leases[:]:
        w.release(lease)
    assert shed(w, 4, in_haste) >= 1


def test_a_slab_that_is_being_written_stays() -> None:
    w, _ = filled(DRAM, 16)
    placed = w.put(tokens_of(70))
    assert placed.ticket
    assert shed(w, 4, in_haste=True) == 3
    w.write(tokens_of(70), placed)
    assert w.commit(placed) == 1
    assert w.tiers_of(tokens_of(70)) == ["dram"]


def test_what_was_given_up_is_room_again() -> None:
    w, _ = filled(THREE, 16)
    given = w.do(p.Shed("dram", 2, True))
    assert len(given) == 2
    for page in given:
        w.do(p.Regain("dram", page))
    assert room(w) == (4, 0)
    for number in range(100, 116):
        w.store(tokens_of(number))
        w.finish_all()
    assert known(w, 16) + sum(bool(w.tiers_of(tokens_of(n))) for n in range(100, 116)) >= 16


def test_another_size_of_blocks_finds_room_in_what_is_left() -> None:
    w, large = filled(DRAM, 16)
    assert shed(w, 2, in_haste=True) == 2
    assert w.store(tokens_of(1), namespace=large).ticket
    w.finish_all()
    assert w.tiers_of(tokens_of(1), large) == ["dram"]

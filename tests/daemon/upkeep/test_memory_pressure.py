"""When the dram tier gives memory back and when it takes it again: a table over a real arena."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.config.units import Share
from hicache.daemon.upkeep.available_memory import Headroom
from hicache.daemon.upkeep.memory_pressure import EVERY_S, Shedding
from hicache.engine import plan as p
from hicache.tiers.dram import DramTier

MIB = 1 << 20
SLAB = 2 * MIB
LEAST = 10 * MIB


class Machine:
    """A tier of eight slabs, all free, on a machine whose memory the test says."""

    def __init__(self, folder: Path, is_pinned: bool = False) -> None:
        self.tier = DramTier(folder, "dram-", 8 * SLAB)
        self.available = 100 * MIB
        self.hasty: list[bool] = []
        self.now_s = 0.0
        parts = "dram", self.tier.arena, self.tier.pool, is_pinned
        self.shedding = Shedding(*parts, self.do, self.headrooms)

    def headrooms(self) -> list[Headroom]:
        return [Headroom("the host", self.available, 1000 * MIB)]

    def do(self, event: p.Event[Any]) -> Any:
        if isinstance(event, p.Shed):
            self.hasty.append(event.in_haste)
            return self.tier.pool.withhold(event.num_slabs)
        assert isinstance(event, p.Regain)
        return self.tier.pool.restore(event.first_page)

    def look(self, available: int, least: int | Share | None = LEAST) -> int:
        """Slabs given up after a look at so much memory."""
        self.available = available
        self.now_s += EVERY_S
        self.shedding.tick(self.now_s, least)
        self.tier.pool.validate()
        return len(self.tier.pool.withheld)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.tier.close()


def test_what_is_missing_is_given_and_the_pages_go(machine: Machine) -> None:
    before = machine.tier.arena.memory_bytes
    assert machine.look(LEAST) == 0
    assert machine.look(LEAST - 1) == 1
    assert machine.look(LEAST - SLAB - 1) == 3
    assert machine.hasty == [False, False]
    assert machine.tier.arena.memory_bytes <= before - 3 * SLAB


def test_far_below_it_is_in_haste(machine: Machine) -> None:
    assert machine.look(LEAST // 2 - 1) == 3
    assert machine.hasty == [True]


def test_it_is_taken_again_slab_by_slab_when_there_is_plenty(machine: Machine) -> None:
    before = machine.tier.arena.memory_bytes
    assert machine.look(LEAST - SLAB - 1) == 2
    assert machine.look(LEAST + 1) == 2, "enough is not plenty"
    assert machine.look(LEAST * 3 // 2 + SLAB + 1) == 1
    assert machine.look(100 * MIB) == 0
    assert machine.tier.arena.memory_bytes == before
    assert (machine.shedding.num_given, machine.shedding.num_taken) == (2, 2)


def test_not_looked_at_all_the_time(machine: Machine) -> None:
    machine.look(100 * MIB)
    machine.available = 0
    machine.shedding.tick(machine.now_s + EVERY_S / 2, LEAST)
    assert not machine.tier.pool.withheld


def test_switched_off_it_takes_all_again(machine: Machine) -> None:
    assert machine.look(0) == 5
    for left in (4, 3, 2, 1, 0):
        assert machine.look(0, None) == left
    assert machine.look(0, None) == 0


def test_a_share_is_of_what_is_tight(machine: Machine) -> None:
    assert machine.look(50 * MIB - 1, Share(0.05)) == 1


def test_holes_that_somebody_filled_are_cut_again(machine: Machine) -> None:
    """A worker that starts touches every page."""
    machine.look(0)
    cut = machine.tier.arena.memory_bytes
    machine.tier.arena.populate()
    assert machine.tier.arena.memory_bytes > cut
    machine.look(LEAST)
    assert machine.tier.arena.memory_bytes == cut


def test_pinned_memory_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A GPU's copy engines would go on using the old pages."""
    machine = Machine(tmp_path, is_pinned=True)
    assert machine.look(0) == 0
    assert "pinned" in caplog.text
    machine.tier.close()

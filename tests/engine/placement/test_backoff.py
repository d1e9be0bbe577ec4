"""A tier that will not take blocks: left alone for a while, then asked with one block."""

from __future__ import annotations

import pytest

from hicache.engine import plan as p
from hicache.engine.placement.backoff import FIRST_PAUSE_S, LONGEST_PAUSE_S, Backoff
from hicache.engine.settings import EngineSettings
from tests.engine.world import MAPPED, ON_DISK, World, tokens_of

DISK = 1
DRAM_DISK = (("dram", 4, MAPPED), ("disk", 20, ON_DISK))


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff()
    now_s, pauses = 0.0, []
    for _ in range(9):
        backoff.rejected(DISK, "full", now_s)
        backoff.rejected(DISK, "full", now_s)  # the rest of the batch says no more
        assert not backoff.takes(DISK)
        pauses.append(backoff.shut[DISK].pause_s)
        backoff.tick(now_s + pauses[-1] - 0.01)
        assert not backoff.takes(DISK)
        now_s += pauses[-1]
        backoff.tick(now_s)
        assert backoff.takes(DISK)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert (FIRST_PAUSE_S, LONGEST_PAUSE_S) == (1, 60)
    assert backoff.reasons() == {DISK: "full"}, "on trial is not healed"
    backoff.took(DISK)
    assert backoff.reasons() == {}
    backoff.rejected(DISK, "full", now_s)
    assert backoff.shut[DISK].pause_s == FIRST_PAUSE_S


def full_disk_world() -> World:
    """Dram holds A and half of B; A's way down has just been rejected."""
    w = World(DRAM_DISK)
    w.store(tokens_of(1, 2))
    w.store(tokens_of(3, 4))
    w.store(tokens_of(5))
    w.finish(*w.moving("dram", "disk"), ok=False, rejected=True)
    assert not w.engine.residency.backoff.takes(DISK)
    return w


def test_puts_find_room_while_the_disk_takes_nothing() -> None:
    """1. The disk rejects what is demoted. 2. Nothing more is sent there, and puts find room at
    once, at the expense of the coldest, as if there were no disk."""
    w = full_disk_world()
    for first in range(10, 40, 2):
        placed = w.store(tokens_of(first, first + 1))
        assert len(placed.slots) == 2
        assert not w.in_flight
    assert w.tiers_of(tokens_of(38, 39)) == ["dram", "dram"]


def test_one_block_is_the_trial_and_opens_the_disk() -> None:
    """1. The pause is over. 2. One block is sent, and while it travels no other. 3. It is taken:
    everything goes down as before."""
    w = full_disk_world()
    w.store(tokens_of(10, 11))
    w.do(p.Tick(w.now_s + FIRST_PAUSE_S))
    for first in range(20, 30, 2):
        w.store(tokens_of(first, first + 1))
        assert len(w.moving("dram", "disk")) <= 1
    assert len(w.moving("dram", "disk")) == 1
    w.finish(*w.moving("dram", "disk"))
    assert w.engine.residency.backoff.reasons() == {}
    for first in range(40, 50, 2):
        w.store(tokens_of(first, first + 1))
        w.finish_all()
    assert set(w.tiers_of(tokens_of(40, 41))) == {"disk"}


def test_a_failed_trial_waits_longer() -> None:
    w = full_disk_world()
    w.store(tokens_of(10, 11))
    w.now_s += FIRST_PAUSE_S
    w.do(p.Tick(w.now_s))
    w.store(tokens_of(20, 21))
    w.store(tokens_of(22, 23))
    w.finish(*w.moving("dram", "disk"), ok=False, rejected=True)
    assert w.engine.residency.backoff.shut[DISK].pause_s == 2 * FIRST_PAUSE_S


@pytest.mark.parametrize("back", [True, False])
def test_what_is_on_a_full_disk_is_still_served(back: bool) -> None:
    """Reading from it goes on; a worker that comes back starts with a clean slate."""
    w = World(DRAM_DISK, EngineSettings(write_policy="write_through"))
    a = tokens_of(1, 2)
    w.store(a)
    w.finish_all()
    w.store(tokens_of(3, 4))
    w.finish(*w.moving("dram", "disk"), ok=False, rejected=True)
    assert w.match(a).hit_blocks == 2
    assert set(w.tiers_of(a)) == {"disk"}
    if back:
        w.lose("disk")
        w.recover("disk")
        assert w.engine.residency.backoff.takes(DISK)

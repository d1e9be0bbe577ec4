"""Paths larger than what they have to pass through, and more of them than the disk has room for: a
clean stop ends all the same."""

from __future__ import annotations

import random

import pytest

from hicache.engine import plan as p
from hicache.engine.planner.planner import PlannerSettings
from hicache.engine.settings import EngineSettings
from tests.engine.world import BLOCK_BYTES, MAPPED, ON_DISK, World, tokens_of

ENOUGH = 60


def world(hbm: int, dram: int, disk: int, most_moving: int = 100) -> World:
    tiers = (("hbm", hbm, MAPPED), ("dram", dram, MAPPED), ("disk", disk, ON_DISK))
    settings = EngineSettings(
        planner=PlannerSettings(mode="always_reload"), max_moving_bytes=most_moving * BLOCK_BYTES
    )
    return World(tiers, settings)


def stop(w: World) -> None:
    """A clean stop, which ends."""
    for _ in range(ENOUGH):
        if not w.do(p.Flush(w.now_s)):
            return
        w.finish_all()
    raise AssertionError("the stop never ends")


def test_an_end_that_nothing_can_save_is_forgotten() -> None:
    """1. The front of a path is in hbm, its end fills dram and drains towards the disk. 2. The
    front waits for room in dram, the end for its front, and the disk has no room for it out of
    turn. 3. Nothing moves and nobody will let go of anything: the end is forgotten, and what is
    left goes on.
    """
    w = world(5, 3, 1)
    w.store(tokens_of(0))
    w.store(tokens_of(0, 0, 0, 2, 0))
    w.finish_all()
    w.store(tokens_of(1))
    w.finish_all()
    w.store(tokens_of(0, 0, 0, 0))
    w.store(tokens_of(0, 1, 0, 0))
    stop(w)
    assert w.engine.evictor.dropped > 0
    assert not any(w.engine.residency.draining_bytes)
    assert w.tiers_of(tokens_of(0))[0] != "-", "the front is still there"


@pytest.mark.parametrize("seed", [23, 221, 257])
def test_random_histories_end(seed: int) -> None:
    """Among them (221): 1. Two paths lack their common front, which waits for room in dram. 2. The
    end of one is written out of turn and fills the disk. 3. So is the end of the other: it does not
    take that room, or they would take it from each other for ever.
    """
    chance = random.Random(seed)
    hbm, dram, disk = (chance.randint(1, most) for most in (8, 8, 24))
    w = world(hbm, dram, disk, most_moving=chance.choice([1, 2, 4, 100]))
    longest, width = chance.randint(2, 30), chance.choice([1, 2, 3])
    for _ in range(chance.randint(5, 60)):
        what, count = chance.random(), chance.randint(1, longest)
        blocks = [chance.randrange(width) if chance.random() < 0.3 else 0 for _ in range(count)]
        if what < 0.6:
            w.store(tokens_of(*blocks), owner=1 if chance.random() < 0.5 else 2)
        elif what < 0.7:
            matched = w.match(tokens_of(*blocks, 99))
            if matched.lease:
                w.release(matched.lease)
        elif what < 0.85:
            w.finish_all()
        elif what < 0.95 and w.in_flight:
            w.finish(*list(w.in_flight)[: chance.randint(1, 3)])
        else:
            w.do(p.Flush(w.now_s))
    stop(w)

"""A second persistent tier beside the disk, slow and shared between hosts; it exists only here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hicache.engine import plan as p
from hicache.engine.planner.planner import PlannerSettings
from hicache.engine.settings import EngineSettings
from tests.engine.world import (
    BLOCK_BYTES,
    MAPPED,
    ON_DISK,
    SHELF,
    World,
    keys_of,
    tokens_of,
)

END = tokens_of(99)
A = tokens_of(1, 2, 3)


def world(dram: int = 8, disk: int = 64, shelf: int = 64, **options: object) -> World:
    tiers = (("dram", dram, MAPPED), ("disk", disk, ON_DISK), ("shelf", shelf, SHELF))
    settings = EngineSettings(planner=PlannerSettings(mode="always_reload"), **options)  # type: ignore[arg-type]
    return World(tiers, settings)


def push_out(w: World) -> None:
    """Other prompts take all of memory."""
    for number in range(50, 58):
        w.store(tokens_of(number))
        w.finish_all()


def demoted() -> World:
    """A lies on disk and on the shelf, and in no memory."""
    w = world()
    w.store(A)
    push_out(w)
    assert w.tiers_of(A) == ["disk+shelf"] * 3
    return w


def measure(w: World, **bytes_per_s: float) -> None:
    for tier, speed in bytes_per_s.items():
        for num_bytes in (1 << 20, 1 << 24) * 8:
            w.do(p.LinkMeasured(tier, "dram", num_bytes, num_bytes / speed + 1e-4))


def sources(w: World, tokens: bytes = A) -> set[str]:
    """Where a reload of the prompt is planned from and comes from."""
    matched = w.match(tokens + END)
    w.fetch(matched.lease)
    planned = {run.tier for run in matched.runs}
    assert planned == {move.src for move in w.in_flight.values() if move.dst == "dram"}
    w.finish_all()
    w.release(matched.lease)
    return planned


def test_what_leaves_memory_is_written_to_both_ancestors_first() -> None:
    w = demoted()
    assert w.records["disk"].keys() == w.records["shelf"].keys() >= set(keys_of(A))
    assert not w.orphans


def test_memory_waits_for_one_copy() -> None:
    """1. A drains into both tiers. 2. The disk has it, the shelf still reads memory: the room is
    not free yet, and no second move begins. 3. The shelf has it."""
    w = world(3)
    w.store(A)
    w.store(tokens_of(7))
    assert len(w.moving("dram", "disk")) == len(w.moving("dram", "shelf")) == 3
    w.finish(*w.moving("dram", "disk"))
    assert w.tiers_of(A) == ["dram+disk"] * 3
    w.finish(*w.moving("dram", "shelf"))
    assert w.tiers_of(A) == ["disk+shelf"] * 3


def test_a_slow_tier_holds_up_no_memory() -> None:
    """1. One block at a time goes to each tier. 2. The disk takes block after block; the shelf is
    still busy with the first. 3. What only the disk has is free: the shelf does without."""
    w = world(3, max_moving_bytes=BLOCK_BYTES)
    w.store(A)
    w.store(tokens_of(7))
    (slow,) = w.moving("dram", "shelf")
    while w.moving("dram", "disk"):
        w.finish(*w.moving("dram", "disk"))
    assert w.tiers_of(A) == ["dram+disk", "disk", "disk"]
    w.finish(slow)
    assert w.tiers_of(A) == ["disk+shelf", "disk", "disk"]
    assert not w.in_flight
    assert not any(w.engine.residency.draining_bytes)


def test_what_a_tier_missed_it_gets_when_the_block_leaves_memory_again() -> None:
    """1. The shelf is away while A goes to disk. 2. It is back, and A is read: it is in memory.
    3. A leaves memory again: the disk has it, the shelf gets it."""
    w = world()
    w.lose("shelf")
    w.store(A)
    push_out(w)
    assert w.tiers_of(A) == ["disk"] * 3
    w.recover("shelf")
    lease = w.match(A + END).lease
    w.fetch(lease)
    w.finish_all()
    w.release(lease)
    for number in range(20, 28):
        w.store(tokens_of(number))
        w.finish_all()
    assert w.tiers_of(A) == ["disk+shelf"] * 3
    assert not w.orphans


@pytest.mark.parametrize(("disk", "shelf", "chosen"), [(1e9, 1e8, "disk"), (1e8, 1e9, "shelf")])
def test_a_reload_reads_the_cheaper_copy(disk: float, shelf: float, chosen: str) -> None:
    w = demoted()
    measure(w, disk=disk, shelf=shelf)
    assert {run.tier for run in w.engine.score(p.MatchPrompt(0, A, 1, 1.0, 1.0)).runs} == {chosen}
    assert sources(w) == {chosen}


def test_a_queue_makes_the_other_copy_the_cheaper_one() -> None:
    """1. The disk is a little faster. 2. Another prompt is being read from it: A comes from the
    shelf meanwhile."""
    w = demoted()
    other = tokens_of(50)
    measure(w, disk=1.2e6, shelf=1e6)
    lease = w.match(other + END).lease
    w.fetch(lease)
    if w.in_flight:
        assert {run.tier for run in w.match(A + END).runs} == {"shelf"}
        w.finish_all()
    w.release(lease)
    assert sources(w) == {"disk"}


def test_a_warm_up_reads_the_cheaper_copy() -> None:
    w = demoted()
    measure(w, disk=1e8, shelf=1e9)
    w.do(p.Warm(0, A, w.now_s, 100.0))
    assert {move.src for move in w.in_flight.values() if move.dst == "dram"} == {"shelf"}


@pytest.mark.parametrize(("lost", "left"), [("disk", "shelf"), ("shelf", "disk")])
def test_an_outage_costs_no_hit(lost: str, left: str) -> None:
    """1. A tier dies: A comes from the other. 2. What leaves memory meanwhile goes there only.
    3. It is back and tells its rows: A has both copies again."""
    w = demoted()
    w.lose(lost)
    assert sources(w) == {left}
    b = tokens_of(4, 5)
    for _ in range(2):  # the first one makes room
        w.store(b)
        w.finish_all()
    for number in range(20, 28):
        w.store(tokens_of(number))
        w.finish_all()
    assert w.tiers_of(b) == [left] * 2
    w.recover(lost)
    assert w.tiers_of(A) == ["disk+shelf"] * 3


def test_a_restart_finds_what_only_the_shelf_holds() -> None:
    before = demoted()
    after = world()
    rows = list(before.records["shelf"].values())
    after.records["shelf"].update({row.key: row for row in rows})
    after.lose("shelf")
    after.recover("shelf")
    assert after.tiers_of(A) == ["shelf"] * 3
    assert sources(after) == {"shelf"}


def test_a_full_tier_gives_up_its_own_records_only() -> None:
    """1. The disk has room for four blocks. 2. What it gives up the shelf still holds."""
    w = world(disk=4)
    for number in range(20, 32):
        w.store(tokens_of(number))
        w.finish_all()
    push_out(w)
    assert len(w.records["disk"]) <= 4
    assert w.tiers_of(tokens_of(20)) == ["shelf"]
    assert sources(w, tokens_of(20)) == {"shelf"}


def test_the_only_copy_is_given_up_where_it_is() -> None:
    """1. The shelf is away; the disk fills. 2. What it gives up is forgotten, not moved."""
    w = world(disk=4)
    w.lose("shelf")
    w.store(tokens_of(20))
    for number in range(21, 32):
        w.store(tokens_of(number))
        w.finish_all()
    push_out(w)
    assert w.tiers_of(tokens_of(20)) == []


def test_a_tier_forgets_for_itself_what_the_other_lets_in() -> None:
    """The gates are per tier: the shelf takes only what returns for certain, so nothing."""
    w = world()
    engine = w.engine
    tiers = [
        replace(spec, min_return=1.0) if spec.name == "shelf" else spec
        for spec in engine.residency.tiers
    ]
    engine.configure(engine.settings, tiers)
    w.store(A)
    push_out(w)
    assert w.tiers_of(A) == ["disk"] * 3
    assert engine.gates()["shelf"].demanded == 1.0
    assert engine.gates()["disk"].is_open


def test_durable_means_the_fastest_persistent_tier() -> None:
    """1. The disk takes blocks: the commit waits for it, not for the shelf. 2. It dies while the
    next commit waits: that one is durable on the shelf."""
    w = world()
    first = w.store(A, durable=True).ticket
    assert not w.moving("dram", "shelf")
    w.finish_all()
    assert first in w.durable
    second = w.store(tokens_of(4, 5), durable=True).ticket
    w.lose("disk")
    assert len(w.moving("dram", "shelf")) == 2
    assert second not in w.durable
    w.finish_all()
    assert second in w.durable
    w.lose("shelf")
    third = w.store(tokens_of(6), durable=True).ticket
    w.finish_all()
    assert third not in w.durable


def test_write_through_goes_to_both() -> None:
    w = world(write_policy="write_through")
    w.store(A)
    w.finish_all()
    assert w.tiers_of(A) == ["dram+disk+shelf"] * 3


def test_a_clean_stop_writes_what_either_lacks() -> None:
    """1. A is on disk alone and not in memory; B is in memory and on disk, C in memory. 2. B and C
    are written to the shelf, C to the disk; A is read by nobody for the shelf's sake."""
    w = world()
    w.lose("shelf")
    w.store(A)
    push_out(w)
    b, c = tokens_of(5), tokens_of(6)
    w.store(b, durable=True)
    w.finish_all()
    w.store(c)
    w.recover("shelf")
    while w.do(p.Flush(w.now_s)):
        assert not w.moving("disk", "dram")
        w.finish_all()
    assert w.tiers_of(A) == ["disk"] * 3
    assert w.tiers_of(b) == w.tiers_of(c) == ["dram+disk+shelf"]


def test_a_cleared_namespace_leaves_both() -> None:
    """1. The shelf is away while A is cleared. 2. Its records come too late and are removed."""
    w = demoted()
    w.lose("shelf")
    begins = True
    while not w.do(p.Clear(0, w.now_s, begins=begins)).is_over:
        begins = False
        w.finish_all()
    assert not w.records["disk"]
    assert w.records["shelf"]
    w.recover("shelf")
    assert not w.records["shelf"]
    assert w.match(A + END).hit_blocks == 0


def test_uses_are_noted_in_each() -> None:
    """Each tier is told of a use once, whatever the other has been told."""
    w = demoted()
    sources(w)
    for tier in ("disk", "shelf"):
        uses = w.do(p.TakeUses(tier, 100, again=True))
        assert {use.key for use in uses} == set(keys_of(A))
        assert not w.do(p.TakeUses(tier, 100, again=True))


def test_a_record_found_bad_is_gone_from_its_tier_only() -> None:
    w = demoted()
    w.do(p.Spoiled("shelf", w.digests[0], A, w.now_s))
    assert w.tiers_of(A) == ["disk+shelf", "disk+shelf", "disk"]
    assert w.match(A + END).hit_blocks == 3


def test_a_slow_tier_alone_is_a_tier_as_any_other() -> None:
    """No tier's name and no second persistent tier is needed."""
    w = World((("dram", 8, MAPPED), ("shelf", 64, SHELF)))
    w.store(A)
    push_out(w)
    assert w.tiers_of(A) == ["shelf"] * 3
    assert {run.tier for run in w.match(A + END).runs} == {"shelf"}

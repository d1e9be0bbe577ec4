"""Warming: a prompt's held blocks are copied to where they can be read, without evictions."""

from __future__ import annotations

import pytest

from hicache.engine import plan as p
from hicache.engine.plan import Priority
from hicache.engine.requests import warm as warming
from tests.engine.test_races import DRAM_DISK, END, GPU_ONLY_HBM, on_disk_only, world
from tests.engine.world import BLOCK_BYTES, MAPPED, ON_DISK, STEP, World, tokens_of

A = tokens_of(1, 2, 3)
B = tokens_of(4, 5, 6)
WIDE = (("dram", 20, MAPPED), ("disk", 60, ON_DISK))


def warm(w: World, tokens: bytes, ttl_s: float = 30.0, *, by_worker: bool = False) -> p.WarmStarted:
    w.now_s += 1
    return w.do(p.Warm(w.namespace, tokens, w.now_s, ttl_s, by_worker))


def is_idle(w: World) -> bool:
    residency = w.engine.residency
    return not (residency.leases.leases or residency.moves or w.engine.fetching.waiters)


def test_a_prompt_on_disk_is_read_from_dram_afterwards() -> None:
    w = world(DRAM_DISK)
    on_disk_only(w, A)
    answer = warm(w, A + END)
    assert (answer.held, answer.warm, answer.refused) == (3, 0, 0)
    assert answer.warming
    assert {move.priority for move in w.in_flight.values()} == {Priority.PREFETCH}
    arrivals = w.finish(*w.in_flight)
    assert arrivals.warmed == {answer.warming: p.WarmStarted(0, 3, 3, 0)}
    assert (arrivals.arrived, arrivals.finished) == ({}, [])
    assert w.match(A + END).runs == (p.TierRun("dram", 3),)
    assert not w.in_flight


def test_nothing_is_left_of_it() -> None:
    w = world(DRAM_DISK)
    on_disk_only(w, A)
    warm(w, A)
    w.finish_all()
    assert is_idle(w)
    assert w.engine.ledger.matches == 0, "nothing was served, nothing was decided"


def test_what_is_warm_or_unknown_starts_nothing() -> None:
    w = world(DRAM_DISK)
    w.store(A)
    assert warm(w, A) == p.WarmStarted(0, 3, 3, 0)
    assert warm(w, B) == p.WarmStarted(0, 0, 0, 0)
    assert warm(w, b"") == p.WarmStarted(0, 0, 0, 0)
    assert is_idle(w)


def test_a_warmed_prompt_is_the_youngest() -> None:
    """A is older than B; it is warmed where it lies, and B goes first."""
    w = World((("dram", 6, MAPPED),))
    w.store(A)
    w.store(B)
    assert warm(w, A) == p.WarmStarted(0, 3, 3, 0)
    w.store(tokens_of(7, 8, 9))
    assert w.tiers_of(A) == ["dram"] * 3
    assert w.tiers_of(B) == []


def test_the_coldest_make_room_and_lose_nothing() -> None:
    """Memory is full of B: what A takes of it the watermarks give back, to disk."""
    w = world(DRAM_DISK)
    on_disk_only(w, A)
    w.store(tokens_of(4, 5, 6, 7))
    answer = warm(w, A)
    w.finish_all()
    assert w.tiers_of(A).count("dram+disk") == 3
    assert "-" not in w.tiers_of(tokens_of(4, 5, 6, 7))
    assert w.engine.evictor.dropped == 0
    assert answer.held == 3
    assert is_idle(w)


def test_what_is_leased_is_not_pushed_out() -> None:
    w = world(DRAM_DISK)
    on_disk_only(w, A)
    full = tokens_of(4, 5, 6, 7)
    w.store(full)
    lease = w.match(full + END).lease
    assert lease
    answer = warm(w, A)
    assert not w.moving("disk", "dram")
    told = w.finish(*w.in_flight)
    assert told.warmed == {answer.warming: p.WarmStarted(0, 3, 0, 3)}, "no room is coming any more"
    assert warm(w, A) == p.WarmStarted(0, 3, 0, 3)
    assert w.tiers_of(full) == ["dram+disk"] * 4
    w.release(lease)
    assert warm(w, A).warming
    w.finish_all()
    assert w.tiers_of(A) == ["dram+disk"] * 3


def test_what_has_nowhere_to_go_is_not_forgotten_for_it() -> None:
    """The disk takes nothing, so dram's coldest cannot go there: what does not fit is refused."""
    w = world((("dram", 8, MAPPED), ("disk", 20, ON_DISK)))
    on_disk_only(w, A)
    w.store(B)
    w.store(tokens_of(7, 8, 9))
    w.finish_all()
    w.engine.residency.backoff.rejected(1, "full", w.now_s)
    answer = warm(w, A)
    told = w.finish(*w.in_flight).warmed[answer.warming]
    assert (told.held, told.warm, told.refused) == (3, 2, 1)
    assert w.engine.evictor.dropped == 0
    assert "-" not in w.tiers_of(B)
    assert is_idle(w)


def test_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so much is begun, and a fetch that comes meanwhile takes the rest as demand."""
    monkeypatch.setattr(warming, "PIECE_BYTES", 2 * BLOCK_BYTES)
    w = world(WIDE)
    long = tokens_of(*range(8))
    on_disk_only(w, long)
    answer = warm(w, long)
    assert len(w.in_flight) == 2
    w.finish(*w.in_flight)
    assert len(w.in_flight) == 2
    lease = w.match(long + END).lease
    fetched = w.fetch(lease)
    assert fetched.waiting == 6
    priorities = [move.priority for move in w.in_flight.values()]
    assert priorities == [Priority.PREFETCH] * 2 + [Priority.DEMAND] * 4
    w.finish_all()
    assert w.read(0, w.arrived[lease] + list(fetched.ready), long) == 8
    w.release(lease)
    assert w.engine.warming.take_ended() == {}
    assert answer.warming
    assert is_idle(w)


def test_it_ends_by_its_time() -> None:
    """Its moves have that as their deadline; those that travel arrive all the same."""
    w = world(DRAM_DISK)
    on_disk_only(w, A)
    answer = warm(w, A, 5.0)
    moves = list(w.in_flight)
    assert {move.deadline_s for move in w.in_flight.values()} == {w.now_s + 5}
    arrivals = w.do(p.Tick(w.now_s + 5))
    assert arrivals.warmed == {answer.warming: p.WarmStarted(0, 3, 0, 3)}
    assert not w.engine.residency.leases.leases
    w.finish(*moves[:2])
    w.finish(*moves[2:], ok=False)
    assert w.tiers_of(A) == ["dram+disk"] * 2 + ["disk"]
    assert is_idle(w)


def test_a_corrupt_block_ends_it_there() -> None:
    w = world(DRAM_DISK)
    on_disk_only(w, A)
    answer = warm(w, A)
    first, second, third = list(w.in_flight)
    w.finish(first)
    w.finish(second, corrupt=True, ok=False)
    told = w.finish(third).warmed[answer.warming]
    assert (told.held, told.warm, told.refused) == (3, 2, 1)
    assert warm(w, A).held == 1
    assert is_idle(w)


def test_the_disk_dies_meanwhile() -> None:
    w = world(DRAM_DISK)
    on_disk_only(w, A)
    answer = warm(w, A)
    w.finish(next(iter(w.in_flight)))
    w.lose("disk")
    assert answer.warming not in w.engine.residency.leases.leases
    assert warm(w, A) == p.WarmStarted(0, 1, 1, 0)
    assert is_idle(w)


def test_a_clean_stop_waits_for_no_warming() -> None:
    w = world(DRAM_DISK)
    on_disk_only(w, A)
    warm(w, A)
    while w.do(p.Flush(w.now_s)):
        w.finish_all()
    assert not w.engine.residency.leases.leases
    w.finish_all()


def test_the_gpus_worker_reads_hbm_where_it_is() -> None:
    """Where it copies for the namespace, blocks in GPU memory are warm; for a client that maps
    only dram they have to come down."""
    w = world(GPU_ONLY_HBM)
    w.store(A)
    w.release(w.match(A + END).lease)
    w.fetch(lease := w.match(A + END).lease)
    w.release(lease)
    w.finish_all()
    residency = w.engine.residency
    ids = residency.index.match(residency.namespaces[0].root, A, STEP).ids()
    residency.vacate(ids, 1)
    residency.settle(ids)
    assert w.tiers_of(A) == ["hbm"] * 3
    assert warm(w, A, by_worker=True) == p.WarmStarted(0, 3, 3, 0)
    assert not w.in_flight
    assert warm(w, A).warming
    assert len(w.moving("hbm", "dram")) == 3
    w.finish_all()
    assert w.tiers_of(A) == ["hbm+dram"] * 3
    assert is_idle(w)

"""Blocks that the GPU's worker is to read: those in its own memory are readable where they are."""

from __future__ import annotations

import pytest

from hicache.engine import plan as p
from hicache.engine.planner.decision_log import Record
from tests.engine.test_races import END, GPU_ONLY_HBM, world
from tests.engine.world import BLOCK_BYTES, World, tokens_of

PROMPT = tokens_of(1, 2)


def in_hbm_only() -> World:
    w = world(GPU_ONLY_HBM)
    w.store(PROMPT)
    matched = w.match(PROMPT + END)
    w.fetch(matched.lease)
    w.release(matched.lease)
    w.finish_all()
    w.lose("dram")
    w.recover("dram")
    assert w.tiers_of(PROMPT) == ["hbm", "hbm"]
    return w


def test_the_worker_reads_its_own_memory_and_a_client_waits_for_a_copy() -> None:
    w = in_hbm_only()
    lease = w.match(PROMPT + END).lease
    fetched = w.fetch(lease, by_worker=True)
    assert [(run.first, run.tier, len(run.slots)) for run in fetched.ready] == [(0, "hbm", 2)]
    assert not fetched.waiting
    assert not w.moving("hbm", "dram")
    assert w.read(0, w.engine.readable_now(lease, 0, 2), PROMPT) == 2
    assert [run.first for run in w.engine.readable_now(lease, 1, 2)] == [1]
    w.release(lease)
    lease = w.match(PROMPT + END).lease
    fetched = w.fetch(lease)
    assert not fetched.ready
    assert len(w.moving("hbm", "dram")) == 2
    assert w.engine.readable_now(lease, 0, 2) == []
    w.finish_all()
    assert w.read(0, w.engine.readable_now(lease, 0, 2), PROMPT) == 2


def test_readable_up_to_the_first_that_is_not() -> None:
    w = in_hbm_only()
    longer = tokens_of(1, 2, 3)
    w.store(longer)
    assert w.tiers_of(longer) == ["hbm", "hbm", "dram"]
    lease = w.match(longer + END).lease
    assert [run.tier for run in w.engine.readable_now(lease, 0, 3)] == []
    assert [run.tier for run in w.engine.readable_now(lease, 2, 3)] == ["dram"]
    w.fetch(lease, by_worker=True)
    assert [run.tier for run in w.engine.readable_now(lease, 0, 3)] == ["hbm", "dram"]
    with pytest.raises(p.UnknownLease):
        w.engine.readable_now(lease + 100, 0, 1)


# --- what it takes -------------------------------------------------------------------------------

SLOW_S = 5.0


def asked(w: World, tokens: bytes, *, by_worker: bool = True) -> p.Matched:
    return w.match(tokens + END, by_worker=by_worker)


def loaded(w: World, tokens: bytes, seconds: float) -> p.ReloadDecision:
    """A request whose pages the worker fills, once all of it is in memory."""
    matched = asked(w, tokens)
    num_blocks = matched.decision.reload_blocks
    w.fetch(matched.lease, by_worker=True)
    w.finish_all()
    runs = w.engine.readable_now(matched.lease, 0, num_blocks)
    assert sum(len(run.slots) for run in runs) == num_blocks
    w.now_s += seconds
    w.do(p.Loaded(matched.lease, runs, seconds, w.now_s))
    w.release(matched.lease)
    return matched.decision


def last(w: World) -> Record:
    w.engine.catch_up()
    return next(w.engine.record.last(1))


def test_what_the_worker_reads_in_place_waits_for_no_link() -> None:
    """A client waits for a copy from GPU memory to where it can read; the worker does not."""
    w = in_hbm_only()
    for _ in range(5):
        w.do(p.LinkMeasured("hbm", "dram", BLOCK_BYTES, SLOW_S))
        w.do(p.LinkMeasured("dram", "hbm", 64 << 20, 0.01))
    assert asked(w, PROMPT, by_worker=False).decision.reload_s > SLOW_S
    over_the_link = w.engine.links[1, 0].seconds(2 * BLOCK_BYTES)
    assert asked(w, PROMPT).decision.reload_s == pytest.approx(over_the_link)


def test_a_load_from_disk_comes_over_both_links() -> None:
    w = in_hbm_only()
    while w.do(p.Flush(w.now_s)):
        w.finish_all()
    w.lose("hbm")
    w.lose("dram")
    w.recover("dram")
    assert w.tiers_of(PROMPT) == ["disk", "disk"]
    size = 2 * BLOCK_BYTES
    over_links = w.engine.links[2, 1].seconds(size) + w.engine.links[1, 0].seconds(size)
    assert asked(w, PROMPT).decision.reload_s == pytest.approx(over_links)
    loaded(w, PROMPT, 0.25)
    assert w.tiers_of(PROMPT) == ["dram+disk", "dram+disk"]
    assert asked(w, PROMPT).decision.reload_s == pytest.approx(0.25, rel=0.3), "the load alone"


def test_what_a_load_took_is_learned_and_recorded() -> None:
    w = in_hbm_only()
    decision = loaded(w, PROMPT, 0.5)
    record = last(w)
    assert record.decision is decision
    assert record.blocks_came == 2
    assert record.reload_s == pytest.approx(0.5)
    assert w.engine.record.errors[0, "hbm"].num == 1
    for _ in range(10):
        loaded(w, PROMPT, 0.5)
    assert asked(w, PROMPT).decision.reload_s == pytest.approx(0.5, rel=0.1)
    assert w.engine.record.errors[0, "hbm"].within >= 9


def test_a_decision_makes_what_it_rests_on_a_little_less_sure() -> None:
    """However many pieces it was about, and whoever asks besides; not what it does not rest on."""
    w = in_hbm_only()
    estimates, size = w.engine.estimates, 2.0 * BLOCK_BYTES
    loaded(w, PROMPT, 0.5)
    load, link = estimates.loads[0], estimates.links[0, 1]
    doubts_s = load.doubt_s({0: size}), link.doubt_s(size)
    asked(w, PROMPT)
    assert load.doubt_s({0: size}) > doubts_s[0]
    assert link.doubt_s(size) == doubts_s[1], "nothing was to come over it"
    matched = asked(w, PROMPT, by_worker=False)
    grown_s = link.doubt_s(size)
    assert grown_s > doubts_s[1]
    w.fetch(matched.lease)
    assert link.doubt_s(size) == grown_s, "how long the load is waited for is a question"


def test_hindsight_knows_who_copied() -> None:
    """What reloading would take by now is a load by the worker, and not by the slow link that a
    client would wait for."""
    w = in_hbm_only()
    w.do(p.LinkMeasured("hbm", "dram", BLOCK_BYTES, SLOW_S))
    loaded(w, PROMPT, 0.5)
    hit = last(w).hit
    assert hit.by_worker
    again_s = w.engine.record.reload_again(hit, 2)
    assert again_s == pytest.approx(w.engine.estimates.loads[0].seconds({0: 2 * BLOCK_BYTES}))


def test_a_load_of_a_lease_that_ended_says_nothing() -> None:
    w = in_hbm_only()
    w.do(p.Loaded(12345, (), 1.0, w.now_s))
    assert not w.engine.estimates.loads


def test_what_loads_take_outlives_the_daemon_and_not_its_namespace() -> None:
    w = in_hbm_only()
    for _ in range(4):
        loaded(w, PROMPT, 0.5)
    w.do(p.Observe(0, 1, 100, 5000, 1.0))
    known = w.engine.memory.snapshot()
    after = World(GPU_ONLY_HBM)
    known["namespaces"]["6d" * 32] = known["namespaces"].pop((b"n" * 32).hex())
    after.engine.memory.recall(known)
    number = after.open(b"m" * 32, BLOCK_BYTES)
    size = {0: 2.0 * BLOCK_BYTES}
    assert after.engine.estimates.loads[number].seconds(size) == pytest.approx(0.5, rel=0.2)
    opened = p.OpenNamespace(b"o" * 32, 2, BLOCK_BYTES, instead_of=number)
    assert after.do(opened) == number
    assert number not in after.engine.estimates.loads

"""Blocks that the GPU's worker is to read: those in its own memory are readable where they are."""

from __future__ import annotations

import pytest

from hicache.engine import plan as p
from tests.engine.test_races import END, GPU_ONLY_HBM, world
from tests.engine.world import World, tokens_of

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
    fetched = w.do(p.Fetch(lease, w.now_s, w.now_s + 10, by_worker=True))
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
    w.do(p.Fetch(lease, w.now_s, w.now_s + 10, by_worker=True))
    assert [run.tier for run in w.engine.readable_now(lease, 0, 3)] == ["hbm", "dram"]
    with pytest.raises(p.UnknownLease):
        w.engine.readable_now(lease + 100, 0, 1)

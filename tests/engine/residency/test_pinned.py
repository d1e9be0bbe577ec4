"""How much of memory leases hold: blocks count once, and each tier by its own room."""

from __future__ import annotations

from hicache.engine.residency.pinned import leased_share
from tests.engine.world import MAPPED, ONE_TIER, World, tokens_of

END = tokens_of(99999)


def test_a_shared_prefix_counts_once() -> None:
    w = World(ONE_TIER)
    tokens = tokens_of(1, 2, 3, 4)
    w.store(tokens)
    residency = w.engine.residency
    assert leased_share(residency) == 0.0
    leases = [w.match(tokens + END).lease for _ in range(3)]
    assert all(leases)
    assert leased_share(residency) == 4 / 8
    for lease in leases:
        w.release(lease)
    assert leased_share(residency) == 0.0


def test_the_mapped_tier_that_has_most_left_decides() -> None:
    w = World((("hbm", 4, MAPPED), ("dram", 16, MAPPED)))
    tokens = tokens_of(1, 2, 3)
    w.store(tokens)
    w.finish_all()
    assert w.match(tokens + END).lease
    assert leased_share(w.engine.residency) <= 3 / 16

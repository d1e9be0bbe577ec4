"""Whose order keeps more of what returns: known for every size, from what has returned since."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.engine.policies.base import ALWAYS
from hicache.engine.policies.hazard.evaluation import (
    KEPT,
    SIZES_BLOCKS,
    hits_at,
    hits_by_size,
    unjudged,
)
from hicache.engine.policies.hazard.history import REFIT_REQUESTS, History
from hicache.engine.policies.hazard.model import (
    NUM_BINS,
    Before,
    Fate,
    Model,
    Snapshot,
    bin_of,
    fit,
)
from hicache.engine.policies.hazard.policy import Hazard

COMES, GOES = 0, 1
RANKS = np.array([[2.0] * NUM_BINS, [1.0] * NUM_BINS])


def test_the_order_that_keeps_what_returns_hits_more_where_room_is_short() -> None:
    """In 100 s each class holds 64 blocks at ages of each bin; 30 return at the third."""
    exposure_s = np.full((2, NUM_BINS), 100.0 * 64 / NUM_BINS)
    events = np.zeros((2, NUM_BINS))
    events[COMES, 2] = 30.0
    hits = hits_by_size(RANKS, events, exposure_s, 100.0)
    by_rank, by_age = hits_at(hits, 8)
    assert by_rank > by_age > 0.0
    assert hits_at(hits, 128) == (30.0, 30.0)
    upside_down = hits_by_size(RANKS[::-1], events, exposure_s, 100.0)
    assert hits_at(upside_down, 8)[0] < by_age


def test_what_has_once_been_given_up_is_not_kept_later() -> None:
    ranks = np.ones((1, NUM_BINS))
    ranks[0, 3], ranks[0, 4] = 0.1, 9.0
    events = np.zeros((1, NUM_BINS))
    events[0, 4] = 1.0
    by_rank, by_age = hits_by_size(ranks, events, np.full((1, NUM_BINS), 4.0), 1.0)
    assert (by_rank == by_age).all()


def test_between_two_sizes_hits_lie_on_a_line_over_the_factor() -> None:
    last = len(SIZES_BLOCKS) - 1
    hits = np.stack((np.arange(len(SIZES_BLOCKS), dtype=float), np.zeros(len(SIZES_BLOCKS))))
    found = [hits_at(hits, n)[0] for n in (0, 1, 2, 3, 1024, 1 << last, 1 << 60)]
    assert found == pytest.approx([0, 0, 1, np.log2(3), 10, last, last])


def test_a_fit_judges_the_model_before_it_by_what_came_since() -> None:
    rng = np.random.default_rng(0)
    then = Fate(50.0, rng.random((1, NUM_BINS)), rng.random((1, NUM_BINS)))
    used = np.vstack((then.used, np.zeros((1, NUM_BINS))))
    used[COMES, 5] += 100.0
    unused = np.vstack((then.unused, np.zeros((1, NUM_BINS))))
    unused[GOES, bin_of(100.0)] += 1000.0
    earlier = np.ones_like(unjudged())
    before = Before([[2.0] * NUM_BINS], [1.0] * NUM_BINS, earlier, then)
    levels = np.array([[0, 1], [0, 2]])
    model = fit(Snapshot(levels, used, unused, Fate(150.0, used, unused), before))
    assert model is not None
    assert model.hits.max() == pytest.approx(KEPT + 100.0)
    assert model.beats_age(16)
    assert not model.beats_age(1 << 20)
    first = fit(Snapshot(levels, used, unused, Fate(150.0, used, unused)))
    assert first is not None
    assert not first.beats_age(16), "nothing is known of it"


@pytest.mark.parametrize("is_better", [True, False])
def test_a_tier_ranks_by_a_model_that_is_better_at_its_size(is_better: bool) -> None:
    history = History()
    history.num_held = lambda tier: 4 ** (1 + tier)
    small, large = Hazard(0, history), Hazard(1, history)
    hits = unjudged()
    hits[0 if is_better else 1, SIZES_BLOCKS == 4] = 1.0
    history.adopt(Model([], [0.5] * NUM_BINS, [], [0.5] * NUM_BINS, hits))
    assert small.worth(-1, 0.0) == (0.5 if is_better else ALWAYS)
    assert large.worth(-1, 0.0) == ALWAYS


def test_a_history_remembers_what_its_model_could_not_know() -> None:
    history = History()
    for number in range(2 * REFIT_REQUESTS):
        blocks = np.arange(number // 4 * 10, number // 4 * 10 + 10, dtype=np.uint64)
        history.used(0, blocks.tobytes(), float(number))
        if number == REFIT_REQUESTS:
            first = history.snapshot()
            assert first.before is None
            history.adopt(fit(first))
    second = history.snapshot()
    assert second.before is not None
    assert second.before.fate is first.fate
    assert second.fate.used.sum() > first.fate.used.sum()

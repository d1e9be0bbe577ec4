"""The small fit behind both estimates: stragglers, changes, doubt."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest

from hicache.engine.planner.cost import LINK_FIT, PREFILL_FIT, LinkCost
from hicache.engine.planner.fit import Fit

SIZES = (1.0, 4.0, 16.0, 64.0)


def taught(steps: int, per_mb_s: float = 0.001, noise: float = 0.0) -> Fit:
    """A link that copies 1 GB/s; one copy in all sizes after the other."""
    fit = Fit([0.0005, 0.002], LINK_FIT)
    rng = np.random.default_rng(1)
    for step in range(steps):
        size = SIZES[step % len(SIZES)]
        seconds = 0.0005 + size * per_mb_s
        fit.learn((1.0, size), seconds * float(np.exp(rng.normal(0, noise))))
    return fit


@pytest.mark.parametrize("steps", [4, 8, 40])
def test_what_is_fitted(steps: int) -> None:
    assert taught(steps).expect((1.0, 100.0)) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_a_change_is_noticed_after_four_steps_and_a_straggler_never(factor: float) -> None:
    fit = taught(40)
    known = fit.expect((1.0, 16.0))
    for step in range(1, 6):
        fit.learn((1.0, 16.0), factor * known)
        expected = fit.expect((1.0, 16.0))
        is_noticed = abs(expected / (factor * known) - 1) < 0.3
        assert is_noticed == (step >= 4), (step, expected)
    fit = taught(40)
    for step in range(30):
        is_straggler = step % 4 == 0
        fit.learn((1.0, 16.0), (10.0 if is_straggler else 1.0) * known)
    assert fit.expect((1.0, 16.0)) == pytest.approx(known, rel=0.35)


def test_a_young_fit_changes_its_mind_sooner() -> None:
    """A probe said so, and the first two real copies say otherwise."""
    fit = Fit([0.0005, 0.002], LINK_FIT)
    fit.learn((1.0, 8.0), 0.008)
    for _ in range(2):
        fit.learn((1.0, 8.0), 0.4)
    assert fit.expect((1.0, 8.0)) == pytest.approx(0.4, rel=0.1)


def test_a_first_straggler_is_forgotten() -> None:
    fit = Fit([0.0005, 0.002], LINK_FIT)
    fit.learn((1.0, 16.0), 0.3)
    for _ in range(6):
        fit.learn((1.0, 16.0), 0.03)
    assert fit.expect((1.0, 16.0)) == pytest.approx(0.03, rel=0.1)


def test_one_prefill_scales_all_terms_of_a_prior() -> None:
    """The model's shape is known and its machine's speed is not: from a step whose attention alone
    counts, the linear term is nearly right as well."""
    truth = [0.005, 0.028, 0.0011]
    fit = Fit([t / 4 for t in truth], PREFILL_FIT)
    x = (1.0, 0.256, 25.0)
    fit.learn(x, sum(t * value for t, value in zip(truth, x, strict=True)))
    assert fit.theta == pytest.approx(truth, rel=0.25)


def test_doubt_shrinks_with_what_is_seen_and_covers_the_error() -> None:
    x = (1.0, 100.0)
    doubts = []
    for steps in (1, 4, 40):
        fit = taught(steps, noise=0.2)
        doubts.append(sqrt(fit.variance(x)))
        assert abs(fit.expect(x) - 0.1005) < 4 * doubts[-1]
    assert doubts == sorted(doubts, reverse=True)
    assert doubts[-1] < 0.1 * 0.1


def test_doubt_of_a_link_grows_with_decisions_while_nothing_is_copied() -> None:
    link = LinkCost()
    for _ in range(20):
        link.measured(16 << 20, 0.017)
    first = link.doubt_s(16 << 20)
    assert link.doubt_s(16 << 20) == first
    for _ in range(200):
        link.note_decision()
    last = link.doubt_s(16 << 20)
    assert first < 0.2 * 0.017 < 0.9 * 0.017 < last
    link.measured(16 << 20, 0.017)
    assert link.doubt_s(16 << 20) < 0.2 * 0.017


def test_a_single_copy_may_have_been_a_straggler() -> None:
    link = LinkCost()
    link.measured(16 << 20, 0.17)
    assert link.doubt_s(16 << 20) > 0.9 * link.seconds(16 << 20)

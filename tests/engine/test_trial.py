"""Whose victims are better: a model that knows is trusted, one that is wrong is not."""

from __future__ import annotations

import pytest

from hicache.engine.ghost import SYMBOL, Run
from hicache.engine.hazard import NUM_BINS, Model
from hicache.engine.history import History
from hicache.engine.policies.base import ALWAYS
from hicache.engine.policies.hazard import Hazard
from hicache.engine.trial import Trial


def run_of(last_s: float) -> Run:
    return Run(None, bytes(SYMBOL), last_s)


def come_back(run: Run, now_s: float) -> None:
    for pair in run.pairs or ():
        pair.returned(run, now_s)
    run.pairs = None


def test_the_first_to_return_decides_once() -> None:
    trial, mine, old = Trial(), run_of(90.0), run_of(50.0)
    trial.begin(mine, old, 100.0)
    come_back(old, 120.0)
    assert trial.share > 0.5
    won = trial.share
    come_back(mine, 121.0)
    assert trial.share == won
    trial.begin(mine, old, 200.0)
    come_back(mine, 201.0)
    assert trial.share < won


def test_a_return_after_lru_would_have_given_it_up_says_nothing() -> None:
    trial, mine, old = Trial(), run_of(90.0), run_of(50.0)
    trial.begin(mine, old, 100.0)
    come_back(mine, 141.0)
    assert trial.share == 0.5


def test_the_same_choice_says_nothing() -> None:
    trial, both = Trial(), run_of(50.0)
    trial.begin(both, both, 100.0)
    assert both.pairs is None


def test_what_never_returns_keeps_few_pairs() -> None:
    trial, mine = Trial(), run_of(90.0)
    for number in range(100):
        trial.begin(mine, run_of(50.0), 100.0 + number)
    assert mine.pairs is not None
    assert len(mine.pairs) <= 8


@pytest.mark.parametrize(("is_right", "worth"), [(True, 0.5), (False, ALWAYS)])
def test_a_model_whose_victims_return_first_does_not_rank(is_right: bool, worth: float) -> None:
    history = History()
    policy = Hazard(history)
    history.adopt(Model([], [0.5] * NUM_BINS, [], [0.5] * NUM_BINS))
    for number in range(50):
        mine, old = run_of(number + 0.0), run_of(number - 50.0)
        policy.trial.begin(mine, old, number + 1.0)
        come_back(old if is_right else mine, number + 2.0)
    assert policy.worth(-1, 0.0) == worth

"""Refits run in a process of their own; a history gets its model and the loop never waits."""

from __future__ import annotations

import multiprocessing.connection

import numpy as np

from hicache.engine.history import REFIT_REQUESTS, History
from hicache.fitting import Fitter


def busy_history() -> History:
    history = History()
    history.wants_fits = True
    for number in range(REFIT_REQUESTS):
        blocks = np.arange(number // 4 * 10, number // 4 * 10 + 10, dtype=np.uint64)
        history.used(0, blocks.tobytes(), float(number))
    return history


def test_a_model_comes_back() -> None:
    history = busy_history()
    fitter = Fitter(history)
    fitter.tick()
    assert history.model is None
    assert not history.is_fit_due()
    assert fitter._answer is not None
    multiprocessing.connection.wait([fitter._answer])
    fitter.tick()
    assert history.model is not None
    fitter.close()


def test_nothing_is_fitted_where_no_policy_ranks_by_a_model() -> None:
    history = busy_history()
    history.wants_fits = False
    fitter = Fitter(history)
    fitter.tick()
    assert fitter._process is None
    fitter.close()


def test_a_fit_that_dies_leaves_the_old_model() -> None:
    history = busy_history()
    fitter = Fitter(history)
    fitter.tick()
    assert fitter._process is not None
    assert fitter._answer is not None
    fitter._process.kill()
    multiprocessing.connection.wait([fitter._answer])
    fitter.tick()
    assert history.model is None
    fitter.close()

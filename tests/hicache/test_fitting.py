"""Refits run in a process of their own; a history gets its model and the loop never waits."""

from __future__ import annotations

import signal

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


def begin(fitter: Fitter) -> None:
    """Tick until the fit's process has been started."""
    while fitter._process is None:
        fitter.tick()


def end(fitter: Fitter) -> None:
    """Wait until the process has ended, and tick."""
    assert fitter._process is not None
    fitter._process.wait()
    fitter.tick()
    assert fitter._process is None


def test_a_model_comes_back() -> None:
    history = busy_history()
    fitter = Fitter(history)
    begin(fitter)
    assert history.model is None
    assert not history.is_fit_due()
    end(fitter)
    assert history.model is not None
    fitter.close()


def test_nobody_waits_for_a_process_that_does_not_get_to_run() -> None:
    """It goes after everybody else: what it is told must not need it to read."""
    history = busy_history()
    fitter = Fitter(history)
    begin(fitter)
    assert fitter._process is not None
    fitter._process.send_signal(signal.SIGSTOP)
    for _ in range(3):
        fitter.tick()
    assert history.model is None
    fitter._process.send_signal(signal.SIGCONT)
    end(fitter)
    assert history.model is not None


def test_a_fit_under_way_is_ended_with_the_daemon() -> None:
    fitter = Fitter(busy_history())
    begin(fitter)
    process = fitter._process
    assert process is not None
    fitter.close()
    assert process.returncode == -signal.SIGKILL


def test_nothing_is_fitted_where_no_policy_ranks_by_a_model() -> None:
    history = busy_history()
    history.wants_fits = False
    fitter = Fitter(history)
    fitter.tick()
    fitter.tick()
    assert fitter._process is None
    fitter.close()


def test_a_fit_that_dies_leaves_the_old_model() -> None:
    history = busy_history()
    fitter = Fitter(history)
    begin(fitter)
    assert fitter._process is not None
    fitter._process.kill()
    end(fitter)
    assert history.model is None
    fitter.close()


def test_a_snapshot_in_slices_is_the_same_and_lets_requests_in_between() -> None:
    history = busy_history()
    whole = history.snapshot()
    slices = list(history.snapshot_in_slices(runs_each=7))
    assert slices[:-1] == [None] * (len(history.ghost.runs()) // 7)
    last = slices[-1]
    assert last is not None
    assert (last.censored == whole.censored).all()
    assert (last.events == whole.events).all()
    slices_now = history.snapshot_in_slices(runs_each=7)
    next(slices_now)
    for number in range(100):
        blocks = np.arange(number * 5, number * 5 + 9, dtype=np.uint64)
        history.used(0, blocks.tobytes(), 1000.0 + number)
    found = [item for item in slices_now if item is not None]
    assert len(found) == 1

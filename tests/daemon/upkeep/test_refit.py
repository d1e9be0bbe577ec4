"""Refits run in a process of their own; a history gets its model and the loop never waits."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from hicache.daemon.upkeep.refit import LONGEST_S, STUCK_S, Fitter, _Fit
from hicache.engine.policies.hazard.history import REFIT_REQUESTS, History


def busy_history() -> History:
    history = History()
    history.wants_fits = True
    for number in range(REFIT_REQUESTS):
        blocks = np.arange(number // 4 * 10, number // 4 * 10 + 10, dtype=np.uint64)
        history.used(0, blocks.tobytes(), float(number))
    return history


def begin(fitter: Fitter) -> None:
    """Tick until the fit's process has been started."""
    while fitter.fit is None:
        fitter.tick(0.0)


def end(fitter: Fitter, now_s: float = 0.0) -> None:
    """Until the fit is over."""
    assert fitter.fit is not None
    fitter.fit.process.wait()
    fitter.tick(now_s)
    assert fitter.fit is None


def test_a_model_comes_back() -> None:
    history = busy_history()
    fitter = Fitter(history)
    begin(fitter)
    assert history.model is None
    assert not history.is_fit_due()
    end(fitter)
    assert history.model is not None
    fitter.close()


def test_nothing_is_fitted_where_no_policy_ranks_by_a_model() -> None:
    history = busy_history()
    history.wants_fits = False
    fitter = Fitter(history)
    fitter.tick(0.0)
    fitter.tick(0.0)
    assert fitter.fit is None
    fitter.close()


def test_a_fit_that_dies_is_told_once_and_tried_again_after_a_pause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    history = busy_history()
    fitter = Fitter(history)
    begin(fitter)
    for now_s in (10.0, 20.0):
        assert fitter.fit is not None
        fitter.fit.process.kill()
        end(fitter, now_s)
        assert history.model is None
        assert fitter.faults.error == "FitFailed: its process died"
        fitter.tick(now_s + 0.9)
        assert fitter.fit is None, "it rests a second first, then two"
        fitter.tick(now_s + 2.0)
    assert fitter.faults.num == 2
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    end(fitter)
    assert history.model is not None
    assert fitter.faults.error == ""


@pytest.mark.parametrize(("how", "after_s"), [("stopped", STUCK_S), ("busy", LONGEST_S)])
def test_a_fit_that_does_not_end_owes_a_model_and_is_killed(how: str, after_s: float) -> None:
    """Stopped, it uses no processor time and is missed at once; busy, it is given longer."""
    fitter = Fitter(busy_history())
    begin(fitter)
    fit = fitter.fit
    assert fit is not None
    os.kill(fit.process.pid, signal.SIGSTOP)
    fitter.tick(1.0)
    if how == "busy":
        fit.used_s = -1.0
        fitter.tick(after_s)
        fit.used_s = -1.0
        fitter.tick(after_s)
        assert fitter.owes_s(after_s) == 0.0
    else:
        fitter.tick(5.0)
        assert fitter.owes_s(5.0) >= 4.0
    fitter.tick(after_s + 1.1)
    assert fitter.fit is None
    assert fit.process.returncode == -signal.SIGKILL
    assert "it hung" in fitter.faults.error
    fitter.close()


def test_a_fit_that_raises_is_told_with_what_it_raised() -> None:
    history = busy_history()
    fitter = Fitter(history)
    begin(fitter)
    fitter.close()
    fitter.fit = _Fit("no snapshot", 0.0)  # type: ignore[arg-type]
    end(fitter)
    assert "AttributeError" in fitter.faults.error
    assert history.model is None


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

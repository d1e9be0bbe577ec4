"""Parts that requests do not need: what they raise is counted, told once, and they go on."""

from __future__ import annotations

import logging
import threading

import pytest

from hicache.daemon.upkeep.supervised import Faults, WorkThread


def test_a_row_of_failures_is_told_once_and_rests_longer_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults = Faults("a part")
    with caplog.at_level(logging.INFO):
        for now_s, pause_s in ((0.0, 1.0), (10.0, 2.0), (20.0, 4.0)):
            faults.record_failure(ValueError("no"), now_s)
            assert faults.is_paused(now_s + 0.9 * pause_s)
            assert not faults.is_paused(now_s + pause_s)
        assert (faults.num, faults.error) == (3, "ValueError: no")
        faults.record_success()
    assert faults.error == ""
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    assert caplog.records[0].exc_info, "with its story"


def test_what_a_step_raises_ends_there() -> None:
    faults, steps = Faults("a part"), []

    def step() -> None:
        steps.append(1)
        raise KeyError("gone")

    faults.guard(step)
    faults.guard(step)  # it rests
    assert (faults.num, len(steps)) == (1, 1)


class Work:
    """Held up until `go`; order "bad" fails."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)
        self.done: list[str] = []

    def __call__(self, order: str) -> None:
        self.begun.release()
        assert self.go.wait(30)
        if order == "bad":
            raise SystemExit("even this")
        self.done.append(order)


def test_a_thread_that_ends_is_started_again_and_does_what_waits() -> None:
    work = Work()
    work.go.set()
    thread = WorkThread("a thread", work, max_waiting=3)
    assert thread.give("bad")
    thread._thread.join()
    thread.tick(100.0)
    assert (thread.faults.num, thread.faults.error) == (1, "SystemExit: even this")
    assert thread.give("good")
    assert thread.num_waiting == 1
    thread.tick(100.5)
    assert not thread._thread.is_alive(), "it rests"
    thread.tick(101.0)
    thread.close(30)
    assert work.done == ["good"]
    assert thread.faults.error == ""


def test_a_thread_that_is_held_up_owes_its_order_and_takes_no_more_than_its_bound() -> None:
    work = Work()
    thread = WorkThread("a thread", work, max_waiting=2)
    assert thread.owes_s(0.0) == 0.0
    assert thread.give("one")
    assert work.begun.acquire(timeout=30)
    since_s = thread._busy_since_s
    assert since_s is not None
    assert thread.owes_s(since_s + 7.0) == 7.0
    assert thread.give("two")
    assert not thread.give("three")
    assert (thread.num_waiting, thread.num_refused) == (2, 1)
    work.go.set()
    thread.close(30)
    assert work.done == ["one", "two"]

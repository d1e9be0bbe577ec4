"""When a worker's queue is overdue, and for how long: a table."""

from __future__ import annotations

from hicache.transfer.liveness import Liveness


def test_an_idle_queue_is_pinged_every_second_and_overdue_until_it_answers() -> None:
    queue = Liveness("read")
    queue.begin(10.0)
    assert not queue.is_due(10.9)
    assert queue.is_due(11.0)
    queue.pinged(11.0)
    assert not queue.is_due(15.0)
    assert queue.overdue_s(14.5, None) == 3.5
    queue.answered(15.0)
    assert queue.overdue_s(99.0, None) == 0.0
    assert queue.is_due(16.0)


def test_a_batch_is_overdue_from_when_it_was_sent() -> None:
    queue = Liveness("write")
    queue.begin(10.0)
    assert queue.overdue_s(14.0, 12.0) == 2.0


def test_a_slow_queue_that_makes_progress_is_hardly_overdue() -> None:
    """The oldest batch is in flight since 12, but another one came back at 19."""
    queue = Liveness("write")
    queue.begin(10.0)
    queue.pinged(12.0)
    queue.moved(19.0)
    assert queue.overdue_s(20.0, 12.0) == 1.0


def test_a_new_process_is_not_overdue_with_what_the_old_one_was_sent() -> None:
    queue = Liveness("read")
    queue.begin(10.0)
    queue.pinged(11.0)
    queue.begin(50.0)
    assert queue.overdue_s(60.0, None) == 0.0

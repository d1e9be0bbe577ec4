"""When one direction of a worker owes an answer, and for how long: a table."""

from __future__ import annotations

from hicache.transfer.liveness import Pulse


def test_an_idle_one_is_asked_every_second_and_owes_until_it_answers() -> None:
    pulse = Pulse("read")
    pulse.begin(10.0)
    assert not pulse.is_due(10.9)
    assert pulse.is_due(11.0)
    pulse.asked(11.0)
    assert not pulse.is_due(15.0)
    assert pulse.owes_s(14.5, None) == 3.5
    pulse.answered(15.0)
    assert pulse.owes_s(99.0, None) == 0.0
    assert pulse.is_due(16.0)


def test_a_batch_is_owed_from_when_it_was_sent() -> None:
    pulse = Pulse("write")
    pulse.begin(10.0)
    assert pulse.owes_s(14.0, 12.0) == 2.0


def test_a_slow_one_that_goes_on_owes_little() -> None:
    """The oldest batch is out since 12, but another one came back at 19."""
    pulse = Pulse("write")
    pulse.begin(10.0)
    pulse.asked(12.0)
    pulse.moved(19.0)
    assert pulse.owes_s(20.0, 12.0) == 1.0


def test_a_new_process_owes_nothing_of_the_old_one() -> None:
    pulse = Pulse("read")
    pulse.begin(10.0)
    pulse.asked(11.0)
    pulse.begin(50.0)
    assert pulse.owes_s(60.0, None) == 0.0

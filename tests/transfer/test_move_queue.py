"""A queue of moves, without any process: order, limits, deadlines, the backlog."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.engine.plan import Move, Priority
from hicache.transfer.move_queue import LIMITS, Limits, MoveQueue
from hicache.transfer.worker_messages import Batch

MIB = 1 << 20


def move(
    number: int,
    priority: Priority = Priority.DEMAND,
    *,
    num_bytes: int = 4096,
    dst: str | None = "dram",
    deadline_s: float | None = None,
) -> Move:
    return Move(
        number, 0, "disk", 0, dst, 0, num_bytes, num_bytes, num_bytes, priority, None, deadline_s
    )


def take(queue: MoveQueue, now_s: float = 0.0) -> list[int]:
    moves, late = queue.take(now_s)
    assert not late
    return [m.id for m in moves]


def test_a_batch_is_of_one_priority_and_bounded_in_moves() -> None:
    queue = MoveQueue(100)
    for number in range(40):
        queue.push(move(number, Priority.DEMOTION))
    queue.push(move(90, Priority.PREFETCH))
    queue.push(move(91))
    assert take(queue) == [91]
    assert take(queue) == [90]
    assert take(queue) == list(range(LIMITS.moves))
    assert take(queue) == list(range(LIMITS.moves, 40))
    assert take(queue) == []


def test_a_batch_is_bounded_in_bytes_but_takes_one_block_of_any_size() -> None:
    queue = MoveQueue(100)
    for number, num_bytes in enumerate([6 * MIB, 6 * MIB, 6 * MIB, 100 * MIB, 1]):
        queue.push(move(number, num_bytes=num_bytes))
    assert [take(queue) for _ in range(4)] == [[0, 1], [2], [3], [4]]
    assert 12 * MIB <= LIMITS.num_bytes < 18 * MIB


def test_a_batch_of_a_slow_link_is_bounded_in_time() -> None:
    """At 2 MiB/s half a second is a MiB. A single block is taken however long it takes. After a
    delayed batch the next one measures the speed anew."""
    queue = MoveQueue(100, Limits(in_flight=100))
    for number, num_bytes in enumerate([MIB // 2] * 5 + [6 * MIB] + [MIB // 2] * 8):
        queue.push(move(number, num_bytes=num_bytes))
    queue.timed(16 * MIB, 8.0)
    assert [take(queue) for _ in range(4)] == [[0, 1], [2, 3], [4], [5]]
    queue.timed(0, 1.0)
    queue.timed(MIB, 0.0)
    assert take(queue) == [6, 7]
    queue.timed(MIB, 0.001)
    assert take(queue) == [8, 9, 10, 11, 12, 13]


def test_copies_and_deletions_never_share_a_batch() -> None:
    queue = MoveQueue(100)
    for number in range(6):
        queue.push(move(number, dst="dram" if number < 2 or number == 5 else None))
    assert [take(queue) for _ in range(3)] == [[0, 1], [2, 3, 4], [5]]


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_batches_in_flight_are_limited(in_flight: int) -> None:
    queue = MoveQueue(100, Limits(in_flight=in_flight))
    for number in range(in_flight):
        queue.push(move(number))
        queue.sent(Batch(number, queue.take(0.0)[0]), float(number))
    queue.push(move(9))
    assert queue.oldest_s() == 0.0
    assert queue.take(0.0) == ([], [])
    assert queue.done(0) is not None
    assert queue.done(0) is None, "an answer counts once"
    assert take(queue) == [9]


def test_deadlines_pass_in_the_queue() -> None:
    queue = MoveQueue(100)
    queue.push(move(1, deadline_s=1.0))
    queue.push(move(2, deadline_s=3.0))
    queue.push(move(3, Priority.DEMOTION, deadline_s=1.5))
    moves, late = queue.take(2.0)
    assert [m.id for m in moves] == [2]
    assert [o.move for o in late] == [1]
    assert [o.move for o in queue.expire(2.0)] == [3]


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["push", "take", "done", "cancel", "expire", "fail"]),
            st.sampled_from(list(Priority)),
            st.integers(0, 30),
        ),
        max_size=60,
    )
)
def test_every_move_ends_once_and_the_backlog_is_its_bytes(
    steps: list[tuple[str, Priority, int]],
) -> None:
    queue, ended = MoveQueue(20), [0]
    waiting: dict[int, Move] = {}
    in_flight: dict[int, list[Move]] = {}
    for number, (what, priority, value) in enumerate(steps):
        ended_now = []
        if what == "push":
            new = move(number, priority, num_bytes=1 + value, deadline_s=float(value))
            if queue.push(new):
                waiting[new.id] = new
            else:
                assert len(waiting) == 20
        elif what == "take":
            moves, late = queue.take(value / 2)
            ended_now = [o.move for o in late]
            if moves:
                queue.sent(Batch(number, moves), 0.0)
                in_flight[number] = [waiting.pop(m.id) for m in moves]
        elif what == "done" and in_flight:
            batch = queue.done(next(iter(in_flight)))
            assert batch is not None
            assert in_flight.pop(batch.number) == batch.moves
        elif what == "cancel":
            ended_now = [o.move for o in queue.cancel([value, value + 1])]
        elif what == "expire":
            ended_now = [o.move for o in queue.expire(value / 2)]
        elif what == "fail" and value < 3:
            failed = [o.move for o in queue.fail_all("gone")]
            out = [m.id for moves in in_flight.values() for m in moves]
            assert sorted(failed) == sorted([*waiting, *out])
            waiting.clear()
            in_flight.clear()
        for move_id in ended_now:
            del waiting[move_id]
        ended[0] += len(ended_now)
        everything = [*waiting.values(), *(m for moves in in_flight.values() for m in moves)]
        for p in Priority:
            assert queue.backlog[p] == sum(m.block_bytes for m in everything if m.priority is p)

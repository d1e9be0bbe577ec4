"""One direction's queue, without any process: order, bounds, deadlines, the backlog."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.engine.plan import Move, Priority
from hicache.transfer.move_queue import LIMITS, Lane, Limits
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


def take(lane: Lane, now_s: float = 0.0) -> list[int]:
    moves, late = lane.take(now_s)
    assert not late
    return [m.id for m in moves]


def test_a_batch_is_of_one_priority_and_bounded_in_moves() -> None:
    lane = Lane(100)
    for number in range(40):
        lane.push(move(number, Priority.DEMOTION))
    lane.push(move(90, Priority.PREFETCH))
    lane.push(move(91))
    assert take(lane) == [91]
    assert take(lane) == [90]
    assert take(lane) == list(range(LIMITS.moves))
    assert take(lane) == list(range(LIMITS.moves, 40))
    assert take(lane) == []


def test_a_batch_is_bounded_in_bytes_but_takes_one_block_of_any_size() -> None:
    lane = Lane(100)
    for number, num_bytes in enumerate([6 * MIB, 6 * MIB, 6 * MIB, 100 * MIB, 1]):
        lane.push(move(number, num_bytes=num_bytes))
    assert [take(lane) for _ in range(4)] == [[0, 1], [2], [3], [4]]
    assert 12 * MIB <= LIMITS.num_bytes < 18 * MIB


def test_a_batch_of_a_slow_link_is_bounded_in_time() -> None:
    """At 2 MiB/s half a second is a MiB; a block is taken however long it takes; and one batch
    that was held up is made good by the next."""
    lane = Lane(100, Limits(in_flight=100))
    for number, num_bytes in enumerate([MIB // 2] * 5 + [6 * MIB] + [MIB // 2] * 8):
        lane.push(move(number, num_bytes=num_bytes))
    lane.timed(16 * MIB, 8.0)
    assert [take(lane) for _ in range(4)] == [[0, 1], [2, 3], [4], [5]]
    lane.timed(0, 1.0)
    lane.timed(MIB, 0.0)
    assert take(lane) == [6, 7]
    lane.timed(MIB, 0.001)
    assert take(lane) == [8, 9, 10, 11, 12, 13]


def test_copies_and_deletions_never_share_a_batch() -> None:
    lane = Lane(100)
    for number in range(6):
        lane.push(move(number, dst="dram" if number < 2 or number == 5 else None))
    assert [take(lane) for _ in range(3)] == [[0, 1], [2, 3, 4], [5]]


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_so_many_batches_travel_at_most(in_flight: int) -> None:
    lane = Lane(100, Limits(in_flight=in_flight))
    for number in range(in_flight):
        lane.push(move(number))
        lane.sent(Batch(number, lane.take(0.0)[0]), float(number))
    lane.push(move(9))
    assert lane.oldest_s() == 0.0
    assert lane.take(0.0) == ([], [])
    assert lane.done(0) is not None
    assert lane.done(0) is None, "an answer counts once"
    assert take(lane) == [9]


def test_deadlines_pass_in_the_queue() -> None:
    lane = Lane(100)
    lane.push(move(1, deadline_s=1.0))
    lane.push(move(2, deadline_s=3.0))
    lane.push(move(3, Priority.DEMOTION, deadline_s=1.5))
    moves, late = lane.take(2.0)
    assert [m.id for m in moves] == [2]
    assert [o.move for o in late] == [1]
    assert [o.move for o in lane.expire(2.0)] == [3]


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
    lane, ended = Lane(20), [0]
    waiting: dict[int, Move] = {}
    travelling: dict[int, list[Move]] = {}
    for number, (what, priority, value) in enumerate(steps):
        over = []
        if what == "push":
            new = move(number, priority, num_bytes=1 + value, deadline_s=float(value))
            if lane.push(new):
                waiting[new.id] = new
            else:
                assert len(waiting) == 20
        elif what == "take":
            moves, late = lane.take(value / 2)
            over = [o.move for o in late]
            if moves:
                lane.sent(Batch(number, moves), 0.0)
                travelling[number] = [waiting.pop(m.id) for m in moves]
        elif what == "done" and travelling:
            batch = lane.done(next(iter(travelling)))
            assert batch is not None
            assert travelling.pop(batch.number) == batch.moves
        elif what == "cancel":
            over = [o.move for o in lane.cancel([value, value + 1])]
        elif what == "expire":
            over = [o.move for o in lane.expire(value / 2)]
        elif what == "fail" and value < 3:
            failed = [o.move for o in lane.fail_all("gone")]
            out = [m.id for moves in travelling.values() for m in moves]
            assert sorted(failed) == sorted([*waiting, *out])
            waiting.clear()
            travelling.clear()
        for move_id in over:
            del waiting[move_id]
        ended[0] += len(over)
        everything = [*waiting.values(), *(m for moves in travelling.values() for m in moves)]
        for p in Priority:
            assert lane.backlog[p] == sum(m.block_bytes for m in everything if m.priority is p)

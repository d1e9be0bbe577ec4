"""Block ids: nothing handed out twice, consecutive where an extent is long enough."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hicache.engine.residency.block_ids import (
    IdSpace,
    Span,
    ids_along,
    ids_of,
    in_few,
    size_of,
    together,
)


def test_the_extent_that_fits_best_is_used() -> None:
    ids = IdSpace()
    ids.grow(100)
    spans = [ids.take(count) for count in (10, 5, 40, 5, 40)]
    assert spans[2] == slice(15, 55)
    ids.give(slice(15, 55))
    ids.give(slice(0, 10))
    assert ids.take(9) == slice(0, 9)
    assert ids.take(33) == slice(15, 48)
    assert ids.take(33) is None
    ids.validate()


def test_odd_ones_are_gathered_the_longest_first() -> None:
    ids = IdSpace()
    ids.grow(10)
    assert ids.take(10) == slice(0, 10)
    for free in (slice(0, 1), slice(3, 7), slice(8, 10)):
        ids.give(free)
    assert ids.take(5) is None
    assert ids.gather(5).tolist() == [3, 4, 5, 6, 8]
    ids.validate()


def test_slices_that_meet_become_one() -> None:
    assert together([slice(4, 6), slice(0, 2), slice(2, 4)]) == [slice(0, 6)]
    assert together([slice(4, 6), slice(0, 3)]) == [slice(0, 3), slice(4, 6)]
    odd = ids_of(slice(7, 9))
    assert together([slice(4, 6), odd, slice(2, 4)]) == [odd, slice(2, 6)]


def test_many_short_spans_become_one_array() -> None:
    assert in_few([slice(2, 4), slice(4, 6), slice(0, 1)]) == [slice(2, 6), slice(0, 1)]
    spans: list[Span] = [slice(2 * n, 2 * n + 1) for n in range(40)]
    (ids,) = in_few(spans)
    assert ids_of(ids).tolist() == ids_along(spans).tolist() == list(range(0, 80, 2))
    assert in_few([]) == []


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=80))
def test_random_takes_and_gives(steps: list[tuple[bool, int]]) -> None:
    ids = IdSpace()
    used: list[Span] = []
    for takes, number in steps:
        if takes:
            span: Span | None = ids.take(number)
            if span is None and ids.num_free < number:
                ids.grow(ids.size + number)
                span = ids.take(number)
                assert span is not None
            used.append(ids.gather(number) if span is None else span)
            assert size_of(used[-1]) == number
        elif used:
            ids.give(used.pop(number % len(used)))
        ids.validate()
        held = [block for span in used for block in ids_of(span).tolist()]
        assert len(set(held)) == len(held) == ids.size - ids.num_free

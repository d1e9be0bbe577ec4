"""The hazard model: what it must find in counts whose truth is known, and what ranks must hold."""

from __future__ import annotations

import numpy as np

from hicache.engine.policies.hazard.history import MAX_KINDS, History
from hicache.engine.policies.hazard.model import (
    NUM_BINS,
    WIDTHS_S,
    Fate,
    Model,
    Snapshot,
    bin_of,
    fit,
    gittins,
)


def snapshot_of(hazards: list[float], num_each: int = 5000) -> Snapshot:
    """Classes with constant hazards: so many intervals of each, by the expected share per bin."""
    ends = np.cumsum(WIDTHS_S)
    rows = []
    for hazard in hazards:
        alive = np.exp(-hazard * np.concatenate(([0.0], ends)))
        rows.append(num_each * (alive[:-1] - alive[1:]))
    numbers = np.arange(len(hazards))
    levels = np.stack((0 * numbers, numbers), axis=1)
    events, censored = np.array(rows), np.zeros((len(hazards), NUM_BINS))
    return Snapshot(levels, events, censored, Fate(0.0, events, censored))


def test_a_constant_hazard_is_its_own_rank_at_every_age() -> None:
    ranks = gittins(np.full((1, NUM_BINS), 0.01))
    assert np.allclose(ranks[0, :20], 0.01, rtol=0.05)


def test_a_rising_hazard_ranks_by_what_is_to_come() -> None:
    hazards = np.full((1, NUM_BINS), 1e-6)
    hazards[0, 10] = 1.0
    ranks = gittins(hazards)[0]
    assert (np.diff(ranks[:11]) > 0).all()
    assert ranks[11] < 1e-3 * ranks[10]


def test_the_fit_tells_classes_apart() -> None:
    model = fit(snapshot_of([0.05, 0.005, 0.0005]))
    assert model is not None
    for age_s in (0.0, 3.0, 15.0):
        ranks = [model.rank(kind, age_s) for kind in range(3)]
        assert ranks[0] > 3 * ranks[1] > 9 * ranks[2]


def test_too_few_returns_say_nothing() -> None:
    assert fit(snapshot_of([0.05, 0.01], num_each=10)) is None


def test_an_unknown_class_ranks_as_anybody() -> None:
    known, other = [0.9] * NUM_BINS, [0.1] * NUM_BINS
    model = Model([known], other, [other], known)
    assert [model.rank(kind, 0.0) for kind in (-1, 0, 1)] == [0.1, 0.9, 0.1]
    assert [model.returns_at(kind, 0.0) for kind in (-1, 0, 1)] == [0.9, 0.1, 0.9]
    assert Model([], other, [], known).rank(-1, 0.0) == 0.1


def test_what_is_still_out_counts_against_its_class() -> None:
    known = snapshot_of([0.01, 0.01])
    known.censored[1, bin_of(600.0)] = 50_000
    model = fit(known)
    assert model is not None
    assert model.rank(1, 0.0) < 0.5 * model.rank(0, 0.0)


def test_classes_never_exceed_their_number() -> None:
    history = History()
    rng = np.random.default_rng(0)
    for number in range(3000):
        blocks = rng.integers(0, 3, int(rng.integers(1, 200)), np.uint64)
        history.used(0, blocks.tobytes(), float(number) ** 1.3, is_partial=bool(number % 3))
        if number % 2:
            history.hinted(0, blocks.tobytes(), number % 8, answer_tokens=number % 3000)
    snapshot = history.snapshot()
    assert len(snapshot.levels) <= MAX_KINDS
    assert fit(snapshot) is not None


def test_a_ghost_stays_within_its_blocks() -> None:
    history = History(max_ghost_blocks=100)
    for number in range(200):
        blocks = np.arange(number * 10, number * 10 + 10, dtype=np.uint64)
        history.used(0, blocks.tobytes(), float(number))
    assert history.ghost.num_blocks <= 100
    assert sum(len(run) for run in history.ghost.runs()) == history.ghost.num_blocks
    assert history.snapshot().censored.sum() == 200


def blocks_of(*numbers: int) -> bytes:
    return np.array(numbers, np.uint64).tobytes()


def test_what_all_begin_with_is_no_turn_before() -> None:
    """A system prompt was once sent alone; each conversation's own turns count all the same."""
    history = History()
    history.used(0, blocks_of(0), 0.0)
    first = history.used(0, blocks_of(0, 1), 1.0)
    assert first[-1].context is not None
    for number in range(2, 9):
        path = history.used(0, blocks_of(0, number), float(number))
        assert path[-1].context is not None
        assert path[-1].context.turn == 1
    later = history.used(0, blocks_of(0, 5, 50, 51), 20.0)
    assert later[-1].context is not None
    assert later[-1].context.turn == 2
    again = history.used(0, blocks_of(0, 5, 60), 30.0)
    assert again[-1].context is not None
    assert again[-1].context.turn == 1, "the answer was asked for again: no further turn"


def test_how_long_an_answer_was_says_what_is_asked_for_again() -> None:
    history = History()
    for number in range(1, 201):
        history.used(0, blocks_of(number), 100.0 * number)
        is_long = number % 2
        history.hinted(0, blocks_of(number), 0, answer_tokens=2000 if is_long else 20)
        if not is_long:
            history.used(0, blocks_of(number, 1000 + number), 100.0 * number + 30.0)
    model = fit(history.snapshot())
    assert model is not None
    kinds = []
    for number, answer_tokens in ((501, 2000), (502, 20)):
        history.used(0, blocks_of(number), 30_000.0)
        (run,) = history.hinted(0, blocks_of(number), 0, answer_tokens=answer_tokens)
        kinds.append(run.kind)
    long, short = kinds
    assert model.rank(short, 0.0) > 3 * model.rank(long, 0.0)


def test_a_trunk_is_one_whoever_ended_there_last() -> None:
    history = History()
    for number in range(1, 4):
        history.used(0, blocks_of(0, number), float(number))
    (trunk,) = history.used(0, blocks_of(0), 5.0)
    assert trunk.is_trunk
    assert history._levels[trunk.kind][0] == 1
    tails = [run for run in history.ghost.runs() if run is not trunk]
    assert {history._levels[run.kind][0] for run in tails} == {0}


def test_roles_have_hazards_of_their_own() -> None:
    """Trunks return within a second: that says nothing of tails of that age."""
    events, censored = np.zeros((2, NUM_BINS)), np.zeros((2, NUM_BINS))
    events[0, 0] = 5000.0
    events[1, bin_of(60.0)] = 100.0
    levels = np.array([[1, 0], [0, 0]])
    model = fit(Snapshot(levels, events, censored, Fate(0.0, events, censored)))
    assert model is not None
    assert model.rank(0, 0.0) > 1.0
    assert model.rank(1, 0.0) < 0.1


def test_beyond_all_ages_seen_the_longest_unused_ranks_lowest() -> None:
    events, censored = np.zeros((1, NUM_BINS)), np.zeros((1, NUM_BINS))
    events[0, : bin_of(30.0)] = 100.0
    censored[0, bin_of(60.0)] = 100.0
    model = fit(Snapshot(np.zeros((1, 1), int), events, censored, Fate(0.0, events, censored)))
    assert model is not None
    ranks = [model.rank(0, age_s) for age_s in (80.0, 200.0, 210.0, 1000.0, 10_000.0, 40_000.0)]
    assert ranks == sorted(ranks, reverse=True)
    assert len(set(ranks)) == len(ranks)
    assert model.returns_at(0, 200.0) == 0.0

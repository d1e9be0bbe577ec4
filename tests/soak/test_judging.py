"""How a soak judges its samples of the daemon's memory."""

from __future__ import annotations

import pytest

from tests.soak.__main__ import LOOK_S, MAX_GROWTH, SETTLED_S, Soak

MIB = 1 << 20
Look = tuple[float, int]


def life(num_s: float, grows: float = 0.0, base: int = 40 * MIB) -> list[Look]:
    """Samples of a daemon from its start on. It grows by this share between its fifth minute and
    its end."""
    ages = [number * LOOK_S for number in range(int(num_s / LOOK_S))]
    span_s = max(num_s - SETTLED_S, 1.0)
    return [(age, round(base * (1 + grows * max(0.0, age - SETTLED_S) / span_s))) for age in ages]


def judged(looks: list[Look]) -> tuple[float | None, list[str]]:
    soak = Soak(duration_s=0, num_clients=0, seed=0)
    soak.memory = looks
    return soak._judge_memory(), soak.troubles


def test_flat_memory_is_no_trouble() -> None:
    assert judged(life(1200)) == (0.0, [])


@pytest.mark.parametrize("share", [0.03, 0.1])
def test_growth_is_reported(share: float) -> None:
    growth, troubles = judged(life(1200, share))
    assert growth is not None
    assert MAX_GROWTH < growth <= share
    assert troubles == [f"memory grew by {growth:.1%}"]


def test_what_is_used_for_the_first_time_is_no_growth() -> None:
    """Nor is the memory of an earlier daemon."""
    early = [(age, num - (MIB if age < SETTLED_S else 0)) for age, num in life(1200)]
    assert judged(life(1000, base=10 * MIB) + early) == (0.0, [])


def test_a_peak_for_a_moment_is_no_growth() -> None:
    looks = life(1200)
    looks[-1] = (looks[-1][0], 60 * MIB)
    assert judged(looks) == (0.0, [])


def test_a_daemon_that_lived_too_briefly_is_not_judged() -> None:
    """A burst of a minute would look like growth."""
    assert judged(life(3 * SETTLED_S - LOOK_S, 0.1)) == (None, [])

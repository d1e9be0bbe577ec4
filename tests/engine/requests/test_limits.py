"""How long a load is waited for, before its request goes on with what has come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.engine.planner.planner import Mode, PlannerSettings, load_limit_s
from hicache.engine.settings import EngineSettings
from tests.engine.planner.test_planner import on_disk_only
from tests.engine.world import tokens_of


@pytest.mark.parametrize(
    ("expected_s", "doubt_s", "saves_s", "limit_s"),
    [
        (1.0, 0.0, 1.5, 1.5),  # half as long again
        (1.0, 0.1, 1.5, 1.7),  # and twice its doubt
        (1.0, 9.0, 1.5, 2.0),  # within its share
        (0.01, 0.0, 0.2, 0.1),  # there is a least
        (0.2, 0.0, 60.0, 6.0),  # and little is lost beside a minute of prefill
    ],
)
def test_a_load_has_a_limit(
    expected_s: float, doubt_s: float, saves_s: float, limit_s: float
) -> None:
    limit = load_limit_s(PlannerSettings(), expected_s, doubt_s, saves_s)
    assert limit == pytest.approx(limit_s)


@given(st.floats(0, 100), st.floats(0, 1e6), st.floats(0, 1000), st.floats(0, 3))
def test_no_load_is_waited_for_beyond_its_share(
    expected_s: float, doubt_s: float, saves_s: float, share: float
) -> None:
    """However slow the disk turns out to be, and whatever is doubted."""
    settings = PlannerSettings(deadline_share=share)
    limit_s = load_limit_s(settings, expected_s, doubt_s, saves_s)
    assert expected_s <= limit_s <= max((1 + share) * expected_s, 0.1, 0.1 * saves_s) + 1e-9


@pytest.mark.parametrize("mode", ["measured", "always_reload"])
def test_a_fetch_ends_by_the_limit_of_its_load(mode: Mode) -> None:
    """Or by its client's deadline, whichever comes first; without a planner by that alone."""
    tokens = tokens_of(1, 2, 3, 9)
    world = on_disk_only(tokens)
    settings = PlannerSettings(mode=mode)
    world.engine.configure(EngineSettings(planner=settings), world.engine.residency.tiers)
    fetched = world.fetch(world.match(tokens).lease)
    limit_s = load_limit_s(settings, fetched.expected_s, world.engine.links[2, 1].doubt_s(12288), 0)
    assert fetched.deadline_s == world.now_s + (10 if mode == "always_reload" else limit_s)

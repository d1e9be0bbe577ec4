"""What a hint changes: what goes first, and what goes at once; and what it never may."""

from __future__ import annotations

import pytest

from hicache.engine import plan as p
from hicache.engine.policies.hazard.history import symbols_of
from tests.engine.policies.registry import every_policy
from tests.engine.world import BLOCK_BYTES, ONE_TIER, STEP, World, tokens_of


def say(
    world: World,
    tokens: bytes,
    ended: p.Ended = "",
    finish_reason: str = "",
    return_s: float = 0.0,
    keep: bool = True,
) -> None:
    world.do(p.Hint(0, tokens, world.now_s, ended, finish_reason, return_s, keep))


def num_held(world: World, tokens: bytes) -> int:
    return len([tier for tier in world.tiers_of(tokens) if tier != "-"])


@pytest.mark.parametrize("eviction", every_policy())
def test_an_ended_conversation_goes_first(eviction: str) -> None:
    """Six of eight blocks; the younger conversation is said to be over, and makes room."""
    world = World(ONE_TIER, eviction=eviction)
    older, younger = tokens_of(1, 1, 1), tokens_of(2, 2, 2)
    world.store(older)
    world.store(younger)
    say(world, younger, "conversation")
    world.store(tokens_of(3, 3, 3))
    assert num_held(world, older) == 3
    assert num_held(world, younger) < 3


def test_one_that_goes_on_after_all_is_as_good_as_any() -> None:
    world = World(ONE_TIER)
    older, younger = tokens_of(1, 1, 1), tokens_of(2, 2, 2)
    world.store(older)
    world.store(younger)
    say(world, younger, "conversation")
    world.do(p.Release(world.match(younger + bytes(4)).lease, world.now_s))
    world.store(tokens_of(3, 3, 3))
    assert num_held(world, younger) == 3
    assert num_held(world, older) < 3


def test_what_others_need_too_is_not_dismissed() -> None:
    """The front is shared: only what hangs below it on this side has ended."""
    world = World(ONE_TIER)
    mine, other = tokens_of(1, 1, 2, 2), tokens_of(1, 1, 3, 3)
    world.store(mine)
    world.store(other)
    say(world, mine, "conversation")
    world.store(tokens_of(4, 4, 4, 4))
    assert num_held(world, mine) == 2
    assert num_held(world, other) == 4


def test_what_is_not_to_be_kept_goes_at_once_as_far_as_nobody_asked_for_it() -> None:
    world = World(ONE_TIER)
    turn, title = tokens_of(1, 1, 1), tokens_of(1, 1, 1, 2, 2)
    world.store(turn)
    world.do(p.Release(world.match(title).lease, world.now_s))
    world.store(title)
    say(world, title, keep=False)
    assert num_held(world, title) == 3
    assert world.engine.residency.pools[0].num_used(BLOCK_BYTES) == 3


def test_what_is_leased_is_kept_all_the_same() -> None:
    world = World(ONE_TIER)
    tokens = tokens_of(1, 1, 1)
    world.store(tokens)
    lease = world.match(tokens + bytes(4)).lease
    say(world, tokens, "conversation", keep=False)
    world.read(0, world.fetch(lease).ready, tokens)
    assert num_held(world, tokens) == 3


def test_a_hint_about_an_unknown_prompt_changes_nothing() -> None:
    world = World(ONE_TIER)
    world.store(tokens_of(1, 1))
    say(world, tokens_of(9, 9), "conversation", "stop", 3.0, keep=False)
    assert num_held(world, tokens_of(1, 1)) == 2


@pytest.mark.parametrize(("finish_reason", "num_kinds"), [("", 2), ("stop", 2), ("tool_calls", 1)])
def test_the_length_counts_where_no_reason_says_more(finish_reason: str, num_kinds: int) -> None:
    world = World(ONE_TIER, eviction="hazard")
    history = world.engine.history
    assert history is not None
    tokens = tokens_of(1, 1)
    world.match(tokens)
    kinds = set()
    for answer_tokens in (10, 2000, 0):  # 0: what was said before still holds
        world.do(
            p.Hint(0, tokens, world.now_s, finish_reason=finish_reason, answer_tokens=answer_tokens)
        )
        kinds.add(history.marks_of(0, symbols_of(tokens, STEP))[-1][1])
    assert len(kinds) == num_kinds


def test_reasons_are_told_apart_and_are_few() -> None:
    world = World(ONE_TIER, eviction="hazard")
    history, hints = world.engine.history, world.engine.hints
    assert history is not None
    tokens = tokens_of(1, 1)
    world.match(tokens)
    kinds = []
    for reason in [str(number) for number in range(20)] * 2:
        say(world, tokens, finish_reason=reason)
        kinds.append(history.marks_of(0, symbols_of(tokens, STEP))[-1][1])
    assert kinds[:20] == kinds[20:]
    assert len(set(kinds)) == 7
    assert len(hints._stops) <= 7

"""What the planner foresaw beside what came, and how its decisions look in hindsight."""

from __future__ import annotations

import pytest

from hicache.engine import plan as p
from hicache.engine.planner.cost import PrefillCost, PrefillPrior
from hicache.engine.planner.decision_log import KEPT, DecisionLog, Record
from hicache.engine.planner.planner import Hit, Mode, PlannerSettings
from hicache.engine.settings import EngineSettings
from tests.engine.world import World, tokens_of

PROMPT = tokens_of(1, 2, 3, 4)
ASKED = PROMPT + b"\x09\0\0\0"


def world_with_a_prompt_on_disk(mode: Mode = "measured") -> World:
    """A prefill takes a second per token, a copy from disk next to nothing."""
    prior = PrefillPrior(0.0, 1.0, 0.0, is_guess=False)
    world = World(settings=EngineSettings(planner=PlannerSettings(mode=mode), prior=prior))
    world.store(PROMPT)
    while world.do(p.Flush(world.now_s)):
        world.finish_all()
    world.lose("hbm")
    world.lose("dram")
    world.recover("dram")
    return world


def observe(world: World, n: int, c: int, seconds: float) -> None:
    world.do(p.Observe(0, 1, n, n * c + n * n / 2, seconds))


def reload(world: World, took_s: float) -> p.ReloadDecision:
    """One request as a client makes it, all blocks coming in time."""
    matched = world.match(ASKED)
    world.fetch(matched.lease)
    world.finish_all()
    world.do(p.ObserveReload(matched.lease, 0, 0, took_s))
    world.release(matched.lease)
    return matched.decision


def last(world: World) -> Record:
    world.engine.catch_up()
    return next(world.engine.record.last(1))


def test_a_reload_is_recorded_with_what_it_took() -> None:
    world = world_with_a_prompt_on_disk()
    decision = reload(world, took_s=0.5)
    record = last(world)
    assert record.decision is decision
    assert (record.blocks_came, record.reload_s) == (4, 0.5)
    assert (record.prefill_tokens, record.context_tokens, record.prefill_s) == (1, 8, None)
    errors = world.engine.record.errors[0, "disk"]
    assert errors.summary()["mean_abs_error_s"] == pytest.approx(0.5 - decision.reload_s)
    assert errors.within == 0, "it took a hundred times as long"
    assert record.regret_s == 0.0, "all the same it was faster than a second per token"


def test_a_step_of_just_that_size_is_its_prefill() -> None:
    world = world_with_a_prompt_on_disk()
    reload(world, took_s=0.01)
    observe(world, 1, 4, 1.0)  # another request's
    assert last(world).prefill_s is None
    observe(world, 1, 8, 1.5)
    assert last(world).prefill_s == 1.5


def test_a_reload_that_was_slower_than_recomputing_is_regretted() -> None:
    world = world_with_a_prompt_on_disk()
    decision = reload(world, took_s=60.0)
    regret_s = last(world).regret_s
    assert regret_s == pytest.approx(60.0 + decision.prefill_s - decision.recompute_s)
    regrets = world.engine.record.regrets
    assert (regrets.num, regrets.num_wrong, regrets.regret_s) == (1, 1, regret_s)
    observe(world, 1, 8, 1.0)
    assert regrets.num == 1, "judged anew, not twice"
    assert regrets.regret_s == last(world).regret_s


def test_recomputing_is_regretted_when_a_reload_would_have_been_faster() -> None:
    world = world_with_a_prompt_on_disk("always_recompute")
    matched = world.match(ASKED)
    assert (matched.decision.name, last(world).regret_s) == ("recompute", None)
    observe(world, 9, 0, 9.0)
    regret_s = last(world).regret_s
    assert regret_s is not None
    rest_s = world.engine.prefill[0].seconds(1, 8)
    assert 9.0 - rest_s - 0.01 < regret_s < 9.0 - rest_s


@pytest.mark.parametrize(
    ("per_block_s", "regret_s"),
    [
        (0.5, 1.0),  # two more blocks would have cost a second, and saved two
        (2.0, 2.0),  # recomputing everything would have saved four, and cost two
        (1.0, 0.0),
    ],
)
def test_a_part_is_judged_by_the_best_other_cut(per_block_s: float, regret_s: float) -> None:
    """Two runs of two blocks, of which one was reloaded; a token takes a second to prefill."""
    runs = [p.TierRun("dram", 2), p.TierRun("disk", 2)]
    cost = PrefillCost(PrefillPrior(0.0, 1.0, 0.0, is_guess=False))
    recorder = DecisionLog([cost], lambda hit, blocks: blocks * per_block_s)
    hit = Hit(5, 1, 0, runs, [2 * per_block_s, 4 * per_block_s], cost.seconds)
    decision = p.ReloadDecision("partial", 2, "faster", 2 * per_block_s, 3.0, 5.0, str)
    recorder.decided(hit, decision, 1, 0.0)
    recorder.reloaded(1, 2, 2 * per_block_s)
    assert recorder.regrets.regret_s == pytest.approx(regret_s)


def test_what_did_not_come_in_time_is_left_to_prefill() -> None:
    world = world_with_a_prompt_on_disk()
    matched = world.match(ASKED)
    world.fetch(matched.lease)
    world.finish(*list(world.in_flight)[:3])
    world.do(p.CutShort(matched.lease, 3))
    world.finish_all()  # they come later, for the next who asks
    world.release(matched.lease)
    record = last(world)
    assert (record.blocks_came, record.prefill_tokens, record.context_tokens) == (3, 3, 6)
    assert world.engine.record.num_cut_short == 1
    assert world.engine.ledger.tiers["disk"].hits == 3
    assert world.tiers_of(PROMPT) == ["dram+disk"] * 4


def test_a_reload_that_nobody_timed_is_not_judged() -> None:
    """It counted as one that took no time, once the prefill of the rest was measured."""
    world = world_with_a_prompt_on_disk()
    matched = world.match(ASKED)
    world.fetch(matched.lease)
    world.do(p.CutShort(matched.lease, 0))
    world.release(matched.lease)
    observe(world, 9, 0, 9.0)
    record = last(world)
    assert (record.blocks_came, record.prefill_s, record.regret_s) == (0, 9.0, None)
    assert not world.engine.record.regrets.num


def test_a_lease_that_nobody_fetched_says_nothing() -> None:
    world = world_with_a_prompt_on_disk()
    world.release(world.match(ASKED).lease)
    assert (last(world).blocks_came, world.engine.record.num_cut_short) == (None, 0)


def test_only_the_last_decisions_are_kept() -> None:
    world = world_with_a_prompt_on_disk("always_recompute")
    for _ in range(KEPT + 10):
        world.engine.handle(p.MatchPrompt(0, ASKED, 1, world.now_s, 100.0))
    world.engine.catch_up()
    numbers = [record.number for record in world.engine.record.last(1000)]
    assert numbers == list(range(KEPT + 10, 10, -1))

"""A score says what a match would find, and leaves everything as it was."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import islice
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from hicache.engine import plan as p
from hicache.engine.index.node import Node
from hicache.engine.planner.planner import PlannerSettings
from hicache.engine.settings import EngineSettings
from tests.engine.index.tree_picture import portrait
from tests.engine.test_core_stateful import (
    EngineMachine,
    GatedMachine,
    TwoSizesMachine,
    UnmappedHbmMachine,
)
from tests.engine.test_races import END, world
from tests.engine.world import MAPPED, THREE_TIERS, World, tokens_of

A = tokens_of(1, 2)
MAX_ASKED = 2
LONG = tokens_of(1, 2, 3, 4, 5)


def asked(w: World, tokens: bytes, namespace: int = 0, *, by_worker: bool = False) -> p.Scored:
    """Score what `World.match` will ask next, and see that nothing has changed by it."""
    w.engine.matching.settle()
    question = p.MatchPrompt(namespace, tokens, 1, w.now_s + 1, 100.0, by_worker=by_worker)
    before = portrait(w.engine)
    scored = w.engine.score(question)
    assert portrait(w.engine) == before
    w.engine.validate()
    return scored


class Scoring:
    """Mixed into a machine: after every step, what is held is scored, and matched in a copy."""

    world: World
    num_asked = 0
    prompts_at_start = 12  # full from the start: every put makes something leave

    @invariant()
    def scores(self) -> None:
        for number, namespace in enumerate(self.world.engine.residency.namespaces):
            for tokens in islice(paths_below(namespace.root, namespace.step), MAX_ASKED):
                self.num_asked += 1
                self.compare(tokens + END * (self.num_asked % 2), number)

    def compare(self, tokens: bytes, namespace: int) -> None:
        by_worker = self.num_asked % 3 == 0
        scored = asked(self.world, tokens, namespace, by_worker=by_worker)
        question = p.MatchPrompt(
            namespace, tokens, 1, self.world.now_s + 1, 100.0, by_worker=by_worker
        )
        matched = deepcopy(self.world.engine).handle(question).answer
        decision, forecast = matched.decision, scored.forecast
        assert (scored.runs, scored.hit_blocks) == (matched.runs, matched.hit_blocks)
        assert forecast.reload_blocks == decision.reload_blocks
        assert forecast.reload_s == decision.reload_s
        assert forecast.prefill_s == decision.prefill_s
        assert forecast.recompute_s == decision.recompute_s


def paths_below(node: Node, step: int, above: bytes = b"") -> Iterator[bytes]:
    """The prompts that end where a path does."""
    tokens = above + node.symbols(step, 0, len(node))
    if not node.children:
        yield tokens
    for child in node.children.values():
        yield from paths_below(child, step, tokens)


SCORED = (EngineMachine, GatedMachine, TwoSizesMachine, UnmappedHbmMachine)


@pytest.mark.thorough
@pytest.mark.parametrize("machine", SCORED)
def test_random_histories(machine: type[EngineMachine]) -> None:
    scoring = type(f"Scoring{machine.__name__}", (Scoring, machine), {})
    run_state_machine_as_test(scoring, settings=settings(max_examples=4, stateful_step_count=20))


def test_what_is_leaving_is_held_and_goes_on_leaving() -> None:
    """A is demoted from hbm to dram. A match would rescue its copy there, a score does not: when
    the new one is ready the old one goes."""
    w = world()
    w.store(A)
    moves = w.moving("hbm", "dram")
    assert moves
    assert asked(w, A + END).runs == (p.TierRun("hbm", 2),)
    w.finish_all()
    assert w.tiers_of(A) == ["dram", "dram"]
    assert asked(w, A + END).runs == (p.TierRun("dram", 2),)


def test_what_is_being_deleted_is_not_held() -> None:
    """Its records are there until the deletion ends, which cannot be called back."""
    w = world()
    w.store(A, durable=True)
    w.finish_all()
    assert w.do(p.Clear(0, w.now_s)).blocks == 2
    assert w.moving("disk", None)
    assert asked(w, A + END).hit_blocks == 0
    assert w.match(A + END).hit_blocks == 0


def test_scored_ones_are_evicted_as_if_nobody_had_asked() -> None:
    """Two prompts fill the only tier, the older one is scored again and again, and goes first."""
    w = World((("dram", 4, MAPPED),))
    other, third = tokens_of(3, 4), tokens_of(5, 6)
    w.store(A)
    w.store(other)
    for _ in range(5):
        assert asked(w, A + END).hit_blocks == 2
    w.store(third)
    assert asked(w, A + END).hit_blocks == 0
    assert asked(w, other + END).hit_blocks == 2


@pytest.mark.parametrize("per_token_s", [None, 1e-3, 1e-9])
@pytest.mark.parametrize("mode", ["measured", "always_reload", "always_recompute"])
def test_the_forecast_is_the_decisions(mode: Any, per_token_s: float | None) -> None:
    """Where prefill was never measured, is dear, and is nearly free."""
    w = World(THREE_TIERS, EngineSettings(planner=PlannerSettings(mode=mode)))
    w.store(LONG)
    w.finish_all()
    for n in (64, 256, 1024, 4096) * 4 if per_token_s else ():
        w.do(p.Observe(0, 1, n, n * n / 2, n * (per_token_s or 0.0)))
    forecast = asked(w, LONG + END).forecast
    decision = w.match(LONG + END).decision
    assert forecast.reload_blocks == decision.reload_blocks
    assert forecast.reload_s == decision.reload_s
    assert forecast.prefill_s == decision.prefill_s
    assert forecast.recompute_s == decision.recompute_s
    is_cheap = mode == "measured" and per_token_s == 1e-9
    assert bool(forecast.reload_blocks) == (mode != "always_recompute" and not is_cheap)


def test_nothing_of_nothing() -> None:
    """A prompt that is not known, one of no token, and one of less than a block."""
    w = world()
    for tokens in (tokens_of(7, 8), b"", END[:4]):
        scored = asked(w, tokens)
        assert (scored.runs, scored.hit_blocks, scored.forecast.reload_blocks) == ((), 0, 0)

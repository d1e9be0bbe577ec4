"""The planner as tables: hits in, decisions out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.engine import plan as p
from hicache.engine.plan import ReloadDecision, TierRun
from hicache.engine.planner.cost import LinkCost
from hicache.engine.planner.planner import Hit, Mode, Planner, PlannerSettings
from hicache.engine.planner.reload_time import ClientCopy, QueuedLink, Route, reload_over
from hicache.engine.settings import EngineSettings
from tests.bench.planner import LINKS, MODELS
from tests.engine.world import BLOCK_BYTES, BLOCK_TOKENS, DIGEST, World, tokens_of

EFFECTIVE_FLOPS = 4.95e14
BLOCK = 16


class Grid:
    """One model on one machine, with tiers of given speeds and queues."""

    def __init__(self, model: str, queued_bytes: float = 0.0) -> None:
        per_token, per_pair, self.kv_bytes = MODELS[model]
        self.per_token_s = per_token / EFFECTIVE_FLOPS
        self.per_pair_s = per_pair / EFFECTIVE_FLOPS
        self.queued_bytes = queued_bytes

    def prefill_s(self, n: float, c: float) -> float:
        if n <= 0:
            return 0.0
        return 0.005 + self.per_token_s * n + self.per_pair_s * (n * c + n * n / 2)

    def reload_s(self, blocks: Sequence[str]) -> float:
        """Links work side by side: the slowest decides. The hop takes every byte."""
        total = 0.0
        for tier in set(blocks) - {"mapped"}:
            bytes_per_s, latency_s = LINKS[tier]
            size = blocks.count(tier) * BLOCK * self.kv_bytes
            total = max(total, latency_s + (self.queued_bytes + size) / bytes_per_s)
        return total + len(blocks) * BLOCK * self.kv_bytes / 5e10

    def hit(self, runs: Sequence[tuple[str, int]], prompt_tokens: int, skipped: int = 0) -> Hit:
        routes = {"mapped": Route(0, None)}
        for tier, (bytes_per_s, latency_s) in LINKS.items():
            routes[tier] = Route(0, QueuedLink(LinkCost(latency_s, bytes_per_s), self.queued_bytes))
        reload = reload_over(
            [TierRun(tier, count) for tier, count in runs],
            routes,
            BLOCK * self.kv_bytes,
            ClientCopy(1 / 5e10),
        )
        return Hit(prompt_tokens, BLOCK, skipped, reload.runs, reload.seconds, self.prefill_s)

    def best_of_every_cut(
        self, runs: Sequence[tuple[str, int]], prompt_tokens: int, skipped: int
    ) -> float:
        """Brute force: the best total over every number of blocks, none included."""
        blocks = [tier for tier, count in runs for _ in range(count)]
        totals = [self.prefill_s(prompt_tokens - skipped, skipped)]
        for cut in range(1, len(blocks) + 1):
            context = skipped + cut * BLOCK
            totals.append(
                self.reload_s(blocks[:cut]) + self.prefill_s(prompt_tokens - context, context)
            )
        return min(totals)


def decide(
    hit: Hit,
    mode: Mode = "measured",
    band: float = 0.05,
    exploration: float = 0.0,
    drawn: float = 0.5,
) -> ReloadDecision:
    settings = PlannerSettings(mode, band, exploration=exploration)
    return Planner(settings, lambda: drawn).decide(hit)


def simple(reload_s: Sequence[float], prefill_s_per_token: float, prompt_tokens: int = 100) -> Hit:
    """Runs of one block of 10 tokens each, in tiers a, b, c…; a prefill without attention."""
    runs = [TierRun("abc"[k], 1) for k in range(len(reload_s))]
    return Hit(prompt_tokens, 10, 0, runs, reload_s, lambda n, _: n * prefill_s_per_token)


@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(sorted(LINKS)),
    st.lists(st.tuples(st.booleans(), st.integers(1, 64)), min_size=1, max_size=5),
    st.integers(1, 4096),
    st.integers(0, 64).map(lambda blocks: blocks * BLOCK),
    st.sampled_from([0.0, float(1 << 30), float(4 << 30)]),
)
def test_cutting_at_run_ends_is_as_good_as_cutting_anywhere(
    model: str,
    below: str,
    runs: list[tuple[bool, int]],
    new_tokens: int,
    skipped: int,
    queued_bytes: float,
) -> None:
    """Runs in a mapped tier and in one below it, as they come with three tiers."""
    grid = Grid(model, queued_bytes)
    named = [(below if is_below else "mapped", count) for is_below, count in runs]
    prompt = skipped + sum(count for _, count in runs) * BLOCK + new_tokens
    decision = decide(grid.hit(named, prompt, skipped), band=0.0)
    best = grid.best_of_every_cut(named, prompt, skipped)
    assert decision.reload_s + decision.prefill_s == pytest.approx(best, rel=0, abs=1e-9)
    assert decision.recompute_s == grid.prefill_s(prompt - skipped, skipped)


def test_cutting_within_a_run_while_another_link_is_busy() -> None:
    """The second run comes for nothing while the first one's link is busy, then costs too much."""
    grid = Grid("qwen3-32b")
    runs = [("lmdb", 244), ("1 GB/s", 250)]
    decision = decide(grid.hit(runs, 494 * BLOCK + 60), band=0.0)
    best = grid.best_of_every_cut(runs, 494 * BLOCK + 60, 0)
    assert 244 < decision.reload_blocks < 494
    assert decision.reload_s + decision.prefill_s == pytest.approx(best, rel=0.01)


@given(
    st.sampled_from(sorted(MODELS)),
    st.lists(
        st.tuples(st.sampled_from(["mapped", *sorted(LINKS)]), st.integers(1, 200)),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 4096),
    st.sampled_from([0.0, float(1 << 26), float(1 << 30)]),
)
def test_with_links_side_by_side_the_cut_is_as_good_as_any(
    model: str, runs: list[tuple[str, int]], new_tokens: int, queued_bytes: float
) -> None:
    """But for the block at which one link comes level with another."""
    grid = Grid(model, queued_bytes)
    prompt = sum(count for _, count in runs) * BLOCK + new_tokens
    decision = decide(grid.hit(runs, prompt), band=0.0)
    best = grid.best_of_every_cut(runs, prompt, 0)
    one_block_s = (
        grid.prefill_s(BLOCK, prompt) + grid.reload_s(["0.2 GB/s"]) - grid.reload_s(["hbm"])
    )
    assert best - 1e-9 <= decision.reload_s + decision.prefill_s <= best + one_block_s


@pytest.mark.parametrize(
    ("reload_s", "per_token", "name", "blocks", "reason"),
    [
        # all: 1 + 7 seconds against 10
        ((0.1, 0.5, 1.0), 0.1, "reload", 3, "faster"),
        # the third run costs more than it saves
        ((0.1, 0.5, 5.0), 0.1, "partial", 2, "faster"),
        ((0.1, 4.0, 5.0), 0.1, "partial", 1, "faster"),
        # the first run alone does not pay, all together do
        ((1.5, 1.5, 1.5), 0.1, "reload", 3, "faster"),
        ((5.0, 6.0, 7.0), 0.1, "recompute", 0, "slower"),
        # 9.6 against 10 is within the band of 5 %
        ((0.6, 2.6, 4.6), 0.1, "recompute", 0, "tie"),
        ((1.0, 2.0, 3.0), 0.1, "recompute", 0, "tie"),
        ((0.4, 2.6, 4.6), 0.1, "partial", 1, "faster"),
    ],
)
def test_decisions(
    reload_s: tuple[float, ...], per_token: float, name: str, blocks: int, reason: str
) -> None:
    decision = decide(simple(reload_s, per_token))
    assert (decision.name, decision.reload_blocks, decision.reason) == (name, blocks, reason)
    assert decision.recompute_s == pytest.approx(100 * per_token)


@pytest.mark.parametrize(
    ("mode", "reload_s", "name", "blocks"),
    [
        ("always_reload", (50.0, 60.0), "reload", 2),
        ("always_reload", (0.1, 0.2), "reload", 2),
        ("always_recompute", (50.0, 60.0), "recompute", 0),
        ("always_recompute", (0.1, 0.2), "recompute", 0),
    ],
)
def test_modes_ask_nobody(mode: Mode, reload_s: tuple[float, ...], name: str, blocks: int) -> None:
    decision = decide(simple(reload_s, 0.1), mode=mode, exploration=1.0, drawn=0.0)
    assert (decision.name, decision.reload_blocks, decision.reason) == (name, blocks, "mode")


@pytest.mark.parametrize("mode", ["measured", "always_reload", "always_recompute"])
def test_without_a_hit_everything_is_recomputed(mode: Mode) -> None:
    decision = decide(simple((), 0.1), mode=mode, exploration=1.0, drawn=0.0)
    assert (decision.name, decision.reload_blocks, decision.reason) == ("recompute", 0, "no_hit")
    assert decision.prefill_s == pytest.approx(10.0)


def in_doubt(reload_s: float, reload_doubt_s: float, prefill_doubt_s: float = 0.0) -> Hit:
    """64 blocks of 16 tokens from one tier, and one token more; a prefill takes 1 ms per token."""
    hit = Hit(1025, 16, 0, [TierRun("disk", 64)], [reload_s], lambda n, _: n * 0.001)
    hit.reload_doubt_s = [reload_doubt_s]
    hit.prefill_doubt_s = lambda *_: prefill_doubt_s
    return hit


@pytest.mark.parametrize(
    ("hit", "name", "reason"),
    [
        (in_doubt(0.93, 0.01), "reload", "faster"),
        (in_doubt(0.93, 0.20), "recompute", "uncertain"),
        (in_doubt(0.93, 0.01, 0.20), "recompute", "uncertain"),
        # beyond the band of doubt the better estimate counts, whatever it may be off
        (in_doubt(0.90, 0.50), "reload", "faster"),
        (in_doubt(1.00, 0.01), "recompute", "tie"),
        (in_doubt(1.50, 0.01), "recompute", "slower"),
    ],
)
def test_what_is_uncertain_is_recomputed_within_a_band(hit: Hit, name: str, reason: str) -> None:
    decision = decide(hit)
    assert (decision.name, decision.reason) == (name, reason)


def test_noise_does_not_swing_the_decision() -> None:
    """Once it is clearly faster, reloading goes on until it is slower; and back only when clear."""
    planner = Planner(PlannerSettings(), lambda: 0.5)
    seen = [(s, planner.decide(in_doubt(s, 0.0)).name == "reload") for s in (0.99, 0.90, 0.99)]
    assert seen == [(0.99, False), (0.90, True), (0.99, True)]
    seen = [(s, planner.decide(in_doubt(s, 0.0)).name == "reload") for s in (1.02, 1.03, 0.99, 0.9)]
    assert seen == [(1.02, True), (1.03, False), (0.99, False), (0.9, True)]


def test_the_other_way_is_tried_where_it_may_be_faster() -> None:
    """A reload that is believed to take three times as long, or a third: as large a part of it as
    the time set aside allows, and not again before there is more of that."""
    planner = Planner(PlannerSettings(exploration=0.01), lambda: 0.0)
    first = planner.decide(in_doubt(3.0, 2.5))
    assert (first.name, first.reason, first.reload_blocks) == ("partial", "exploration", 8)
    assert planner.decide(in_doubt(3.0, 2.5)).reload_blocks < 8
    assert planner.num_tried == 2
    assert 0.2 < planner.tried_s < 0.4


def test_recomputing_is_tried_too() -> None:
    planner = Planner(PlannerSettings(exploration=0.01), lambda: 0.0)
    tried = planner.decide(in_doubt(0.5, 0.0, prefill_doubt_s=0.9))
    assert (tried.name, tried.reason, tried.reload_blocks) == ("partial", "exploration", 48)
    assert planner.decide(in_doubt(0.5, 0.0, prefill_doubt_s=0.1)).reason == "faster"


@pytest.mark.parametrize(
    ("hit", "exploration", "drawn"),
    [
        (in_doubt(3.0, 0.5), 0.01, 0.0),  # slower for certain
        (in_doubt(3.0, 2.5), 0.01, 0.25),  # not every time
        (in_doubt(3.0, 2.5), 0.0, 0.0),  # not wanted
        (in_doubt(90.0, 89.5), 0.01, 0.0),  # no part of it can be afforded
    ],
)
def test_nothing_is_tried(hit: Hit, exploration: float, drawn: float) -> None:
    assert decide(hit, exploration=exploration, drawn=drawn).reason == "slower"


def test_what_trying_costs_is_bounded() -> None:
    """Where the doubt never ends, too: the share of all time, and what there was at first."""
    planner = Planner(PlannerSettings(exploration=0.01), lambda: 0.0)
    for _ in range(1000):
        planner.decide(in_doubt(3.0, 2.5))
    assert 5.0 < planner.tried_s < 0.01 * 1000 * 1.025 + 0.4


@pytest.mark.parametrize(
    ("hit", "mode", "sentence"),
    [
        (
            simple((), 0.001),
            "measured",
            "Nothing of these 100 tokens is held; prefill is expected to take 100.0 ms.",
        ),
        (
            simple((0.001, 0.002), 0.001),
            "measured",
            "Reload 20 tokens from a and b (2.0 ms) and prefill 80 (80.0 ms), "
            "against 100.0 ms to recompute everything.",
        ),
        (
            simple((20.0,), 0.2),
            "measured",
            "Recompute all 100 tokens (20.0 s): the best reload would take 38.0 s.",
        ),
        (
            simple((0.01,), 0.001),
            "measured",
            "Recompute all 100 tokens (100.0 ms): "
            "the best reload (100.0 ms) is not clearly faster.",
        ),
        (
            simple((0.001,), 0.001),
            "always_recompute",
            "Recompute all 100 tokens (100.0 ms): the planner's mode is always_recompute.",
        ),
        (
            simple((5.0,), 0.001),
            "always_reload",
            "Reload 10 tokens from a (5000.0 ms) and prefill 90 (90.0 ms), "
            "because the planner's mode is always_reload.",
        ),
    ],
)
def test_sentences(hit: Hit, mode: Mode, sentence: str) -> None:
    assert decide(hit, mode).sentence == sentence


def test_tokens_that_the_inference_engine_has_are_context() -> None:
    grid = Grid("llama-3-8b")
    decision = decide(grid.hit([("pcie5", 32)], 4096, skipped=2048))
    assert decision.name == "reload"
    assert decision.reload_blocks == 32
    assert decision.prefill_s == pytest.approx(grid.prefill_s(4096 - 2048 - 512, 2048 + 512))


# --- through the engine -------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_a_token_is_always_left_to_prefill(num_blocks: int) -> None:
    """The inference engine needs a last token to compute: a whole hit is cut by one block."""
    world = World(settings=EngineSettings(planner=PlannerSettings(mode="always_reload")))
    tokens = tokens_of(*range(num_blocks))
    world.store(tokens)
    matched = world.match(tokens)
    assert matched.hit_blocks == num_blocks
    assert matched.decision.reload_blocks == num_blocks - 1
    longer = world.match(tokens + b"\x07\0\0\0")  # one token more
    assert longer.decision.reload_blocks == num_blocks


@pytest.mark.parametrize(("skip", "reload"), [(0, 4), (1, 3), (3, 1), (4, 0), (5, 0), (9, 0)])
def test_what_the_inference_engine_holds_is_skipped(skip: int, reload: int) -> None:
    world = World(settings=EngineSettings(planner=PlannerSettings(mode="always_reload")))
    tokens = tokens_of(1, 2, 3, 4, 5)
    world.store(tokens)
    event = p.MatchPrompt(0, tokens, 1, world.now_s, 100.0, skip_blocks=skip)
    matched = world.do(event)
    assert matched.decision.reload_blocks == reload
    if reload:
        leased = world.engine.residency.leases.leases[matched.lease]
        assert world.engine.residency.blocks.depth[leased.ids].tolist() == list(range(skip, 4))


def test_a_models_arithmetic_stands_in_for_a_first_prefill() -> None:
    """Told with a later hello, too: a namespace that came back from disk had none."""
    world = World(settings=EngineSettings(flop_per_s=1e12))
    tokens = tokens_of(1, 2, 3)
    world.store(tokens)
    assert world.match(tokens).decision.reason == "unmeasured"
    told = p.OpenNamespace(DIGEST, BLOCK_TOKENS, BLOCK_BYTES, None, 10**12, 10**10)
    assert world.do(told) == world.namespace
    decision = world.match(tokens).decision
    assert decision.reason == "faster"
    assert decision.recompute_s == pytest.approx(0.005 + 6 + 0.01 * 6 * 6 / 2)
    world.do(p.Observe(0, 1, 6.0, 18.0, 1.2))
    assert world.do(told) == world.namespace
    assert world.match(tokens).decision.recompute_s < 2.0, "what was measured stays"


def on_disk_only(*prompts: bytes) -> World:
    """These prompts are on disk and nowhere else, and HBM is gone."""
    world = World(settings=EngineSettings(planner=PlannerSettings(mode="always_reload")))
    for tokens in prompts:
        world.store(tokens)
    while world.do(p.Flush(world.now_s)):
        world.finish_all()
    world.lose("hbm")
    world.lose("dram")
    world.recover("dram")
    return world


def test_the_queue_ahead_makes_a_reload_dearer() -> None:
    """Two prompts on disk; the second is asked for behind the first's demand."""
    first, second = tokens_of(1, 2, 3, 9), tokens_of(4, 5, 9)
    world = on_disk_only(first, second)
    alone = world.match(second).decision.reload_s
    world.fetch(world.match(first).lease)
    behind = world.match(second).decision.reload_s
    bytes_ahead = 3 * 4096
    link = world.engine.links[2, 1]
    late_s = 1.0 - link.seconds(bytes_ahead)  # nothing has come for the second since the fetch
    assert behind - alone == pytest.approx(bytes_ahead / link.bytes_per_s + late_s)


def test_what_is_on_its_way_need_not_be_copied_again() -> None:
    """The same prompt asked for again while its first blocks travel."""
    tokens = tokens_of(1, 2, 3, 4, 9)
    world = on_disk_only(tokens)
    first = world.match(tokens)
    alone = first.decision.reload_s
    world.fetch(first.lease)
    world.now_s -= 1
    assert world.match(tokens).decision.reload_s == pytest.approx(alone)


def test_a_link_that_brings_nothing_is_believed_to_go_on_so() -> None:
    """What waits for it may wait as long again; once something comes, all is well."""
    first, second = tokens_of(1, 2, 3, 9), tokens_of(4, 5, 9)
    world = on_disk_only(first, second)
    world.fetch(world.match(first).lease)
    world.now_s += 60
    assert 60 < world.match(second).decision.reload_s < 62
    world.finish(*list(world.in_flight)[:1])
    world.now_s -= 1
    assert world.match(second).decision.reload_s < 0.01
    world.finish_all()
    world.now_s += 60
    assert world.match(second).decision.reload_s < 0.01

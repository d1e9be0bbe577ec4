"""The two estimates: recovered from noisy steps, bounded where the data leave them open."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.engine.planner.cost import (
    LinkCost,
    LoadCost,
    PrefillCost,
    PrefillPrior,
    learn_hop,
    plausible_hop,
)

FIXED_S, PER_TOKEN_S, PER_PAIR_S = 0.004, 3e-5, 1.1e-9
"""About an 8B model on one H100."""


@dataclass
class Machine:
    """An inference engine that takes what the equation says, times noise."""

    seed: int = 0
    noise: float = 0.05
    stragglers: float = 0.0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def true_seconds(self, n: float, c: float) -> float:
        return FIXED_S + PER_TOKEN_S * n + PER_PAIR_S * (n * c + n * n / 2)

    def step(self, cost: PrefillCost, n: float, c: float) -> None:
        factor = float(np.exp(self.rng.normal(0.0, self.noise)))
        if self.rng.random() < self.stragglers:
            factor *= 10.0
        cost.observe(1, n, n * c + n * n / 2, self.true_seconds(n, c) * factor)

    def run(self, cost: PrefillCost, steps: int = 300) -> None:
        for _ in range(steps):
            n = float(self.rng.integers(64, 8192))
            self.step(cost, n, float(self.rng.integers(0, 65536)))


PRIOR = PrefillPrior(FIXED_S, PER_TOKEN_S, PER_PAIR_S)
POINTS = [(512, 0), (2048, 0), (8192, 0), (512, 32768), (8192, 65536)]


def errors(cost: PrefillCost, machine: Machine) -> list[float]:
    return [abs(cost.seconds(n, c) / machine.true_seconds(n, c) - 1) for n, c in POINTS]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0])
def test_noisy_steps_overcome_a_wrong_prior(seed: int, factor: float) -> None:
    cost = PrefillCost(PrefillPrior(FIXED_S * factor, PER_TOKEN_S * factor, PER_PAIR_S * factor))
    machine = Machine(seed)
    machine.run(cost)
    assert max(errors(cost, machine)) < 0.12


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_few_steps_already_beat_a_wrong_prior(factor: float) -> None:
    cost = PrefillCost(PrefillPrior(FIXED_S * factor, PER_TOKEN_S * factor, PER_PAIR_S * factor))
    machine = Machine()
    before = max(errors(cost, machine))
    machine.run(cost, 8)
    assert max(errors(cost, machine)) < before / 3


@pytest.mark.parametrize("seed", range(5))
def test_stragglers_move_it_little(seed: int) -> None:
    """One step in fifty takes ten times as long; one comes last of all."""
    cost = PrefillCost(PRIOR)
    machine = Machine(seed, stragglers=0.02)
    machine.run(cost)
    machine.stragglers = 1.0
    machine.step(cost, 2048, 8192)
    assert max(errors(cost, machine)) < 0.25


def test_constant_chunks_do_not_wind_anything_up() -> None:
    """n is the same in every step, so t0 and a cannot be told apart: they stay near the prior,
    within what was seen, however many steps there are."""
    cost = PrefillCost(PrefillPrior(FIXED_S * 2, PER_TOKEN_S * 2, PER_PAIR_S * 2))
    machine = Machine()
    seen = []
    for step in range(20_000):
        machine.step(cost, 2048, float(step % 16 * 2048))
        if step % 1000 == 999:
            seen.append(cost.seconds(256, 0))
            assert cost.seconds(2048, 8192) == pytest.approx(
                machine.true_seconds(2048, 8192), rel=0.12
            )
    assert max(seen) < 3 * machine.true_seconds(256, 0)
    assert min(seen) > machine.true_seconds(256, 0) / 3
    assert max(seen[5:]) / min(seen[5:]) < 1.3


@given(
    st.lists(
        st.tuples(
            st.integers(1, 10**6),
            st.floats(0, 1e15),
            st.floats(0, 1e18),
            st.floats(0, 1e6),
        ),
        max_size=20,
    ),
    st.floats(0, 1e6),
    st.floats(0, 1e6),
)
def test_whatever_is_observed_it_is_finite_non_negative_and_grows_with_tokens(
    steps: list[tuple[int, float, float, float]], n: float, c: float
) -> None:
    """Whatever the wire lets through."""
    cost = PrefillCost(PrefillPrior())
    for requests, sum_n, sum_nc, seconds in steps:
        cost.observe(requests, sum_n, sum_nc, seconds)
    assert 0.0 <= cost.seconds(n, c) < float("inf")
    assert cost.seconds(n, c) <= cost.seconds(n + 1, c) + 1e-12
    assert cost.seconds(n, c) <= cost.seconds(n, c + 1) + 1e-12


LIES = {
    "a million tokens in no time": (1, 1e4, 5e7, 1e-5),
    "in less than that": (1, 1e4, 5e7, 5e-324),
    "half an hour for a token": (1, 1.0, 1.0, 1800.0),
    "a part of a token": (1, 5e-324, 0.0, 1.0),
    "on an endless context": (1, 1.0, 1e18, 1.0),
    "more than anything": (10**6, 1e15, 1e18, 1e6),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("honest_steps", [0, 50])
@pytest.mark.parametrize("prior", [PRIOR, PrefillPrior(0.0, 0.0, 0.0, is_guess=False)])
def test_a_liar_is_forgotten(lie: str, honest_steps: int, prior: PrefillPrior) -> None:
    """A first step that took no time at all was believed for ever: the prior, which never fades,
    was scaled down by it and became certain. Others divided by zero."""
    cost = PrefillCost(prior)
    machine = Machine()
    machine.run(cost, honest_steps)
    for _ in range(20):
        cost.observe(*LIES[lie])
    machine.run(cost, 200)
    assert max(errors(cost, machine)) < 0.15


def test_a_slower_machine_is_followed() -> None:
    cost = PrefillCost(PRIOR)
    machine = Machine()
    machine.run(cost, 200)
    for _ in range(200):
        n, c = float(machine.rng.integers(64, 8192)), 0.0
        cost.observe(1, n, n * n / 2, 3 * machine.true_seconds(n, c))
    assert cost.seconds(4096, 0) == pytest.approx(3 * machine.true_seconds(4096, 0), rel=0.15)


@pytest.mark.parametrize("step", [(1, 0.0, 0.0, 1.0), (1, 10.0, 50.0, 0.0), (0, -1.0, 0.0, 1.0)])
def test_steps_that_say_nothing_are_ignored(step: tuple[int, float, float, float]) -> None:
    cost = PrefillCost(PRIOR)
    before = cost.seconds(1000, 1000)
    cost.observe(*step)
    assert cost.seconds(1000, 1000) == before
    assert cost.num_observed == 0


def test_nothing_to_prefill_costs_nothing() -> None:
    cost = PrefillCost(PRIOR)
    assert cost.seconds(0, 1000) == 0.0
    assert cost.tokens_per_s() == pytest.approx(1024 / cost.seconds(1024, 0))


# --- priors -----------------------------------------------------------------------------------

FLOP_PER_TOKEN, FLOP_PER_PAIR, FLOP_PER_S = 1.40e10, 5.24e5, 4.95e14


def test_a_models_shape_and_a_machines_speed_make_a_prior() -> None:
    prior = PrefillPrior().for_model(FLOP_PER_TOKEN, FLOP_PER_PAIR, FLOP_PER_S)
    assert not prior.is_guess
    assert prior.per_token_s == pytest.approx(PER_TOKEN_S, rel=0.1)
    assert prior.per_pair_s == pytest.approx(PER_PAIR_S, rel=0.1)
    assert PrefillCost(prior).is_known
    assert max(errors(PrefillCost(prior), Machine())) < 0.15


@pytest.mark.parametrize(
    ("shape", "is_told"), [((FLOP_PER_TOKEN, FLOP_PER_PAIR), True), ((0.0, 0.0), False)]
)
def test_a_shape_alone_says_nothing_until_a_step_says_all(
    shape: tuple[float, float], is_told: bool
) -> None:
    """One short prefill on no context, and long ones on long contexts are known as well."""
    machine = Machine(noise=0.0)
    cost = PrefillCost(PrefillPrior().for_model(*shape, 0.0))
    assert not cost.is_known
    machine.step(cost, 2048, 0)
    assert (max(errors(cost, machine)) < 0.25) == is_told


@pytest.mark.parametrize(
    ("said", "shape", "expected"),
    [
        # what an operator said of seconds stays, and says what a pair costs
        ((0.001, 2e-5, 0.0, False), (64.0, 2.0, 1e9), (0.001, 2e-5, 2e-5 / 32, False)),
        ((0.001, 2e-5, 5e-9, False), (100.0, 1.0, 1e9), (0.001, 2e-5, 5e-9, False)),
        ((0.001, 1e-4, 5e-9, True), (1e5, 1.0, 1e9), (0.001, 1e-4, 5e-9, False)),
        # nothing is known of the model
        ((0.001, 1e-4, 0.0, True), (0.0, 0.0, 1e9), (0.001, 1e-4, 0.0, True)),
        # nor beyond reason
        ((0.001, 1e-4, 0.0, True), (1.0, 2.0**62, 0.0), (0.001, 1e-4, 1e-4, True)),
        ((0.001, 1e-4, 0.0, True), (2.0**62, 0.0, 1.0), (0.001, 1.0, 0.0, False)),
    ],
)
def test_what_is_said_and_what_follows(
    said: tuple[float, float, float, bool],
    shape: tuple[float, float, float],
    expected: tuple[float, float, float, bool],
) -> None:
    assert PrefillPrior(*said).for_model(*shape) == PrefillPrior(*expected)


def test_tokens_decoded_in_the_same_step_are_not_charged_to_the_prefill() -> None:
    cost, machine = PrefillCost(PRIOR), Machine()
    for step in range(200):
        n, decoded = 64.0 + 40 * (step % 50), 8.0 * (step % 100)
        seconds = machine.true_seconds(n, 0) + PER_TOKEN_S * decoded
        cost.observe(1, n, n * n / 2, seconds, decoded)
    assert max(errors(cost, machine)) < 0.12


# --- hops -------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 2.0**63), st.floats(0, 1e6)), max_size=30))
def test_whatever_is_said_of_a_hop_it_stays_a_speed(hops: list[tuple[float, float]]) -> None:
    known = 1 / 2e9
    for num_bytes, seconds in hops:
        known = learn_hop(known, num_bytes, seconds)
    assert 1e-16 < known < 1e-2


@pytest.mark.parametrize("lie", [(5e-324, 1.0), (2.0**63, 5e-324), (1.0, 1e6), (2.0**63, 1e-6)])
def test_a_liar_about_hops_is_forgotten(lie: tuple[float, float]) -> None:
    """A hop of 5e-324 bytes took an endless time, and so did every reload after it."""
    known = 1 / 2e9
    for _ in range(3):
        known = learn_hop(known, *lie)
    for _ in range(40):
        known = learn_hop(known, 64e6, 64e6 / 2e9)
    assert known == pytest.approx(1 / 2e9, rel=0.05)


def test_a_speed_that_a_client_claims_is_within_reason() -> None:
    assert plausible_hop(0.0) == 0.0
    assert plausible_hop(5e9) == 5e9
    assert plausible_hop(5e-324) == 1e4
    assert plausible_hop(1e15) == 1e14


# --- links ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bytes_per_s", [2e8, 2.5e9, 5e10])
def test_a_link_learns_its_bandwidth(bytes_per_s: float) -> None:
    link = LinkCost()
    rng = np.random.default_rng(1)
    for _ in range(40):
        size = float(rng.integers(8 << 20, 256 << 20))
        link.measured(size, (0.0005 + size / bytes_per_s) * rng.uniform(0.9, 1.1))
    assert link.bytes_per_s == pytest.approx(bytes_per_s, rel=0.15)


def test_one_probe_replaces_the_guess() -> None:
    link = LinkCost()
    assert link.bytes_per_s == pytest.approx(LinkCost.GUESS_BYTES_PER_S)
    link.measured(64 << 20, 0.0005 + (64 << 20) / 5e9)
    assert link.bytes_per_s == pytest.approx(5e9, rel=0.05)


def test_what_is_queued_ahead_is_waited_for() -> None:
    link = LinkCost(latency_s=0.001, bytes_per_s=1e9)
    assert link.seconds(1e6) == pytest.approx(0.002)
    assert link.seconds(1e6, queued_bytes=9e6) == pytest.approx(0.011)
    assert link.seconds(0, queued_bytes=9e6) == 0.0


@pytest.mark.parametrize(("size", "seconds"), [(0, 1.0), (1000, 0.0), (-5, 1.0), (5, -1.0)])
def test_impossible_measurements_are_ignored(size: float, seconds: float) -> None:
    link = LinkCost()
    link.measured(size, seconds)
    assert link.num_measured == 0
    assert link.bytes_per_s == pytest.approx(LinkCost.GUESS_BYTES_PER_S)


def test_doubt_grows_with_decisions_and_not_with_questions() -> None:
    """A hit of many pieces asks for each of them, and so counted as many decisions."""
    link = LinkCost()
    for _ in range(10):
        link.measured(1e8, 0.1)
    doubt_s = link.doubt_s(1e8)
    assert link.doubt_s(1e8) == doubt_s
    link.note_decision()
    grown_s = link.doubt_s(1e8)
    assert grown_s > doubt_s
    link.measured(1e8, 0.1)
    assert link.doubt_s(1e8) < grown_s


def test_a_tiny_fast_copy_does_not_look_infinitely_fast() -> None:
    link = LinkCost(latency_s=0.0005)
    link.measured(4096, 1e-5)  # less than the latency itself
    assert link.bytes_per_s < 2 * LinkCost.GUESS_BYTES_PER_S
    assert link.latency_s < 2e-5


# --- loads by the GPU's worker --------------------------------------------------------------------

HBM, DRAM = 0, 1
PCIE = 5e10


def load_of(hbm_mib: float, dram_mib: float) -> dict[int, float]:
    return {HBM: hbm_mib * (1 << 20), DRAM: dram_mib * (1 << 20)}


def taken_s(bytes_from: dict[int, float], latency_s: float = 2e-4) -> float:
    """On a GPU that copies 1 TB/s within its memory, and 20 GB/s of small pages over the link."""
    return latency_s + bytes_from[HBM] / 1e12 + bytes_from[DRAM] / 2e10


def test_before_a_load_was_measured_it_costs_what_the_link_is_known_to() -> None:
    """Asked for before the link was measured: it must not stay with the guess of then."""
    link = LinkCost()
    load = LoadCost((HBM, DRAM), link)
    assert load.seconds({DRAM: 1e9}) == pytest.approx(link.seconds(1e9))
    for _ in range(30):
        link.measured(1e8, 1e8 / PCIE)
    assert load.seconds({DRAM: 1e9}) == pytest.approx(link.seconds(1e9), rel=0.01)
    assert load.bytes_per_s[HBM] == pytest.approx(link.bytes_per_s, rel=0.01)


def test_until_a_load_was_measured_it_is_believed_to_come_over_the_link() -> None:
    load = LoadCost((HBM, DRAM), LinkCost(1e-4, PCIE))
    for bytes_from in (load_of(512, 0), load_of(0, 512), load_of(256, 256)):
        assert load.seconds(bytes_from) == pytest.approx(1e-4 + (512 << 20) / PCIE)
        assert load.doubt_s(bytes_from) >= load.seconds(bytes_from)
    assert load.seconds({}) == load.doubt_s({}) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_loads_from_both_memories_teach_both_speeds(seed: int) -> None:
    """A prompt's front in GPU memory and its end in host memory: no load has one tier only."""
    rng = np.random.default_rng(seed)
    load = LoadCost((HBM, DRAM), LinkCost(1e-4, PCIE))
    for _ in range(40):
        bytes_from = load_of(rng.uniform(16, 1024), rng.uniform(2, 256))
        load.measured(bytes_from, taken_s(bytes_from) * rng.uniform(0.9, 1.1))
    for bytes_from in (load_of(1024, 0), load_of(0, 256), load_of(512, 64)):
        assert load.seconds(bytes_from) == pytest.approx(taken_s(bytes_from), rel=0.3)
    assert load.num_measured == 40


def test_a_load_within_the_gpu_alone_says_so_at_once() -> None:
    load = LoadCost((HBM, DRAM), LinkCost(1e-4, PCIE))
    dram_s = load.seconds(load_of(0, 256))
    load.measured(load_of(1024, 0), taken_s(load_of(1024, 0)))
    assert load.seconds(load_of(1024, 0)) == pytest.approx(taken_s(load_of(1024, 0)), rel=0.3)
    assert load.seconds(load_of(0, 256)) == pytest.approx(dram_s, rel=0.3), "the link is as it was"


@pytest.mark.parametrize(("bytes_from", "seconds"), [({}, 1.0), (load_of(1, 1), 0.0)])
def test_loads_that_cannot_be_are_ignored(bytes_from: dict[int, float], seconds: float) -> None:
    load = LoadCost((HBM, DRAM), LinkCost(1e-4, PCIE))
    load.measured(bytes_from, seconds)
    assert load.num_measured == 0

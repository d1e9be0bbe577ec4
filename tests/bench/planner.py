"""The planner on simulated machines: its estimates and decisions, compared with the best ones.

    4 models × 7 links × 3 queues × 9 prefixes × 4 contexts = 3,024 cells, each with priors that are
    4 times too high and 4 times too low, of the prefill and of the link: 12,096 runs

A run is 100 requests that hit the same prefix. Each outcome has lognormal noise, σ 0.2, and one in
fifty takes ten times as long. The planner sees outcomes only: of the prefills and the reloads that
it chose, and of what is copied from the queue anyway. Regret is what the choice is expected to take
over what the best cut is, as a share of that; the first 50 decisions are for learning.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp
from statistics import fmean, median
from typing import Any, Final

from hicache.bench.report import ProgressStep
from hicache.engine.plan import TierRun
from hicache.engine.planner.cost import LinkCost, PrefillCost, PrefillPrior
from hicache.engine.planner.planner import Hit, Planner, PlannerSettings
from hicache.engine.planner.reload_time import ClientCopy, QueuedLink, Route, reload_over
from tests.bench.synthetic_tree import CLOCK_S, clock

FLOP_PER_S: Final = 4.95e14
MODELS: Final = {  # FLOP per token, FLOP per pair of tokens, KV bytes per token
    "llama-3-8b": (1.40e10, 5.24e5, 128 << 10),
    "qwen3-32b": (6.24e10, 2.10e6, 256 << 10),
    "llama-3-70b": (1.37e11, 2.62e6, 320 << 10),
    "deepseek-v3": (7.4e10, 5.0e6, 69 << 10),
}
LINKS: Final = {  # bytes per second, latency in seconds
    "hbm": (2e12, 2e-5),
    "pcie5": (5e10, 1e-4),
    "nvme5": (1.2e10, 1e-3),
    "nvme4": (6e9, 1e-3),
    "lmdb": (2.5e9, 1e-3),
    "1 GB/s": (1e9, 5e-3),
    "0.2 GB/s": (2e8, 5e-3),
}
QUEUES: Final = {"empty": 0.0, "half": float(1 << 30), "full": float(4 << 30)}
PREFIXES: Final = tuple(512 << n for n in range(9))
CONTEXTS: Final = (0, 4096, 16384, 65536)
WRONG: Final = (0.25, 4.0)
STEP_S: Final = 0.005
BLOCK: Final = 16
SIGMA: Final = 0.2
STRAGGLERS: Final = 0.02
LEARNING: Final = 50
DECISIONS: Final = 100
DROP: Final = 10.0
RECOVERED: Final = 0.15
BATCH_BYTES: Final = 16 << 20
SAMPLE: Final = 1000
NEVER: Final = 1 << 60


@dataclass(frozen=True, slots=True)
class Cell:
    """One machine and one request: a prefix in one tier, after a context that the inference engine
    has."""

    model: str
    link: str
    queue: str
    prefix: int
    context: int


@dataclass(slots=True)
class Machine:
    """The true times of a cell's prefills and reloads, without noise."""

    per_token_s: float
    per_pair_s: float
    block_bytes: int
    latency_s: float
    bytes_per_s: float
    queued_bytes: float

    @classmethod
    def of(cls, cell: Cell) -> Machine:
        per_token, per_pair, kv_bytes = MODELS[cell.model]
        bytes_per_s, latency_s = LINKS[cell.link]
        return cls(
            per_token / FLOP_PER_S,
            per_pair / FLOP_PER_S,
            kv_bytes * BLOCK,
            latency_s,
            bytes_per_s,
            QUEUES[cell.queue],
        )

    def prefill_s(self, n: int, c: int) -> float:
        pairs = n * (c + n / 2)
        return STEP_S + self.per_token_s * n + self.per_pair_s * pairs if n else 0.0

    def copy_s(self, num_bytes: float, queued_bytes: float = 0.0) -> float:
        return self.latency_s + (queued_bytes + num_bytes) / self.bytes_per_s

    def ttft_s(self, cell: Cell, new: int, blocks: int) -> float:
        """TTFT with `blocks` blocks of the prefix reloaded."""
        context = cell.context + blocks * BLOCK
        prefill_s = self.prefill_s(cell.prefix + new - blocks * BLOCK, context)
        if not blocks:
            return prefill_s
        return self.copy_s(blocks * self.block_bytes, self.queued_bytes) + prefill_s

    def best_s(self, cell: Cell, new: int) -> float:
        """Of one run, the best cut is at one of its ends."""
        return min(self.ttft_s(cell, new, 0), self.ttft_s(cell, new, cell.prefix // BLOCK))


class Pupil:
    """The product's planner and estimates, trained in one cell."""

    def __init__(
        self, machine: Machine, wrong: tuple[float, float], settings: PlannerSettings, seed: int
    ) -> None:
        self.machine = machine
        self._rng = random.Random(seed)
        prefill, link = wrong
        prior = PrefillPrior(
            STEP_S * prefill, machine.per_token_s * prefill, machine.per_pair_s * prefill, False
        )
        self.prefill = PrefillCost(prior)
        self.link = LinkCost(machine.latency_s * link, machine.bytes_per_s / link)
        self.planner = Planner(settings, self._rng.random)
        self.decision_s: list[float] = []

    def regret(self, cell: Cell, new: int) -> float:
        """The regret of one decision, which is then carried out and measured."""
        machine = self.machine
        if machine.queued_bytes:  # queued bytes are copied and measured in any case
            self.link.measured(BATCH_BYTES, self._noisy(machine.copy_s(BATCH_BYTES)))
        runs = [TierRun(cell.link, cell.prefix // BLOCK)]
        start = clock()
        routes = {cell.link: Route(0, QueuedLink(self.link, machine.queued_bytes))}
        self.link.note_decision()
        reload = reload_over(runs, routes, machine.block_bytes, ClientCopy(0.0))
        decision = self.planner.decide(
            Hit(
                cell.context + cell.prefix + new,
                BLOCK,
                cell.context,
                reload.runs,
                reload.seconds,
                self.prefill.seconds,
                True,
                reload.doubt_s,
                self.prefill.doubt_s,
                reload.start_s,
            )
        )
        self.decision_s.append(clock() - start - CLOCK_S)
        blocks = decision.reload_blocks
        if blocks:
            size = blocks * machine.block_bytes
            self.link.measured(size, self._noisy(machine.copy_s(size)))
        n, c = cell.prefix + new - blocks * BLOCK, cell.context + blocks * BLOCK
        self.prefill.observe(1, n, n * (c + n / 2), self._noisy(machine.prefill_s(n, c)))
        return machine.ttft_s(cell, new, blocks) / machine.best_s(cell, new) - 1.0

    def _noisy(self, seconds: float) -> float:
        straggles = 10.0 if self._rng.random() < STRAGGLERS else 1.0
        return seconds * exp(self._rng.gauss(0.0, SIGMA)) * straggles


def cells() -> list[Cell]:
    """The whole grid."""
    return [Cell(*fields) for fields in product(MODELS, LINKS, QUEUES, PREFIXES, CONTEXTS)]


def run(
    step: ProgressStep, settings: PlannerSettings, sample: int | None = SAMPLE, seed: int = 1
) -> dict[str, Any]:
    """All figures, from `sample` cells (None: all). Regrets are shares; fixed policies learn
    nothing."""
    chosen = cells() if sample is None else random.Random(seed).sample(cells(), sample)
    regrets: list[tuple[float, Cell, tuple[float, float]]] = []
    tried, ttft_s, decision_s = 0.0, 0.0, list[float]()
    for number, cell in enumerate(chosen):
        if number % 20 == 0:
            step("cells", number, len(chosen))
        for wrong in product(WRONG, WRONG):
            machine = Machine.of(cell)
            pupil = Pupil(machine, wrong, settings, seed + number)
            asked = _asked(seed + number, DECISIONS)
            seen = [pupil.regret(cell, new) for new in asked]
            regrets.append((fmean(seen[LEARNING:]), cell, wrong))
            tried += pupil.planner.tried_s
            decision_s.append(median(pupil.decision_s))
            ttft_s += sum([machine.best_s(cell, new) for new in asked])
    worst = max(regrets, key=lambda item: item[0])
    threshold, threshold_tokens = _best_threshold(chosen)
    recovery = _recoveries(chosen, settings, step, seed)
    return {
        "mean_regret": fmean(item[0] for item in regrets),
        "worst_regret": worst[0],
        "worst_cell": [*_named(worst[1]), *worst[2]],
        "always_reload": fmean(_fixed(cell, 0) for cell in chosen),
        "always_recompute": fmean(_fixed(cell, NEVER) for cell in chosen),
        "threshold": threshold,
        "threshold_tokens": threshold_tokens,
        "recovery_decisions": max(recovery, default=0),
        "explored_share": tried / ttft_s,
        "decision_p50_us": round(median(decision_s) * 1e6, 1),
        "runs": len(regrets),
        "by_link": _by(regrets, lambda cell: cell.link),
        "by_model": _by(regrets, lambda cell: cell.model),
    }


def _asked(seed: int, count: int) -> list[int]:
    """New tokens of each request."""
    rng = random.Random(seed)
    return [rng.randrange(16, 512) for _ in range(count)]


def _fixed(cell: Cell, least: int) -> float:
    """The regret of a policy that reloads prefixes of at least `least` tokens."""
    machine, new = Machine.of(cell), 256
    blocks = cell.prefix // BLOCK if cell.prefix >= least else 0
    return machine.ttft_s(cell, new, blocks) / machine.best_s(cell, new) - 1.0


def _best_threshold(chosen: Sequence[Cell]) -> tuple[float, int]:
    """The best fixed threshold over all cells, as (mean regret, tokens)."""
    tried = (*PREFIXES, 2 * PREFIXES[-1])
    return min((fmean(_fixed(cell, least) for cell in chosen), least) for least in tried)


def _recoveries(
    chosen: Sequence[Cell], settings: PlannerSettings, step: ProgressStep, seed: int
) -> list[int]:
    """Cells where reloading becomes wrong when the link becomes ten times slower: how many
    decisions it takes to notice."""
    found = []
    for number, cell in enumerate(_that_flip(chosen)):
        step("a link that drops", number, 0)
        machine = Machine.of(cell)
        pupil = Pupil(machine, (1.0, 1.0), settings, seed + number)
        asked = _asked(seed + number, DECISIONS)
        for new in asked[:LEARNING]:
            pupil.regret(cell, new)
        machine.bytes_per_s /= DROP
        seen = [pupil.regret(cell, new) for new in asked[LEARNING:]]
        after = range(len(seen) - 10)
        found.append(next((i for i in after if fmean(seen[i : i + 10]) <= RECOVERED), len(seen)))
    return found


def _that_flip(chosen: Sequence[Cell]) -> Iterator[Cell]:
    for cell in chosen:
        machine, blocks = Machine.of(cell), cell.prefix // BLOCK
        before = machine.ttft_s(cell, 256, blocks) < 0.8 * machine.ttft_s(cell, 256, 0)
        machine.bytes_per_s /= DROP
        if before and machine.ttft_s(cell, 256, blocks) > 1.2 * machine.ttft_s(cell, 256, 0):
            yield cell


def _by(
    regrets: Sequence[tuple[float, Cell, tuple[float, float]]], group: Callable[[Cell], str]
) -> dict[str, float]:
    names = dict.fromkeys(group(cell) for _, cell, _ in regrets)
    return {
        name: fmean(regret for regret, cell, _ in regrets if group(cell) == name) for name in names
    }


def _named(cell: Cell) -> list[object]:
    return [cell.model, cell.link, cell.queue, cell.prefix, cell.context]

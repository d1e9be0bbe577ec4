"""The effect of a refit of the eviction model on other calls: round trips of ping during refits and
between them, alternately.

grown     conversations, each turn a match, until the ghost index holds as many runs as asked for
due       so many more turns that a refit is due
during    pings from then until the daemon has its new model: the ghost index is looked through,
          the process starts, fits, and its model is taken
idle      as many pings, with nothing under way
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hicache.bench.daemon_process import Running, measured_daemon
from hicache.bench.report import BenchError, ProgressStep
from hicache.client import Client, LayerGroup, NamespaceSpec, admin_call
from hicache.engine.policies.hazard.history import REFIT_REQUESTS

BLOCK_TOKENS: Final = 16
TURN_TOKENS: Final = 64
TURNS: Final = 4
BATCH: Final = 50
MIN_PINGS: Final = 1000
GIVE_UP_S: Final = 300.0
CONFIG: Final = {
    "block_tokens": BLOCK_TOKENS,
    "tiers": {"dram": {"size": "64MiB", "eviction": "hazard"}},
}
SPEC: Final = NamespaceSpec(
    model_digest="bench",
    weights_digest="bench refit",
    dtype="uint8",
    groups=(LayerGroup(1, 1, 1, "bench"),),
    block_tokens=BLOCK_TOKENS,
    block_bytes=4096,
    name="bench refit",
)


@dataclass(frozen=True, slots=True)
class RefitRow:
    """Round trips of ping in microseconds: `n` of them while the eviction model is refitted,
    `fits` times, and `idle_n` between refits, in turns. `ratio`: p99 over idle p99."""

    op: str
    fits: int
    p50_us: float
    p99_us: float
    longest_us: float
    idle_p50_us: float
    idle_p99_us: float
    idle_longest_us: float
    ratio: float
    n: int
    idle_n: int

    @classmethod
    def of(cls, fits: int, during: list[float], idle: list[float]) -> RefitRow:
        figures = [np.percentile(seconds, (50, 99, 100)) * 1e6 for seconds in (during, idle)]
        (p50, p99, longest), (idle_p50, idle_p99, idle_longest) = np.round(figures, 2).tolist()
        ratio = round(p99 / idle_p99, 3)
        return cls(
            "ping",
            fits,
            p50,
            p99,
            longest,
            idle_p50,
            idle_p99,
            idle_longest,
            ratio,
            len(during),
            len(idle),
        )


def run(num_runs: int, num_fits: int, step: ProgressStep) -> RefitRow:
    """The row, of `num_fits` refits with about `num_runs` runs in the ghost index. Raises
    BenchError."""
    with measured_daemon(None, CONFIG) as (daemon, _), daemon.client(SPEC, "bench refit") as client:
        return _Refit(daemon, client, step).row(num_runs, num_fits)


class _Refit:
    def __init__(self, daemon: Running, client: Client, step: ProgressStep) -> None:
        self._daemon = daemon
        self._client = client
        self._step = step
        self._prompts = _conversations()

    def row(self, num_runs: int, num_fits: int) -> RefitRow:
        for number in range(num_runs):  # each turn adds a run
            self._step("growing the ghost index", number, num_runs)
            self._turn()
        self._ping_while_fitting()
        during: list[float] = []
        idle: list[float] = []
        first = fits = self._history()["fits"]
        while fits - first < num_fits:
            self._step("refits", fits - first, num_fits)
            for _ in range(REFIT_REQUESTS):
                self._turn()
            seconds = self._ping_while_fitting()
            during += seconds
            while len(idle) < len(during):
                self._history()  # as during a refit
                idle += self._pings()
            fits = self._history()["fits"]
        if len(idle) < MIN_PINGS:
            raise BenchError(f"only {len(idle)} pings were measured: ask for more refits")
        return RefitRow.of(fits - first, during, idle)

    def _turn(self) -> None:
        match = self._client.match(next(self._prompts))
        if not match.is_answered:
            raise BenchError(f"a match went wrong: {match.decision.sentence}")

    def _ping_while_fitting(self) -> list[float]:
        """Pings until no refit is due or under way."""
        seconds: list[float] = []
        give_up_s = time.monotonic() + GIVE_UP_S
        while self._history()["is_fitting"]:
            if time.monotonic() > give_up_s:
                raise BenchError("the daemon did not refit its model")
            seconds += self._pings()
        return seconds

    def _pings(self) -> list[float]:
        seconds = []
        clock = time.perf_counter
        for _ in range(BATCH):
            start = clock()
            answer = self._client.ping()
            seconds.append(clock() - start)
            if answer is None:
                raise BenchError(f"a ping went wrong: {self._client.last_error}")
        return seconds

    def _history(self) -> dict[str, Any]:
        stats = admin_call(self._daemon.endpoint, "stats", timeout_s=10.0)
        history: dict[str, Any] = stats["history"]
        return history


def _conversations() -> Iterator[npt.NDArray[np.uint32]]:
    """Endless prompts: the turns of many conversations, interleaved."""
    rng = np.random.default_rng(1)
    while True:
        many = [rng.integers(0, 2**32, TURN_TOKENS * TURNS, np.uint32) for _ in range(25)]
        for turn in range(1, TURNS + 1):
            for tokens in many:
                yield tokens[: turn * TURN_TOKENS]

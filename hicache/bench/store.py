"""Blocks through the arena: put of new ones, fetch into the caller's buffer, beside a bare copy.

A put is all that the client does: place, write, commit. A fetch is match, checked copy, release.
Both rotate over `ROUND` sets of slots, and the floor over as many buffers. Blocks are cleared
between rounds (not timed), so no put finds its blocks present.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.bench.daemon_process import Running, measured_daemon
from hicache.bench.report import BenchError, ProgressStep
from hicache.client import Client, LayerGroup, NamespaceSpec

BLOCKS = 32
VALUE_BYTES = (2 << 20, 256 << 10)
ROUND = 4
WARM_UP_ROUNDS = 2

Prompt = npt.NDArray[np.uint32]
Blocks = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StoreRow:
    """Blocks per second in GB (10⁹ bytes), from the median of `n` calls, beside a bare copy."""

    op: str
    value_bytes: int
    blocks_per_call: int
    gb_s: float
    floor_gb_s: float
    ratio: float
    n: int

    @classmethod
    def of(
        cls, op: str, value_bytes: int, blocks: int, seconds: list[float], floor: list[float]
    ) -> StoreRow:
        total = value_bytes * blocks / 1e9
        speed, floor_speed = total / float(np.median(seconds)), total / float(np.median(floor))
        figures = (round(speed, 3), round(floor_speed, 3), round(speed / floor_speed, 3))
        return cls(op, value_bytes, blocks, *figures, len(seconds))


def run(
    running: Running | None, block_tokens: int, num_calls: int, step: ProgressStep
) -> list[StoreRow]:
    """The rows, at least `num_calls` calls each. Raises BenchError."""
    room_bytes = (ROUND + 1) * BLOCKS * max(VALUE_BYTES)
    config = {
        "block_tokens": block_tokens,
        "tiers": {"dram": {"size": room_bytes * 5 // 4}},
        "planner": {"mode": "always_reload"},
    }
    rows: list[StoreRow] = []
    with measured_daemon(running, config) as (daemon, _):
        for value_bytes in VALUE_BYTES:
            spec = _spec(block_tokens, value_bytes)
            with daemon.client(spec, "bench store", "arena") as client:
                rows += _Store(client, spec, num_calls, step).rows()
                client.clear()
    return rows


def _spec(block_tokens: int, value_bytes: int) -> NamespaceSpec:
    return NamespaceSpec(
        model_digest="bench",
        weights_digest=f"bench {time.time_ns()}",
        dtype="uint8",
        groups=(LayerGroup(1, 1, value_bytes // block_tokens, "bench"),),
        block_tokens=block_tokens,
        block_bytes=value_bytes,
        name="bench store",
    )


class _Store:
    def __init__(
        self, client: Client, spec: NamespaceSpec, num_calls: int, step: ProgressStep
    ) -> None:
        self._client = client
        self._spec = spec
        self._num_rounds = -(-num_calls // ROUND)
        self._step = step
        self._rng = np.random.default_rng(1)
        shape = (BLOCKS, spec.block_bytes)
        self._ours: Blocks = self._rng.integers(0, 256, shape, np.uint8)
        self._out: Blocks = np.ones(shape, np.uint8)
        self._theirs: Blocks = np.ones((ROUND, *shape), np.uint8)

    def rows(self) -> list[StoreRow]:
        """Put and fetch alternate round by round, each followed by its floor."""
        times: dict[str, list[float]] = {"put": [], "put floor": [], "fetch": [], "fetch floor": []}
        size = self._spec.block_bytes
        for number in range(-WARM_UP_ROUNDS, self._num_rounds):
            self._step(f"blocks of {size >> 10:,} KiB", max(0, number), self._num_rounds)
            prompts = [self._prompt() for _ in range(ROUND)]
            now = {
                "put": [self._put(prompt) for prompt in prompts],
                "put floor": [_copy(self._ours, theirs) for theirs in self._theirs],
                "fetch": [self._fetch(prompt) for prompt in prompts],
                "fetch floor": [_copy(theirs, self._out) for theirs in self._theirs],
            }
            self._client.clear()
            if number >= 0:
                for name, seconds in now.items():
                    times[name] += seconds
        return [
            StoreRow.of(op, size, BLOCKS, times[op], times[f"{op} floor"])
            for op in ("put", "fetch")
        ]

    def _prompt(self) -> Prompt:
        """One token more than the blocks, so that one is left to prefill."""
        return self._rng.integers(0, 2**32, BLOCKS * self._spec.block_tokens + 1, np.uint32)

    def _put(self, prompt: Prompt) -> float:
        start = time.perf_counter()
        result = self._client.put(prompt, self._ours)
        seconds = time.perf_counter() - start
        self._check(result.stored == BLOCKS, "put", result)
        return seconds

    def _fetch(self, prompt: Prompt) -> float:
        start = time.perf_counter()
        match = self._client.match(prompt)
        fetched = self._client.fetch(match, self._out)
        self._client.release(match)
        seconds = time.perf_counter() - start
        self._check(fetched.blocks == BLOCKS, "fetch", match)
        self._check(bool((self._out[:, -1] == self._ours[:, -1]).all()), "fetch", "other bytes")
        self._out[:, -1] = 0
        return seconds

    def _check(self, is_right: bool, op: str, found: Any) -> None:
        if not is_right:
            raise BenchError(f"a {op} went wrong: {found}; {self._client.last_error}")


def _copy(source: Blocks, target: Blocks) -> float:
    start = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - start

"""A real model behind daemons with throttled disks, under three policies, interleaved.

    one daemon per speed of the disk; on each disk one long prompt, once for each of two policies
    warm-up                  prefills of every size, reported to every planner; loads from each disk
    per prefix and round     recompute · recompute again · the planner on each disk, one by one ·
                             always reload, on all disks at once

The speeds are multiples of the model's KV-generation bandwidth, measured here with 1,024 tokens:
from about there on a disk should be worth it. A request is the front of the long prompt and a new
end; before it, the prompt is pushed out of memory. What is recomputed depends on no disk, so it is
measured twice in each round for all of them, which also says how much two runs of the same differ.
Reloads wait for their own daemons' disks, so they need not wait for each other.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import yaml

from hicache.bench.report import BenchError, ProgressStep
from hicache.client import Client
from hicache.connectors.transformers import CachedModel, Generation
from hicache.demo.demo_daemon import PrivateDaemon
from hicache.demo.demo_model import DemoModel
from hicache.protocol.keys import NamespaceSpec

BLOCK: Final = 16
NEW: Final = 32
"""Tokens of each prompt that are in no cache."""
ROUND_TOKENS: Final = 1024
WARM_UP: Final = 3
MODES: Final = {"planner": "measured", "reload": "always_reload"}
TIMEOUT_S: Final = 900.0
Blocks = npt.NDArray[np.uint8]
Ask = Callable[[int], list[int]]
"""The front of the prompt, of this length, and a new end."""


@dataclass(frozen=True, slots=True)
class ReloadRow:
    """A model's time to first token on a throttled disk: medians in milliseconds. `of_best`: the
    planner's over the better of the two fixed policies'; `spread`: how far two medians of the same
    policy are apart, as a share; `reloads`: of the planner's `n` requests."""

    speed: str
    prefix: int
    planner_ms: float
    reload_ms: float
    recompute_ms: float
    of_best: float
    spread: float
    reloads: int
    n: int

    @property
    def is_good(self) -> bool:
        """Whether the planner was within a tenth of the best, or within the spread."""
        return self.of_best <= 1.1 or self.of_best - 1.0 <= self.spread


class ModelServer:
    """A daemon, the model in front of it under each policy, and the prompt on its disk."""

    def __init__(self, demo: DemoModel, folder: Path, longest: int, undo: ExitStack) -> None:
        file = folder / "bench.yaml"
        file.write_text(yaml.safe_dump(_config(demo, longest)))
        self._daemon = undo.enter_context(PrivateDaemon(file, needs_hbm=False, explores=True))
        self._daemon.start()
        self.models = {policy: self.model(demo, policy) for policy in MODES}
        for made in self.models.values():
            undo.callback(made.close)
        spec = self.models["planner"].spec
        self.block_bytes = spec.block_bytes
        self._filler = _connect(self._daemon.endpoint, replace(spec, cache_salt="filler"))
        undo.callback(self._filler.close)
        self._rng = np.random.default_rng(1)

    def model(self, demo: DemoModel, salt: str) -> CachedModel:
        """The model with this daemon, in its own namespace."""
        connect = partial(_connect, self._daemon.endpoint)
        return CachedModel(demo.model, connect, block_tokens=BLOCK, cache_salt=salt)

    def client(self, policy: str) -> Client:
        return _client_of(self.models[policy])

    def store(self, prompt: Sequence[int], blocks: Blocks) -> None:
        """Store until it is on disk. Raises BenchError if it does not get there."""
        for policy in MODES:
            if not self.client(policy).put(prompt, blocks, durable=True).durable:
                raise BenchError("the prompt did not reach the disk")

    def throttle(self, bytes_per_s: float) -> None:
        speed = {} if bytes_per_s == inf else {"disk_to_dram": max(int(bytes_per_s), 1)}
        self._daemon.change(debug={"throttle_bytes_per_s": speed})

    def serve(
        self, policy: str, prompt: Sequence[int], mode: str = "", *, pushed_out: bool = False
    ) -> Generation:
        """One request, whose front is only on disk, in the policy's mode or in `mode`."""
        if not pushed_out:
            self.push_out()
        self.serve_as(mode or MODES[policy])
        return self.models[policy].generate(prompt, 1, keep=False)

    def serve_as(self, mode: str) -> None:
        """Set the planner's mode."""
        self._daemon.change(planner={"mode": mode})

    def push_out(self) -> None:
        """Fill memory with blocks of another namespace, and clear those, until it is empty."""
        give_up_s = time.monotonic() + TIMEOUT_S
        while self._dram()["blocks"]:
            if time.monotonic() > give_up_s:
                raise BenchError("the prompt stays in memory")
            num_blocks = int(self._dram()["capacity_bytes"] // self.block_bytes)
            tokens = self._rng.integers(0, 1 << 31, num_blocks * BLOCK, dtype=np.uint32)
            self._filler.put(tokens, lambda _, view: view.fill(0))
            self._filler.clear()
            while any(tier["queue_depth"] for tier in self._daemon.stats()["tiers"]):
                time.sleep(0.02)

    def _dram(self) -> dict[str, Any]:
        tiers: list[dict[str, Any]] = self._daemon.stats()["tiers"]
        return next(tier for tier in tiers if tier["name"] == "dram")


def run(
    demo: DemoModel,
    speeds: Sequence[float],
    prefixes: Sequence[int],
    rounds: int,
    step: ProgressStep,
    tell: Callable[[ReloadRow], None],
) -> tuple[list[ReloadRow], float]:
    """All cells, and the KV-generation bandwidth in bytes per second. `speeds` are multiples of
    that, infinity for a disk that is not throttled. `tell` is called with each finished cell."""
    rng = np.random.default_rng(1)
    words = int(demo.model.config.vocab_size)
    longest = max(max(prefixes), ROUND_TOKENS)
    prompt: list[int] = rng.integers(10, words, longest).tolist()

    def ask(prefix: int) -> list[int]:
        end: list[int] = rng.integers(10, words, NEW).tolist()
        return prompt[:prefix] + end

    alone = CachedModel(demo.model, None, block_tokens=BLOCK)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
        servers = [ModelServer(demo, Path(folder), longest, undo) for _ in speeds]
        step("the prompt", 0, 1)
        blocks = _kv_of(demo, servers[0], prompt)
        for number, server in enumerate(servers):
            step("storing it", number, len(servers))
            server.store(prompt, blocks)
        generated = _warm_up(alone, servers, prefixes, ask, step)
        for speed, server in zip(speeds, servers, strict=True):
            server.throttle(speed * generated)
        for number, server in enumerate(servers):
            step("loads to warm up", number, len(servers))
            for _ in range(WARM_UP):
                for prefix in sorted(prefixes)[:2]:
                    server.serve("planner", ask(prefix), "always_reload")
        rows = []
        at_speed = dict(zip(speeds, servers, strict=True))
        for prefix in prefixes:
            for row in _cells(alone, at_speed, prefix, rounds, ask, step):
                rows.append(row)
                tell(row)
    return rows, generated


def _kv_of(demo: DemoModel, server: ModelServer, prompt: Sequence[int]) -> Blocks:
    """The prompt's blocks, as the model makes them."""
    asked = [*prompt, 0]  # a token is always left to prefill
    server.serve_as("always_reload")
    source = server.model(demo, "source")
    try:
        source.generate(asked, 1)
        client = _client_of(source)
        match = client.match(asked)
        out = np.empty((len(prompt) // BLOCK, server.block_bytes), np.uint8)
        came = client.fetch(match, out).blocks
        client.release(match)
    finally:
        source.close()
    if came < len(out):
        raise BenchError("the prompt could not be read back")
    return out


def _warm_up(
    alone: CachedModel,
    servers: Sequence[ModelServer],
    prefixes: Sequence[int],
    ask: Ask,
    step: ProgressStep,
) -> float:
    """Prefills of every size, reported to every planner as an inference engine reports its steps.
    Returns the KV-generation bandwidth."""
    sizes = sorted({*prefixes, ROUND_TOKENS})
    alone.generate(ask(sizes[0]), 1)  # the first one in a process is slow
    seconds: list[float] = []
    for turn in range(WARM_UP):
        for size in sizes if not turn else sizes[: sizes.index(ROUND_TOKENS) + 1]:
            step(f"prefills to warm up: {size} tokens", turn, WARM_UP)
            made = alone.generate(ask(size), 1)
            n = made.prompt_tokens
            for server in servers:
                server.client("planner").observe(sum_n=n, sum_nc=n * n / 2, seconds=made.prefill_s)
            if size == ROUND_TOKENS:
                seconds.append(made.prefill_s)
    return ROUND_TOKENS // BLOCK * servers[0].block_bytes / median(seconds)


def _cells(
    alone: CachedModel,
    servers: dict[float, ModelServer],
    prefix: int,
    rounds: int,
    ask: Ask,
    step: ProgressStep,
) -> list[ReloadRow]:
    """One prefix, at every speed."""
    recomputed: list[list[float]] = [[], []]
    planned: dict[float, list[Generation]] = {speed: [] for speed in servers}
    reloaded: dict[float, list[Generation]] = {speed: [] for speed in servers}

    def recompute(seen: list[float]) -> None:
        seen.append(alone.generate(ask(prefix), 1).ttft_s)

    def plan(speed: float) -> None:
        planned[speed].append(servers[speed].serve("planner", ask(prefix)))

    def reload_all() -> None:
        with ThreadPoolExecutor(len(servers)) as pool:
            served = [
                pool.submit(server.serve, "reload", ask(prefix), pushed_out=True)
                for server in servers.values()
            ]
        for speed, one in zip(servers, served, strict=True):
            reloaded[speed].append(one.result())

    turns: list[Callable[[], None]] = [partial(recompute, seen) for seen in recomputed]
    turns += [partial(plan, speed) for speed in servers]
    for number in range(rounds):
        first = number * len(turns) // rounds
        for done, turn in enumerate((*turns[first:], *turns[:first], reload_all)):
            step(f"{prefix} tokens", number * (len(turns) + 1) + done, rounds * (len(turns) + 1))
            if turn is reload_all:
                for server in servers.values():
                    server.push_out()
            turn()
    one, other = (median(seen) for seen in recomputed)
    recompute_s, spread = median(chain(*recomputed)), abs(one - other) / min(one, other)
    return [
        _row(speed, prefix, planned[speed], reloaded[speed], recompute_s, spread)
        for speed in servers
    ]


def _row(
    speed: float,
    prefix: int,
    planned: Sequence[Generation],
    reloaded: Sequence[Generation],
    recompute_s: float,
    spread: float,
) -> ReloadRow:
    planner_s, reload_s = (median([made.ttft_s for made in some]) for some in (planned, reloaded))
    return ReloadRow(
        "free" if speed == inf else f"{speed:g}",
        prefix,
        round(planner_s * 1e3, 1),
        round(reload_s * 1e3, 1),
        round(recompute_s * 1e3, 1),
        round(planner_s / min(reload_s, recompute_s), 3),
        round(spread, 3),
        sum(bool(made.hit_tokens) for made in planned),
        len(planned),
    )


def _config(demo: DemoModel, longest: int) -> dict[str, Any]:
    """Memory for a little more than one prompt, a disk for several. Watermarks at their maximum:
    pushing the prompt out of memory must not leave moves to the disk."""
    config = demo.model.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    width = config.hidden_size // config.num_attention_heads
    itemsize = next(demo.model.parameters()).element_size()
    per_token = 2 * config.num_hidden_layers * heads * width * itemsize
    prompt_bytes = per_token * (longest + 4 * BLOCK + NEW)
    return {
        "tiers": {
            "dram": {
                "size": int(1.3 * prompt_bytes) + (8 << 20),
                "high_watermark": 1.0,
                "low_watermark": 0.99,
            },
            "disk": {"size": 8 * prompt_bytes + (256 << 20), "path": "disk", "min_free": 0},
        },
        "block_tokens": BLOCK,
        "deadlines": {"fetch": f"{TIMEOUT_S:.0f}s", "put": f"{TIMEOUT_S:.0f}s"},
    }


def _client_of(model: CachedModel) -> Client:
    assert isinstance(model.client, Client)
    return model.client


def _connect(endpoint: str, spec: NamespaceSpec) -> Client:
    return Client(spec, endpoint, fetch_timeout_s=TIMEOUT_S, put_timeout_s=TIMEOUT_S)

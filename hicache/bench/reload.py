"""For real: a model behind a daemon whose disk is throttled, under three policies, interleaved.

    per speed of the disk    warm-up of the planner: each way, some times
    per prefix and round     planner · always reload · always recompute · always recompute again

The speeds are multiples of the model's KV-generation bandwidth, measured here: from there on a disk
should be worth it. Each policy has a namespace of its own, so none learns from another's prefills.
Before every request the prompt is pushed out of memory. The two runs that recompute say how much
two runs of the same differ.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import yaml

from hicache.bench.report import ReloadRow, Step
from hicache.client import Client
from hicache.connectors.transformers import CachedModel
from hicache.demo.daemon import PrivateDaemon
from hicache.demo.model import DemoModel
from hicache.keys import NamespaceSpec

BLOCK: Final = 16
NEW: Final = 32
"""Tokens of each prompt that no cache holds."""
WARM_UP: Final = 3
POLICIES: Final = ("planner", "reload", "recompute", "recompute again")
MODES: Final = {
    "planner": "measured",
    "reload": "always_reload",
    "recompute": "always_recompute",
    "recompute again": "always_recompute",
}
TIMEOUT_S: Final = 300.0


class Bench:
    """The daemon, the model under each policy, and the prompts on disk."""

    def __init__(self, demo: DemoModel, house: PrivateDaemon, prefixes: Sequence[int]) -> None:
        self.house = house
        self.prefixes = prefixes
        self._rng = np.random.default_rng(1)
        vocabulary = int(demo.model.config.vocab_size)
        self.prompts = {
            prefix: self._rng.integers(10, vocabulary, prefix).tolist() for prefix in prefixes
        }
        self._vocabulary = vocabulary
        self.models = {
            policy: CachedModel(
                demo.model,
                partial(_connect, house.endpoint),
                block_tokens=BLOCK,
                cache_salt=policy,
            )
            for policy in POLICIES
        }
        spec = self.models["planner"].spec
        self._filler = Client(
            replace(spec, cache_salt="filler"), house.endpoint, put_timeout_s=TIMEOUT_S
        )
        self._block_bytes = spec.block_bytes
        self._block = np.zeros(spec.block_bytes, np.uint8)

    def store(self, step: Step) -> float:
        """All prompts, under each policy. Returns the model's KV-generation bandwidth."""
        seconds, num_bytes = 0.0, 0
        for number, (policy, model) in enumerate(self.models.items()):
            for prefix, prompt in self.prompts.items():
                step(f"storing {prefix} tokens", number, len(self.models))
                self._set(MODES[policy], inf)
                made = model.generate(prompt, 1)
                if prefix == max(self.prefixes):
                    seconds += made.prefill_s
                    num_bytes += prefix // BLOCK * self._block_bytes
        return num_bytes / seconds

    def ttft_ms(
        self, policy: str, prefix: int, bytes_per_s: float, mode: str = ""
    ) -> tuple[float, int]:
        """One request with a new end, in the policy's mode unless another is said; and how many
        tokens of it were reloaded."""
        self._set("measured", inf)
        self._push_out(policy, prefix)
        self._set(mode or MODES[policy], bytes_per_s)
        end = self._rng.integers(10, self._vocabulary, NEW).tolist()
        made = self.models[policy].generate(self.prompts[prefix] + end, 1)
        return made.ttft_s * 1e3, sum(made.hit_tokens.values())

    def close(self) -> None:
        for model in self.models.values():
            model.close()
        self._filler.close()

    def _set(self, mode: str, bytes_per_s: float) -> None:
        speed = {} if bytes_per_s == inf else {"disk_to_dram": max(int(bytes_per_s), 1)}
        self.house.change(planner={"mode": mode}, debug={"throttle_bytes_per_s": speed})

    def _push_out(self, policy: str, prefix: int) -> None:
        """Fill memory with blocks of another namespace, and forget those again, until the prompt is
        on disk only."""
        client = self.models[policy].client
        assert isinstance(client, Client)
        (dram,) = (t for t in self.house.stats()["tiers"] if t["name"] == "dram")
        blocks = int(dram["capacity_bytes"] // self._block_bytes)
        give_up_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < give_up_s:
            self._settle()
            match = client.match(self.prompts[prefix])
            client.release(match)
            if not any(tier == "dram" for tier, _ in match.runs):
                return
            tokens = self._rng.integers(0, 1 << 31, blocks * BLOCK, dtype=np.uint32)
            self._filler.put(tokens, self._fill)
            self._filler.clear()

    def _fill(self, _: int, view: Any) -> None:
        view[:] = self._block

    def _settle(self) -> None:
        give_up_s = time.monotonic() + TIMEOUT_S
        while any(t["queue_depth"] for t in self.house.stats()["tiers"]):
            if time.monotonic() > give_up_s:
                break
            time.sleep(0.02)


def run(
    demo: DemoModel, speeds: Sequence[float], prefixes: Sequence[int], rounds: int, step: Step
) -> tuple[list[ReloadRow], float]:
    """All cells, and the KV-generation bandwidth in bytes per second. `speeds` are multiples of
    that, infinity for a disk that is not throttled."""
    rows: list[ReloadRow] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.yaml"
        file.write_text(yaml.safe_dump(_config(demo, max(prefixes))))
        with PrivateDaemon(file, needs_hbm=False, explores=True) as house:
            house.start()
            bench = Bench(demo, house, prefixes)
            try:
                generated = bench.store(step)
                for number, speed in enumerate(speeds):
                    step(f"{_named(speed)}: warming up", number, len(speeds))
                    for mode in ("always_reload", "always_recompute") * WARM_UP:
                        for prefix in prefixes:
                            bench.ttft_ms("planner", prefix, speed * generated, mode)
                    for prefix in prefixes:
                        step(f"{_named(speed)}: {prefix} tokens", number, len(speeds))
                        rows.append(_cell(bench, speed, speed * generated, prefix, rounds))
            finally:
                bench.close()
            house.stop()
    return rows, generated


def _cell(bench: Bench, speed: float, bytes_per_s: float, prefix: int, rounds: int) -> ReloadRow:
    seen: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    reloads = 0
    for number in range(rounds):
        turn = number % len(POLICIES)
        for policy in (*POLICIES[turn:], *POLICIES[:turn]):
            ttft_ms, reloaded = bench.ttft_ms(policy, prefix, bytes_per_s)
            seen[policy].append(ttft_ms)
            reloads += policy == "planner" and reloaded > 0
    planner, reload, one, other = (median(seen[policy]) for policy in POLICIES)
    recompute = median([*seen["recompute"], *seen["recompute again"]])
    return ReloadRow(
        _named(speed),
        prefix,
        round(planner, 1),
        round(reload, 1),
        round(recompute, 1),
        round(planner / min(reload, recompute), 3),
        round(abs(one - other) / min(one, other), 3),
        reloads,
        rounds,
    )


def _named(speed: float) -> str:
    return "free" if speed == inf else f"{speed:g}"


def _config(demo: DemoModel, longest: int) -> dict[str, Any]:
    """Memory for one prompt and a little, a disk for all."""
    config = demo.model.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    width = config.hidden_size // config.num_attention_heads
    itemsize = next(demo.model.parameters()).element_size()
    per_token = 2 * config.num_hidden_layers * heads * width * itemsize
    prompt_bytes = per_token * (longest + 4 * BLOCK + NEW)
    return {
        "tiers": {
            "dram": {"size": int(1.3 * prompt_bytes) + (8 << 20)},
            "disk": {"size": 24 * prompt_bytes + (256 << 20), "path": "disk", "min_free": 0},
        },
        "block_tokens": BLOCK,
        "deadlines": {"fetch": f"{TIMEOUT_S:.0f}s", "put": f"{TIMEOUT_S:.0f}s"},
    }


def _connect(endpoint: str, spec: NamespaceSpec) -> Client:
    return Client(spec, endpoint, fetch_timeout_s=TIMEOUT_S, put_timeout_s=TIMEOUT_S)

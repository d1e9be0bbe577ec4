"""Store in one vLLM process, load in a fresh one: everything but the last token's block comes from
the daemon, and what the model says is the same."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.daemon_process import DaemonProcess
from tests.vllm.driver import Driver, Events

pytestmark = pytest.mark.timeout(1800)

BLOCK_TOKENS = 128
LENGTHS = (200 + 3800 * np.linspace(0, 1, 20) ** 4).astype(int).tolist()
"""From 200 to 4,000 tokens, few of them long: in fp32 a CPU computes some 200 tokens a second."""

CROWDED = 5 * BLOCK_TOKENS - 2
"""Eight such prompts fill forty blocks, and all of them soon need one more."""


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    chance = np.random.default_rng(seed)
    return [chance.integers(100, 40_000, length).tolist() for length in lengths]


def whole_blocks(prompt: list[int]) -> int:
    """Tokens of all full blocks that leave one to compute."""
    return (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_store_in_one_process_load_in_a_fresh_one(
    daemon: DaemonProcess, checkpoint: Path, tmp_path: Path
) -> None:
    """Twenty prompts in fp32. The first vLLM has room for all. The second has forty blocks, for
    requests of up to 32, and computes 512 tokens a step: prompts are computed in chunks, pages
    change hands all the time, and requests that grow are preempted and resumed."""
    asked = prompts(LENGTHS)
    crowd = [prompt[:CROWDED] for prompt in asked if len(prompt) > CROWDED]
    with Driver(checkpoint, daemon.endpoint, tmp_path / "store.log") as first:
        cold = first.generate(asked, max_tokens=40)
        apart = first.generate(crowd, max_tokens=40)
        several_requests(first, asked[10])
    assert cold.cached == [0] * len(asked)
    daemon.settle()
    small: dict[str, Any] = {
        "num_gpu_blocks_override": 41,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 8,
    }
    with Driver(checkpoint, daemon.endpoint, tmp_path / "load.log", **small) as second:
        warm = second.generate(asked, max_tokens=40)
        crowded = second.generate(crowd, max_tokens=40)
        assert second.metric("vllm:num_preemptions") > 0
    assert crowded.outputs == apart.outputs
    assert warm.cached == [whole_blocks(prompt) for prompt in asked]
    assert warm.outputs == cold.outputs
    assert daemon.stats()["leases"] == 0
    print(f"cold {cold.seconds:.1f} s, from hicache {warm.seconds:.1f} s")


def several_requests(vllm: Driver, prompt: list[int]) -> None:
    """Requests that share a prompt, and those that must not share it."""
    whole = whole_blocks(prompt)
    beams = vllm.search([prompt], beams=3, max_tokens=4)
    vllm.reset()
    assert vllm.search([prompt], beams=3, max_tokens=4) == beams
    vllm.reset()
    several = vllm.generate([prompt], n=3, max_tokens=5)
    assert several.cached == [whole]
    assert len({tuple(said) for said in several.outputs}) > 1
    salted = vllm.generate([prompt], salt="somebody's", max_tokens=1)
    vllm.reset()
    again = vllm.generate([prompt], salt="somebody's", max_tokens=1)
    other = vllm.generate([prompt], salt="somebody else's", max_tokens=1)
    assert (salted.cached, again.cached, other.cached) == ([0], [whole], [0])
    assert salted.outputs == again.outputs == other.outputs


def test_bf16_says_what_a_local_hit_says(
    daemon: DaemonProcess, checkpoint: Path, tmp_path: Path
) -> None:
    """In bf16 vLLM's own hits differ from a cold run now and then, so they are what is compared;
    and what else is computed in the same step changes the last bits, so each prompt is asked alone.
    In processes of their own: the API, the scheduler, the worker. And a router hears of it all."""
    asked = prompts([300, 700, 1300], seed=1)
    options: dict[str, Any] = {"dtype": "bfloat16", "in_process": False}
    events = Events()
    options["kv_events_config"] = events.config
    with (
        closing(events),
        Driver(checkpoint, daemon.endpoint, tmp_path / "vllm.log", **options) as vllm,
    ):
        vllm.generate(asked)
        local = [vllm.generate([prompt]) for prompt in asked]
        daemon.settle()
        vllm.reset()
        external = [vllm.generate([prompt]) for prompt in asked]
        told = events.take()
    for prompt, ours, theirs in zip(asked, external, local, strict=True):
        assert ours.cached == theirs.cached == [whole_blocks(prompt)]
        assert ours.outputs == theirs.outputs
    in_gpu, in_cpu = (hashes(told, medium) for medium in ("GPU", "CPU"))
    assert len(in_cpu) == sum(len(prompt) // BLOCK_TOKENS for prompt in asked)
    assert in_cpu == in_gpu, "hashes that vLLM does not know, or that nobody was told of"


def hashes(events: list[dict[str, Any]], medium: str) -> set[int | bytes]:
    """Of the blocks that were stored there."""
    stored = [e for e in events if e["type"] == "BlockStored" and e["medium"] == medium]
    assert all(event["block_size"] == BLOCK_TOKENS for event in stored)
    return {name for event in stored for name in event["block_hashes"]}

"""Store in one vLLM process, load in a fresh one: everything but the last token's block comes from
the daemon, and what the model says is the same."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.household import Household, wait_for
from tests.vllm.driver import Driver, Events

pytestmark = pytest.mark.timeout(1800)

BLOCK_TOKENS = 128
LENGTHS = np.geomspace(200, 4000, 20).astype(int).tolist()


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    chance = np.random.default_rng(seed)
    return [chance.integers(100, 40_000, length).tolist() for length in lengths]


def whole_blocks(prompt: list[int]) -> int:
    """Tokens of all full blocks that leave one to compute."""
    return (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_twenty_prompts_in_fp32(house: Household, checkpoint: Path, tmp_path: Path) -> None:
    asked = prompts(LENGTHS)
    with Driver(checkpoint, house.endpoint, tmp_path / "store.log") as first:
        cold = first.generate(asked)
    assert cold.cached == [0] * len(asked)
    house.settle()
    with Driver(checkpoint, house.endpoint, tmp_path / "load.log") as second:
        warm = second.generate(asked)
    assert warm.cached == [whole_blocks(prompt) for prompt in asked]
    assert warm.outputs == cold.outputs
    assert house.stats()["leases"] == 0
    print(f"cold {cold.seconds:.1f} s, from hicache {warm.seconds:.1f} s")


def test_bf16_says_what_a_local_hit_says(
    house: Household, checkpoint: Path, tmp_path: Path
) -> None:
    """In bf16 vLLM's own hits differ from a cold run now and then, so they are what is compared.
    In processes of its own: scheduler and worker on one side, the API on the other."""
    asked = prompts([300, 700, 1500, 2600], seed=1)
    options: dict[str, Any] = {"dtype": "bfloat16", "in_process": False}
    with Driver(checkpoint, house.endpoint, tmp_path / "store.log", **options) as first:
        first.generate(asked)
        local = first.generate(asked)
    house.settle()
    with Driver(checkpoint, house.endpoint, tmp_path / "load.log", **options) as second:
        external = second.generate(asked)
    assert local.cached == external.cached == [whole_blocks(prompt) for prompt in asked]
    assert external.outputs == local.outputs


def test_a_small_cache_that_preempts(house: Household, checkpoint: Path, tmp_path: Path) -> None:
    """Forty blocks for requests of twelve each that grow: pages change hands all the time. Also
    several answers to one prompt, salts, and answers of one token."""
    asked = prompts([1500] * 4, seed=2)
    events = Events()
    with (
        closing(events),
        Driver(
            checkpoint, house.endpoint, tmp_path / "plain.log", kv_events_config=events.config
        ) as plain,
    ):
        cold = plain.generate(asked, max_tokens=60)
        plain.reset()
        stored = [event for event in events.take() if event["type"] == "BlockStored"]
        in_gpu, in_cpu = (
            {bytes(name) for e in stored if e["medium"] == medium for name in e["block_hashes"]}
            for medium in ("GPU", "CPU")
        )
        assert in_cpu
        assert in_cpu <= in_gpu, "a hash that vLLM does not know"
        several = plain.generate(asked[:1], n=3, max_tokens=5)
        assert several.cached == [whole_blocks(asked[0])]
        salted = plain.generate(asked[1:2], salt="somebody's", max_tokens=1)
        plain.reset()
        again = plain.generate(asked[1:2], salt="somebody's", max_tokens=1)
        other = plain.generate(asked[1:2], salt="somebody else's", max_tokens=1)
    assert (salted.cached, again.cached, other.cached) == ([0], [whole_blocks(asked[1])], [0])
    assert salted.outputs == again.outputs == [cold.outputs[1][:1]]
    wait_for(lambda: house.stats()["leases"] == 0, "no lease")
    with Driver(
        checkpoint, house.endpoint, tmp_path / "small.log", num_gpu_blocks_override=40
    ) as small:
        first = small.generate(asked * 2, max_tokens=60)
        second = small.generate(asked, max_tokens=60)
    assert first.outputs == cold.outputs * 2
    assert second.outputs == cold.outputs

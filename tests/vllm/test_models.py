"""Other kinds of models, adapters and prompts: held apart and right, or left alone with a word."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.daemon_process import DaemonProcess
from tests.vllm.driver import Driver
from tests.vllm.small_models import HIDDEN, write_adapter, write_model
from tests.vllm.test_reload import prompts

pytestmark = pytest.mark.timeout(900)

BLOCK_TOKENS = 32
WINDOW = 64


def twins(length: int) -> list[list[int]]:
    """Two prompts of which only the first block differs: what is said after them must differ, or
    these models would tell nothing of the KV they use."""
    one, other = prompts([length] * 2, seed=length)
    return [one, other[:BLOCK_TOKENS] + one[BLOCK_TOKENS:]]


ASKED = [*twins(200), *twins(700)]
ALL = [(len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in ASKED]


def start(model: Path, checkpoint: Path, daemon: DaemonProcess, log: Path, **more: Any) -> Driver:
    small = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "block_size": BLOCK_TOKENS}
    return Driver(model, daemon.endpoint, log, tokenizer=str(checkpoint), **{**small, **more})


def test_adapters_and_embedded_prompts_on_two_ranks(
    daemon: DaemonProcess, checkpoint: Path, tmp_path: Path
) -> None:
    """An adapter is known by its files, whatever its name, number and path."""
    model = write_model(tmp_path / "model", "llama")
    one, other = (write_adapter(tmp_path / f"adapter-{seed}", seed) for seed in (1, 2))
    moved = Path(shutil.copytree(one, tmp_path / "elsewhere"))
    options: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "in_process": False,
        "enable_lora": True,
        "max_loras": 1,
        "enable_prompt_embeds": True,
    }
    vectors = [200, HIDDEN]
    with start(model, checkpoint, daemon, tmp_path / "vllm.log", **options) as vllm:
        plain = vllm.generate(ASKED)
        adapted = vllm.generate(ASKED, lora=["one", 1, str(one)])
        embedded = vllm.generate([], embedded=vectors)
        vllm.reset()
        anew = vllm.generate([], embedded=vectors)
        assert (anew.cached, anew.outputs) == ([0], embedded.outputs)
        again = vllm.generate(ASKED, lora=["the same", 2, str(moved)])
        assert (again.cached, again.outputs) == (ALL, adapted.outputs)
        again = vllm.generate(ASKED)
        assert (again.cached, again.outputs) == (ALL, plain.outputs)
        assert sum(vllm.generate(ASKED, lora=["other", 3, str(other)]).cached) == 0
    assert len({tuple(said) for said in plain.outputs + adapted.outputs}) == 2 * len(ASKED)
    stats = daemon.stats()
    assert (len(stats["namespaces"]), stats["leases"]) == (3 * 2, 0)


def test_layers_with_windows_and_what_ends_the_weights(
    daemon: DaemonProcess, checkpoint: Path, tmp_path: Path
) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    model = write_model(tmp_path / "model", "gemma3_text", layer_types=kinds, sliding_window=WINDOW)
    with start(model, checkpoint, daemon, tmp_path / "vllm.log") as vllm:
        cold = vllm.generate(ASKED)

        def again() -> list[int]:
            said = vllm.generate(ASKED)
            assert said.outputs == cold.outputs
            return said.cached

        vllm.reset()
        assert again() == ALL
        vllm.nap()  # the weights may be others when it wakes up
        assert sum(again()) == 0
        vllm.reset()
        assert again() == ALL
        vllm.reset(connector=True)
        assert sum(again()) == 0
    assert len({tuple(said) for said in cold.outputs}) == len(ASKED)
    assert "serves without it" not in vllm.said()
    assert daemon.stats()["leases"] == 0


def test_windows_alone_are_left_to_vllm(
    daemon: DaemonProcess, checkpoint: Path, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", "mistral", sliding_window=WINDOW)
    with start(model, checkpoint, daemon, tmp_path / "vllm.log") as vllm:
        cold = vllm.generate(ASKED)
        vllm.reset()
        assert vllm.generate(ASKED).outputs == cold.outputs
    assert "vLLM serves without it: the model has sliding-window" in vllm.said()
    assert not daemon.stats()["namespaces"]

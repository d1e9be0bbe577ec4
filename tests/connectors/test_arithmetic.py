"""What a prefill costs by a model's configuration alone, against what is known of the models."""

from __future__ import annotations

from typing import Any

import pytest

from hicache.connectors.common.prefill_arithmetic import prefill_flop

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN3_32B = LLAMA_8B | {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "head_dim": 128,
}
MIXTRAL = LLAMA_8B | {"num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


@pytest.mark.parametrize(
    ("config", "per_token", "per_pair"),
    [
        (LLAMA_8B, 1.40e10, 5.24e5),
        (LLAMA_70B, 1.37e11, 2.62e6),
        (QWEN3_32B, 6.24e10, 2.10e6),
        (MIXTRAL, 2.54e10, 5.24e5),
        (QWEN3_30B_A3B, 5.44e9, 7.86e5),
        ({"model_type": "some", "text_config": LLAMA_8B}, 1.40e10, 5.24e5),
    ],
)
def test_models(config: dict[str, Any], per_token: float, per_pair: float) -> None:
    assert list(prefill_flop(config)) == pytest.approx([per_token, per_pair], rel=0.02)


def test_ranks_share_it() -> None:
    assert prefill_flop(LLAMA_70B, 8)[0] == prefill_flop(LLAMA_70B)[0] // 8


@pytest.mark.parametrize(
    "config",
    [{}, {"n_embd": 768, "n_layer": 12}, LLAMA_8B | {"kv_lora_rank": 512}, {"hidden_size": "9"}],
)
def test_what_is_not_known(config: dict[str, Any]) -> None:
    assert prefill_flop(config) == (0, 0)

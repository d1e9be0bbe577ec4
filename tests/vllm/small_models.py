"""Checkpoints of random weights: kinds of models and adapters that the demo's model is not.

They are small, and wild enough that what they say depends on every block of a prompt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

VOCABULARY: Final = 49_152
"""The demo's model's, whose tokenizer they use."""
HIDDEN: Final = 64
LAYERS: Final = 4
COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


def write_model(folder: Path, kind: str, **more: Any) -> Path:
    """`kind`: as Transformers names it in `model_type`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **{**COMMON, **more})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def write_adapter(folder: Path, seed: int) -> Path:
    """A LoRA of keys and values, so that the KV of every layer is another."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    seeded = torch.Generator().manual_seed(seed)
    rank, targets = 4, {"k_proj": 64, "v_proj": 64}
    tensors = {}
    for layer in range(LAYERS):
        for name, size in targets.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, HIDDEN, generator=seeded)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(size, rank, generator=seeded)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": [*targets]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder

"""The fields of a model's configuration that change its KV, for every connector."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

# Fields that name, locate or describe the model, or act after the logits: they change no KV byte.
# A field that is not listed here counts.
# fmt: off
_COSMETIC = frozenset((
    "_name_or_path", "name_or_path", "transformers_version", "architectures", "dtype",
    "torch_dtype", "use_cache", "return_dict", "output_attentions", "output_hidden_states",
    "id2label", "label2id", "problem_type", "bos_token_id", "eos_token_id", "pad_token_id",
    "sep_token_id", "decoder_start_token_id", "task_specific_params", "finetuning_task",
    "tokenizer_class", "gguf_file", "quantization_config",
))
# fmt: on


def plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Removes the cosmetic fields, at every depth."""
    return {
        key: plain(value) if isinstance(value, Mapping) else value
        for key, value in fields.items()
        if key not in _COSMETIC
    }


def canonical(fields: Mapping[str, Any]) -> str:
    """The same text for equal fields."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":")) if fields else ""


def quantisation(config: Mapping[str, Any] | None) -> str:
    return canonical(plain(config)) if config else ""


def rope_types(value: Any) -> Iterator[str]:
    """Every kind of RoPE that a config names, at any depth."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key in ("rope_type", "type") and isinstance(inner, str):
                yield inner
            yield from rope_types(inner)


MOVING_ROPE = frozenset(("dynamic", "longrope"))
"""Kinds under which a prefix's KV depends on more than the prefix."""

"""The arithmetic of a model's prefill, from its configuration. The planner's estimate starts with
it before a prefill was measured.

Every new token is multiplied once with each weight of the layers (two FLOP each); the embedding is
looked up, and the head sees the last token only. Each pair of tokens that attend costs four FLOP
per layer, query head and width: a score, and its share of the values.

An estimate: wrong by a third where the MLP has no gate, or where some layers of a mixture of
experts are dense. The first measured prefill replaces it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def prefill_flop(config: Mapping[str, Any], ranks: int = 1) -> tuple[int, int]:
    """FLOP per new token and per pair of tokens, of one of `ranks` tensor-parallel ranks. `config`
    has Hugging Face's field names; (0, 0) if it does not, or if the attention is latent."""
    nested = config.get("text_config")
    fields = nested if isinstance(nested, Mapping) else config
    hidden, layers = _number(fields, "hidden_size"), _number(fields, "num_hidden_layers")
    heads = _number(fields, "num_attention_heads")
    if not hidden or not layers or not heads or fields.get("kv_lora_rank"):
        return 0, 0
    width = _number(fields, "head_dim") or hidden // heads
    kv_heads = _number(fields, "num_key_value_heads") or heads
    attention = 2 * hidden * (heads + kv_heads) * width
    weights = layers * (attention + 3 * hidden * _inner(fields))
    return 2 * weights // ranks, 4 * layers * heads * width // ranks


def _inner(fields: Mapping[str, Any]) -> int:
    """The width of the MLP that one token goes through."""
    dense = _number(fields, "intermediate_size")
    chosen = _number(fields, "num_experts_per_tok")
    if not chosen or not _number(fields, "num_local_experts", "num_experts", "n_routed_experts"):
        return dense
    expert = _number(fields, "moe_intermediate_size") or dense
    shared = _number(fields, "shared_expert_intermediate_size")
    return (chosen + _number(fields, "n_shared_experts")) * expert + shared


def _number(fields: Mapping[str, Any], *names: str) -> int:
    """The value of the first of these fields that exists, else 0."""
    found = (fields[name] for name in names if type(fields.get(name)) is int)
    return max(next(found, 0), 0)

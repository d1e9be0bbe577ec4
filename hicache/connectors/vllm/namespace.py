"""The namespace of a rank: everything in vLLM's configuration and cache that changes KV bytes.

Read once per rank, after vLLM has made its cache, so that the geometry is the real one. The content
of the model's files counts, their path does not. vLLM's version counts: how a backend arranges the
bytes of a page may change with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hicache.connectors.common.model_config import (
    MOVING_ROPE,
    canonical,
    plain,
    quantisation,
    rope_types,
)
from hicache.connectors.common.prefill_arithmetic import prefill_flop
from hicache.connectors.vllm.vllm_pages import UnsupportedLayout
from hicache.connectors.vllm.weights import digest_files
from hicache.protocol.keys import LayerGroup, NamespaceSpec


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a rank's namespace is made from. `attention`: the backends' names, and what else decides
    how they arrange a page. `weights_digest`: given by the operator, "" to read the files."""

    vllm_version: str
    hf_config: Mapping[str, Any]
    architectures: Sequence[str]
    model_dtype: str
    cache_dtype: str
    quantisation: str
    max_model_len: int
    attention: Sequence[str]
    kv_heads: int
    head_dim: int
    block_tokens: int
    tp_rank: int
    tp_size: int
    model: str
    revision: str | None
    load_format: str
    weights_digest: str


def refuse_by_config(vllm: Any) -> None:
    """Raises UnsupportedLayout for what the configuration alone (vLLM's VllmConfig) rules out."""
    parallel = vllm.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise UnsupportedLayout("pipeline parallelism is not held yet, only tensor parallelism is")
    contexts = ("prefill_context_parallel_size", "decode_context_parallel_size")
    if any(getattr(parallel, name, 1) > 1 for name in contexts):
        raise UnsupportedLayout(
            "context parallelism is not held: a block would lie in several ranks"
        )
    if getattr(vllm.cache_config, "calculate_kv_scales", False):
        raise UnsupportedLayout(
            "KV scales that are calculated at run time differ from start to start"
        )
    speculative = vllm.speculative_config
    if speculative is not None and speculative.method not in ("ngram", "ngram_gpu", "suffix"):
        raise UnsupportedLayout(
            f"speculative decoding by {speculative.method} keeps KV of a second model in the same "
            "blocks, which is not held; ngram is"
        )


def refuse_by_cache(groups: Sequence[Any]) -> None:
    """Raises UnsupportedLayout for layer groups (vLLM's KVCacheGroupSpec) that cannot be held."""
    if len(groups) != 1:
        raise UnsupportedLayout(
            f"the model has {len(groups)} groups of layers with caches of different kinds (hybrid "
            "or sliding-window attention), and one is held"
        )
    # In a model with both kinds of layers, under a connector like this one, vLLM keeps the layers
    # with a window or chunks like the others: blocks for all tokens, and none is freed early. The
    # window is applied in the attention only, so every byte of a block is defined.
    name = type(groups[0].kv_cache_spec).__name__
    if name in ("SlidingWindowSpec", "ChunkedLocalAttentionSpec"):
        raise UnsupportedLayout(
            "the model has sliding-window or chunked attention only, and vLLM frees blocks outside "
            "the window"
        )
    if name != "FullAttentionSpec":
        raise UnsupportedLayout(f"a cache of the kind {name} is not held: only full attention is")


def namespace_spec(facts: EngineFacts, caches: Sequence[torch.Tensor]) -> NamespaceSpec:
    """The namespace of one rank. `caches`: its layers' tensors. Raises UnsupportedLayout."""
    first = caches[0]
    if any(cache.shape != first.shape or cache.dtype != first.dtype for cache in caches):
        raise UnsupportedLayout("the layers differ in the shape or number type of their caches")
    shape, strides = list(first.shape[1:]), list(first.stride()[1:])
    layout = f"vllm-{facts.vllm_version}:{first.device.type}:{'+'.join(facts.attention)}:"
    layout += f"[layer,page{shape}/{strides}]"
    page_bytes = first[0].numel() * first.element_size()
    counted: dict[str, Any] = {
        "architectures": list(facts.architectures),
        "dtype": facts.model_dtype,
        "config": plain(facts.hf_config),
    }
    if any(kind in MOVING_ROPE for kind in rope_types(facts.hf_config)):
        counted["max_model_len"] = facts.max_model_len
    text = canonical(counted)
    rope = canonical({key: value for key, value in facts.hf_config.items() if "rope" in key})
    flop_per_token, flop_per_pair = prefill_flop(facts.hf_config, facts.tp_size)
    return NamespaceSpec(
        model_digest=hashlib.blake2b(text.encode(), digest_size=32).hexdigest(),
        weights_digest=facts.weights_digest or _weights_of(facts),
        dtype=f"{str(first.dtype).removeprefix('torch.')}:{facts.cache_dtype}",
        groups=(LayerGroup(len(caches), facts.kv_heads, facts.head_dim, layout),),
        block_tokens=facts.block_tokens,
        block_bytes=page_bytes * len(caches),
        tp_rank=facts.tp_rank,
        tp_size=facts.tp_size,
        rope=rope,
        quantisation=f"{facts.quantisation}:{_quantisation(facts)}",
        name=str(facts.hf_config.get("model_type", "")) or "vllm",
        flop_per_token=flop_per_token,
        flop_per_pair=flop_per_pair,
    )


def _quantisation(facts: EngineFacts) -> str:
    config = facts.hf_config.get("quantization_config")
    return quantisation(config if isinstance(config, Mapping) else None)


def _weights_of(facts: EngineFacts) -> str:
    remedy = "set weights_digest in kv_connector_extra_config, a different text for other weights"
    if facts.load_format == "dummy":
        raise UnsupportedLayout(f"dummy weights have no files to identify them by; {remedy}")
    try:
        return digest_files(_folder_of(facts.model, facts.revision))
    except (OSError, ValueError) as error:
        raise UnsupportedLayout(
            f"the model's weights cannot be identified: {error}; {remedy}"
        ) from error


def _folder_of(model: str, revision: str | None) -> Path:
    path = Path(model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, local_files_only=True))

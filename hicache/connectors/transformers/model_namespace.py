"""The shape of a Hugging Face model's KV, its namespace, and which models are refused.

The shape is not read from the config, where every architecture has its own field names, but from
the cache object after one token of prefill: what the model keeps there is what is stored.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hicache.connectors.common.model_config import (
    MOVING_ROPE,
    canonical,
    plain,
    quantisation,
    rope_types,
)
from hicache.connectors.common.prefill_arithmetic import prefill_flop
from hicache.protocol.keys import (
    LayerGroup,
    NamespaceSpec,
    digest_weights,
    sample_bytes,
)

LAYOUT = "hf:[layer,kv,head,token,dim]"


class Unsupported(ValueError):
    """This model's KV cannot be stored; the text says why."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """The shape of one token's KV, as the model made it. `devices`: of each layer."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    devices: tuple[torch.device, ...]

    def block(self, tokens: int) -> tuple[int, int, int, int, int]:
        """The shape of this many tokens' KV, in the order of LAYOUT."""
        return self.layers, 2, self.kv_heads, tokens, self.head_dim


class Forward:
    """One step of a model on a cache object, with the argument names of its version of
    transformers.

    Computes only the last token's logits, if the model can leave out the others.
    """

    def __init__(self, model: Any) -> None:
        parameters = inspect.signature(model.forward).parameters
        self._model = model
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._more: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in parameters:
            self._more["logits_to_keep"] = 1

    def __call__(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """The logits, [1, tokens, vocabulary] or fewer tokens. The cache grows by `ids`."""
        return self._model(ids, **{self._cache_name: cache}, **self._more).logits


def kv_shape(model: Any, forward: Forward) -> KvShape:
    """Computes one token with the model. Raises Unsupported if its KV cannot be stored."""
    _refuse_by_config(model)
    cache = _empty_cache(model.config)
    with torch.inference_mode():
        token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        forward(token, cache)
    tensors = [(layer.keys, layer.values) for layer in cache.layers]
    if not tensors or any(keys is None or not keys.numel() for keys, _ in tensors):
        raise Unsupported(
            "some layers keep no KV of their own in the cache object (shared, or held elsewhere)"
        )
    first = tensors[0][0]
    if any(tensor.shape != first.shape for pair in tensors for tensor in pair):
        raise Unsupported(
            "keys and values, or the layers, differ in heads or head size (several layer groups, "
            "or latent attention), and one layer group is held"
        )
    if first.dim() != 4 or first.shape[0] != 1 or first.shape[2] != 1:
        raise Unsupported(f"KV of the shape {list(first.shape)} is not [1, heads, token, dim]")
    if any(tensor.dtype != first.dtype for pair in tensors for tensor in pair):
        raise Unsupported("the layers keep KV of different number types")
    devices = tuple(keys.device for keys, _ in tensors)
    return KvShape(len(tensors), first.shape[1], first.shape[3], first.dtype, devices)


def namespace_spec(
    model: Any,
    shape: KvShape,
    *,
    block_tokens: int,
    lora_digest: str = "",
    cache_salt: str = "",
    weights_version: int = 0,
) -> NamespaceSpec:
    """The namespace of everything that changes this model's KV bytes."""
    fields = json.loads(model.config.to_json_string(use_diff=False))
    counted = {"class": type(model).__name__, "dtype": str(model.dtype), "config": plain(fields)}
    group = LayerGroup(shape.layers, shape.kv_heads, shape.head_dim, LAYOUT)
    flop_per_token, flop_per_pair = prefill_flop(fields)
    return NamespaceSpec(
        model_digest=hashlib.blake2b(canonical(counted).encode(), digest_size=32).hexdigest(),
        weights_digest=digest_weights(_tensors(model)),
        dtype=str(shape.dtype).removeprefix("torch."),
        groups=(group,),
        block_tokens=block_tokens,
        block_bytes=int(np.prod(shape.block(block_tokens))) * shape.dtype.itemsize,
        weights_version=weights_version,
        rope=canonical({key: value for key, value in fields.items() if "rope" in key}),
        lora_digest=lora_digest,
        quantisation=quantisation(fields.get("quantization_config")),
        cache_salt=cache_salt,
        name=str(getattr(model.config, "model_type", "")) or type(model).__name__,
        flop_per_token=flop_per_token,
        flop_per_pair=flop_per_pair,
    )


def _refuse_by_config(model: Any) -> None:
    config = model.config
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "add_cross_attention", False):
        raise Unsupported(
            "encoder-decoder models and cross-attention are not held: their KV depends on more "
            "than the prompt's tokens"
        )
    if model.training:
        raise Unsupported("the model is in training mode, where dropout changes KV: call eval()")
    kind = getattr(getattr(model, "generation_config", None), "cache_implementation", None)
    if kind not in (None, "dynamic"):
        raise Unsupported(f"a {kind} cache is not held: only the plain growing one is")
    for kind in rope_types(config.to_dict()):
        if kind in MOVING_ROPE:
            raise Unsupported(
                f"{kind} RoPE is not held: a prefix's KV depends on how long the prompt is"
            )


def _empty_cache(config: Any) -> DynamicCache:
    try:
        cache = DynamicCache(config=config)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise Unsupported(f"transformers has no growing cache for this model: {error}") from error
    strange = {type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer}
    if any("Sliding" in name for name in strange):
        raise Unsupported("sliding-window layers are not held: they forget the prefix")
    if strange:
        raise Unsupported(
            f"layers of the kind {', '.join(sorted(strange))} are not held: only plain attention is"
        )
    return cache


class _DeviceBytes:
    """A tensor's bytes on its device: only requested slices are copied from it."""

    def __init__(self, tensor: Any) -> None:
        self._flat = tensor.detach().reshape(-1).view(torch.uint8)
        self.nbytes = int(self._flat.numel())

    def __getitem__(self, part: slice) -> npt.NDArray[np.uint8]:
        taken: npt.NDArray[np.uint8] = self._flat[part].cpu().numpy()
        return taken

    def tobytes(self) -> bytes:
        return self[:].tobytes()


def _tensors(model: Any) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
    """Name, number type, shape and sample of everything loaded, buffers included."""
    for tensors in (model.named_parameters(), model.named_buffers()):
        for name, tensor in tensors:
            if tensor.device.type == "meta":
                raise Unsupported(f"{name} is not loaded (meta device), so it cannot be identified")
            sample = sample_bytes(cast(Any, _DeviceBytes(tensor))) if tensor.numel() else b""
            yield name, str(tensor.dtype), tuple(tensor.shape), sample

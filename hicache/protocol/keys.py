"""Content hashes: namespace digests and block keys. The only module that hashes tokens.

A namespace digest covers every field that changes KV bytes, so blocks of another model, dtype,
layout, LoRA, salt or weights can never be a hit. Block keys are chained: a key covers the
namespace, the whole prefix and the block's tokens.

    key(block) = BLAKE2b-256(namespace ‖ parent key ‖ token ids as little-endian u32)

The parent key of a first block is 32 zero bytes. The same in every process, language and on disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

KEY_BYTES = 32
ROOT_KEY = bytes(KEY_BYTES)
UNCOUNTED = ("name", "flop_per_token", "flop_per_pair")
"""Fields of a NamespaceSpec that do not change KV bytes, and are not part of the digest."""


def block_key(namespace: bytes, parent: bytes, tokens: bytes) -> bytes:
    """The key of one block after `parent`."""
    return hashlib.blake2b(namespace + parent + tokens, digest_size=KEY_BYTES).digest()


def chain_keys(namespace: bytes, parent: bytes, tokens: bytes, block_bytes: int) -> list[bytes]:
    """Keys of consecutive whole blocks of `block_bytes` symbol bytes after `parent`."""
    keys = []
    for start in range(0, len(tokens) - block_bytes + 1, block_bytes):
        parent = block_key(namespace, parent, tokens[start : start + block_bytes])
        keys.append(parent)
    return keys


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one KV shape. `layout`: the arrangement of a block's bytes."""

    layers: int
    kv_heads: int
    head_dim: int
    layout: str
    window: int = 0


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """Everything that changes KV bytes. Two specs that differ in any field never share a block.

    `weights_digest` samples the content of every tensor (`digest_weights`), never a path.
    Protocol 1 holds one layer group; more are refused with a sentence. Ranks have one spec each.
    `name` is for people. `flop_per_token` and `flop_per_pair` are the arithmetic of a prefill per
    new token and per pair of tokens that attend, of this rank alone (0: unknown), for the estimate
    before the first measurement. These three do not change KV bytes.
    """

    model_digest: str
    weights_digest: str
    dtype: str
    groups: tuple[LayerGroup, ...]
    block_tokens: int
    block_bytes: int
    weights_version: int = 0
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    rope: str = ""
    lora_digest: str = ""
    quantisation: str = ""
    cache_salt: str = ""
    name: str = field(default="", compare=False)
    flop_per_token: int = field(default=0, compare=False)
    flop_per_pair: int = field(default=0, compare=False)

    def digest(self) -> bytes:
        """BLAKE2b-256 over the canonical encoding (`to_wire`, keys sorted, without UNCOUNTED)."""
        fields = self.to_wire()
        for name in UNCOUNTED:
            del fields[name]
        packed = msgpack.packb(_canonical(fields), use_bin_type=True)
        return hashlib.blake2b(packed, digest_size=KEY_BYTES, person=b"hicache-ns-1").digest()

    def to_wire(self) -> dict[str, Any]:
        """The fields as a map for msgpack."""
        fields = asdict(self)
        fields["groups"] = [asdict(group) for group in self.groups]
        return fields

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> NamespaceSpec:
        """The strict inverse of `to_wire`. Raises ValueError that names a field that is missing,
        unknown, of the wrong type, or out of range."""
        values = _typed(cls, fields)
        groups = values["groups"]
        if not groups:
            raise ValueError("groups: at least one layer group is needed")
        values["groups"] = tuple(LayerGroup(**_typed(LayerGroup, group)) for group in groups)
        spec = cls(**values)
        if spec.block_tokens < 1 or spec.block_bytes < 1:
            raise ValueError("block_tokens and block_bytes must be at least 1")
        return spec


_TYPES: dict[type, dict[str, type]] = {
    LayerGroup: {"layers": int, "kv_heads": int, "head_dim": int, "layout": str, "window": int},
    NamespaceSpec: {
        "model_digest": str,
        "weights_digest": str,
        "dtype": str,
        "groups": list,
        "block_tokens": int,
        "block_bytes": int,
        "weights_version": int,
        "tp_rank": int,
        "tp_size": int,
        "pp_rank": int,
        "pp_size": int,
        "rope": str,
        "lora_digest": str,
        "quantisation": str,
        "cache_salt": str,
        "name": str,
        "flop_per_token": int,
        "flop_per_pair": int,
    },
}
_OPTIONAL = {
    "window": 0,
    "weights_version": 0,
    "tp_rank": 0,
    "tp_size": 1,
    "pp_rank": 0,
    "pp_size": 1,
    "flop_per_token": 0,
    "flop_per_pair": 0,
}
_OPTIONAL_TEXT = ("rope", "lora_digest", "quantisation", "cache_salt", "name")


def _typed(cls: type, fields: object) -> dict[str, Any]:
    if not isinstance(fields, Mapping):
        raise ValueError(f"{cls.__name__} must be a map, not {type(fields).__name__}")
    types = _TYPES[cls]
    optional = {**_OPTIONAL, **dict.fromkeys(_OPTIONAL_TEXT, "")}
    for name in fields:
        if name not in types:
            raise ValueError(f"{name}: unknown field of {cls.__name__}")
    values: dict[str, Any] = {}
    for name, kind in types.items():
        value = fields.get(name, optional.get(name))
        if value is None:
            raise ValueError(f"{name}: missing in {cls.__name__}")
        if type(value) is not kind:
            raise ValueError(f"{name}: must be {kind.__name__}, not {type(value).__name__}")
        if isinstance(value, int) and not 0 <= value < 2**63:
            raise ValueError(f"{name}: {value} is outside 0 … 2⁶³-1")
        values[name] = value
    return values


def _canonical(value: Any) -> Any:
    """Maps with their keys sorted, so that one spec has one encoding."""
    if isinstance(value, dict):
        return {key: _canonical(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return value


SAMPLE_BYTES = 4096


def digest_weights(tensors: Iterable[tuple[str, str, tuple[int, ...], bytes]]) -> str:
    """A digest of (name, dtype, shape, sample) of every tensor, in name order.

    `sample` is `sample_bytes` of the tensor's bytes: a few KiB from its start, middle and end, so
    a fine-tune of the same shape gets another digest without reading 140 GB.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"hicache-w-1")
    for name, dtype, shape, sample in sorted(tensors):
        digest.update(msgpack.packb([name, dtype, list(shape), sample], use_bin_type=True))
    return digest.hexdigest()


def sample_bytes(flat: npt.NDArray[np.uint8]) -> bytes:
    """Up to 4 KiB spread over a tensor's bytes (uint8, flat): start, quarters and end."""
    if flat.nbytes <= SAMPLE_BYTES:
        return flat.tobytes()
    part = SAMPLE_BYTES // 8
    starts = np.linspace(0, flat.nbytes - part, 8).astype(np.int64)
    return b"".join(flat[start : start + part].tobytes() for start in starts)

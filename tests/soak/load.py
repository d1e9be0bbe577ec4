"""The prompts of a soak's clients and the expected bytes of their blocks, all made from numbers.

A few models of different block sizes, and conversations that grow turn by turn and share their
beginnings. A block's bytes are computed from its model and its whole prefix, so every client can
check what another client has stored.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import lru_cache
from typing import Final

import numpy as np

from hicache.client import LayerGroup, NamespaceSpec
from tests.e2e.daemon_process import SPEC, Blocks, Tokens

KIB: Final = 1 << 10
NUM_CONVERSATIONS: Final = 60
NUM_FAMILIES: Final = 6
MAX_TURNS: Final = 8
SHARED_BLOCKS: Final = 4
TURN_BLOCKS: Final = 3


def _model(name: str, block_bytes: int) -> NamespaceSpec:
    group = LayerGroup(1, 1, block_bytes // SPEC.block_tokens, "soak")
    return replace(SPEC, model_digest=name, dtype="uint8", groups=(group,), block_bytes=block_bytes)


MODELS: Final = (
    _model("small", 4 * KIB),
    _model("middle", 64 * KIB),
    _model("middle with a LoRA", 64 * KIB),
    _model("large", 256 * KIB),
)


@lru_cache(maxsize=4 * NUM_CONVERSATIONS)
def conversation(number: int) -> Tokens:
    """A whole conversation. Those of a family share their first blocks."""
    step = SPEC.block_tokens
    family = np.random.default_rng(number % NUM_FAMILIES)
    own = np.random.default_rng(1000 + number)
    head = family.integers(0, 50_000, SHARED_BLOCKS * step)
    rest = own.integers(0, 50_000, MAX_TURNS * TURN_BLOCKS * step + 1)
    return np.concatenate((head, rest)).astype(np.uint32)


def prompt(number: int, turn: int) -> Tokens:
    """A conversation up to a turn: whole blocks, and one token more."""
    num_blocks = SHARED_BLOCKS + turn * TURN_BLOCKS
    return conversation(number)[: num_blocks * SPEC.block_tokens + 1]


def block(spec: NamespaceSpec, tokens: Tokens, index: int) -> Blocks:
    """The bytes of block `index` of this prompt: uint8, shape [block_bytes]."""
    end = (index + 1) * spec.block_tokens
    name = spec.digest() + tokens[:end].tobytes()
    word = np.frombuffer(hashlib.blake2b(name, digest_size=64).digest(), np.uint8)
    return np.resize(word, spec.block_bytes)


def blocks(spec: NamespaceSpec, tokens: Tokens, first: int, last: int) -> Blocks:
    """Blocks first … last-1: uint8, shape [n, block_bytes]."""
    rows = [block(spec, tokens, index) for index in range(first, last)]
    return np.stack(rows) if rows else np.empty((0, spec.block_bytes), np.uint8)

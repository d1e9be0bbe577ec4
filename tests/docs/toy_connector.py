"""A connector for an inference engine that exists only here, as docs/adding.md shows it.

The toy's KV of a token is a function of the whole prompt up to it, as in a real model, so a wrong
byte from the cache changes the answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hicache.client import Client, LayerGroup, NamespaceSpec

Kv = npt.NDArray[np.float32]  # [tokens, layers, K and V, width]
LAYERS, WIDTH = 2, 8
NOTHING: Kv = np.zeros((0, LAYERS, 2, WIDTH), np.float32)


class ToyEngine:
    """Computes KV and one token. `seed` stands for its weights."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.num_computed = 0
        self._weights = np.random.default_rng(seed).random((LAYERS, 2, WIDTH), np.float32)

    def prefill(self, tokens: Sequence[int], held: Kv) -> Kv:
        """The KV of all tokens; that of the first `len(held)` is given."""
        rows = list(held)
        state = rows[-1] if rows else np.zeros_like(self._weights)
        for token in tokens[len(held) :]:
            state = (state * 0.5 + self._weights * (token + 1)).astype(np.float32)
            rows.append(state)
            self.num_computed += 1
        return np.stack(rows)

    def next_token(self, kv: Kv) -> int:
        """What follows the last token."""
        return int(np.abs(kv[-1]).sum() * 1000) % 1000


class ToyConnector:
    """Serves prompts of one `ToyEngine` from the daemon's tiers."""

    def __init__(self, engine: ToyEngine, endpoint: str | None = None, block_tokens: int = 4):
        self.engine = engine
        self.block_tokens = block_tokens
        self.spec = NamespaceSpec(
            model_digest=f"toy, {LAYERS} layers of {WIDTH}",
            weights_digest=f"seed {engine.seed}",
            dtype="float32",
            groups=(LayerGroup(LAYERS, 1, WIDTH, layout="token,layer,kv,dim"),),
            block_tokens=block_tokens,
            block_bytes=block_tokens * LAYERS * 2 * WIDTH * 4,
        )
        self.client = Client(self.spec, endpoint, timeout_s=5.0)

    def answer(self, tokens: Sequence[int]) -> int:
        """The next token. The cache may make it faster, and never different."""
        kv = self._load(tokens)
        held = len(kv)
        started = time.monotonic()
        kv = self.engine.prefill(tokens, kv)
        seconds = time.monotonic() - started
        num = len(tokens) - held
        self.client.observe(sum_n=num, sum_nc=num * held + num * num / 2, seconds=seconds)
        self._store(tokens, kv, held // self.block_tokens)
        return self.engine.next_token(kv)

    def _load(self, tokens: Sequence[int]) -> Kv:
        """The KV of whole blocks from the front; empty after any failure."""
        match = self.client.match(tokens)
        blocks = np.empty((match.decision.reload_blocks, self.spec.block_bytes), np.uint8)
        fetched = self.client.fetch(match, blocks)
        self.client.release(match)
        came: Kv = blocks[: fetched.blocks].view(np.float32)  # only what came, from the front
        return came.reshape(-1, LAYERS, 2, WIDTH)

    def _store(self, tokens: Sequence[int], kv: Kv, first: int) -> None:
        """Offer the whole blocks that were computed here."""
        last = len(tokens) // self.block_tokens
        new = np.ascontiguousarray(kv[first * self.block_tokens : last * self.block_tokens])
        blocks = new.view(np.uint8).reshape(-1, self.spec.block_bytes)
        self.client.put(tokens, blocks, first=first, last=last)

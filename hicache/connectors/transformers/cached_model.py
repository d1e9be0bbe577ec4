"""Hugging Face causal language models on hicache: prompts as token ids in, tokens out.

    served = CachedModel(model)                     # the daemon at the default endpoint
    answer = served.generate(token_ids, max_new_tokens=64)

Each request starts from an empty cache object and the prompt's blocks in the daemon:

    |-- reloaded blocks --|-- prefilled here --|-- generated --|
    |-- stored already ---|-- new whole blocks, stored afterwards --|..|

The daemon is optional: whatever fails there is a miss, and the tokens are the same without it. One
request at a time per object, from any thread.

Imported with transformers and torch present; `hicache.client` alone needs neither.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from hicache.client import Client, Decision, FetchedRun, Match, PutResult
from hicache.connectors.transformers.model_namespace import (
    Forward,
    Unsupported,
    kv_shape,
    namespace_spec,
)
from hicache.protocol.keys import NamespaceSpec

__all__ = ["CachedModel", "Generation", "Unsupported"]

DEFAULT_BLOCK_TOKENS = 16

log = logging.getLogger(__name__)

Words = npt.NDArray[Any]
"""KV as integers of the width of the model's numbers: numpy has no bfloat16."""
_WORDS: dict[int, type[np.generic]] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_TORCH_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CacheClient(Protocol):
    """The part of `hicache.client.Client` that is used here."""

    def match(
        self, tokens: Sequence[int], *, explain: bool = False, conversation: str = ""
    ) -> Match: ...
    def fetch_runs(self, match: Match) -> Iterator[FetchedRun]: ...
    def release(
        self, match: Match, *, hop_bytes: float = 0.0, hop_s: float = 0.0, total_s: float = 0.0
    ) -> None: ...
    def put(
        self,
        tokens: Sequence[int],
        blocks: Callable[[int, npt.NDArray[np.uint8]], object],
        *,
        first: int = 0,
        last: int | None = None,
    ) -> PutResult: ...
    def observe(self, *, sum_n: float, sum_nc: float, seconds: float) -> None: ...
    def hint(
        self,
        tokens: Sequence[int] | None = None,
        *,
        conversation: str = "",
        finish_reason: str = "",
        answer_tokens: int = 0,
    ) -> None: ...
    def close(self) -> None: ...


Connect = Callable[[NamespaceSpec], CacheClient]


@dataclass(frozen=True, slots=True)
class Generation:
    """The tokens and their costs. `hit_tokens`: reloaded tokens by tier.

    `ttft_s` runs from the call to the first token, `prefill_s` is the model's own share of it.
    `decision` is None without a cache. `stored`, `refused`: counts of new blocks.
    """

    tokens: list[int]
    prompt_tokens: int
    hit_tokens: dict[str, int]
    ttft_s: float
    prefill_s: float
    total_s: float
    decision: Decision | None
    stored: int = 0
    refused: int = 0


@dataclass(slots=True)
class LoadedPrefix:
    """The prefix that has arrived: `blocks` blocks, as `words` [layer, kv, head, token, dim]."""

    match: Match | None = None
    blocks: int = 0
    tokens: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)
    words: Words | None = None
    hop_bytes: int = 0
    hop_s: float = 0.0
    total_s: float = 0.0


class CachedModel:
    """A causal language model that reloads the KV of prompts computed before, here or elsewhere.

    `connect` makes the client for this model's namespace, by default to the daemon at the default
    endpoint; None serves without a cache, with the same code. `lora_digest`, `cache_salt`,
    `weights_version`: as in NamespaceSpec. Raises Unsupported.
    """

    def __init__(
        self,
        model: Any,
        connect: Connect | None = Client,
        *,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
        lora_digest: str = "",
        cache_salt: str = "",
        weights_version: int = 0,
    ) -> None:
        self.model = model
        self._forward = Forward(model)
        self.shape = kv_shape(model, self._forward)
        self.spec = namespace_spec(
            model,
            self.shape,
            block_tokens=block_tokens,
            lora_digest=lora_digest,
            cache_salt=cache_salt,
            weights_version=weights_version,
        )
        self.client = connect(self.spec) if connect else None
        self.last_trouble = ""
        self._word = _WORDS[self.shape.dtype.itemsize]
        self._staging: Words = np.empty(self.shape.block(0), self._word)

    def generate(
        self,
        tokens: Sequence[int],
        max_new_tokens: int,
        *,
        stop: Collection[int] = (),
        conversation: str = "",
        keep: bool = True,
    ) -> Generation:
        """Greedy decoding of at least one token, up to and including the first one in `stop`.

        With `keep`, its KV is stored after the last token. `conversation`: a name by which the
        daemon links this prompt with the next turn's. Raises what the model raises.
        """
        if not tokens:
            raise ValueError("a prompt needs at least one token")
        started_s = time.perf_counter()
        prompt = list(tokens)
        loaded = self._load(prompt, conversation)
        try:
            with torch.inference_mode():
                cache = self._cache_of(loaded)
                prefill_started_s = time.perf_counter()
                generated = [self._next_token(prompt[loaded.tokens :], cache)]
                first_out_s = time.perf_counter()
                while len(generated) < max_new_tokens and generated[-1] not in stop:
                    generated.append(self._next_token(generated[-1:], cache))
            prefill_s = first_out_s - prefill_started_s
            total_s = time.perf_counter() - started_s
            put = self._store(prompt + generated, cache, loaded) if keep else PutResult()
        finally:
            self._release(loaded)
        if keep:
            reason = "stop" if generated[-1] in stop else "length"
            self._hint(prompt, conversation, reason, len(generated))
        self._observe(len(prompt) - loaded.tokens, loaded.tokens, prefill_s)
        return Generation(
            tokens=generated,
            prompt_tokens=len(prompt),
            hit_tokens=loaded.by_tier,
            ttft_s=first_out_s - started_s,
            prefill_s=prefill_s,
            total_s=total_s,
            decision=loaded.match.decision if loaded.match else None,
            stored=put.stored,
            refused=put.refused,
        )

    def warm_up(self, tokens: Sequence[int], new: int) -> None:
        """Prefill this prompt, then its last `new` tokens on the context of the others, and store
        nothing. The first calls of a shape, and first touches of memory, are slow."""
        cache = DynamicCache(config=self.model.config)
        with torch.inference_mode():
            for part in (tokens[:-new], tokens[-new:]):
                self._next_token(list(part), cache)
        self._reserve(len(tokens) // self.spec.block_tokens)

    def close(self) -> None:
        if self.client:
            self.client.close()

    # --- the model ------------------------------------------------------------------------------

    def _next_token(self, tokens: list[int], cache: DynamicCache) -> int:
        ids = torch.tensor([tokens], device=self.model.device)
        return int(self._forward(ids, cache)[0, -1].argmax())

    def _cache_of(self, loaded: LoadedPrefix) -> DynamicCache:
        """A cache object that begins with the loaded prefix.

        On a CPU its tensors are the staging buffer itself: the first step of the model
        concatenates them with its own, which copies, and then drops them.
        """
        cache = DynamicCache(config=self.model.config)
        if loaded.words is None:
            return cache
        hop_started_s = time.perf_counter()
        kv = torch.from_numpy(loaded.words[:, :, :, : loaded.tokens]).view(self.shape.dtype)
        for layer, pair, device in zip(cache.layers, kv, self.shape.devices, strict=True):
            keys, values = pair[:, None].to(device)
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        spent_s = time.perf_counter() - hop_started_s
        loaded.hop_s += spent_s
        loaded.total_s += spent_s
        return cache

    # --- the daemon: whatever fails here is a miss ------------------------------------------------

    def _load(self, prompt: list[int], conversation: str) -> LoadedPrefix:
        """Load the blocks that the daemon advises to reload, as far as they arrive complete."""
        loaded = LoadedPrefix()
        if self.client is None:
            return loaded
        started_s = time.perf_counter()
        arrived: set[int] = set()
        with self._harmless("load"):
            loaded.match = self.client.match(prompt, explain=True, conversation=conversation)
            wanted = min(loaded.match.decision.reload_blocks, len(prompt) // self.spec.block_tokens)
            if wanted < 1:
                return loaded
            self._reserve(wanted)
            for run in self.client.fetch_runs(loaded.match):
                hop_started_s = time.perf_counter()
                taken = self._copy_in(run, wanted)
                is_good = run.verify()
                loaded.hop_s += time.perf_counter() - hop_started_s
                if is_good:
                    arrived.update(taken)
        loaded.blocks = next(block for block in range(len(arrived) + 1) if block not in arrived)
        # The model needs at least one token to compute the next.
        loaded.tokens = min(loaded.blocks * self.spec.block_tokens, len(prompt) - 1)
        if loaded.match and loaded.tokens:
            loaded.by_tier = _by_tier(loaded.match, loaded.tokens, self.spec.block_tokens)
            loaded.words = self._staging
            loaded.hop_bytes = loaded.blocks * self.spec.block_bytes
        loaded.total_s = time.perf_counter() - started_s
        return loaded

    def _copy_in(self, run: FetchedRun, wanted: int) -> range:
        """Copy the run's blocks to their places in the staging buffer. Returns their numbers."""
        bt = self.spec.block_tokens
        shape = self.shape.block(bt)
        taken = range(run.first, min(run.first + run.num_blocks, wanted))
        for block, view in zip(taken, run.views, strict=False):
            place = self._staging[:, :, :, block * bt : (block + 1) * bt]
            place[...] = view.view(self._word).reshape(shape)
        return taken

    def _store(self, tokens: list[int], cache: DynamicCache, loaded: LoadedPrefix) -> PutResult:
        """Store the whole blocks whose KV exists now and which were not loaded."""
        bt = self.spec.block_tokens
        first, last = loaded.blocks, cache.get_seq_length() // bt
        if self.client is None or last <= first:
            return PutResult()
        shape = self.shape.block(bt)
        gathered: list[Words] = []

        def fill(block: int, view: npt.NDArray[np.uint8]) -> None:
            if not gathered:  # only if the daemon lacks a block
                gathered.append(self._gather(cache, first * bt, last * bt))
            start = (block - first) * bt
            view.view(self._word).reshape(shape)[...] = gathered[0][:, :, :, start : start + bt]

        put = PutResult(refused=last - first)
        with self._harmless("store"):
            put = self.client.put(tokens[: last * bt], fill, first=first, last=last)
            self._reserve(last)
        return put

    def _gather(self, cache: DynamicCache, start: int, stop: int) -> Words:
        """The cache's KV of tokens `start … stop-1` as [layer, kv, head, token, dim]."""
        words = np.empty(self.shape.block(stop - start), self._word)
        kind = _TORCH_WORDS[self.shape.dtype.itemsize]
        for place, layer in zip(words, cache.layers, strict=True):
            for kv, tensor in enumerate((layer.keys, layer.values)):
                place[kv] = tensor[0, :, start:stop].view(kind).cpu().numpy()
        return words

    def _reserve(self, blocks: int) -> None:
        """Allocate and touch room for this many blocks. Called after storing, too: the first touch
        of new memory is several times slower than a copy, and the next hit would wait for it."""
        tokens = blocks * self.spec.block_tokens
        if self._staging.shape[3] < tokens:
            self._staging = np.empty(self.shape.block(tokens), self._word)
            self._staging.fill(0)

    def _release(self, loaded: LoadedPrefix) -> None:
        if self.client is None or loaded.match is None or not loaded.match.lease:
            return
        with self._harmless("release"):
            self.client.release(
                loaded.match,
                hop_bytes=loaded.hop_bytes,
                hop_s=loaded.hop_s,
                total_s=loaded.total_s,
            )

    def _hint(
        self, prompt: list[int], conversation: str, finish_reason: str, answer_tokens: int
    ) -> None:
        """The daemon estimates from an answer's end and length whether the prompt will be
        continued."""
        if self.client is None:
            return
        with self._harmless("hint"):
            tokens = None if conversation else prompt
            self.client.hint(
                tokens,
                conversation=conversation,
                finish_reason=finish_reason,
                answer_tokens=answer_tokens,
            )

    def _observe(self, new: int, context: int, seconds: float) -> None:
        if self.client is None:
            return
        with self._harmless("observe"):
            sum_nc = new * context + new * new / 2
            self.client.observe(sum_n=float(new), sum_nc=sum_nc, seconds=seconds)

    @contextmanager
    def _harmless(self, what: str) -> Iterator[None]:
        """Turns any exception of the daemon or its client into a log line."""
        try:
            yield
        except Exception as error:  # the boundary: a request goes on without hicache
            self.last_trouble = f"{what}: {error or type(error).__name__}"
            log.warning("hicache is not used for this request: %s", self.last_trouble)


def _by_tier(match: Match, tokens: int, block_tokens: int) -> dict[str, int]:
    """The first `tokens` of a hit, by the tier they were found in."""
    by_tier: Counter[str] = Counter()
    for tier, blocks in match.runs:
        taken = min(blocks * block_tokens, tokens - by_tier.total())
        if taken:
            by_tier[tier] += taken
    return dict(by_tier)

"""A request of vLLM, and what the scheduler's side keeps about it."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hicache.connectors.vllm.lookup import Question


class VllmRequest(Protocol):
    """The part of vLLM's request that is used here."""

    request_id: str
    num_computed_tokens: int
    num_preemptions: int
    cache_salt: str | None
    lora_request: Any
    mm_features: Sequence[Any]
    prompt_embeds: Any
    resumable: bool
    pooling_params: Any
    session_id: str | None

    @property
    def block_hashes(self) -> Sequence[Any]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...


def is_identified_by_tokens(request: VllmRequest) -> bool:
    """Whether equal tokens mean equal KV. They do not where images are behind placeholder tokens,
    where a prompt is embedded and has no tokens, where a resumed session removes tokens, and where
    an adapter is replaced in place under the same name."""
    lora = request.lora_request
    return not (
        request.mm_features
        or request.prompt_embeds is not None
        or request.resumable
        or request.pooling_params is not None
        or (lora is not None and lora.load_inplace)
    )


@dataclass(slots=True)
class TrackedRequest:
    """A request between its arrival and its end. `stored`: blocks given to the worker, from the
    first on.

    `waited_since_s`: since when it waits for the daemon, 0 if it does not. `is_abandoned`: the
    daemon did not answer in time. `tries`: loads begun. `sources`: tokens of the last load by tier.
    """

    request: VllmRequest
    is_cached: bool
    stored: int = 0
    tries: int = 0
    is_loading: bool = False
    is_abandoned: bool = False
    waited_since_s: float = 0.0
    question: Question | None = None
    sources: dict[str, int] = field(default_factory=dict)
    tokens: bytearray = field(default_factory=bytearray)

    def encoded(self, num_tokens: int) -> bytes:
        """Its first tokens as little-endian u32; each is encoded once."""
        have = len(self.tokens) // 4
        if have < num_tokens:
            more = array("I", self.request.all_token_ids[have:num_tokens])
            if sys.byteorder == "big":
                more.byteswap()
            self.tokens += more.tobytes()
        return bytes(self.tokens[: 4 * num_tokens])

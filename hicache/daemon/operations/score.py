"""What is held of many prompts, for a router or a scheduler that chooses where a request goes.

A question about a namespace: it needs no session, takes no lease, is noted by nobody and changes
nothing that a later match, eviction or fit could see. One request is answered at one go, so its
prompts are bounded together (`wire.MAX_SCORED_…`). Used from the daemon's loop only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from hicache.daemon.operations.gpu_pages import Paging
from hicache.engine import plan as p
from hicache.engine.core import CacheEngine
from hicache.protocol.messages import TOKEN_BYTES, WireError
from hicache.protocol.operations import MAX_SCORED_PROMPTS, MAX_SCORED_TOKENS, ScoreRequest

_NOBODY = 0
_NOTHING = p.Scored((), 0, p.Forecast(0, 0.0, 0.0, 0.0))
"""Of a namespace that has never been heard of."""


class Scoring:
    """Answers `score`."""

    def __init__(self, engine: CacheEngine, paging: Paging) -> None:
        self._engine = engine
        self._paging = paging

    def answer(self, body: ScoreRequest, now_s: float) -> dict[str, Any]:
        """The reply's fields. Raises WireError('malformed' or 'too_large')."""
        prompts = list(_prompts_of(body))
        number = self._engine.number_of(body.namespace)
        if number is None:
            scores = [_NOTHING] * len(prompts)
            return {"block_tokens": 0, "measured": False, "scores": list(map(_told, scores))}
        by_worker = self._paging.copies_in(number)
        ask = self._engine.score
        return {
            "block_tokens": self._engine.residency.namespaces[number].block_tokens,
            "measured": self._engine.prefill[number].is_known,
            "scores": [
                _told(ask(p.MatchPrompt(number, tokens, _NOBODY, now_s, 0.0, by_worker=by_worker)))
                for tokens in prompts
            ],
        }


def _prompts_of(body: ScoreRequest) -> Iterator[bytes]:
    """The tokens of each prompt, which came in a row."""
    tokens, lengths = body.tokens, np.frombuffer(body.lengths, "<u4").tolist()
    if len(lengths) > MAX_SCORED_PROMPTS:
        raise WireError("too_large", f"{len(lengths)} prompts; at most {MAX_SCORED_PROMPTS}")
    count = len(tokens) // TOKEN_BYTES
    if count > MAX_SCORED_TOKENS:
        raise WireError("too_large", f"{count} tokens in all; at most {MAX_SCORED_TOKENS}")
    if sum(lengths) != count:
        raise WireError("malformed", f"lengths: {sum(lengths)} tokens in all, where {count} came")
    for start, end in pairwise(accumulate(lengths, initial=0)):
        yield tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]


def _told(scored: p.Scored) -> dict[str, Any]:
    forecast = scored.forecast
    return {
        "hit_blocks": scored.hit_blocks,
        "runs": [(run.tier, run.num_blocks) for run in scored.runs],
        "reload_blocks": forecast.reload_blocks,
        "reload_s": forecast.reload_s,
        "prefill_s": forecast.prefill_s,
        "recompute_s": forecast.recompute_s,
    }

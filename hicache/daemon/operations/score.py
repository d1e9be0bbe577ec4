"""`score`: the held blocks of many prompts, for a router that chooses a daemon for a request.

Needs no session, takes no lease and has no effect on later matches, evictions or fits. One request
is answered in one step, so the tokens of its prompts are limited together (MAX_SCORED_TOKENS).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Final

import numpy as np

from hicache.daemon.gate import Asked, Gate, handles
from hicache.daemon.operations.gpu_pages import GpuPages
from hicache.engine import plan as p
from hicache.protocol.messages import TOKEN_BYTES, WireError
from hicache.protocol.operations import (
    MAX_SCORED_PROMPTS,
    MAX_SCORED_TOKENS,
    SCORE,
    PromptScore,
    ScoreReply,
    ScoreRequest,
)

_NO_OWNER: Final = 0
_NOTHING: Final = p.Scored((), 0, p.Forecast(0, 0.0, 0.0, 0.0))
"""The score in an unknown namespace."""


@handles(SCORE)
def score(gate: Gate, asked: Asked[ScoreRequest]) -> None:
    """Reply with what a match of each prompt would find now."""
    engine, now_s = gate.engine, asked.now_s
    prompts = list(_prompts_of(asked.request))
    number = engine.number_of(asked.request.namespace)
    if number is None:
        scores = [_score_of(_NOTHING) for _ in prompts]
        gate.reply(asked.peer, ScoreReply(block_tokens=0, measured=False, scores=scores))
        return
    by_worker = gate.state(GpuPages).copies_in(number)
    events = [
        p.MatchPrompt(number, tokens, _NO_OWNER, now_s, 0.0, by_worker=by_worker)
        for tokens in prompts
    ]
    reply = ScoreReply(
        block_tokens=engine.queries.namespace(number).block_tokens,
        measured=engine.prefill[number].is_known,
        scores=[_score_of(engine.score(event)) for event in events],
    )
    gate.reply(asked.peer, reply)


def _prompts_of(request: ScoreRequest) -> Iterator[bytes]:
    """The tokens of each prompt. Raises WireError('malformed' or 'too_large')."""
    tokens, lengths = request.tokens, np.frombuffer(request.lengths, "<u4").tolist()
    if len(lengths) > MAX_SCORED_PROMPTS:
        raise WireError("too_large", f"{len(lengths)} prompts; at most {MAX_SCORED_PROMPTS}")
    count = len(tokens) // TOKEN_BYTES
    if count > MAX_SCORED_TOKENS:
        raise WireError("too_large", f"{count} tokens in all; at most {MAX_SCORED_TOKENS}")
    if sum(lengths) != count:
        raise WireError("malformed", f"lengths: {sum(lengths)} tokens in all, where {count} came")
    for start, end in pairwise(accumulate(lengths, initial=0)):
        yield tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]


def _score_of(scored: p.Scored) -> PromptScore:
    forecast = scored.forecast
    return PromptScore(
        scored.hit_blocks,
        [(run.tier, run.num_blocks) for run in scored.runs],
        forecast.reload_blocks,
        forecast.reload_s,
        forecast.prefill_s,
        forecast.recompute_s,
    )

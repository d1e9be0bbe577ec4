"""The cost of a request on the daemon's loop, in thread-CPU time, from decoded to answered.

- `decision`: all of it: match, plan, lease, and noting that the path was used (`CacheEngine.handle`
  of a match, then `catch_up`).
- `answer`, `bookkeeping`: its two parts; the reply leaves between them.
- `release`: the request is over.
- `interpreter`: a thousand rounds of an empty loop between them: how fast this machine was.

Prompts of 8,192 to 131,072 tokens in a full synthetic tree, built in chunks of 8,192 tokens, in
turns of 512, and in turns with a second try after each.
"""

from __future__ import annotations

import gc
from typing import Final

from hicache.bench.report import ProgressStep
from hicache.engine import plan as p
from hicache.engine.planner.planner import PlannerSettings
from tests.bench.index import IndexRow
from tests.bench.synthetic_tree import (
    CLOCK_S,
    LONG,
    OWNER,
    PROMPT,
    TTL_S,
    TURN,
    SyntheticTree,
    clock,
    quiet,
)

PAGES: Final = (16, 64)


def run(step: ProgressStep, repeat: int = 300) -> list[IndexRow]:
    """All rows."""
    rows: list[IndexRow] = []
    for page in PAGES:
        what = f"page {page}"
        planted = SyntheticTree(page, 2000 * PROMPT, PlannerSettings())
        prompts = planted.plant(2000, step, f"{what}: planting")
        chunks = planted.plant_long(PROMPT)
        turns = planted.plant_long(TURN)
        branched = planted.plant_long(TURN, branched=True)
        planted.engine.handle(p.Observe(planted.namespace, 1, 8192, 8192**2 / 2, 1.0))
        quiet()
        step(f"{what}: measuring", 0, 1)
        for suffix, query in (
            ("", prompts[77]),
            ("", chunks[: 32768 * 4]),
            ("", chunks),
            ("_turns", turns),
            ("_turns_branched", branched),
            ("_miss", planted.random(LONG)),
        ):
            rows += _decisions(planted, suffix, query, repeat)
        rows.append(IndexRow.of("interpreter", page, 0, planted.rates, planted.num_tokens))
        gc.unfreeze()
    return rows


def _decisions(planted: SyntheticTree, suffix: str, tokens: bytes, repeat: int) -> list[IndexRow]:
    """Every prompt ends with a new token, so that all its known blocks can be loaded."""
    asked = tokens + planted.random(1)
    engine = planted.engine
    whole, answered, noted, released = [], [], [], []
    for _ in range(repeat):
        planted.note_pace()
        planted.now_s += 1e-3
        event = p.MatchPrompt(planted.namespace, asked, OWNER, planted.now_s, TTL_S)
        start = clock()
        lease = engine.handle(event).answer.lease
        half = clock()
        engine.catch_up()
        end = clock()
        whole.append(end - start - 2 * CLOCK_S)
        answered.append(half - start - CLOCK_S)
        noted.append(max(0.0, end - half - CLOCK_S))  # after a miss only the clock's time is left
        if lease:
            start = clock()
            engine.handle(p.Release(lease, planted.now_s))
            released.append(clock() - start - CLOCK_S)
    return [
        IndexRow.of(name + suffix, planted.page, len(tokens) // 4, seconds, planted.num_tokens)
        for name, seconds in (
            ("decision", whole),
            ("answer", answered),
            ("bookkeeping", noted),
            ("release", released),
        )
        if seconds
    ]

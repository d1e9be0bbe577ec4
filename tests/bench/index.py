"""The radix index by itself, in thread-CPU time.

- `hit`: a prompt's path, residency runs and block ids (as ranges). The long prompts were built as
  an inference engine builds them, in chunks of 8,192 tokens or turns of 512; the nodes of turns
  that nothing tells apart are merged by then, those of `hit_turns_branched` are not: there a second
  try that differs in the last block was stored after every turn.
- `insert`: match and hang in a new prompt of 8,192 tokens. Slots and states of its blocks, and
  hashing them (which happens only when they leave for a disk), are not part of it and stand beside.
- `evict`: make room: find the coldest leaves, see that nobody leases them, take them out of the
  tree. Their blocks' states, ids and slots are given back beside it.
- `interpreter`: a thousand rounds of an empty loop, between the samples of the other rows: how fast
  this machine was meanwhile.

Memory is weighed object by object; what the allocator wastes is not in it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from hicache.bench.report import ProgressStep
from hicache.protocol.keys import ROOT_KEY, chain_keys
from tests.bench.synthetic_tree import (
    CLOCK_S,
    LONG,
    PROMPT,
    SHARED,
    TURN,
    SyntheticTree,
    clock,
    quiet,
)

PAGES: Final = (1, 16, 64)
SCALES_MILLIONS: Final = (1, 10, 100)
NAMESPACES: Final = (1, 4000)
BATCH: Final = 5
"""A sample is the mean of a few calls: the clock itself costs about a microsecond."""


@dataclass(frozen=True, slots=True)
class IndexRow:
    """Microseconds of thread-CPU time for one operation of the index, over `n` samples."""

    op: str
    page_tokens: int
    query_tokens: int
    p50_us: float
    p99_us: float
    n: int
    indexed_tokens: int

    @classmethod
    def of(cls, op: str, page: int, query: int, seconds: list[float], indexed: int) -> IndexRow:
        p50, p99 = np.percentile(seconds, (50, 99)) * 1e6
        p50_us, p99_us = round(float(p50), 2), round(float(p99), 2)
        return cls(op, page, query, p50_us, p99_us, len(seconds), indexed)


def run(step: ProgressStep, repeat: int = 300) -> tuple[list[IndexRow], float, float]:
    """All rows; bytes per token of tokens and tree at page 16, and with all per-block state."""
    rows: list[IndexRow] = []
    weight = (0.0, 0.0)
    for page in PAGES:
        planted, found = _rows(page, step, repeat)
        rows += found
        if page == 16:
            weight = planted.weigh()
    return rows, *weight


def scale(step: ProgressStep, repeat: int = 200) -> tuple[list[IndexRow], list[dict[str, float]]]:
    """The same operations while the index grows from 1 M to 100 M tokens; and its memory."""
    rows: list[IndexRow] = []
    memory: list[dict[str, float]] = []
    for page in (16, 256):
        planted = SyntheticTree(page, 104_000_000)
        prompts: list[bytes] = []
        for millions in SCALES_MILLIONS:
            missing = millions * 1_000_000 - planted.num_tokens
            what = f"page {page}, {millions} M tokens"
            prompts += planted.plant(max(1, missing // (PROMPT - SHARED)), step, what)
            quiet()
            tree, everything = planted.weigh()
            memory.append(
                {
                    "page_tokens": page,
                    "indexed_tokens": planted.num_tokens,
                    "bytes_per_token": tree,
                    "bytes_per_token_with_state": everything,
                }
            )
            few = planted.rng.integers(0, len(prompts), 50).tolist()
            queries = [prompts[number] for number in few]
            rows.append(_measured("hit", planted, PROMPT, _cycle(planted.hit, queries), repeat))
            rows += _inserts(planted, 40)
            rows += _evicts(planted, SHARED, 40)
            rows.append(_pace(planted))
        gc.unfreeze()
    rows += _namespaces(step, repeat)
    return rows, memory


def _rows(page: int, step: ProgressStep, repeat: int) -> tuple[SyntheticTree, list[IndexRow]]:
    what = f"page {page}"
    planted = SyntheticTree(page, 2000 * PROMPT)
    prompts = planted.plant(2000, step, f"{what}: planting")
    chunks = planted.plant_long(PROMPT)
    turns = planted.plant_long(TURN)
    branched = planted.plant_long(TURN, branched=True)
    for tokens in (chunks, turns, branched):
        planted.ask(tokens)  # matches the last turn like those before it
    quiet()
    step(f"{what}: measuring", 0, 1)
    rows = []
    for op, num_tokens, query in (
        ("hit", PROMPT, prompts[77]),
        ("hit", 32768, chunks[: 32768 * 4]),
        ("hit", LONG, chunks),
        ("hit_turns", LONG, turns),
        ("hit_turns_branched", LONG, branched),
        ("hit_then_miss", LONG, prompts[5][: SHARED * 4] + planted.random(LONG - SHARED)),
    ):
        rows.append(_measured(op, planted, num_tokens, _cycle(planted.hit, [query]), repeat))
    rows += _inserts(planted, 100)
    rows += _evicts(planted, SHARED, 100)
    rows += _evicts(planted, 1_500_000, 5)
    gc.unfreeze()
    return planted, [*rows, _pace(planted)]


def _namespaces(step: ProgressStep, repeat: int) -> list[IndexRow]:
    """Hits where one and where thousands of namespaces have a prompt each."""
    rows = []
    planted = SyntheticTree(16, 2 * max(NAMESPACES) * SHARED)
    prompts: list[bytes] = []
    for count in NAMESPACES:
        for number in range(len(prompts), count):
            if number % 100 == 0:
                step("namespaces", number, count)
            planted.open(number)
            prompts.append(planted.random(SHARED))
            planted.store(prompts[-1])
        quiet()
        op = f"hit_in_{count}_namespaces"
        rows.append(_measured(op, planted, SHARED, _cycle(planted.hit, prompts[-1:]), repeat))
    gc.unfreeze()
    return rows


def _measured(
    op: str, planted: SyntheticTree, num_tokens: int, call: Callable[[], object], repeat: int
) -> IndexRow:
    seconds = []
    for _ in range(repeat):
        planted.note_pace()
        start = clock()
        for _ in range(BATCH):
            call()
        seconds.append((clock() - start) / BATCH)
    return IndexRow.of(op, planted.page, num_tokens, seconds, planted.num_tokens)


def _inserts(planted: SyntheticTree, repeat: int) -> list[IndexRow]:
    """As in a full cache: old blocks were evicted for the new prompts, and their ids are reused."""
    inserted, occupied, hashed = [], [], []
    planted.make_room(repeat * PROMPT)
    for _ in range(repeat):
        planted.note_pace()
        tokens = planted.random(PROMPT)
        planted.now_s += 1e-3
        start = clock()
        count = planted.insert(tokens)
        inserted.append(clock() - start - CLOCK_S)
        start = clock()
        planted.occupy(count)
        occupied.append(clock() - start)
    for _ in range(max(3, repeat // 10)):
        start = clock()
        chain_keys(b"n" * 32, ROOT_KEY, tokens, planted.step)
        hashed.append(clock() - start)
    return [
        IndexRow.of("insert", planted.page, PROMPT, inserted, planted.num_tokens),
        IndexRow.of("insert_slots_and_states", planted.page, PROMPT, occupied, planted.num_tokens),
        IndexRow.of("insert_hashing", planted.page, PROMPT, hashed, planted.num_tokens),
    ]


def _evicts(planted: SyntheticTree, num_tokens: int, repeat: int) -> list[IndexRow]:
    """Eviction is measured; after a large one, new prompts are stored."""
    evicted, freed = [], []
    is_much = num_tokens > PROMPT
    times = 1 if is_much else BATCH
    for _ in range(repeat):
        planted.note_pace()
        evicting_s, forgetting_s = planted.make_room(num_tokens, times)
        evicted.append(evicting_s)
        freed.append(forgetting_s)
        for _ in range(is_much * num_tokens // PROMPT):
            planted.store(planted.random(PROMPT))
    return [
        IndexRow.of("evict", planted.page, num_tokens, evicted, planted.num_tokens),
        IndexRow.of("evict_slots_and_states", planted.page, num_tokens, freed, planted.num_tokens),
    ]


def _pace(planted: SyntheticTree) -> IndexRow:
    row = IndexRow.of("interpreter", planted.page, 0, planted.rates, planted.num_tokens)
    planted.rates.clear()
    return row


def _cycle(call: Callable[[bytes], object], queries: list[bytes]) -> Callable[[], object]:
    position = 0

    def once() -> object:
        nonlocal position
        position = (position + 1) % len(queries)
        return call(queries[position])

    return once

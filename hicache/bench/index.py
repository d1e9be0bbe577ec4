"""The radix index by itself: the product's own engine over slots that hold nothing.

Thread-CPU time. A *hit* collects the path, the residency runs and the block ids. An *insert*
matches and hangs in a new prompt of 8,192 tokens; hashing its blocks and the bookkeeping of slots
and states are not part of it and stand beside it. An *evict* gives up the coldest tokens of a full
tier; the slots' free list stands beside it again.

    tree: 2,000 prompts of 8,192 tokens in 50 groups that share their first 2,048
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable
from typing import Final

import numpy as np

from hicache.bench.report import IndexRow, Step
from hicache.engine import plan as p
from hicache.engine.blocks import State
from hicache.engine.core import CacheEngine
from hicache.engine.index import Path
from hicache.engine.planner import PlannerSettings
from hicache.engine.settings import EngineSettings
from hicache.keys import ROOT_KEY, chain_keys
from hicache.tiers.block import Ids, TierSpec
from hicache.tiers.slots import SlotPool

PROMPT: Final = 8192
SHARED: Final = 2048
GROUPS: Final = 50
LONG: Final = 131072
TURN: Final = 512
BLOCK_BYTES: Final = 4096
PAGES: Final = (1, 16, 64)

clock = time.thread_time


class TimedPool(SlotPool):
    """A free list that knows how long it took, so that it can stand beside and not within."""

    seconds = 0.0

    def free(self, slot_bytes: int, slots: Ids) -> None:
        """See SlotPool."""
        start = clock()
        super().free(slot_bytes, slots)
        self.seconds += clock() - start


class Grove:
    """A cache engine with one tier in memory that is filled to the brim with random prompts."""

    def __init__(self, page: int, num_tokens: int, seed: int = 1) -> None:
        self.page = page
        self.step = page * 4
        self.rng = np.random.default_rng(seed)
        room = (num_tokens + 64 * LONG) // page
        tier = TierSpec("dram", room * BLOCK_BYTES, mapped=True, high_watermark=1.0)
        self.pool = TimedPool(tier.capacity_bytes)
        settings = EngineSettings(planner=PlannerSettings(mode="always_reload"))
        self.engine = CacheEngine([tier], [self.pool], [], settings, lambda: 0.5)
        self.now_s = 1.0
        self.engine.handle(p.TierUp("dram", self.now_s))
        self.namespace = self.engine.handle(p.OpenNamespace(b"n" * 32, page, BLOCK_BYTES)).answer
        self.house = self.engine.residency
        self.root = self.house.namespaces[self.namespace].root
        self.num_tokens = 0

    def random(self, num_tokens: int) -> bytes:
        return self.rng.integers(0, 1 << 17, num_tokens, dtype=np.uint32).tobytes()

    def insert(self, tokens: bytes) -> int:
        """The index's part: match and hang in. Returns the number of new blocks."""
        path = self.house.index.match(self.root, tokens, self.step)
        count = len(tokens) // self.step - path.num_blocks
        if count:
            node = self.house.index.extend(self.root, path, tokens, self.step, count)
            node.touched_s = self.now_s
            self._last = node
        return count

    def occupy(self, count: int) -> None:
        """Slots and states of the blocks inserted last."""
        ids = self._last.block_ids()
        slots = self.pool.allocate(BLOCK_BYTES, count)
        self.house.blocks.fill(0, ids, slots)
        self.house.blocks.change(0, ids, State.READY)
        self.house.settle(ids)

    def store(self, tokens: bytes) -> None:
        self.now_s += 1e-3
        count = self.insert(tokens)
        if count:
            self.occupy(count)
            self.num_tokens += count * self.page

    def hit(self, tokens: bytes) -> tuple[Path, list[p.TierRun], Ids]:
        """Path, residency runs and block ids of a prompt."""
        path = self.house.index.match(self.root, tokens, self.step)
        runs, _ = self.engine.matching.runs(path)
        return path, runs, path.ids()

    def plant(self, num_prompts: int, step: Step, what: str) -> list[bytes]:
        """The tree of the docstring. Returns the prompts."""
        heads = [self.random(SHARED) for _ in range(GROUPS)]
        prompts = []
        for number in range(num_prompts):
            if number % 100 == 0:
                step(what, number, num_prompts)
            tokens = heads[number % GROUPS] + self.random(PROMPT - SHARED)
            self.store(tokens)
            prompts.append(tokens)
        return prompts

    def plant_long(self, chunk: int, branched: bool = False) -> bytes:
        """131,072 tokens built in chunks, with another branch at every chunk if asked."""
        tokens = self.random(LONG)
        for end in range(chunk * 4, len(tokens) + 1, chunk * 4):
            self.store(tokens[:end])
            if branched:
                self.store(tokens[: end - self.step] + self.random(self.page))
        return tokens


def run(step: Step, repeat: int = 300) -> tuple[list[IndexRow], float, float]:
    """All rows; bytes per token of tokens and tree at page 16, and with all per-block state."""
    rows: list[IndexRow] = []
    for page in PAGES:
        rows += _rows(page, step, repeat)
    return rows, *_memory(step)


def scale(step: Step, repeat: int = 200) -> list[IndexRow]:
    """The same operations while the index grows from 1 M to 100 M tokens."""
    rows: list[IndexRow] = []
    for page in (16, 256):
        grove = Grove(page, 104_000_000)
        prompts: list[bytes] = []
        for millions in (1, 10, 100):
            missing = millions * 1_000_000 - grove.num_tokens
            prompts += grove.plant(
                max(1, missing // (PROMPT - SHARED)), step, f"{millions} M tokens"
            )
            _quiet()
            few = grove.rng.integers(0, len(prompts), 50).tolist()
            queries = [prompts[number] for number in few]
            rows.append(_measured("hit", grove, PROMPT, _cycle(grove.hit, queries), repeat))
            rows += _inserts(grove, 60)
            rows += _evicts(grove, SHARED, 60)
        gc.unfreeze()
    return rows


def _rows(page: int, step: Step, repeat: int) -> list[IndexRow]:
    what = f"page {page}"
    grove = Grove(page, 2000 * PROMPT)
    prompts = grove.plant(2000, step, f"{what}: planting")
    chunks = grove.plant_long(PROMPT)
    turns = grove.plant_long(TURN)
    branched = grove.plant_long(TURN, branched=True)
    _quiet()
    step(f"{what}: measuring", 0, 1)
    rows = []
    for op, tokens, query in (
        ("hit", PROMPT, prompts[77]),
        ("hit", 32768, chunks[: 32768 * 4]),
        ("hit", LONG, chunks),
        ("hit_turns", LONG, turns),
        ("hit_turns_branched", LONG, branched),
        ("hit_then_miss", LONG, prompts[5][: SHARED * 4] + grove.random(LONG - SHARED)),
    ):
        rows.append(_measured(op, grove, tokens, _cycle(grove.hit, [query]), repeat))
    rows += _inserts(grove, 100)
    rows += _evicts(grove, SHARED, 100)
    rows += _evicts(grove, 1_500_000, 5)
    gc.unfreeze()
    return rows


def _measured(
    op: str, grove: Grove, tokens: int, call: Callable[[], object], repeat: int, batch: int = 5
) -> IndexRow:
    """A sample is the mean of a few calls: the clock itself costs half a microsecond."""
    seconds = []
    for _ in range(repeat):
        start = clock()
        for _ in range(batch):
            call()
        seconds.append((clock() - start) / batch)
    return IndexRow.of(op, grove.page, tokens, seconds, grove.num_tokens)


def _inserts(grove: Grove, repeat: int) -> list[IndexRow]:
    inserted, occupied, hashed = [], [], []
    for _ in range(repeat):
        tokens = grove.random(PROMPT)
        grove.now_s += 1e-3
        start = clock()
        count = grove.insert(tokens)
        inserted.append(clock() - start)
        start = clock()
        grove.occupy(count)
        occupied.append(clock() - start)
        start = clock()
        chain_keys(b"n" * 32, ROOT_KEY, tokens, grove.step)
        hashed.append(clock() - start)
        grove.num_tokens += PROMPT
    return [
        IndexRow.of("insert", grove.page, PROMPT, inserted, grove.num_tokens),
        IndexRow.of("insert_slots_and_states", grove.page, PROMPT, occupied, grove.num_tokens),
        IndexRow.of("insert_hashing", grove.page, PROMPT, hashed, grove.num_tokens),
    ]


def _evicts(grove: Grove, num_tokens: int, repeat: int) -> list[IndexRow]:
    """Room is made, measured, and filled again with new prompts (not measured)."""
    evicted, freed = [], []
    count = num_tokens // grove.page
    for _ in range(repeat):
        wanted = grove.pool.available(BLOCK_BYTES) + count
        grove.pool.seconds = 0.0
        start = clock()
        grove.engine.evictor.make_room(0, BLOCK_BYTES, wanted)
        seconds = clock() - start
        evicted.append(seconds - grove.pool.seconds)
        freed.append(grove.pool.seconds)
        grove.num_tokens -= num_tokens
        while num_tokens > 10 * PROMPT and grove.pool.available(BLOCK_BYTES) > wanted - count:
            grove.store(grove.random(PROMPT))
    return [
        IndexRow.of("evict", grove.page, num_tokens, evicted, grove.num_tokens),
        IndexRow.of("evict_slots", grove.page, num_tokens, freed, grove.num_tokens),
    ]


def _memory(step: Step) -> tuple[float, float]:
    """Bytes per token at page 16: tokens and tree; the same with all per-block state."""
    gc.collect()
    tracemalloc.start()
    grove = Grove(16, 500 * PROMPT)
    pool_bytes = tracemalloc.get_traced_memory()[0]
    grove.plant(500, step, "weighing").clear()
    gc.collect()
    total = tracemalloc.get_traced_memory()[0] - pool_bytes
    tracemalloc.stop()
    blocks = grove.house.blocks
    state = blocks.num_bytes()
    return round((total - state) / grove.num_tokens, 2), round(total / grove.num_tokens, 2)


def _cycle(call: Callable[[bytes], object], queries: list[bytes]) -> Callable[[], object]:
    position = 0

    def once() -> object:
        nonlocal position
        position = (position + 1) % len(queries)
        return call(queries[position])

    return once


def _quiet() -> None:
    """The collector would walk millions of objects in the middle of a measurement."""
    gc.collect()
    gc.freeze()

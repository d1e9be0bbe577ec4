"""Trees to measure: the product's own cache engine over slots without memory.

    2,000 prompts of 8,192 tokens in 50 groups that share their first 2,048

They are stored the way an inference engine does it: ask for the prompt, release, put, commit.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import Final

import numpy as np

from hicache.bench.report import ProgressStep
from hicache.engine import plan as p
from hicache.engine.core import CacheEngine
from hicache.engine.index.radix import Path
from hicache.engine.planner.planner import PlannerSettings
from hicache.engine.residency.block_ids import Span
from hicache.engine.residency.blocks import BlockTable, CopyState
from hicache.engine.settings import EngineSettings
from hicache.tiers.block import TierSpec, TierTraits
from hicache.tiers.pool import SlotPool

PROMPT: Final = 8192
SHARED: Final = 2048
GROUPS: Final = 50
LONG: Final = 131072
TURN: Final = 512
BLOCK_BYTES: Final = 4096
OWNER: Final = 1
TTL_S: Final = 60.0

clock = time.thread_time


def _clock_s() -> float:
    start = clock()
    for _ in range(1000):
        clock()
    return (clock() - start) / 1001


CLOCK_S: Final = _clock_s()
"""The time of reading the clock, about a microsecond, which is subtracted."""


class DeferredForget:
    """Replaces `BlockTable.forget`: collects the calls, so that they can be timed by themselves."""

    def __init__(self, blocks: BlockTable) -> None:
        self._forget = blocks.forget
        self._asked: list[tuple[int, list[Span], int]] = []
        vars(blocks)["forget"] = self

    def __call__(self, tier: int, spans: list[Span], slot_bytes: int) -> int:
        self._asked.append((tier, spans[:], slot_bytes))
        return 0

    def seconds(self) -> float:
        """Do all collected calls. Returns the seconds."""
        start = clock()
        for asked in self._asked:
            self._forget(*asked)
        self._asked.clear()
        return clock() - start - CLOCK_S


class SyntheticTree:
    """A cache engine with one tier in memory and random prompts.

    `rates`: see `note_pace`.
    """

    def __init__(
        self,
        page: int,
        num_tokens: int,
        planner: PlannerSettings | None = None,
        seed: int = 1,
    ) -> None:
        self.page = page
        self.step = page * 4
        self.rng = np.random.default_rng(seed)
        room = (num_tokens + 64 * LONG) // page
        tier = TierSpec("dram", room * BLOCK_BYTES, TierTraits(mapped=True), high_watermark=1.0)
        self.pool = SlotPool(tier.capacity_bytes)
        settings = EngineSettings(planner=planner or PlannerSettings(mode="always_reload"))
        self.engine = CacheEngine([tier], [self.pool], [], settings, lambda: 0.5)
        self.now_s = 1.0
        self.engine.handle(p.TierUp("dram", self.now_s))
        self.server = self.engine.residency
        self._forgetting = DeferredForget(self.server.blocks)
        self.open(0)
        self.num_tokens = 0
        self.rates: list[float] = []

    def open(self, number: int) -> None:
        """Switch to the namespace of this number."""
        digest = number.to_bytes(32, "big")
        event = p.OpenNamespace(digest, self.page, BLOCK_BYTES)
        self.namespace = self.engine.handle(event).answer
        self.root = self.server.namespaces[self.namespace].root

    def note_pace(self) -> None:
        """How long a thousand rounds of an empty loop take now. A shared processor runs at half
        its speed while others use its other half, and changes within milliseconds."""
        start = clock()
        for _ in range(1000):
            pass
        self.rates.append(clock() - start - CLOCK_S)

    def random(self, num_tokens: int) -> bytes:
        """A prompt, as little-endian u32."""
        return self.rng.integers(0, 1 << 17, num_tokens, dtype=np.uint32).tobytes()

    def ask(self, tokens: bytes) -> None:
        """The whole decision on a prompt, its bookkeeping, and the release of its lease."""
        self.now_s += 1e-3
        event = p.MatchPrompt(self.namespace, tokens, OWNER, self.now_s, TTL_S)
        matched = self.engine.handle(event).answer
        self.engine.catch_up()
        self.engine.handle(p.Release(matched.lease, self.now_s))

    def store(self, tokens: bytes) -> None:
        """Match a prompt, and store its new blocks."""
        handle = self.engine.handle
        self.ask(tokens)
        num_blocks = len(tokens) // self.step
        put = p.Put(self.namespace, tokens, 0, num_blocks, OWNER, self.now_s, TTL_S)
        placed = handle(put).answer
        if placed.ticket:
            handle(p.Commit(placed.ticket, placed.indices, self.now_s))
            self.num_tokens += len(placed.indices) * self.page

    def hit(self, tokens: bytes) -> tuple[Path, list[p.TierRun], list[Span]]:
        """Path, residency runs and block ids (as indices into the arrays) of a prompt."""
        path = self.server.index.match(self.root, tokens, self.step)
        runs, _ = self.engine.matching.runs(path, 0.0)
        return path, runs, path.spans(0, path.num_blocks)

    def make_room(self, num_tokens: int, times: int = 1) -> tuple[float, float]:
        """Evict the coldest `num_tokens`, `times` times. Returns the seconds of each, and those of
        freeing states, ids and slots afterwards."""
        wanted = self.pool.available(BLOCK_BYTES) + num_tokens // self.page
        self.num_tokens -= num_tokens * times
        make_room = self.engine.evictor.make_room
        start = clock()
        for _ in range(times):
            make_room(0, BLOCK_BYTES, wanted)
        evicting_s = clock() - start - CLOCK_S
        return evicting_s / times, self._forgetting.seconds() / times

    def insert(self, tokens: bytes) -> int:
        """The index's part of storing: match and insert. Returns the number of new blocks."""
        path = self.server.index.match(self.root, tokens, self.step)
        count = len(tokens) // self.step - path.num_blocks
        if count:
            symbols = tokens[path.num_blocks * self.step :]
            node = self.server.index.extend(self.root, path, symbols, self.step)
            node.touched_s = self.now_s
            self._last = node
            self.num_tokens += count * self.page
        return count

    def occupy(self, count: int) -> None:
        """Slots and states of the blocks inserted last."""
        blocks, span = self.server.blocks, self._last.span
        blocks.fill(0, span, self.pool.allocate(BLOCK_BYTES, count))
        blocks.change(0, span, CopyState.READY)
        self.server.settle(self._last.block_ids())

    def plant(self, num_prompts: int, step: ProgressStep, what: str) -> list[bytes]:
        """The tree of the docstring. Returns some hundreds of the prompts."""
        heads = [self.random(SHARED) for _ in range(GROUPS)]
        prompts: list[bytes] = []
        for number in range(num_prompts):
            if number % 100 == 0:
                step(what, number, num_prompts)
            tokens = heads[number % GROUPS] + self.random(PROMPT - SHARED)
            self.store(tokens)
            if len(prompts) < 2 * GROUPS or number % GROUPS == number // GROUPS % GROUPS:
                prompts.append(tokens)
        return prompts

    def plant_long(self, chunk: int, branched: bool = False) -> bytes:
        """131,072 tokens built in chunks, with another try at every chunk if asked: all but its
        last block is the same."""
        tokens = self.random(LONG)
        for end in range(chunk * 4, len(tokens) + 1, chunk * 4):
            self.store(tokens[:end])
            if branched:
                self.store(tokens[: end - self.step] + self.random(self.page))
        return tokens

    def weigh(self) -> tuple[float, float]:
        """Bytes per token: tokens and tree with its candidates; the same with all per-block
        state."""
        server = self.server
        size = sys.getsizeof
        tree = size(server.index.nodes)
        for namespace in server.namespaces:
            for node in server.index.subtree(namespace.root):
                tree += size(node) + size(node.children) + size(node.holding) + size(node.span)
                tree += CANDIDATE_BYTES
                stem = node.stem
                if stem.nodes[0] is node:
                    tree += size(stem) + size(stem.nodes) + size(stem.symbols)
        total = tree + server.blocks.num_bytes()
        return round(tree / self.num_tokens, 2), round(total / self.num_tokens, 2)


CANDIDATE_BYTES: Final = 2 * 8 + 2 * sys.getsizeof(0.0)
"""The memory of a policy per leaf: its places in two queues, and the times there and on the
node."""


def quiet() -> None:
    """Otherwise the collector would walk millions of objects during a measurement."""
    gc.collect()
    gc.freeze()

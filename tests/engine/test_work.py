"""A fetch as large as the memory costs the same per block, however large: counted in lines run and
not in seconds, while outcomes come in small batches and another prompt must be written down for it.
"""

from __future__ import annotations

import sys
from collections import deque
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from hicache.engine import plan as p
from hicache.engine.core import CacheEngine
from hicache.engine.planner.planner import PlannerSettings
from hicache.engine.requests import block_keys
from hicache.engine.settings import EngineSettings
from hicache.tiers.block import TierSpec
from hicache.tiers.pool import SlotPool
from tests.engine.world import BLOCK_BYTES, BLOCK_TOKENS, DIGEST, MAPPED, ON_DISK, STEP

pytestmark = pytest.mark.thorough

BATCH = 4
MOVING_BLOCKS = 64


class Lines:
    """Counts the lines of the cache engine that run meanwhile."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Lines:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._ran if "/engine/" in frame.f_code.co_filename else None

    def _ran(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.count += event == "line"
        return self._ran


class Errand:
    """Two prompts of `num_blocks` in a memory that holds one of them: the first lies on disk."""

    def __init__(self, num_blocks: int, num_turns: int) -> None:
        slots = num_blocks * 21 // 20
        tiers = [
            TierSpec("dram", slots * BLOCK_BYTES, MAPPED),
            TierSpec("disk", 6 * num_blocks * BLOCK_BYTES, ON_DISK),
        ]
        slab_bytes = max(1, num_blocks // 64) * BLOCK_BYTES
        self.engine = CacheEngine(
            tiers,
            [SlotPool(tier.capacity_bytes, slab_bytes) for tier in tiers],
            [(0, 1), (1, 0)],
            EngineSettings(
                planner=PlannerSettings(mode="always_reload"),
                max_moving_bytes=MOVING_BLOCKS * BLOCK_BYTES,
            ),
            lambda: 0.99,
        )
        self.now_s = 0.0
        self.queue: deque[p.Move] = deque()
        self.finished: set[int] = set()
        for tier in tiers:
            self.do(p.TierUp(tier.name, self.now_s))
        self.namespace = self.do(p.OpenNamespace(DIGEST, BLOCK_TOKENS, BLOCK_BYTES))
        rng = np.random.default_rng(1)
        shape = (2, num_blocks * BLOCK_TOKENS + 1)
        self.prompts = [row.tobytes() for row in rng.integers(0, 1 << 20, shape, "<u4")]
        for tokens in self.prompts:
            self.store(tokens, num_blocks, num_blocks // num_turns)

    def do(self, event: p.Event[Any]) -> Any:
        plan = self.engine.handle(event)
        later = self.engine.catch_up()
        self.queue.extend(plan.moves + (later.moves if later else []))
        if isinstance(plan.answer, p.Arrivals):
            self.finished.update(plan.answer.finished)
        return plan.answer

    def end_a_batch(self) -> None:
        self.now_s += 0.01
        batch = [self.queue.popleft() for _ in range(min(BATCH, len(self.queue)))]
        self.engine.identify(batch)
        outcomes = [p.Outcome(move.id, ok=True, seconds=0.001) for move in batch]
        self.do(p.MovesDone(outcomes, self.now_s))

    def store(self, tokens: bytes, num_blocks: int, at_a_time: int) -> None:
        first = 0
        while first < num_blocks:
            self.now_s += 1.0
            last = min(num_blocks, first + at_a_time)
            put = p.Put(self.namespace, tokens[: last * STEP], first, last, 1, self.now_s, 1e9)
            placed = self.do(put)
            if placed.ticket:
                self.do(p.Commit(placed.ticket, placed.indices, self.now_s))
                first += len(placed.indices)
            else:
                assert self.queue, "no room, and none is coming"
                self.end_a_batch()
        while self.queue:
            self.end_a_batch()

    def fetch(self) -> int:
        """Fetch the first prompt. Returns how many blocks that was."""
        self.now_s += 1.0
        matched = self.do(p.MatchPrompt(self.namespace, self.prompts[0], 1, self.now_s, 1e9))
        fetched = self.do(p.Fetch(matched.lease, self.now_s, self.now_s + 1e9))
        assert fetched.waiting
        while matched.lease not in self.finished:
            self.end_a_batch()
        assert self.engine.residency.leases.leases[matched.lease].failed_at == len(
            self.engine.residency.leases.leases[matched.lease].ids
        )
        reloaded: int = matched.decision.reload_blocks
        return reloaded


def lines_per_block(num_blocks: int, num_turns: int) -> float:
    errand = Errand(num_blocks, num_turns)
    hashing = patch.object(block_keys, "keys_along", wraps=block_keys.keys_along)
    with hashing as hashed, Lines() as lines:
        assert errand.fetch() == num_blocks
    num_hashed = sum(len(edge) // step for (_, _, edge, step), _ in hashed.call_args_list)
    assert 0 < num_hashed <= 3 * num_blocks
    errand.engine.validate()
    return lines.count / num_blocks


@pytest.mark.parametrize("num_turns", [1, 16])
def test_a_large_fetch_costs_no_more_per_block_than_a_small_one(num_turns: int) -> None:
    """Every batch walked the whole path, asked for room for all that lacked it, and hashed the path
    again: eight times as many blocks took twenty times the work."""
    small, large = lines_per_block(192, num_turns), lines_per_block(1536, num_turns)
    assert large < 1.3 * small, (small, large)

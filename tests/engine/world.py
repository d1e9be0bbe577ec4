"""A scripted world around a CacheEngine: slots with contents, moves that end when told to.

`World` carries out plans against a dict from (tier, slot) to the key of what stands there, so that
a slot reused too early, a copy of the wrong block, or a miss of a stored one is seen at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from hicache.engine import plan as p
from hicache.engine.core import CacheEngine
from hicache.engine.settings import EngineSettings
from hicache.keys import chain_keys
from hicache.tiers.block import TierSpec
from hicache.tiers.slots import SlotPool

A = TypeVar("A")

BLOCK_TOKENS = 2
STEP = BLOCK_TOKENS * 4
BLOCK_BYTES = 4096
DIGEST = b"n" * 32
ROOT = bytes(32)

THREE_TIERS = (("hbm", 6, True, False), ("dram", 8, True, False), ("disk", 12, False, True))
TWO_TIERS = (("hbm", 6, False, False), ("dram", 8, True, False))


def tokens_of(*blocks: int) -> bytes:
    """A prompt whose i-th block holds the token blocks[i] twice."""
    return np.repeat(np.array(blocks, "<u4"), BLOCK_TOKENS).tobytes()


def keys_of(tokens: bytes) -> list[bytes]:
    return chain_keys(DIGEST, ROOT, tokens, STEP)


class World:
    """An engine, the contents of all slots, and the moves in flight."""

    def __init__(
        self,
        tiers: Sequence[tuple[str, int, bool, bool]] = THREE_TIERS,
        settings: EngineSettings | None = None,
    ) -> None:
        specs = [
            TierSpec(name, slots * BLOCK_BYTES, mapped, durable)
            for name, slots, mapped, durable in tiers
        ]
        pools = [SlotPool(spec.capacity_bytes, BLOCK_BYTES) for spec in specs]
        links = [(a, b) for a in range(len(specs)) for b in range(len(specs)) if abs(a - b) == 1]
        self.engine = CacheEngine(specs, pools, links, settings or EngineSettings(), lambda: 0.99)
        self.now_s = 1.0
        self.contents: dict[tuple[str, int], bytes] = {}
        self.rows: dict[bytes, p.StoredBlock] = {}
        self.in_flight: dict[int, p.Move] = {}
        self.arrived: dict[int, list[p.ReadyRun]] = {}
        self.finished: set[int] = set()
        self.durable: set[int] = set()
        self.namespace = self.do(p.OpenNamespace(DIGEST, BLOCK_TOKENS, BLOCK_BYTES))
        for spec in specs:
            self.do(p.TierUp(spec.name, self.now_s))

    def do(self, event: p.Event[A]) -> A:
        """Handle an event, take its moves, check every invariant."""
        plan = self.engine.handle(event)
        self.engine.identify(plan.moves)
        for move in plan.moves:
            self.in_flight[move.id] = move
        if isinstance(plan.answer, p.Arrivals):
            for lease, runs in plan.answer.arrived.items():
                self.arrived.setdefault(lease, []).extend(runs)
            self.finished.update(plan.answer.finished)
            self.durable.update(plan.answer.durable)
        self.engine.validate()
        return plan.answer

    # --- shorthands ---------------------------------------------------------------------------

    def match(self, tokens: bytes, owner: int = 1) -> p.Matched:
        self.now_s += 1
        return self.do(p.Match(self.namespace, tokens, owner, self.now_s, 100.0))

    def put(self, tokens: bytes, first: int = 0, last: int | None = None) -> p.Placed:
        self.now_s += 1
        last = len(tokens) // STEP if last is None else last
        return self.do(p.Put(self.namespace, tokens, first, last, 1, self.now_s, 100.0))

    def write(self, tokens: bytes, placed: p.Placed) -> None:
        """What a client does between put and commit."""
        keys = keys_of(tokens)
        for index, slot in zip(placed.indices.tolist(), placed.slots.tolist(), strict=True):
            self.contents[placed.tier, slot] = keys[index]

    def store(self, tokens: bytes, durable: bool = False) -> p.Placed:
        """put, write, commit: as much as finds room at once."""
        placed = self.put(tokens)
        if placed.ticket:
            self.write(tokens, placed)
            self.do(p.Commit(placed.ticket, placed.indices, self.now_s, durable))
        return placed

    def finish(self, *moves: int, ok: bool = True, corrupt: bool = False) -> p.Arrivals:
        """End these moves. A successful one copies what its source slot holds by now."""
        outcomes = []
        for number in moves:
            move = self.in_flight.pop(number)
            if ok:
                self._carry_out(move)
            outcomes.append(p.Outcome(number, ok, 0.001, "" if ok else "told to fail", corrupt))
        self.now_s += 1
        return self.do(p.MovesDone(outcomes, self.now_s))

    def finish_all(self) -> None:
        """End moves until there are none left."""
        for _ in range(1000):
            if not self.in_flight:
                return
            self.finish(*self.in_flight)
        raise AssertionError("the engine keeps moving blocks for ever")

    def read(self, ids_first: int, runs: Sequence[p.ReadyRun], tokens: bytes) -> int:
        """Check that ready runs hold the right blocks. Returns how many."""
        keys = keys_of(tokens)
        count = 0
        for run in runs:
            for offset, slot in enumerate(run.slots.tolist()):
                found = self.contents[run.tier, slot]
                assert found == keys[ids_first + run.first + offset], "wrong bytes"
                count += 1
        return count

    def _carry_out(self, move: p.Move) -> None:
        identity = move.identity
        if move.dst is None:
            assert identity is not None
            self.rows.pop(identity.key, None)
            return
        if move.src == "disk":
            assert identity is not None
            content = identity.key
            assert content in self.rows, "a read of a record that is not there"
        else:
            content = self.contents[move.src, move.src_slot]
            if identity is not None:
                assert content == identity.key, "another block stands in the source slot"
        if move.dst == "disk":
            assert identity is not None
            self.rows[identity.key] = p.StoredBlock(
                identity.key, identity.parent, identity.tokens, move.block_bytes, identity.hits
            )
        else:
            self.contents[move.dst, move.dst_slot] = content

    def lose(self, tier: str) -> None:
        """The tier's worker dies: its moves fail, then the engine hears of it."""
        mine = [n for n, move in self.in_flight.items() if tier in (move.src, move.dst)]
        for number in mine:
            del self.in_flight[number]
        self.do(p.TierDown(tier, self.now_s))
        assert not any(tier in (m.src, m.dst) for m in self.in_flight.values())

    def recover(self, tier: str) -> None:
        """The worker is back; a durable tier tells what it holds, parents first."""
        self.do(p.TierUp(tier, self.now_s))
        if tier == "disk":
            rows = self.rows_parents_first()
            homeless = self.do(p.Restore("disk", self.namespace, rows, self.now_s))
            for key in homeless:
                del self.rows[key]

    def rows_parents_first(self) -> list[p.StoredBlock]:
        ordered: list[p.StoredBlock] = []
        placed = {ROOT}
        waiting = list(self.rows.values())
        while waiting:
            ready = [row for row in waiting if row.parent in placed]
            if not ready:
                return ordered + waiting
            ordered += ready
            placed.update(row.key for row in ready)
            waiting = [row for row in waiting if row.key not in placed]
        return ordered

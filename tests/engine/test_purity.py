"""The cache engine runs on numbers alone: no arena, no file, no callback."""

from __future__ import annotations

import subprocess
import sys

from hicache.engine import plan as p
from tests.engine.world import BLOCK_BYTES, DIGEST, ONE_TIER, World, tokens_of

STORY = """
import sys
from hicache.engine import plan as p
from hicache.engine.core import CacheEngine
from hicache.engine.planner.planner import PlannerSettings
from hicache.engine.settings import EngineSettings
from hicache.tiers.block import PAGE_BYTES, TierSpec, TierTraits
from hicache.tiers.pool import SlotPool

mapped = TierTraits(mapped=True)
disk = TierTraits(persistent=True, deletion_is_io=True, keeps_whole_prefixes=True)
rooms = [("hbm", 6, mapped), ("dram", 8, mapped), ("disk", 200, disk)]
tiers = [TierSpec(name, pages * PAGE_BYTES, traits) for name, pages, traits in rooms]
pools = [SlotPool(tier.capacity_bytes, PAGE_BYTES) for tier in tiers]
links = [(0, 1), (1, 0), (1, 2), (2, 1)]
settings = EngineSettings(planner=PlannerSettings(mode="always_reload"))
engine = CacheEngine(tiers, pools, links, settings, lambda: 0.5)
reshaped = 0

def do(event):
    global reshaped
    plan = engine.handle(event)
    moves = plan.moves
    while moves:
        engine.identify(moves)
        done = engine.handle(p.MovesDone([p.Outcome(move.id, True) for move in moves], now_s))
        reshaped += len(done.reshaped)
        moves = done.moves
    reshaped += len(plan.reshaped)
    engine.validate()
    return plan.answer

for now_s, tier in enumerate(tiers):
    do(p.TierUp(tier.name, now_s))
spaces = [do(p.OpenNamespace(bytes([n]) * 32, 1, n * PAGE_BYTES)) for n in (1, 2)]
prompts = [bytes([n]) * 8 + bytes(4) for n in range(30)]
for now_s, prompt in enumerate(prompts):
    placed = do(p.Put(spaces[now_s % 2], prompt, 0, 2, 1, now_s, 100.0))
    do(p.Commit(placed.ticket, placed.indices, now_s, False))
matched = do(p.MatchPrompt(spaces[0], prompts[0], 1, now_s, 100.0))
assert [run.tier for run in matched.runs] == ["disk"], matched
do(p.Fetch(matched.lease, now_s, now_s + 9.0, False))
assert engine.readable_now(matched.lease, 0, 2)[0].tier == "dram"
assert do(p.Release(matched.lease, now_s)) and reshaped
print(*(name for name in sys.modules if name.startswith("hicache.tiers.")))
print(*({"mmap", "lmdb", "zmq"} & sys.modules.keys()))
"""


def test_the_engine_runs_without_an_arena() -> None:
    """Blocks of two sizes are put, demoted, written down, evicted, matched and fetched, in an
    interpreter of its own, so that only what the engine imports is loaded."""
    command = [sys.executable, "-c", STORY]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"hicache.tiers.block", "hicache.tiers.pool"}


def test_a_plan_names_the_pages_that_it_cuts_anew() -> None:
    """Blocks of one page come where a block of four pages was."""
    w = World(ONE_TIER, slab_bytes=4 * BLOCK_BYTES)
    large = w.open(b"l" * 32, 4 * BLOCK_BYTES)
    assert w.put(tokens_of(1), namespace=large).ticket
    w.do(p.WriterGone(1, w.now_s))

    plan = w.engine.handle(p.Put(0, tokens_of(1, 2, 3), 0, 3, 1, w.now_s, 100.0))
    assert plan.answer.slots.tolist() == [0, 1, 2]
    assert plan.reshaped == [p.Reshaped("dram", 0, 4)]
    assert w.engine.handle(p.Tick(w.now_s)).reshaped == (), "named once"


def test_pages_wait_for_the_next_plan_where_one_could_not_be_made() -> None:
    """A fault of the engine's own after it took slots: no answer named them, the next may."""
    w = World(ONE_TIER)
    pool = w.engine.residency.pools[0]
    slots = pool.allocate(BLOCK_BYTES, 1)
    pool.free(BLOCK_BYTES, slots)
    assert w.engine.handle(p.OpenNamespace(DIGEST, 2, BLOCK_BYTES)).reshaped == [
        p.Reshaped("dram", 0, 1)
    ]

"""What is written to a durable tier when memory gives it up, and what is forgotten instead."""

from __future__ import annotations

import math

import pytest

from hicache.engine import plan as p
from hicache.engine.index.node import Node
from hicache.engine.placement.write_gate import BURST_S, UNKNOWN_RETURN, WriteGate
from hicache.engine.planner.planner import PlannerSettings
from hicache.engine.policies.hazard.history import History
from hicache.engine.policies.hazard.model import NUM_BINS, Model
from hicache.engine.settings import EngineSettings
from tests.engine.world import BLOCK_BYTES, MAPPED, ON_DISK, World, tokens_of

DRAM_AND_DISK = (("dram", 8, MAPPED), ("disk", 40, ON_DISK))


def model_of(returns: float) -> Model:
    """All blocks return with this probability."""
    row = [returns] * NUM_BINS
    return Model([], row, [], row)


def leaf() -> Node:
    return Node(1, 0, Node(0, 0, None, slice(0, 0), 0, 0), slice(0, 1), 1, 0)


def gate_of(returns: float, min_return: float, bytes_per_s: float = math.inf) -> WriteGate:
    history = History()
    history.adopt(model_of(returns))
    return WriteGate(history, min_return, bytes_per_s)


def test_only_what_is_likely_to_return_passes() -> None:
    assert gate_of(0.3, 0.2).admits(leaf())
    assert not gate_of(0.1, 0.2).admits(leaf())
    assert WriteGate(None, UNKNOWN_RETURN, math.inf).admits(leaf())


def test_what_others_hang_from_passes() -> None:
    node = leaf()
    node.add_child(b"", leaf())
    assert gate_of(0.0, 0.2).admits(node)


@pytest.mark.parametrize("returns", [0.2, 0.5, 0.9])
def test_a_days_writes_come_to_the_budget(returns: float) -> None:
    """However much is given up, a budget is used and not exceeded, but for its first allowance."""
    gate = gate_of(returns, 0.0, bytes_per_s=1000.0)
    written = 0
    for second in range(0, 86_400, 10):
        gate.pass_time(float(second))
        for _ in range(10):  # five times what the budget allows
            if gate.admits(leaf()):
                gate.written(5000)
                written += 5000
    assert 86_000_000 < written < 86_400_000 + 1000 * BURST_S + 5000


def test_a_shorter_balance_demands_more() -> None:
    gate = gate_of(0.5, 0.1, bytes_per_s=1.0)
    assert gate.demanded == 0.1
    gate.written(int(0.4 * BURST_S))
    assert gate.admits(leaf())
    gate.written(int(0.2 * BURST_S))
    assert not gate.admits(leaf())
    gate.pass_time(0.0)
    gate.pass_time(0.2 * BURST_S)
    assert gate.admits(leaf())


def gated_world(min_return: float) -> World:
    reload = PlannerSettings(mode="always_reload")
    settings = EngineSettings(planner=reload)
    return World(DRAM_AND_DISK, settings, eviction="lfu", min_return=min_return)


def fill(world: World) -> None:
    """Four times what memory holds, each prompt once."""
    history = world.engine.history
    assert history is not None
    history.adopt(model_of(0.1))
    for number in range(8):
        world.store(tokens_of(number, number, number, number))
        world.finish_all()


def test_what_does_not_return_is_not_written() -> None:
    closed, opened = gated_world(0.2), gated_world(0.05)
    for world in (closed, opened):
        fill(world)
    assert closed.engine.residency.pools[1].used_bytes == 0
    assert closed.engine.evictor.dropped == closed.engine.gates()["disk"].refused_blocks > 0
    assert opened.engine.residency.pools[1].used_bytes >= 16 * BLOCK_BYTES
    assert opened.engine.evictor.dropped == 0


def test_what_somebody_waits_for_is_written_all_the_same() -> None:
    world = gated_world(1.0)
    history = world.engine.history
    assert history is not None
    history.adopt(model_of(0.0))
    world.store(tokens_of(1, 1, 1), durable=True)
    world.finish_all()
    assert world.engine.residency.pools[1].used_bytes == 3 * BLOCK_BYTES
    assert world.do(p.Flush(world.now_s)) == 0

"""Which queue, and so which threads and stream, a move uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.engine.plan import Priority
from hicache.transfer.move_queue import GPU_LIMITS
from hicache.transfer.queues import queue_name, queue_names
from tests.transfer.rig import GPU, Rig

STAND_IN = Path(__file__).parents[1] / "e2e" / "stand_in"


def test_a_disk_has_two_queues_and_a_gpu_two_for_each_priority() -> None:
    assert queue_names(by_priority=False) == {"read": "read", "write": "write"}
    names = queue_names(by_priority=True)
    assert list(names)[:3] == ["read-demand", "write-demand", "read-prefetch"]
    assert len(names) == 2 * len(Priority)
    assert names[queue_name("read", Priority.DEMOTION, by_priority=True)] == "read"


@pytest.fixture
def gpu_rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """With a worker whose CuPy is a stand-in."""
    paths = [str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    rig = Rig(tmp_path, devices=[GPU], on_gpu=True)
    yield rig
    rig.close()


def test_demands_are_sent_past_demotions_in_flight(gpu_rig: Rig) -> None:
    rig = gpu_rig
    rig.hold(GPU)
    low = [rig.move("hbm", "dram", n, Priority.DEMOTION) for n in range(200)]
    high = [rig.move("hbm", "dram", n) for n in range(200, 203)]
    assert not rig.submit(*low)
    assert not rig.submit(*high)
    device, direction = rig.mover._device_of["hbm", "dram"]
    demands, demotions = (device.queue(direction, p) for p in (Priority.DEMAND, Priority.DEMOTION))
    assert [m.id for b, _ in demands.in_flight.values() for m in b.moves] == [m.id for m in high]
    assert len(demotions.in_flight) <= GPU_LIMITS.in_flight
    assert rig.mover.overdue_s(rig.now_s + 100.0)[GPU] > 0
    rig.let_go(GPU)
    outcomes = rig.outcomes(*low, *high)
    assert len(outcomes) == 203
    assert rig.mover.num_queued() == {GPU: 0}

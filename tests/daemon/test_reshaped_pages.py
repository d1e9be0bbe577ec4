"""The loop raises the generations of reshaped pages before it does anything else with a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from hicache.config import Surroundings, parse_config
from hicache.daemon.build import assemble
from hicache.daemon.loop import Daemon
from hicache.engine import plan as p
from hicache.tiers.arena import Arena
from hicache.tiers.block import PAGE_BYTES
from hicache.tiers.hbm_probe import Gpus
from hicache.transfer.mover import Mover

CONFIG = """
socket: {{endpoint: "ipc://{folder}/socket"}}
tiers:
  hbm: {{size: 1MiB, device: host, path: "{folder}"}}
  dram: {{size: 1MiB, path: "{folder}"}}
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A whole daemon in this process. Its loop and its workers do not run."""
    config = parse_config(CONFIG.format(folder=tmp_path), "x.yaml", Surroundings("/", "")).config
    parts = assemble(config, Gpus(), lambda *_: None)
    made = Daemon(config, parts, [], lambda _: pytest.fail("the configuration is read again"))
    yield made
    made._close()


def test_a_slot_of_another_size_comes_over_one_that_is_being_read(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A client copies a block out of a slot of eight pages; its lease expires meanwhile.
    2. The slot is freed, and its pages are cut into slots of one page. A plan hands one of them,
       not the first, to a move, and another to a put.
    3. The loop raises the generations of all eight pages, then submits the move, then replies: so
       no byte changes before the client can see that its copy may be torn.
    """
    arena = daemon.parts.arenas["dram"]
    old_slot = np.array([0], np.int32)
    reader = Arena.attach(arena.path)
    seen = reader.generations(old_slot)
    was_raised: list[bool] = []
    submit = Mover.submit

    def watched(self: Mover, moves: Sequence[p.Move], now_s: float) -> list[p.Move]:
        was_raised.append(bool(reader.generations(old_slot) != seen))
        return submit(self, moves, now_s)

    monkeypatch.setattr(Mover, "submit", watched)
    sizes = PAGE_BYTES, PAGE_BYTES, PAGE_BYTES
    move = p.Move(1, 0, "hbm", 0, "dram", 3, *sizes, p.Priority.DEMOTION)
    daemon.dispatch(p.Plan(None, [move], [], [p.Reshaped("dram", 0, 8)]))
    assert was_raised == [True]
    assert (reader.generations(np.arange(9, dtype=np.int32)) - seen).tolist() == [1] * 8 + [0]


def test_a_put_is_answered_after_its_pages_generations_were_raised(daemon: Daemon) -> None:
    """The same through the whole daemon: two namespaces, whose blocks differ in size."""
    now_s = 1.0
    for tier in ("hbm", "dram"):
        daemon.gate.do(p.TierUp(tier, now_s))
    large = daemon.gate.do(p.OpenNamespace(b"l" * 32, 1, 8 * PAGE_BYTES))
    small = daemon.gate.do(p.OpenNamespace(b"s" * 32, 1, PAGE_BYTES))
    placed = daemon.gate.do(p.Put(large, bytes(4), 0, 1, 1, now_s, 100.0))
    reader = Arena.attach(daemon.parts.arenas[placed.tier].path)
    seen = reader.generations(placed.slots)
    daemon.gate.do(p.WriterGone(1, now_s))
    daemon.gate.do(p.Put(small, bytes(12), 0, 3, 2, now_s, 100.0))
    assert reader.generations(placed.slots) == seen + 1


def test_pages_of_a_tier_without_an_arena_are_no_work(daemon: Daemon) -> None:
    daemon.dispatch(p.Plan(None, [], [], [p.Reshaped("disk", 0, 8)]))

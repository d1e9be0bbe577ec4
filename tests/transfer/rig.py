"""Real workers on real devices, driven by a test as by the daemon's loop."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hicache.engine.plan import BlockIdentity, Move, Outcome, Priority
from hicache.tiers.block import slot_bytes_for
from hicache.tiers.disk.builder import MAX_COMMITTED
from hicache.tiers.dram import DramTier
from hicache.tiers.hbm import HostPool, emulated_spec, gpu_spec
from hicache.tiers.tier import DeviceSpec, DeviceTraits
from hicache.transfer.mover import Mover
from hicache.transfer.worker_events import MoverEvent, WorkerDown, WorkerRows, WorkerUp
from hicache.transfer.worker_messages import WorkerConfig
from tests.tiers.blocks import content, name

MIB = 1 << 20
BLOCK = 40_000
SLOT = slot_bytes_for(BLOCK)
WAIT_S = 30.0
DISK, GPU = "disk:test", "gpu:0"


class Rig:
    """Three tiers in a temporary folder and the mover over them. Block n lies at slot n's place in
    every tier; its bytes and identity follow from n."""

    def __init__(
        self,
        path: Path,
        *,
        devices: Sequence[str] = (DISK, GPU),
        capacity_bytes: int = 32 * MIB,
        on_gpu: bool = False,
        codec: str = "",
        disk_path: Path | None = None,
    ) -> None:
        self.dram = DramTier(path, "dram-", 16 * MIB)
        self.hbm = HostPool(path, "hbm-", 16 * MIB)
        self.disk_path = disk_path or path / "disk"
        disk = DeviceSpec(
            DISK,
            "hicache-disk-0",
            "hicache.transfer.media.disk:DiskMedium",
            capacity_bytes,
            {"path": str(self.disk_path), "durability": "fast"},
            DeviceTraits(persistent=True, batch_moves=MAX_COMMITTED),
            codec,
        )
        hbm = gpu_spec(0, 16 * MIB) if on_gpu else emulated_spec(self.hbm.arena)
        near = "dram", str(self.dram.path)
        configs = {
            DISK: WorkerConfig(disk, *near, "disk", probe_bytes=1 << 20),
            GPU: WorkerConfig(hbm, *near, "hbm", probe_bytes=1 << 20),
        }
        self.arenas = {"dram": self.dram.arena, "hbm": self.hbm.arena}
        self.events: list[MoverEvent] = []
        self.skew_s = 0.0
        self.forgotten: set[int] = set()
        self.takes_rows = True
        self._num_taken = 0
        self._next_id = 0
        self.mover = Mover([configs[d] for d in devices], self.arenas, self.identify)
        self.mover.start(self.now_s)
        self.wait(lambda: sum(isinstance(n, WorkerUp) for n in self.events) == len(devices))

    @property
    def now_s(self) -> float:
        return time.monotonic() + self.skew_s

    def identify(self, moves: Sequence[Move]) -> None:
        for move in moves:
            if move.block not in self.forgotten:
                n = name(move.block)
                fields = (n.namespace, n.key, n.parent, n.tokens, n.depth, n.hits)
                move.identity = BlockIdentity(*fields)

    def move(
        self,
        src: str,
        dst: str | None,
        block: int,
        priority: Priority = Priority.DEMAND,
        deadline_s: float | None = None,
    ) -> Move:
        self._next_id += 1
        slot = block * (SLOT // 4096)
        number = self._next_id
        return Move(
            number, block, src, slot, dst, slot, BLOCK, SLOT, SLOT, priority, None, deadline_s
        )

    def fill(self, tier: str, *blocks: int) -> None:
        for block in blocks:
            self.view(tier, block)[:] = content(block, BLOCK)

    def holds(self, tier: str, block: int) -> bool:
        return bool(np.array_equal(self.view(tier, block), content(block, BLOCK)))

    def view(self, tier: str, block: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        return self.arenas[tier].view(block * (SLOT // 4096), BLOCK)

    def submit(self, *moves: Move) -> list[Move]:
        return self.mover.submit(moves, self.now_s)

    def run(self, *moves: Move) -> list[Outcome]:
        """Submit and wait for all outcomes, in the order of the moves."""
        assert not self.submit(*moves)
        return self.outcomes(*moves)

    def outcomes(self, *moves: Move) -> list[Outcome]:
        ids = {move.id for move in moves}
        self.wait(lambda: ids <= {o.move for o in self.heard()})
        found = {outcome.move: outcome for outcome in self.heard()}
        return [found[move.id] for move in moves]

    def heard(self) -> list[Outcome]:
        """Every outcome so far, in the order in which it came."""
        outcomes = [event for event in self.events if isinstance(event, Outcome)]
        ids = [outcome.move for outcome in outcomes]
        assert len(ids) == len(set(ids)), "a move had two outcomes"
        return outcomes

    def heard_of(self, moves: Sequence[Move]) -> bool:
        """Whether any of these has an outcome."""
        return bool({outcome.move for outcome in self.heard()} & {move.id for move in moves})

    def wait(self, until: Callable[[], bool]) -> None:
        """Run the loop until the condition is true."""
        poller = select.poll()
        poller.register(self.mover.fileno(), select.POLLIN)
        give_up_s = time.monotonic() + WAIT_S
        while not until():
            assert time.monotonic() < give_up_s, f"waited too long; heard {self.events[-5:]}"
            poller.poll(20)
            self.events += self.mover.on_readable(self.now_s)
            self.events += self.mover.tick(self.now_s)
            self._take_rows()

    def _take_rows(self) -> None:
        """Acknowledge rows, as the daemon does, so that more come."""
        told = [event.device for event in self.events if isinstance(event, WorkerRows)]
        while self.takes_rows and self._num_taken < len(told):
            self.mover.taken(told[self._num_taken])
            self._num_taken += 1

    def pass_time(self, seconds: float) -> None:
        """Run the loop while its clock advances by `seconds`, one second per turn."""
        poller = select.poll()
        poller.register(self.mover.fileno(), select.POLLIN)
        for _ in range(int(seconds)):
            self.skew_s += 1.0
            poller.poll(20)
            self.events += self.mover.on_readable(self.now_s)
            self.events += self.mover.tick(self.now_s)

    def hold(self, device: str) -> None:
        """Stop the worker's process."""
        os.kill(self.mover.pids()[device], signal.SIGSTOP)

    def let_go(self, device: str) -> None:
        os.kill(self.mover.pids()[device], signal.SIGCONT)

    def downs(self) -> list[WorkerDown]:
        return [event for event in self.events if isinstance(event, WorkerDown)]

    def close(self) -> None:
        self.events += self.mover.close(10.0)
        self.heard()
        self.dram.close()
        self.hbm.close()

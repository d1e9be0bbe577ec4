"""A real GPU worker behind the daemon's own mover: the time of moves as the daemon makes them."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hicache.bench.gpu_check.check import Check
from hicache.bench.gpu_check.gpu_machine import arena_of
from hicache.engine.plan import Move, Outcome
from hicache.tiers.arena import Arena
from hicache.tiers.hbm import emulated_spec, gpu_spec
from hicache.transfer.mover import Mover
from hicache.transfer.worker_events import WorkerDown, WorkerUp
from hicache.transfer.worker_messages import WorkerConfig

WAIT_S = 30.0


class Fed:
    """A mover whose loop is run here. In a dry run its worker copies host memory."""

    def __init__(self, check: Check, near: Arena, far: Arena) -> None:
        spec = emulated_spec(far) if check.is_dry else gpu_spec(0, near.data_bytes)
        config = WorkerConfig(spec, "dram", str(near.path), "hbm", probe_bytes=0)
        self._mover = Mover([config], {"dram": near}, lambda moves: None)
        self._poller = select.poll()
        self._poller.register(self._mover.fileno(), select.POLLIN)
        self._num_moves = 0
        self._mover.start(time.monotonic())
        self._run(1, WorkerUp)

    def seconds(self, moves: Sequence[Move]) -> float:
        """Seconds from submitting all moves to the last outcome."""
        for move in moves:  # ids must be new
            self._num_moves += 1
            move.id = self._num_moves
        start = time.perf_counter()
        refused = self._mover.submit(moves, time.monotonic())
        assert not refused, "the mover's queue is full"
        self._run(len(moves), Outcome)
        return time.perf_counter() - start

    def close(self) -> None:
        self._mover.close(10.0)

    def _run(self, count: int, kind: type[Outcome] | type[WorkerUp]) -> None:
        """Run the loop until `count` events of this kind have come."""
        give_up_s = time.monotonic() + WAIT_S
        while count > 0:
            assert time.monotonic() < give_up_s, "the worker does not answer"
            self._poller.poll(1000)
            for news in self._mover.on_readable(time.monotonic()):
                assert not isinstance(news, WorkerDown), news.error
                assert not isinstance(news, Outcome) or news.ok, news
                count -= isinstance(news, kind)


@contextmanager
def fed(check: Check, num_bytes: int) -> Iterator[Fed]:
    far_bytes = num_bytes if check.is_dry else 1 << 20
    with arena_of(num_bytes) as near, arena_of(far_bytes) as far:
        worker = Fed(check, near, far)
        try:
            yield worker
        finally:
            worker.close()

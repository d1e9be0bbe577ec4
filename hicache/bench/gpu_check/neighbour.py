"""The cost of the worker's copies for an inference engine in another process: its matrix products,
alternately with and without copies in both directions."""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

from hicache.bench.gpu_check.check import Check, CheckStep
from hicache.bench.gpu_check.copies_check import Sides, paths, sides
from hicache.engine.plan import Move
from hicache.tiers.block import PAGE_BYTES
from hicache.transfer.media.cuda import CudaLink
from hicache.transfer.media.cuda_copy import CopyPath
from hicache.transfer.media.pinned_memory import CHUNK_BYTES

BLOCK = 2 << 20
BATCH = 8
TURNS = 4
TARGET = 0.03


class Neighbour:
    """The process of hicache/bench/gpu_check/matmul.py."""

    def __init__(self, is_dry: bool) -> None:
        command = [
            sys.executable,
            "-m",
            "hicache.bench.gpu_check.matmul",
            *(["--dry"] if is_dry else []),
        ]
        pipes = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipes, stdout=pipes, text=True)
        self._answer()

    def milliseconds(self, seconds: float) -> tuple[float, float]:
        """The median and the mean of one product."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        median, mean, _ = self._answer().split()
        return float(median), float(mean)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the matrix process ended with status {self._process.wait()}")
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()


class CopyTraffic:
    """Runs both links in a `with`, each in its thread, as in the worker."""

    def __init__(self, both: Sides) -> None:
        pages = BLOCK // PAGE_BYTES
        half = both.size // BLOCK // 2
        places = [(n * pages, n * pages, BLOCK) for n in range(2 * half)]
        down = [both.move("dram", "hbm", *place) for place in places[:half]]
        up = [both.move("hbm", "dram", *place) for place in places[half:]]
        self.num_bytes = 0
        self.errors: list[str] = []
        self._is_over = threading.Event()
        self._counting = threading.Lock()
        jobs = ((both.down, down), (both.up, up))
        self._threads = [threading.Thread(target=self._work, args=job) for job in jobs]

    def _work(self, link: CudaLink, moves: list[Move]) -> None:
        while not self._is_over.is_set():
            for start in range(0, len(moves), BATCH):
                outcomes = link.copy(moves[start : start + BATCH])
                with self._counting:
                    self.num_bytes += BLOCK * len(outcomes)
                    self.errors += [outcome.error for outcome in outcomes if not outcome.ok]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


def run(check: Check) -> None:
    with check.step("a process of bf16 products of 8192 x 8192 matrices") as step:
        with Neighbour(check.is_dry) as neighbour:
            for name, make in paths(check):
                with check.step(f"products beside copies both ways, by {name}") as part:
                    _compare(check, neighbour, make(), part)
        step.value = "ran to its end"


def _compare(check: Check, neighbour: Neighbour, copies: CopyPath, step: CheckStep) -> None:
    seconds, size = (0.2, 32 << 20) if check.is_dry else (1.5, 512 << 20)
    quiet: list[tuple[float, float]] = []
    busy: list[tuple[float, float]] = []
    rates = []
    with sides(check, size, copies, CHUNK_BYTES) as both:
        for _ in range(TURNS):
            quiet.append(neighbour.milliseconds(seconds))
            with CopyTraffic(both) as traffic:
                busy.append(neighbour.milliseconds(seconds))
            assert not traffic.errors, traffic.errors[0]
            rates.append(traffic.num_bytes / seconds / 1e9)
    alone, beside = (statistics.median(median for median, _ in part) for part in (quiet, busy))
    means = [statistics.median(mean for _, mean in part) for part in (quiet, busy)]
    slower = beside / alone - 1
    value = (
        f"{alone:.3f} ms alone, {beside:.3f} beside {statistics.median(rates):.0f} GB/s: "
        f"{slower:+.1%} (means {means[1] / means[0] - 1:+.1%}); target {TARGET:.0%}"
    )
    step.judge(slower <= TARGET, value, quiet_ms=quiet, busy_ms=busy, gb_s=rates)

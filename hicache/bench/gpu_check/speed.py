"""CudaLink beside plain pinned copies of the same bytes, by block size, and copies on the card.

    peak     one cudaMemcpyAsync of everything, between a buffer pinned by CUDA and the card
    plain    one cudaMemcpyAsync a block, in order, of the same buffer; one wait at the end
    each     CudaLink, blocks in random slots of the pinned arena, by cudaMemcpyAsync
    batch    the same by cuMemcpyBatchAsync
    fed      the same in batches of a lane's size, as many in flight as a lane allows
    worker   a worker process fed by the daemon's own mover: the figure that is judged

All in GB/s (10⁹), each the median of a few rounds that take turns.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from rich.table import Table

from hicache.bench.gpu_check.check import Check, Skipped
from hicache.bench.gpu_check.copies_check import Sides, paths, sides
from hicache.bench.gpu_check.feeding import Fed, fed
from hicache.bench.report import wide_console
from hicache.engine.plan import Move
from hicache.tiers.block import PAGE_BYTES
from hicache.transfer.media.cuda import CudaLink, Started
from hicache.transfer.media.cuda_copy import CopyPath, CopyRefused, rows_of
from hicache.transfer.media.pinned_memory import CHUNK_BYTES
from hicache.transfer.move_queue import GPU_LIMITS

BLOCKS = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20, 8 << 20, 32 << 20)
JUDGED_BLOCK, TARGET = 2 << 20, 0.90
MAX_MOVES = 4096
ROUNDS = 7

Timed = Callable[[], float]


def run(check: Check) -> None:
    total = (64 << 20) if check.is_dry else (512 << 20)
    rounds = 2 if check.is_dry else ROUNDS
    table = Table(title="GB/s by block size")
    names = ("peak", "plain", *_NAMES)
    for column in ("way", "KiB", *names, "worker of peak"):
        table.add_column(column, justify="right")
    with check.step("a block at a time and in batches, by size") as step:
        known = dict(_known(check))
        step.value = ", ".join(known)
        first = next(iter(known.values()))
        with (
            sides(check, total, first, CHUNK_BYTES) as both,
            _Plain(both) as plain,
            fed(check, total) as worker,
        ):
            for block in BLOCKS:
                for to_device in (True, False):
                    found = _measure(both, plain, worker, known, block, to_device, rounds)
                    _judge(check, block, to_device, found)
                    way = "H2D" if to_device else "D2H"
                    figures = [f"{found[name]:.1f}" if name in found else "-" for name in names]
                    share = f"{found['worker'] / found['peak']:.2f}"
                    table.add_row(way, f"{block >> 10}", *figures, share)
            _pageable(check, both, rounds)
            _both_ways(check, both, known, rounds)
    wide_console().print(table)
    _on_the_card(check)


_NAMES = ("each", "each fed", "batch", "batch fed", "worker")


def _known(check: Check) -> list[tuple[str, CopyPath]]:
    found = []
    for (name, make), short in zip(paths(check), ("each", "batch"), strict=True):
        try:
            found.append((short, make()))
        except (CopyRefused, Skipped, OSError) as error:
            check.note(name, f"not used: {error}")
    return found


def _judge(check: Check, block: int, to_device: bool, found: dict[str, float]) -> None:
    way = "to the GPU" if to_device else "from the GPU"
    with check.step(f"{block >> 10} KiB blocks {way}") as step:
        text = ", ".join(f"{name} {rate:.1f}" for name, rate in found.items())
        share = found["worker"] / found["peak"]
        is_met = share >= TARGET or block != JUDGED_BLOCK
        target = f", target {TARGET}" if block == JUDGED_BLOCK else ""
        step.judge(is_met, f"{text} GB/s; {share:.2f} of peak{target}", gb_s=found)


@dataclass
class _Plain:
    """A buffer pinned by CUDA itself, and a stream of its own."""

    both: Sides

    def __enter__(self) -> _Plain:
        cupy = self.both.pool.cupy
        self.runtime: Any = cupy.cuda.runtime
        self.host = self.runtime.hostAlloc(self.both.size, 0)
        self.stream: Any = cupy.cuda.Stream(non_blocking=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.synchronize()
        self.runtime.freeHost(self.host)

    def copy(self, total: int, block: int, to_device: bool) -> float:
        gpu = self.both.pool.address(0, total)
        to, source = (gpu, self.host) if to_device else (self.host, gpu)
        kind = 1 if to_device else 2
        start = time.perf_counter()
        for at in range(0, total, block):
            self.runtime.memcpyAsync(
                to + at, source + at, min(block, total - at), kind, self.stream.ptr
            )
        self.stream.synchronize()
        return time.perf_counter() - start


def _measure(
    both: Sides,
    plain: _Plain,
    worker: Fed,
    known: dict[str, CopyPath],
    block: int,
    to_device: bool,
    rounds: int,
) -> dict[str, float]:
    num = min(both.size // block, MAX_MOVES)
    total = num * block
    moves = _moves(both, block, num, to_device)
    timed: dict[str, Timed] = {
        "peak": lambda: plain.copy(total, total, to_device),
        "plain": lambda: plain.copy(total, block, to_device),
    }
    for name, path in known.items():
        link = _link(both, path, to_device)
        lane = _batches(moves)
        timed[name] = partial(_feed, link, [moves], 1)
        timed[f"{name} fed"] = partial(_feed, link, lane, GPU_LIMITS.in_flight)
    timed["worker"] = partial(worker.seconds, moves)
    return {name: total / seconds / 1e9 for name, seconds in _take_turns(timed, rounds).items()}


def _take_turns(timed: dict[str, Timed], rounds: int) -> dict[str, float]:
    """Medians; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(rounds + 1):
        for name, go in timed.items():
            spent = go()
            if number:
                seconds[name].append(spent)
    return {name: float(np.median(spent)) for name, spent in seconds.items()}


def _moves(both: Sides, block: int, num: int, to_device: bool) -> list[Move]:
    pages = block // PAGE_BYTES
    sources = both.rng.permutation(both.size // block)[:num]
    targets = both.rng.permutation(both.size // block)[:num]
    names = ("dram", "hbm") if to_device else ("hbm", "dram")
    return [
        both.move(*names, int(source) * pages, int(target) * pages, block)
        for source, target in zip(sources, targets, strict=True)
    ]


def _batches(moves: Sequence[Move]) -> list[Sequence[Move]]:
    """As transfer/move_queue.py cuts them."""
    step = max(1, min(GPU_LIMITS.moves, GPU_LIMITS.num_bytes // moves[0].block_bytes))
    return [moves[start : start + step] for start in range(0, len(moves), step)]


def _link(both: Sides, path: CopyPath, to_device: bool) -> CudaLink:
    names = ("dram", "hbm") if to_device else ("hbm", "dram")
    return CudaLink(*names, both.pinned, both.pool, path, to_device=to_device)


def _feed(link: CudaLink, batches: Sequence[Sequence[Move]], in_flight: int) -> float:
    waiting: deque[Started] = deque()
    start = time.perf_counter()
    for batch in batches:
        waiting.append(link.start(batch))
        if len(waiting) == in_flight:
            _finish(waiting.popleft())
    while waiting:
        _finish(waiting.popleft())
    return time.perf_counter() - start


def _finish(started: Started) -> None:
    bad = [outcome.error for outcome in started.wait() if not outcome.ok]
    assert not bad, bad[0]


def _pageable(check: Check, both: Sides, rounds: int) -> None:
    """The speed without pinning."""
    with check.step("plain copies of memory that is not pinned") as step:
        host = np.ones(both.size, np.uint8)
        runtime, stream = both.pool.cupy.cuda.runtime, both.pool.cupy.cuda.Stream(non_blocking=True)
        gpu = both.pool.address(0, 0)

        def copy(to: int, source: int, kind: int) -> float:
            start = time.perf_counter()
            runtime.memcpyAsync(to, source, both.size, kind, stream.ptr)
            stream.synchronize()
            return time.perf_counter() - start

        timed: dict[str, Timed] = {
            "to": lambda: copy(gpu, host.ctypes.data, 1),
            "from": lambda: copy(host.ctypes.data, gpu, 2),
        }
        found = {n: both.size / s / 1e9 for n, s in _take_turns(timed, min(3, rounds)).items()}
        step.value = f"to the GPU {found['to']:.1f}, from it {found['from']:.1f} GB/s"
        step.figures = found


def _both_ways(check: Check, both: Sides, known: dict[str, CopyPath], rounds: int) -> None:
    """Started together from one thread: PCIe carries both directions at once."""
    half = both.size // JUDGED_BLOCK // 2
    for name, path in known.items():
        with check.step(f"2 MiB blocks, both directions at once, by {name}") as step:
            down, up = _link(both, path, True), _link(both, path, False)
            seconds = _take_turns({name: partial(_at_once, both, down, up, half)}, rounds)[name]
            rate = 2 * half * JUDGED_BLOCK / seconds / 1e9
            step.value, step.figures = f"{rate:.1f} GB/s in all", {"gb_s": rate}


def _at_once(both: Sides, down: CudaLink, up: CudaLink, half: int) -> float:
    pages = JUDGED_BLOCK // PAGE_BYTES
    places = [(n * pages, n * pages, JUDGED_BLOCK) for n in range(2 * half)]
    lower = [both.move("dram", "hbm", *place) for place in places[:half]]
    upper = [both.move("hbm", "dram", *place) for place in places[half:]]
    start = time.perf_counter()
    for started in [down.start(lower), up.start(upper)]:
        _finish(started)
    return time.perf_counter() - start


def _on_the_card(check: Check) -> None:
    """From slot to slot within GPU memory by the copy engines, for comparison. One call per block
    does not use most of the card's bandwidth, so the product uses page_kernels.py there."""
    with check.step("2 MiB blocks within GPU memory") as step:
        total = (64 << 20) if check.is_dry else (2 << 30)
        cupy = check.cupy
        runtime, stream = cupy.cuda.runtime, cupy.cuda.Stream(non_blocking=True)
        memory = [cupy.cuda.Memory(total) for _ in range(2)]
        source, target = (int(m.ptr) for m in memory)
        order = np.random.default_rng(1).permutation(total // JUDGED_BLOCK)
        places = [(n * JUDGED_BLOCK, int(m) * JUDGED_BLOCK) for n, m in enumerate(order)]
        pieces = [(target + to, source + at, JUDGED_BLOCK) for at, to in places]

        def timed(enqueue: Callable[[], object]) -> Timed:
            def go() -> float:
                start = time.perf_counter()
                enqueue()
                stream.synchronize()
                return time.perf_counter() - start

            return go

        def each() -> None:
            for to, at, num_bytes in pieces:
                runtime.memcpyAsync(to, at, num_bytes, 3, stream.ptr)

        whole = timed(lambda: runtime.memcpyAsync(target, source, total, 3, stream.ptr))
        ways = {"whole": whole, "each": timed(each)}
        batch = dict(_known(check)).get("batch")
        if batch is not None:
            rows = rows_of(pieces)
            ways["batch"] = timed(lambda: batch.enqueue(rows, stream.ptr, to_device=None))
        rates = {n: 2 * total / s / 1e9 for n, s in _take_turns(ways, 5).items()}
        text = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
        step.judge(True, f"{text} GB/s read and written; by a kernel: see pages", **rates)

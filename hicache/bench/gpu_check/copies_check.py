"""Random copies in both directions; afterwards every byte of both sides is compared.

Arena and pool are compared whole, so a byte written beside a slot is found as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache.bench.gpu_check.check import Check, Skipped
from hicache.bench.gpu_check.gpu_machine import arena_of
from hicache.engine.plan import Move, Priority
from hicache.tiers.arena import Arena
from hicache.tiers.block import PAGE_BYTES, slot_bytes_for
from hicache.tiers.errors import TierDamaged
from hicache.tiers.hbm import CudaPool
from hicache.transfer.media.cuda import CudaLink, Started
from hicache.transfer.media.cuda_copy import BatchCopy, CopyPath, EachCopy
from hicache.transfer.media.pinned_memory import PinnedArena

SIZES = (1, 1000, PAGE_BYTES, 40_000, 16 << 10, 256 << 10, 300_001, 2 << 20, 6 << 20)
MAX_BATCH = 32
_CHUNK_BYTES = (4 << 20) + PAGE_BYTES  # many blocks lie in two chunks

Bytes = npt.NDArray[np.uint8]


@dataclass
class Sides:
    """An arena and a pool of one size, a link each way, and the expected bytes of both."""

    check: Check
    arena: Arena
    pool: CudaPool
    pinned: PinnedArena
    down: CudaLink
    up: CudaLink
    rng: np.random.Generator

    def __post_init__(self) -> None:
        self.size = self.arena.data_bytes
        self.host = self.rng.integers(0, 256, self.size, np.uint8)
        self.gpu = self.rng.integers(0, 256, self.size, np.uint8)
        self.arena.data[:] = self.host
        self._raw(self.pool.address(0, 0), self.gpu.ctypes.data)
        self._num_moves = 0

    def plan(self, num_moves: int, parity: int | None = None) -> tuple[list[Move], list[Move]]:
        """Moves down and up between disjoint places, of random sizes in random order.
        With `parity`, only the even or the odd half of both sides is used."""
        low, high = 0, self.size
        if parity is not None:
            low, high = (parity * self.size // 2, (parity + 1) * self.size // 2)
        places: list[tuple[int, int]] = []
        at = low
        while len(places) < num_moves:
            num_bytes = int(self.rng.choice(SIZES))
            room = slot_bytes_for(num_bytes)
            if at + room > high:
                break
            places.append((at // PAGE_BYTES, num_bytes))
            at += room + PAGE_BYTES * int(self.rng.integers(0, 3))
        # The same places on both sides, matched at random among those of one size.
        down, up = [], []
        for num_bytes in SIZES:
            slots = [slot for slot, size in places if size == num_bytes]
            targets = self.rng.permutation(slots).tolist()
            for number, (slot, target) in enumerate(zip(slots, targets, strict=True)):
                if number % 2:
                    up.append((slot, target, num_bytes))
                else:
                    down.append((slot, target, num_bytes))
        # One direction must not write what the other reads: keep disjoint moves.
        read_here = {slot for slot, _, _ in down}
        written_there = {target for _, target, _ in down}
        up = [u for u in up if u[0] not in written_there and u[1] not in read_here]
        return self._moves("dram", "hbm", down), self._moves("hbm", "dram", up)

    def _moves(self, src: str, dst: str, planned: list[tuple[int, int, int]]) -> list[Move]:
        self.rng.shuffle(planned)
        return [self.move(src, dst, *each) for each in planned]

    def move(self, src: str, dst: str, source: int, target: int, num_bytes: int) -> Move:
        self._num_moves += 1
        n, room = self._num_moves, slot_bytes_for(max(1, num_bytes))
        return Move(
            id=n,
            block=n,
            src=src,
            src_slot=source,
            dst=dst,
            dst_slot=target,
            block_bytes=num_bytes,
            src_slot_bytes=room,
            dst_slot_bytes=room,
            priority=Priority.DEMAND,
        )

    def expect(self, moves: Sequence[Move]) -> None:
        for each in moves:
            source, target = each.src_slot * PAGE_BYTES, each.dst_slot * PAGE_BYTES
            here, there = (self.host, self.gpu) if each.src == "dram" else (self.gpu, self.host)
            there[target : target + each.block_bytes] = here[source : source + each.block_bytes]

    def compare(self) -> None:
        """Compare both sides completely with the expected bytes."""
        found = np.empty(self.size, np.uint8)
        self._raw(found.ctypes.data, self.pool.address(0, 0))
        for name, real, right in (("GPU", found, self.gpu), ("arena", self.arena.data, self.host)):
            wrong = np.flatnonzero(real != right)
            assert len(wrong) == 0, f"{len(wrong)} wrong bytes in the {name}, first at {wrong[0]}"

    def _raw(self, to: int, source: int) -> None:
        """A plain copy of a whole side. No other copy may be under way."""
        runtime, stream = self.pool.cupy.cuda.runtime, self.pool.cupy.cuda.Stream()
        runtime.memcpyAsync(to, source, self.size, 4, stream.ptr)
        stream.synchronize()


@contextmanager
def sides(check: Check, size: int, copies: CopyPath, chunk: int = _CHUNK_BYTES) -> Iterator[Sides]:
    with arena_of(size) as arena:
        pool = CudaPool(0, size, check.cupy)
        pinned = PinnedArena(check.cupy.cuda.runtime, arena, chunk_bytes=chunk)
        assert pinned.is_whole, pinned.trouble
        down = CudaLink("dram", "hbm", pinned, pool, copies, to_device=True)
        up = CudaLink("hbm", "dram", pinned, pool, copies, to_device=False)
        try:
            yield Sides(check, arena, pool, pinned, down, up, np.random.default_rng(7))
            down.close()
            up.close()
        finally:
            pinned.close()
            pool.close()


def paths(check: Check) -> Iterator[tuple[str, Callable[[], CopyPath]]]:
    """Each way of copying by its name. Making one raises if the driver does not have it."""
    yield "cudaMemcpyAsync", lambda: EachCopy(check.cupy.cuda.runtime)
    yield "cuMemcpyBatchAsync", lambda: _batch(check)


def _batch(check: Check) -> CopyPath:
    if check.is_dry:
        raise Skipped("the driver's own call")
    return BatchCopy()


def run(check: Check) -> None:
    size = 32 << 20 if check.is_dry or check.is_small else 88 << 20
    rounds = 3 if check.is_dry or check.is_small else 8
    kinds: tuple[tuple[str, Callable[[Sides, int], str]], ...] = (
        ("random slots and sizes, both ways", _random_rounds),
        ("several batches in flight, waited for in any order", _in_flight),
        ("both directions at once, a thread each", _two_threads),
    )
    for name, make in paths(check):
        for what, play in kinds:
            with check.step(f"{name}: {what}") as step, sides(check, size, make()) as both:
                step.value = play(both, rounds)
        if not check.is_small:
            _errors(check, name, make)
    if not check.is_small:
        _refusal(check)
        _sticky(check)


def _errors(check: Check, name: str, make: Callable[[], CopyPath]) -> None:
    what = f"{name}: slots that are not there fail alone"
    with check.step(what) as step, sides(check, 16 << 20, make()) as both:
        batch = [both.move("dram", "hbm", n, n, PAGE_BYTES) for n in range(4)]
        batch[1].dst_slot = both.size // PAGE_BYTES
        batch[2].src_slot = -1
        outcomes = both.down.copy(batch)
        assert [o.ok for o in outcomes] == [True, False, False, True], outcomes
        assert [o.move for o in outcomes] == [move.id for move in batch]
        both.expect([batch[0], batch[3]])
        both.compare()
        step.value = "and the others arrive"


def _refusal(check: Check) -> None:
    what = "an address CUDA refuses fails its batch, not the link"
    each = EachCopy(check.cupy.cuda.runtime)
    with check.step(what) as step, sides(check, 16 << 20, each) as both:
        if check.is_dry:
            raise Skipped("a question to the driver")
        good = both.move("dram", "hbm", 8, 8, PAGE_BYTES)
        both.pool.capacity_bytes += 1 << 50
        bad = both.move("dram", "hbm", 0, (1 << 40) // PAGE_BYTES, PAGE_BYTES)
        (outcome,) = both.down.copy([bad])
        step.value = outcome.error or "it was accepted"
        assert not outcome.ok
        assert both.down.copy([good])[0].ok
        both.expect([good])
        both.compare()


def _sticky(check: Check) -> None:
    """Runs last: the process cannot use CUDA afterwards."""
    with check.step("a context that breaks is TierDamaged") as step:
        if check.is_dry:
            raise Skipped("needs a context to break")
        cupy = check.cupy
        code = 'extern "C" __global__ void wild(int *p) { *p = 1; }'
        wild = cupy.RawKernel(code, "wild")
        each = EachCopy(cupy.cuda.runtime)
        with arena_of(1 << 20) as arena:
            pool = CudaPool(0, 1 << 20)
            pinned = PinnedArena(cupy.cuda.runtime, arena)
            link = CudaLink("dram", "hbm", pinned, pool, each, to_device=True)
            wild((1,), (1,), (np.uint64(16),))
            move = Move(
                id=1,
                block=1,
                src="dram",
                src_slot=0,
                dst="hbm",
                dst_slot=0,
                block_bytes=4096,
                src_slot_bytes=4096,
                dst_slot_bytes=4096,
                priority=Priority.DEMAND,
            )
            try:
                for _ in range(100):
                    link.copy([move])
            except TierDamaged as error:
                step.value = str(error)
                return
        raise AssertionError("copies went on")


def _random_rounds(both: Sides, rounds: int) -> str:
    num = 0
    for _ in range(rounds):
        for link, moves in zip((both.down, both.up), both.plan(400), strict=True):
            both.expect(moves)
            for start in range(0, len(moves), MAX_BATCH):
                batch = moves[start : start + MAX_BATCH]
                assert all(outcome.ok for outcome in link.copy(batch))
            num += len(moves)
        both.compare()
    return f"{num} blocks, {2 * both.size >> 20} MiB compared {rounds} times"


def _in_flight(both: Sides, rounds: int) -> str:
    most = 0
    for _ in range(rounds):
        down, up = both.plan(400)
        started: list[tuple[Started, list[Move]]] = []
        for link, moves in ((both.down, down), (both.up, up)):
            batches = [moves[n : n + 8] for n in range(0, len(moves), 8)]
            started += [(link.start(batch), batch) for batch in batches]
        both.expect(down)
        both.expect(up)
        most = max(most, len(started))
        both.rng.shuffle(started)
        for each, batch in started:
            outcomes = each.wait()
            assert [(o.move, o.ok) for o in outcomes] == [(move.id, True) for move in batch]
            # Reported as copied, so it is there now, although other batches are under way.
            for move in batch if batch[0].dst == "dram" else ():
                start = move.dst_slot * PAGE_BYTES
                here = both.arena.view(move.dst_slot, move.block_bytes)
                assert np.array_equal(here, both.host[start : start + move.block_bytes])
        both.compare()
    return f"up to {most} batches"


def _two_threads(both: Sides, rounds: int) -> str:
    errors: list[str] = []
    down = [both.plan(300, parity=0)[0] for _ in range(rounds)]
    up = [both.plan(300, parity=1)[1] for _ in range(rounds)]

    def work(link: CudaLink, plans: list[list[Move]]) -> None:
        for moves in plans:
            for start in range(0, len(moves), MAX_BATCH):
                for outcome in link.copy(moves[start : start + MAX_BATCH]):
                    if not outcome.ok:
                        errors.append(outcome.error)

    jobs = ((both.down, down), (both.up, up))
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[:3]
    for moves in (*down, *up):
        both.expect(moves)
    both.compare()
    return f"{sum(map(len, down))} down, {sum(map(len, up))} up"

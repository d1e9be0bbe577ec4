"""The disk tier by itself, beside raw `pread` and `pwrite` of the same sizes in the same run.

    written   batches of 32 MiB into a full tier, its oldest blocks deleted before (only puts are
              timed); the floor overwrites an old file, one fdatasync per batch if the tier syncs
    read      batches of 32 MiB in random order, with as many threads as the floor
    cold      closed, written out, dropped from the page cache; less than 1 % is resident
    churn     five turnovers of a full map, deleting blocks of any age

Tier and floor take turns, and the order changes every time. `ratio` is the median over the pairs of
turns, so that other load, or a disk that slows down, affects both.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from hicache.bench.report import BenchError, ProgressStep
from hicache.engine.plan import BlockIdentity
from hicache.tiers.block import PAGE_BYTES
from hicache.tiers.disk.disk_tier import DiskTier, Durability
from hicache.tiers.disk.format import derive_key
from hicache.tiers.disk.reader import Bytes

KIB, MIB = 1 << 10, 1 << 20
BATCH_BYTES = 32 * MIB
TURNOVERS = 5
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class DiskRow:
    """Values in GB (10⁹ bytes) per second, median of several rounds, beside raw reads or writes."""

    op: str
    temperature: str
    value_bytes: int
    workers: int
    gb_s: float
    floor_gb_s: float
    ratio: float


@dataclass(frozen=True, slots=True)
class DiskBenchPlan:
    """How much is measured."""

    total_bytes: int = 128 * MIB
    rounds: int = 5
    sizes: Sequence[int] = (256 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB)
    readers: Sequence[int] = (1, 2, 4, 8)
    durability: Durability = "batched"


def run(
    folder: Path | None, plan: DiskBenchPlan, step: ProgressStep
) -> tuple[list[DiskRow], list[dict[str, float]]]:
    """(rows, churn). Files are made in a temporary folder below `folder` and removed."""
    rows: list[DiskRow] = []
    with TemporaryDirectory(prefix="hicache-bench-", dir=folder) as name:
        for number, size in enumerate(plan.sizes):
            step(f"values of {size >> 10:,} KiB", number, len(plan.sizes) + 1)
            bench = _Values(Path(name) / str(size), plan, size)
            rows += bench.rows()
        step("turnovers", len(plan.sizes), len(plan.sizes) + 1)
        churn = _churn(Path(name) / "churn", plan)
    return rows, churn


class _Values:
    """One size of values, in a tier and in a plain file."""

    def __init__(self, folder: Path, plan: DiskBenchPlan, size: int) -> None:
        folder.mkdir()
        self.plan, self.size = plan, size
        self.count = plan.total_bytes // size
        self.per_batch = max(1, BATCH_BYTES // size)
        self.tier_path, self.file = folder / "tier", folder / "raw"
        self.data_file = self.tier_path / f"class-{size}" / "data.mdb"
        rng = np.random.default_rng(size)
        self.source: Bytes = rng.integers(0, 256, (self.count, size), np.uint8)
        self.target: Bytes = np.ones((self.count, size), np.uint8)
        self.generation = 0
        self.rng = rng

    def open(self, readers: int = 4) -> DiskTier:
        room = 3 * self.plan.total_bytes + 4 * BATCH_BYTES
        return DiskTier(self.tier_path, room, durability=self.plan.durability, readers=readers)

    def rows(self) -> list[DiskRow]:
        found = [self._write_row()]
        for temperature in ("cold", "warm"):
            for readers in self.plan.readers:
                found.append(self._read_row(temperature, readers))
        return found

    def batches(self, order: Sequence[int]) -> list[Sequence[int]]:
        return [order[i : i + self.per_batch] for i in range(0, len(order), self.per_batch)]

    def _write_row(self) -> DiskRow:
        ours, floor = [], []
        with self.open() as tier:
            for number in range(self.plan.rounds + 2):  # the first two make the files
                if number % 2:
                    ours.append(self._write(tier))
                floor.append(self._write_raw(number % 2))
                if not number % 2:
                    ours.append(self._write(tier))
        return self._row("write", "warm", 1, ours[2:], floor[2:])

    def _write(self, tier: DiskTier) -> float:
        seconds = 0.0
        self.generation += 1
        for batch in self.batches(range(self.count)):
            if self.generation > 1:
                tier.delete(self.size, [_name(self.generation - 1, i).key for i in batch])
            blocks = [(_name(self.generation, i), self.source[i]) for i in batch]
            start = time.perf_counter()
            tier.put(self.size, blocks)
            seconds += time.perf_counter() - start
        return seconds

    def _write_raw(self, half: int) -> float:
        fd = os.open(self.file, os.O_RDWR | os.O_CREAT)
        start = time.perf_counter()
        for batch in self.batches(range(self.count)):
            for i in batch:
                os.pwrite(fd, self.source[i].data, (half * self.count + i) * self.size)
            if self.plan.durability != "fast":
                os.fdatasync(fd)
        seconds = time.perf_counter() - start
        os.close(fd)
        return seconds

    def _read_row(self, temperature: str, readers: int) -> DiskRow:
        ours, floor = [], []
        for number in range(self.plan.rounds):
            order = self.rng.permutation(self.count).tolist()
            for file in (self.data_file, self.file):
                (_cool if temperature == "cold" else _warm)(file)
            if number % 2:
                floor.append(self._read_raw(order, readers))
            with self.open(readers) as tier:
                ours.append(self._read(tier, order))
            if not number % 2:
                floor.append(self._read_raw(order, readers))
        return self._row("read", temperature, readers, ours, floor)

    def _read(self, tier: DiskTier, order: Sequence[int]) -> float:
        start = time.perf_counter()
        for batch in self.batches(order):
            wanted = [(_name(self.generation, i), self.target[i]) for i in batch]
            problems = tier.read(self.size, wanted)
            if any(problems):
                raise BenchError(f"a stored value could not be read: {problems}")
        return time.perf_counter() - start

    def _read_raw(self, order: Sequence[int], readers: int) -> float:
        fd = os.open(self.file, os.O_RDONLY)

        def read(i: int) -> int:
            return os.preadv(fd, [self.target[i].data], i * self.size)

        with ThreadPoolExecutor(readers) as pool:
            start = time.perf_counter()
            for batch in self.batches(order):
                for num_bytes in map(read, batch) if readers == 1 else pool.map(read, batch):
                    assert num_bytes == self.size
            seconds = time.perf_counter() - start
        os.close(fd)
        return seconds

    def _row(
        self, op: str, temperature: str, workers: int, ours: list[float], floor: list[float]
    ) -> DiskRow:
        total = self.count * self.size / 1e9
        ratio = statistics.median(raw / mine for mine, raw in zip(ours, floor, strict=True))
        speeds = (total / statistics.median(seconds) for seconds in (ours, floor))
        figures = (*(round(gb_s, 3) for gb_s in speeds), round(ratio, 3))
        return DiskRow(op, temperature, self.size, workers, *figures)


def _churn(folder: Path, plan: DiskBenchPlan) -> list[dict[str, float]]:
    size = 2 * MIB
    per_batch = BATCH_BYTES // size
    capacity = plan.total_bytes + 4 * BATCH_BYTES
    most = plan.total_bytes // size // per_batch * per_batch
    rng = np.random.default_rng(1)
    source = rng.integers(0, 256, (per_batch, size), np.uint8)
    held: list[int] = []
    number, churn = 0, []
    with DiskTier(folder, capacity, durability=plan.durability) as tier:
        for turnover in range(TURNOVERS + 1):
            seconds = 0.0
            for _ in range(most // per_batch):
                start = time.perf_counter()
                if len(held) >= most:
                    rng.shuffle(held)
                    gone, held = held[:per_batch], held[per_batch:]
                    tier.delete(size, [_name(0, n).key for n in gone])
                names = range(number, number + per_batch)
                blocks = [(_name(0, n), source[i]) for i, n in enumerate(names)]
                tier.put(size, blocks)
                seconds += time.perf_counter() - start
                held += names
                number += per_batch
            if turnover:  # the first round fills the map
                gb_s = round(most * size / 1e9 / seconds, 3)
                churn.append({"turnover": turnover, "gb_s": gb_s})
    return churn


def _name(generation: int, number: int) -> BlockIdentity:
    tokens = generation.to_bytes(4, "little") + number.to_bytes(4, "little")
    namespace, parent = bytes(32), bytes(32)
    return BlockIdentity(namespace, derive_key(namespace, parent, tokens), parent, tokens, 0, 0)


def _warm(file: Path) -> None:
    with file.open("rb") as data:
        while data.read(8 * MIB):
            pass


def _cool(file: Path) -> None:
    """Drop the file from the page cache. Raises BenchError if the kernel keeps it."""
    fd = os.open(file, os.O_RDWR)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        share = _resident_share(fd)
    finally:
        os.close(fd)
    if share >= 0.01:
        raise BenchError(f"{share:.0%} of {file} stayed in the page cache: nothing cold to measure")


def _resident_share(fd: int) -> float:
    length = os.fstat(fd).st_size
    with mmap.mmap(fd, length, access=mmap.ACCESS_WRITE) as view:
        resident = np.zeros(-(-length // PAGE_BYTES), np.uint8)
        mapped = np.frombuffer(view, np.uint8)
        address = mapped.ctypes.data
        del mapped  # or the mapping could not be closed
        if _libc.mincore(address, length, resident.ctypes.data):
            raise BenchError("mincore does not report what is resident")
        return float((resident & 1).mean())

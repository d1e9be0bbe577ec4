"""However much is stored, the files together never take more of the volume than the capacity."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hicache.tiers.block import PAGE_BYTES
from hicache.tiers.disk import disk_tier as disk
from hicache.tiers.disk.disk_tier import DiskTier
from hicache.tiers.disk.format import record_pages, usable_bytes
from hicache.tiers.errors import NoRoomForSize, TierFull
from hicache.tiers.pool import SlotPool
from tests.tiers.blocks import content, name

pytestmark = pytest.mark.thorough

MIB = 1 << 20
CAPACITY = 16 * MIB
BATCH = 8


def on_volume(path: Path) -> int:
    """Bytes that everything below this folder takes, folders included."""
    return sum(p.lstat().st_blocks * 512 for p in [path, *path.rglob("*")])


class Store:
    """Puts of mixed sizes as the daemon makes them: evictions ahead, as its pool says."""

    def __init__(self, path: Path, sizes: tuple[int, ...], durability: disk.Durability) -> None:
        self.path, self.sizes, self.durability = path, sizes, durability
        self.pool = SlotPool(usable_bytes(CAPACITY, BATCH * max(sizes)), pages_of=record_pages)
        self.held: list[tuple[int, int, int]] = []
        self.rng = np.random.default_rng(1)
        self.most = self.number = self.num_refused = 0

    def run(self, num_bytes: int) -> None:
        """Store these bytes, and sample after each commit."""
        written = 0
        with DiskTier(self.path, CAPACITY, durability=self.durability) as tier:
            self.sample()
            while written < num_bytes:
                size = int(self.rng.choice(self.sizes))
                written += size * BATCH
                slots = self.pool.allocate(size, BATCH)
                self.pool.free(size, slots[len(slots) :])
                if len(slots) < BATCH:
                    self.pool.free(size, slots)
                    self.evict(tier)
                    continue
                numbers = range(self.number, self.number + BATCH)
                self.number += BATCH
                data = content(self.number, size)
                try:
                    tier.put(size, [(name(n), data) for n in numbers])
                except NoRoomForSize:
                    self.num_refused += 1
                    self.pool.free(size, slots)
                    self.evict(tier)
                else:
                    held = zip(numbers, slots.tolist(), strict=True)
                    self.held += [(size, n, slot) for n, slot in held]
                self.sample()
        self.sample()

    def evict(self, tier: DiskTier) -> None:
        self.rng.shuffle(self.held)
        gone, self.held = self.held[:BATCH], self.held[BATCH:]
        for size in self.sizes:
            tier.delete(size, [name(n).key for of, n, _ in gone if of == size])
            self.pool.free(size, np.array([s for of, _, s in gone if of == size], np.int32))
        self.sample()

    def sample(self) -> None:
        self.most = max(self.most, on_volume(self.path))
        assert self.most <= CAPACITY, f"{self.most} bytes on the volume"


@pytest.mark.parametrize(
    ("sizes", "durability"),
    [
        ((64 * PAGE_BYTES,), "fast"),
        ((64 * PAGE_BYTES,), "batched"),
        ((4 * PAGE_BYTES,), "fast"),
        ((5 * PAGE_BYTES, 40 * PAGE_BYTES), "fast"),
        ((5 * PAGE_BYTES, 40 * PAGE_BYTES), "batched"),
    ],
)
def test_ten_capacities_of_puts_with_restarts(
    tmp_path: Path, sizes: tuple[int, ...], durability: disk.Durability
) -> None:
    store = Store(tmp_path / "d", sizes, durability)
    for _ in range(5):
        store.run(2 * CAPACITY)
    assert store.most > 0.5 * CAPACITY, "it was filled"


def test_what_was_set_aside_counts_and_goes_first(tmp_path: Path) -> None:
    path = tmp_path / "d"
    size = 64 * PAGE_BYTES
    for _ in range(3):
        store = Store(path, (size,), "fast")
        store.run(CAPACITY // 2)
        (path / "state.json").unlink()
    with DiskTier(path, CAPACITY, durability="fast") as tier:
        assert len(tier.notes) == 1
        assert list(path.glob("aside-*"))
        data = content(1, size)
        for first in range(0, 48, BATCH):
            tier.put(size, [(name(n), data) for n in range(first, first + BATCH)])
            assert on_volume(path) <= CAPACITY
        assert not list(path.glob("aside-*"))


def test_the_volume_keeps_its_free_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process fills the volume: the file does not grow, and freed room is used again."""
    size = 64 * PAGE_BYTES
    free_bytes = [1 << 40]
    monkeypatch.setattr(disk, "volume_free_bytes", lambda _: free_bytes[0])
    data = content(1, size)
    with DiskTier(tmp_path, CAPACITY, min_free_bytes=MIB) as tier:
        for first in range(0, 24, BATCH):
            tier.put(size, [(name(n), data) for n in range(first, first + BATCH)])
        free_bytes[0] = MIB + 100_000
        length = (tmp_path / f"class-{size}" / "data.mdb").stat().st_size
        with pytest.raises(TierFull, match="MiB left") as raised:
            tier.put(size, [(name(n), data) for n in range(100, 100 + BATCH)])
        assert not isinstance(raised.value, NoRoomForSize)
        tier.delete(size, [name(n).key for n in range(2 * BATCH)])
        tier.put(size, [(name(n), data) for n in range(200, 200 + BATCH)])
        assert (tmp_path / f"class-{size}" / "data.mdb").stat().st_size <= length + 100_000
        free_bytes[0] = 1 << 40
        tier.put(size, [(name(n), data) for n in range(300, 300 + 2 * BATCH)])

"""Another capacity at the next start: more keeps everything, less keeps the warmest that fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hicache.tiers.block import PAGE_BYTES
from hicache.tiers.disk import compact as disk_shrink
from hicache.tiers.disk.disk_tier import DiskTier
from hicache.tiers.disk.format import map_bytes
from hicache.tiers.errors import TierUnavailable
from tests.tiers.blocks import Name, content, listed, name
from tests.tiers.disk.test_cap import on_volume

MIB = 1 << 20
SLOTS = (10 * PAGE_BYTES, 64 * PAGE_BYTES)


def chains() -> dict[int, list[Name]]:
    """By chain, four blocks below one another; the higher the chain's number, the more hits."""
    made: dict[int, list[Name]] = {}
    for number in range(60):
        parent = bytes(32)
        for depth in range(4):
            row = name(10 * number + depth, parent=parent, depth=depth)
            made.setdefault(number, []).append(replace(row, hits=number if depth == 3 else 0))
            parent = row.key
    return made


def slot_of(number: int) -> int:
    return SLOTS[number % 2]


def fill(path: Path, capacity: int) -> dict[int, list[Name]]:
    made = chains()
    with DiskTier(path, capacity, durability="fast") as tier:
        for number, rows in made.items():
            slot = slot_of(number)
            tier.put(slot, [(row, content(number, slot)) for row in rows])
    return made


def whole(tier: DiskTier, number: int, rows: list[Name]) -> int:
    """How many of a chain's blocks are there; right, and without a hole."""
    slot = slot_of(number)
    views = [np.zeros(slot, np.uint8) for _ in rows]
    problems = tier.read(slot, list(zip(rows, views, strict=True)))
    for view, problem in zip(views, problems, strict=True):
        assert problem is not None or np.array_equal(view, content(number, slot))
    count = sum(problem is None for problem in problems)
    assert all(problem is None for problem in problems[:count]), "a hole"
    return count


def test_growing_keeps_everything(tmp_path: Path) -> None:
    path = tmp_path / "d"
    made = fill(path, 48 * MIB)
    with DiskTier(path, 96 * MIB) as tier:
        assert not tier.notes
        assert all(whole(tier, number, rows) == 4 for number, rows in made.items())
        tier.put(SLOTS[1], [(name(9000 + n), content(n, SLOTS[1])) for n in range(100)])
        assert tier.num_blocks() == 340


def test_shrinking_keeps_the_warmest_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "d"
    made = fill(path, 48 * MIB)
    told: list[tuple[int, int]] = []
    with DiskTier(path, 16 * MIB, progress=lambda done, all_: told.append((done, all_))) as tier:
        assert "of the coldest blocks removed" in tier.notes[0]
        assert on_volume(path) <= 16 * MIB
        kept = {number: whole(tier, number, rows) for number, rows in made.items()}
        coldest_kept = min(number for number, count in kept.items() if count)
        assert coldest_kept > 0
        assert all(kept[number] == 4 for number in range(coldest_kept + 1, 60))
        assert tier.num_blocks() == sum(kept.values())
        assert listed(tier)
        assert told
    with DiskTier(path, 16 * MIB) as tier:
        assert not tier.notes
        tier.delete(SLOTS[1], [row.key for row in made[59]])
        tier.put(SLOTS[1], [(name(9000), content(1, SLOTS[1]))])
        assert on_volume(path) <= 16 * MIB


def test_shrinking_without_room_to_do_it_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "d"
    fill(path, 48 * MIB)
    with monkeypatch.context() as patch:
        patch.setattr(disk_shrink, "volume_free_bytes", lambda _: 4 * MIB)
        with pytest.raises(TierUnavailable, match="free some space, or configure the old size"):
            DiskTier(path, 16 * MIB)
    with DiskTier(path, 16 * MIB) as tier:
        assert tier.num_blocks() > 0
    assert not list(path.glob("compact-*"))
    assert map_bytes(16 * MIB) < 16 * MIB

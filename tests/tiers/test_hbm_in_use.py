"""What a CUDA context takes, with a management library of our own."""

from __future__ import annotations

from pathlib import Path

from hicache.tiers.hbm_in_use import grown_by, used_bytes
from tests.tiers.nvml import build


def test_used_bytes_by_the_library(tmp_path: Path) -> None:
    library = build(tmp_path)
    assert used_bytes("0000:81:00.0", library) == 1000 << 20
    assert used_bytes("0000:81:00.0", library) == 1518 << 20
    assert used_bytes("0000:99:00.0", library) is None


def test_without_the_library_nobody_tells(tmp_path: Path) -> None:
    assert used_bytes("0000:81:00.0", str(tmp_path / "none.so")) is None
    assert grown_by(None, 5) == grown_by(5, None) == 0
    assert grown_by(10, 30, 15) == 5
    assert grown_by(30, 10) == 0

"""`hicache doctor`, on this machine, and with a stand-in for CuPy on its path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hicache.tiers.arena import Arena
from hicache.tiers.hbm_probe import look
from tests.tiers.nvml import build

pytestmark = pytest.mark.thorough

STAND_IN = Path(__file__).parents[1] / "e2e" / "stand_in"
BROKEN = "raise ImportError('libcuda.so.1: cannot open shared object file')"


def doctor(*more: str, path: Path | None = None, libraries: Path | None = None) -> str:
    paths = [str(path)] if path else []
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    around = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if libraries is not None:
        around["LD_LIBRARY_PATH"] = str(libraries)
    command = [sys.executable, "-m", "hicache", "doctor", *more]
    ran = subprocess.run(command, capture_output=True, text=True, env=around, check=True)
    return ran.stdout


def test_it_says_clearly_that_there_is_no_gpu() -> None:
    said = doctor("--no-measure")
    assert "/dev/shm" in said
    if not look().found:
        assert "GPU            none: " in said
        assert "emulated in host memory" in said


def test_a_gpu_with_its_measured_link() -> None:
    data = json.loads(doctor("--json", path=STAND_IN))
    (gpu,) = data["gpu"]["found"]
    assert gpu["name"] == "stand-in"
    assert gpu["free_bytes"] == gpu["total_bytes"] == 80 << 30
    assert gpu["to_device_bytes_per_s"] > 0
    assert data["gpu"]["trouble"] == ""
    assert data["host"]["memory_bytes"] > 0
    said = doctor(path=STAND_IN)
    assert "cuda:0         stand-in, 80GiB of 80GiB free" in said
    assert "CUDA 13.0" in said


def test_what_cuda_itself_takes_and_where_the_arena_lies(tmp_path: Path) -> None:
    build(tmp_path)
    arena = Arena.create(f"/dev/shm/hicache-dram-doctor-{os.getpid()}", 1 << 20)
    try:
        said = doctor("--no-measure", path=STAND_IN, libraries=tmp_path)
        data = json.loads(doctor("--json", "--no-measure"))
    finally:
        arena.close()
        arena.path.unlink()
    assert "CUDA itself takes 518MiB for each process" in said
    assert f"arena          {arena.path}, 1" in said
    (mine,) = [row for row in data["arenas"] if row["path"] == str(arena.path)]
    if Path("/proc/self/numa_maps").exists():
        assert sum(mine["sampled_by_node"].values()) > 0


def test_a_cupy_that_cannot_be_imported_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text(BROKEN)
    said = doctor(path=tmp_path)
    assert "the CUDA probe failed: ImportError: libcuda.so.1" in said

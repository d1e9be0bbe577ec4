"""Freed memory goes back: large pieces at once, the rest every few seconds."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from hicache.freed import EVERY_S, FreedMemory

USE_AND_FREE = """
import ctypes, sys
from pathlib import Path
from hicache.freed import limit_heaps

def own_mib():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) // 1024

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
if sys.argv[1] == "limited":
    limit_heaps()
before = own_mib()
for mib in (30, 20):  # the first teaches the C library that such blocks are usual
    block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(mib << 20)))
    ctypes.memset(block, 1, mib << 20)
    libc.free(block)
print(own_mib() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc, whose limits these are")
@pytest.mark.parametrize(("how", "is_kept"), [("limited", False), ("as it is", True)])
def test_large_blocks_go_back_at_once(how: str, is_kept: bool) -> None:
    command = [sys.executable, "-c", USE_AND_FREE, how]
    kept_mib = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert (kept_mib >= 15) == is_kept


USE_ALL_SIZES = """
import ctypes, sys
import numpy as np
from hicache.freed import fill_small_buffers

class Uses(ctypes.Structure):
    _fields_ = [(f"field {n}", ctypes.c_size_t) for n in range(7)] + [
        ("in_use", ctypes.c_size_t), ("free", ctypes.c_size_t), ("at_end", ctypes.c_size_t)]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Uses
if sys.argv[1] == "filled":
    fill_small_buffers()
before = libc.mallinfo2().in_use
for num_bytes in range(1, 1200):
    arrays = [np.empty(num_bytes, np.uint8) for _ in range(20)]
    del arrays
print((libc.mallinfo2().in_use - before) // 1024)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc, which is asked")
@pytest.mark.parametrize(("how", "grows"), [("filled", False), ("as it is", True)])
def test_what_numpy_keeps_of_small_arrays_is_taken_at_once(how: str, grows: bool) -> None:
    """It took megabytes within a quarter of an hour, a size at a time, between what was used."""
    command = [sys.executable, "-c", USE_ALL_SIZES, how]
    grown_kib = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert (grown_kib > 100) == grows


def test_again_and_again() -> None:
    freed = FreedMemory(100.0)
    calls: list[int] = []
    freed._trim = calls.append
    for now_s in (
        100.0,
        100.0 + EVERY_S - 1,
        100.0 + EVERY_S,
        101.0 + EVERY_S,
        100.0 + 2 * EVERY_S,
    ):
        freed.tick(now_s)
    assert calls == [0, 0]

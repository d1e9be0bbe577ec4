"""Freed memory goes back: large pieces at once, the rest every second or so."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from hicache.daemon.upkeep.heap import EVERY_S, MAX_SHARE, FreedMemory

USE_AND_FREE = """
import ctypes, sys
from pathlib import Path
from hicache.daemon.upkeep.heap import limit_heaps

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


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="needs glibc: a Linux with no other C library"
)
@pytest.mark.parametrize(("how", "is_kept"), [("limited", False), ("as it is", True)])
def test_large_blocks_go_back_at_once(how: str, is_kept: bool) -> None:
    command = [sys.executable, "-c", USE_AND_FREE, how]
    kept_mib = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert (kept_mib >= 15) == is_kept


USE_ALL_SIZES = """
import ctypes, sys
import numpy as np
from hicache.daemon.upkeep.heap import fill_small_buffers

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


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="needs glibc: a Linux with no other C library"
)
@pytest.mark.parametrize(("how", "grows"), [("filled", False), ("as it is", True)])
def test_what_numpy_keeps_of_small_arrays_is_taken_at_once(how: str, grows: bool) -> None:
    """It took megabytes within a quarter of an hour, a size at a time, between what was used."""
    command = [sys.executable, "-c", USE_ALL_SIZES, how]
    grown_kib = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert (grown_kib > 100) == grows


USE_MANY_NAMES = """
import sys
from pathlib import Path
import hicache.daemon.loop
from hicache.daemon.upkeep.heap import grow_table_of_names

def own_kib():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))

own_kib()
if sys.argv[1] == "grown":
    grow_table_of_names()
before = own_kib()
for number in range(50_000):
    sys.intern(f"name {number}")
print(own_kib() - before)
"""


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="a name stays for ever: needs Python 3.11")
@pytest.mark.parametrize(("how", "grows"), [("grown", False), ("as it is", True)])
def test_the_table_of_names_is_as_large_at_the_start_as_it_gets(how: str, grows: bool) -> None:
    command = [sys.executable, "-c", USE_MANY_NAMES, how]
    grown_kib = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert (grown_kib > 300) == grows, grown_kib


class Trims:
    """A C library that takes as long for it as the test says."""

    def __init__(self, took_s: float) -> None:
        self.clock_s = 100.0
        self.calls_s: list[float] = []
        self.freed = FreedMemory(self.clock_s, lambda: self.clock_s)
        self.freed._trim = self.trim
        self._took_s = took_s

    def trim(self, pad: int) -> None:
        self.calls_s.append(self.clock_s)
        self.clock_s += self._took_s

    def during(self, seconds: float) -> list[float]:
        """Looked after ten times a second: when it happened, from the start on."""
        end_s = self.clock_s + seconds
        while self.clock_s < end_s:
            self.freed.tick(self.clock_s)
            self.clock_s += 0.1
        return [round(at_s - 100.0) for at_s in self.calls_s]


def test_again_and_again() -> None:
    assert Trims(0.0005).during(3.5 * EVERY_S) == [EVERY_S, 2 * EVERY_S, 3 * EVERY_S]


def test_a_thousandth_of_the_time_at_most() -> None:
    trims = Trims(0.02)
    assert trims.during(100) == [EVERY_S, EVERY_S + 20, EVERY_S + 40, EVERY_S + 60, EVERY_S + 80]
    assert len(trims.calls_s) * 0.02 / 100 <= MAX_SHARE

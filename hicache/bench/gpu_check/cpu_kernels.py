"""gpu_pages/kernels.cu on this machine's CPU, for tests and dry runs. Needs a C++ compiler."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from hicache.transfer.gpu_pages.page_kernels import SOURCE, THREADS, Launch


class NoCompiler(Exception):
    """There is no C++ compiler here."""


@cache
def library() -> Callable[..., None]:
    """The shim's `run`. Raises NoCompiler."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NoCompiler("no C++ compiler here: install c++, g++ or clang++")
    source = SOURCE.with_name("kernels_on_cpu.cpp")
    with tempfile.TemporaryDirectory(prefix="hicache-kernels-") as folder:
        target = Path(folder) / "kernels.so"
        flags = ["-std=c++14", "-O2", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
        subprocess.run([compiler, *flags, str(source), "-o", str(target)], check=True)
        run: Callable[..., None] = ctypes.CDLL(str(target)).run
        return run


class CpuRunner:
    """Runs a launch to its end, over host memory. `launches` are the kernels' names."""

    def __init__(self) -> None:
        self._run = library()
        self.launches: list[str] = []

    def run(self, launch: Launch, grid: int, stream: Any) -> None:
        self.launches.append(launch.kernel)
        arrays = (launch.plane_bases, launch.plane_strides, launch.block_bases, launch.pages)
        places = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
        counts = [ctypes.c_uint(number) for number in launch.numbers[:-1]]
        start = (launch.kernel.encode(), ctypes.c_uint(grid), ctypes.c_uint(THREADS))
        self._run(*start, *places, *counts, ctypes.c_int(launch.numbers[-1]))

"""The machine: driver, card, memory; and pinning an arena in chunks."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from hicache.bench.gpu_check.check import Check, Skipped
from hicache.tiers.arena import Arena
from hicache.tiers.hbm_probe import look
from hicache.transfer.media.pinned_memory import CHUNK_BYTES, PinnedArena

_SYSTEM_FILES = {
    "huge pages": "/sys/kernel/mm/transparent_hugepage/enabled",
    "huge pages in shared memory": "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
}
_QUERY = "name,driver_version,memory.total,memory.used,pcie.link.gen.max,pcie.link.width.max"
_QUERY += ",clocks.sm,compute_mode"


def run(check: Check) -> None:
    _note_host(check)
    _note_gpu(check)
    _doctor(check)
    _pin(check)


@contextmanager
def arena_of(num_bytes: int) -> Iterator[Arena]:
    """In shared memory, every page touched, as the daemon makes it."""
    with tempfile.TemporaryDirectory(prefix="hicache-gpu-", dir="/dev/shm") as folder:
        arena = Arena.create(Path(folder) / "arena", num_bytes, pretouch=lambda done, total: None)
        try:
            yield arena
        finally:
            arena.close()


def _note_host(check: Check) -> None:
    room = os.statvfs("/dev/shm")
    check.note("host", f"{platform.release()}, {os.cpu_count()} cores, Python "
               f"{platform.python_version()}, numpy {np.__version__}")  # fmt: skip
    check.note(
        "memory",
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB, {_gib(room.f_bavail * room.f_frsize)} "
        "free in /dev/shm",
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    check.note("locked memory", f"limit {_limit(soft)}, at most {_limit(hard)}")
    for what, file in _SYSTEM_FILES.items():
        if Path(file).exists():
            check.note(what, Path(file).read_text().strip())
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    check.note("NUMA nodes of the host", len(nodes))
    tools = ("nvcc", "compute-sanitizer", "nvidia-smi", "nvidia-cuda-mps-control")
    check.note("tools", ", ".join(tool for tool in tools if shutil.which(tool)) or "none")
    devices = sorted(path.name for path in Path("/dev").glob("nvidia*"))
    check.note("device files", ", ".join(devices) or "none")


def _note_gpu(check: Check) -> None:
    with check.step("nvidia-smi") as step:
        if shutil.which("nvidia-smi") is None:
            raise Skipped("not here")
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        step.value = ran.stdout.strip() or ran.stderr.strip()
    if check.is_dry:
        check.note("GPU", "not queried in a dry run")
        return
    with check.step("CuPy sees the GPU") as step:
        cupy, runtime = check.cupy, check.cupy.cuda.runtime
        started_s = time.perf_counter()
        properties = runtime.getDeviceProperties(0)
        free, total = runtime.memGetInfo()
        step.value = (
            f"{properties['name'].decode()}, {_gib(free)} of {_gib(total)} free, CuPy "
            f"{cupy.__version__}, runtime {runtime.runtimeGetVersion()}, driver "
            f"{runtime.driverGetVersion()}, {properties['asyncEngineCount']} copy engines; the "
            f"context took {time.perf_counter() - started_s:.1f} s"
        )
        step.figures = {"free_bytes": free, "total_bytes": total}
    with check.step("attributes") as step:
        names = (
            "HostRegisterSupported",
            "PageableMemoryAccess",
            "CanUseHostPointerForRegisteredMem",
        )
        found = {name: _attribute(check, name) for name in names}
        step.value = ", ".join(f"{name} {value}" for name, value in found.items())
    with check.step("the context's own memory") as step:
        step.value = _context_memory(os.getpid())
    with check.step("NUMA node of the GPU") as step:
        bus = check.cupy.cuda.Device(0).pci_bus_id.lower()
        file = Path("/sys/bus/pci/devices") / bus / "numa_node"
        step.value = f"{bus}: {file.read_text().strip() if file.exists() else 'unknown'}"


def _doctor(check: Check) -> None:
    """Compares what the daemon's probe finds with what this process finds."""
    with check.step("as hicache doctor sees it") as step:
        if check.is_dry:
            raise Skipped("needs the driver")
        gpus = look(measure=True)
        gpu = gpus.get(0)
        assert gpu is not None, gpus.trouble
        free, total = check.cupy.cuda.runtime.memGetInfo()
        assert gpu.total_bytes == total, f"{gpu.total_bytes} bytes in all, not {total}"
        away = abs(gpu.free_bytes - free)
        assert away < 1 << 30, f"{away} bytes more or less are free than this process sees"
        step.value = (
            f"{gpu.name}, {_gib(gpu.free_bytes)} free, driver {gpus.driver}, to it "
            f"{gpu.to_device_bytes_per_s / 1e9:.1f}, from it "
            f"{gpu.from_device_bytes_per_s / 1e9:.1f} GB/s"
        )


def _pin(check: Check) -> None:
    room = os.statvfs("/dev/shm")
    free = room.f_bavail * room.f_frsize
    size = min(64 << 20 if check.is_dry else 4 << 30, (free // 2) >> 20 << 20)
    runtime: Any = check.cupy.cuda.runtime
    with check.step("an arena pinned, given back, pinned again") as step, arena_of(size) as arena:
        seconds = []
        for chunk in (CHUNK_BYTES, 256 << 20):
            reported: list[int] = []
            pinned = PinnedArena(runtime, arena, lambda done, _, t=reported: t.append(done), chunk)  # type: ignore[misc]
            step.value = pinned.summary()
            assert pinned.is_whole, pinned.trouble
            assert reported[-1] == size
            seconds.append(pinned.seconds)
            pinned.close()
        step.value += f"; again in {seconds[1]:.1f} s by 256 MiB"
        step.figures = {"seconds": seconds, "bytes": size}
    with check.step("one copy over two chunks, not cut") as step, arena_of(32 << 20) as arena:
        if check.is_dry:
            raise Skipped("needs the driver")
        pinned = PinnedArena(runtime, arena, chunk_bytes=16 << 20)
        gpu = runtime.malloc(2 << 20)
        try:
            runtime.memcpy(gpu, arena.address(4096 - 256, 0), 2 << 20, 1)
            step.value = "taken by this driver"
        except runtime.CUDARuntimeError as error:
            step.value = f"refused ({error}): cutting is needed"
        finally:
            runtime.free(gpu)
            pinned.close()


def _attribute(check: Check, name: str) -> int:
    runtime = check.cupy.cuda.runtime
    return int(runtime.deviceGetAttribute(getattr(runtime, f"cudaDevAttr{name}"), 0))


def _context_memory(pid: int) -> str:
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return f"pid {pid}; nvidia-smi says: {ran.stdout.strip() or ran.stderr.strip() or 'nothing'}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _limit(num_bytes: int) -> str:
    return "none" if num_bytes < 0 else _gib(num_bytes)

"""`hicache doctor`: what hicache finds on this machine, before anything is served."""

from __future__ import annotations

import json
import os
import platform
import resource
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click
import psutil

from hicache.config.units import format_size
from hicache.tiers.hbm_probe import Gpu, Gpus, look

_SHARED_MEMORY = "/dev/shm"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As data.")
@click.option("--no-measure", is_flag=True, help="Copy nothing to a GPU and back.")
def doctor(as_json: bool, no_measure: bool) -> None:
    """Say what hicache finds here: memory, limits, NUMA, driver, CuPy, GPUs and the speed of their
    links; or why it sees no GPU, and what it does then."""
    gpus = look(measure=not no_measure)
    host = _host()
    if as_json:
        click.echo(json.dumps({"host": host, "gpu": asdict(gpus)}, indent=2))
        return
    rows = [*_host_rows(host), *_gpu_rows(gpus)]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        click.echo(f"{name:<{width}}  {text}")


def _host() -> dict[str, int | str | None]:
    memory, room = psutil.virtual_memory(), os.statvfs(_SHARED_MEMORY)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    huge = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return {
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(memory.total),
        "memory_free_bytes": int(memory.available),
        "shared_memory_bytes": room.f_blocks * room.f_frsize,
        "shared_memory_free_bytes": room.f_bavail * room.f_frsize,
        "locked_memory_limit_bytes": None if soft < 0 else soft,
        "numa_nodes": len(nodes) or 1,
        "huge_pages_in_shared_memory": huge.read_text().strip() if huge.exists() else "",
    }


def _host_rows(host: dict[str, int | str | None]) -> Iterator[tuple[str, str]]:
    def size(name: str) -> str:
        value = host[name]
        return format_size(value) if isinstance(value, int) else "no limit"

    yield (
        "host",
        f"{host['cores']} cores, Linux {host['kernel']}, {host['numa_nodes']} NUMA node(s)",
    )
    yield "memory", f"{size('memory_bytes')}, {size('memory_free_bytes')} free"
    yield (
        _SHARED_MEMORY,
        f"{size('shared_memory_bytes')}, {size('shared_memory_free_bytes')} free: room for dram",
    )
    yield "locked memory", f"{size('locked_memory_limit_bytes')}"
    if host["huge_pages_in_shared_memory"]:
        yield "huge pages", f"in shared memory: {host['huge_pages_in_shared_memory']}"


def _gpu_rows(gpus: Gpus) -> Iterator[tuple[str, str]]:
    yield "driver", gpus.driver or "no NVIDIA driver on this machine"
    if gpus.cupy:
        versions = f"CUDA {_version(gpus.cuda_runtime)}, the driver's {_version(gpus.cuda_driver)}"
        yield "CuPy", f"{gpus.cupy}, {versions}"
    for gpu in gpus.found:
        yield f"cuda:{gpu.index}", _gpu_row(gpu)
    if gpus.trouble:
        yield "GPU", f"none: {gpus.trouble}"
        yield "hbm", "with device: auto it is emulated in host memory, and `stats` says so"


def _gpu_row(gpu: Gpu) -> str:
    node = f"NUMA node {gpu.numa_node}" if gpu.numa_node >= 0 else "NUMA node not told"
    said = f"{gpu.name}, {format_size(gpu.free_bytes)} of {format_size(gpu.total_bytes)} free, "
    said += f"{gpu.bus_id}, {node}"
    if gpu.to_device_bytes_per_s:
        to, back = gpu.to_device_bytes_per_s / 1e9, gpu.from_device_bytes_per_s / 1e9
        said += f"; pinned memory to it {to:.1f} GB/s, from it {back:.1f} GB/s"
    return said


def _version(number: int) -> str:
    """CUDA's 13020 is 13.2."""
    return f"{number // 1000}.{number % 1000 // 10}"

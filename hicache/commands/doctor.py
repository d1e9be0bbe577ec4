"""`hicache doctor`: what hicache finds on this machine, with or without a running daemon."""

from __future__ import annotations

import json
import os
import platform
import resource
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import psutil

from hicache.config.units import format_size
from hicache.daemon.build import ARENA_PREFIX
from hicache.tiers import numa
from hicache.tiers.hbm_probe import Gpu, Gpus, look

_SHARED_MEMORY = "/dev/shm"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As data.")
@click.option("--no-measure", is_flag=True, help="Do not measure copies to a GPU and back.")
def doctor(as_json: bool, no_measure: bool) -> None:
    """Show what hicache finds here: memory, limits, NUMA, driver, CuPy, GPUs, the memory that CUDA
    itself takes and the speed of their links; or why it finds no GPU, and what it does then. For
    running daemons, the NUMA nodes of their memory."""
    gpus = look(measure=not no_measure)
    host, arenas = _host(), _arenas(Path(_SHARED_MEMORY))
    if as_json:
        data = {"host": host, "arenas": [asdict(a) for a in arenas], "gpu": asdict(gpus)}
        click.echo(json.dumps(data, indent=2))
        return
    rows = [*_host_rows(host), *_gpu_rows(gpus), *_arena_rows(arenas, gpus)]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        click.echo(f"{name:<{width}}  {text}")


@dataclass(frozen=True, slots=True)
class ArenaHere:
    """An arena in shared memory, and the NUMA nodes of a sample of its pages."""

    path: str
    num_bytes: int
    sampled_by_node: dict[int, int]


def _arenas(folder: Path) -> list[ArenaHere]:
    """The arenas that this user may read."""
    found = []
    for path in sorted(folder.glob(f"{ARENA_PREFIX}dram-*")):
        try:
            found.append(ArenaHere(str(path), path.stat().st_size, numa.sampled_by_node(path)))
        except (OSError, ValueError):  # another user's, or removed meanwhile
            continue
    return found


def _host() -> dict[str, int | str | None]:
    memory, room = psutil.virtual_memory(), os.statvfs(_SHARED_MEMORY)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    huge = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return {
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(memory.total),
        "memory_free_bytes": int(memory.available),
        "shared_memory_bytes": room.f_blocks * room.f_frsize,
        "shared_memory_free_bytes": room.f_bavail * room.f_frsize,
        "locked_memory_limit_bytes": None if soft < 0 else soft,
        "numa_nodes": numa.num_nodes(),
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
    yield (
        "locked memory",
        f"{size('locked_memory_limit_bytes')} (ulimit -l); what CUDA pinned, `hicache stats` says",
    )
    if host["huge_pages_in_shared_memory"]:
        yield "huge pages", f"in shared memory: {host['huge_pages_in_shared_memory']}"


def _gpu_rows(gpus: Gpus) -> Iterator[tuple[str, str]]:
    yield "driver", gpus.driver or "no NVIDIA driver on this machine"
    if gpus.cupy:
        versions = f"CUDA {_version(gpus.cuda_runtime)}"
        if gpus.cuda_driver:
            versions += f", the driver's {_version(gpus.cuda_driver)}"
        yield "CuPy", f"{gpus.cupy}, {versions}"
    for gpu in gpus.found:
        yield f"cuda:{gpu.index}", _gpu_row(gpu)
    if gpus.trouble:
        yield "GPU", f"none: {gpus.trouble}"
        yield "hbm", "with device: auto it is emulated in host memory, and `stats` says so"


def _gpu_row(gpu: Gpu) -> str:
    node = f"NUMA node {gpu.numa_node}" if gpu.numa_node >= 0 else "NUMA node unknown"
    text = f"{gpu.name}, {format_size(gpu.free_bytes)} of {format_size(gpu.total_bytes)} free, "
    text += f"{gpu.bus_id}, {node}"
    if gpu.context_bytes:
        text += f"; CUDA itself takes {format_size(gpu.context_bytes >> 20 << 20)} for each process"
    if gpu.to_device_bytes_per_s:
        to, back = gpu.to_device_bytes_per_s / 1e9, gpu.from_device_bytes_per_s / 1e9
        text += f"; pinned memory to it {to:.1f} GB/s, from it {back:.1f} GB/s"
    return text


def _arena_rows(arenas: Sequence[ArenaHere], gpus: Gpus) -> Iterator[tuple[str, str]]:
    """For each GPU with a known node, the share of the arena on it; otherwise the nodes."""
    nodes = sorted({gpu.numa_node for gpu in gpus.found if gpu.numa_node >= 0}) or [-1]
    for arena in arenas:
        where = [text for node in nodes if (text := numa.describe(arena.sampled_by_node, node))]
        said = "; ".join(where) or "the kernel does not report the NUMA node"
        yield "arena", f"{arena.path}, {format_size(arena.num_bytes)}: {said}"
    if not arenas:
        yield "arena", f"no daemon of yours holds one in {_SHARED_MEMORY} now"


def _version(number: int) -> str:
    """CUDA's number 13020 means 13.2."""
    return f"{number // 1000}.{number % 1000 // 10}"

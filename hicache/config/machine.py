"""The configuration against the machine it is to run on.

Owns the look at memory, /dev/shm and the disk's volume (`probe_machine`, the only I/O here), the
step from shares to bytes (`resolve_sizes`), and the sentences for what does not fit
(`check_against_machine`). A tier that does not fit must be refused at start: later the same lack
is a SIGBUS, an out-of-memory kill, or a full disk under somebody else's program.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from hicache.config.models import Config, DiskConfig, DramConfig, HbmConfig, TierConfig
from hicache.config.units import Share, format_size

_KEPT_FOR_OTHERS = 0.05  # of the host's memory: the kernel, the inference engine's own code
_Tier = TypeVar("_Tier", bound=TierConfig)


@dataclass(frozen=True, slots=True)
class Volume:
    """A file system. `ours_bytes` is held by files of an earlier run that the next one reuses."""

    total_bytes: int
    free_bytes: int
    ours_bytes: int = 0
    mount: str = ""

    @property
    def usable_bytes(self) -> int:
        return self.free_bytes + self.ours_bytes


@dataclass(frozen=True, slots=True)
class MachineProbe:
    """What the machine has. `volumes` by configured path; `gpus` by device number, in bytes."""

    memory_total_bytes: int
    memory_available_bytes: int
    volumes: Mapping[str, Volume] = field(default_factory=dict)
    gpus: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a key's value cannot work on this machine, and what to do."""

    key: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.key}: {self.sentence}"


def probe_machine(
    config: Config,
    *,
    gpus: Mapping[int, int] | None = None,
    adopted_bytes: Mapping[str, int] | None = None,
) -> MachineProbe:
    """Looks now. `adopted_bytes` names, by folder, what an earlier daemon's mappings hold there."""
    adopted = adopted_bytes or {}
    tiers, gpus = config.tiers, gpus or {}
    volumes = {tiers.dram.path: _volume(tiers.dram.path, adopted.get(tiers.dram.path, 0))}
    if tiers.hbm is not None and gpu_of(tiers.hbm, gpus) is None:
        volumes[tiers.hbm.path] = _volume(tiers.hbm.path, adopted.get(tiers.hbm.path, 0))
    if tiers.disk is not None:
        volumes[tiers.disk.path] = _volume(tiers.disk.path, _held_under(tiers.disk.path))
    memory = psutil.virtual_memory()
    return MachineProbe(int(memory.total), int(memory.available), volumes, gpus)


def gpu_of(hbm: HbmConfig, gpus: Mapping[int, int]) -> int | None:
    """The device number that the tier is to use; None means emulated in host memory."""
    if hbm.device == "host":
        return None
    if hbm.device == "auto":
        return min(gpus, default=None)
    return int(hbm.device.removeprefix("cuda:"))


def resolve_sizes(config: Config, probe: MachineProbe) -> Config:
    """The same configuration with every share as bytes: of host memory, GPU memory, or volume.

    A share of a GPU that the probe does not know stays a share; `check_against_machine` says so.
    """
    tiers = config.tiers
    hbm = tiers.hbm
    if hbm is not None:
        gpu = gpu_of(hbm, probe.gpus)
        total = probe.memory_total_bytes if gpu is None else probe.gpus.get(gpu)
        hbm = hbm if total is None else _sized(hbm, total)
    disk = tiers.disk
    if disk is not None:
        disk = _sized(disk, probe.volumes[disk.path].total_bytes)
    dram = _sized(tiers.dram, probe.memory_total_bytes)
    resolved = tiers.model_copy(update={"hbm": hbm, "dram": dram, "disk": disk})
    return config.model_copy(update={"tiers": resolved})


def check_against_machine(config: Config, probe: MachineProbe) -> list[Problem]:
    """Why this configuration cannot start here; empty when it can."""
    config = resolve_sizes(config, probe)
    tiers = config.tiers
    problems: list[Problem] = []
    in_memory: list[tuple[str, HbmConfig | DramConfig]] = [("tiers.dram", tiers.dram)]
    if tiers.hbm is not None:
        if (gpu := gpu_of(tiers.hbm, probe.gpus)) is None:
            in_memory.append(("tiers.hbm", tiers.hbm))
        else:
            problems += _check_gpu(tiers.hbm, gpu, probe)
    problems += _check_shared_memory(in_memory, probe)
    problems += _check_memory(in_memory, probe)
    if tiers.disk is not None:
        problems += _check_disk(tiers.disk, probe.volumes[tiers.disk.path])
    return problems


def _sized(tier: _Tier, total_bytes: int) -> _Tier:
    if not isinstance(tier.size, Share):
        return tier
    return tier.model_copy(update={"size": tier.size.of(total_bytes)})


def _check_gpu(hbm: HbmConfig, gpu: int, probe: MachineProbe) -> list[Problem]:
    total = probe.gpus.get(gpu)
    if total is None and isinstance(hbm.size, Share):
        said = f"{hbm.size} of cuda:{gpu} is not known in bytes; give size in bytes, as in 8GiB"
        return [Problem("tiers.hbm.size", said)]
    if total is not None and hbm.size_bytes > total:
        said = (
            f"{format_size(hbm.size_bytes)} is more than the {format_size(total)} of cuda:{gpu}; "
            "give less, and leave room for the model"
        )
        return [Problem("tiers.hbm.size", said)]
    return []


def _check_shared_memory(
    tiers: list[tuple[str, HbmConfig | DramConfig]], probe: MachineProbe
) -> list[Problem]:
    """Tiers on one volume share its room, so they are added up before they are compared."""
    problems: list[Problem] = []
    rooms: dict[str, list[tuple[str, HbmConfig | DramConfig]]] = {}
    for key, tier in tiers:
        rooms.setdefault(probe.volumes[tier.path].mount or tier.path, []).append((key, tier))
    for mount, members in rooms.items():
        needed = sum(tier.size_bytes for _, tier in members)
        volumes = {tier.path: probe.volumes[tier.path] for _, tier in members}
        free = min(volume.free_bytes for volume in volumes.values())
        usable = free + sum(volume.ours_bytes for volume in volumes.values())
        if needed > usable:
            keys = " and ".join(f"{key}.size" for key, _ in members)
            said = (
                f"{format_size(needed)} in {mount}, but only {format_size(usable)} is free there; "
                f"give less, or make it larger (mount -o remount,size=... {mount}; in a container "
                "--shm-size), or set path to a folder with room"
            )
            problems.append(Problem(keys, said))
    return problems


def _check_memory(
    tiers: list[tuple[str, HbmConfig | DramConfig]], probe: MachineProbe
) -> list[Problem]:
    needed = sum(tier.size_bytes for _, tier in tiers)
    keys = " and ".join(f"{key}.size" for key, _ in tiers)
    most = int(probe.memory_total_bytes * (1 - _KEPT_FOR_OTHERS))
    if needed > most:
        said = (
            f"{format_size(needed)} is more than this machine can give: it has "
            f"{format_size(probe.memory_total_bytes)} of memory, of which 5% must stay for others; "
            f"give at most {format_size(most)} in all"
        )
        return [Problem(keys, said)]
    paths = {tier.path for _, tier in tiers}
    usable = probe.memory_available_bytes + sum(probe.volumes[p].ours_bytes for p in paths)
    if needed > usable:
        said = (
            f"{format_size(needed)} is more than the {format_size(usable)} of memory free now; "
            "stop what holds the rest, or give less"
        )
        return [Problem(keys, said)]
    return []


def _check_disk(disk: DiskConfig, volume: Volume) -> list[Problem]:
    needed = disk.size_bytes + disk.min_free_bytes
    if needed <= volume.usable_bytes:
        return []
    said = (
        f"{format_size(disk.size_bytes)} and min_free {format_size(disk.min_free_bytes)} do not "
        f"fit on the volume of {disk.path}, where {format_size(volume.usable_bytes)} can be used; "
        "give less, free some room, or set path to another volume"
    )
    return [Problem("tiers.disk.size", said)]


def _volume(path: str, ours_bytes: int) -> Volume:
    """The volume of a folder that need not exist yet: then of the nearest one above it."""
    folder = Path(path)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    stat = os.statvfs(folder)
    return Volume(
        total_bytes=stat.f_blocks * stat.f_frsize,
        free_bytes=stat.f_bavail * stat.f_frsize,
        ours_bytes=ours_bytes,
        mount=str(_mount_of(folder)),
    )


def _mount_of(folder: Path) -> Path:
    folder = folder.resolve()
    while not folder.is_mount():
        folder = folder.parent
    return folder


def _held_under(path: str) -> int:
    """Bytes on disk below a folder: LMDB's files are sparse, so blocks count and not lengths."""
    files = (Path(root, name) for root, _, names in os.walk(path) for name in names)
    return sum(file.lstat().st_blocks * 512 for file in files)

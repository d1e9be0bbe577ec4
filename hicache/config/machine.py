"""The configuration against the machine it is to run on.

`probe_machine` looks at memory, /dev/shm and the disk's volume (the only I/O here), `resolve_sizes`
turns shares into bytes, and `check_against_machine` returns a sentence for each thing that does not
fit. A tier that does not fit is refused at start: later the same lack would be a SIGBUS, an
out-of-memory kill, or a full disk for other programs.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import psutil

from hicache.config.models import Config, DramConfig, HbmConfig, TierConfig, VolumeTierConfig
from hicache.config.units import Share, format_size
from hicache.tiers.hbm import CONTEXT_BYTES, Device, pick_device
from hicache.tiers.hbm_probe import Gpu, Gpus, look

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
    """What the machine has. `volumes` by configured path."""

    memory_total_bytes: int
    memory_available_bytes: int
    volumes: Mapping[str, Volume] = field(default_factory=dict)
    gpus: Gpus = field(default_factory=Gpus)

    def device(self, hbm: HbmConfig) -> Device:
        """Where this tier is to live. ValueError when it asks for a GPU that is not there."""
        return pick_device(hbm.device, [gpu.index for gpu in self.gpus.found], self.gpus.trouble)

    def gpu(self, hbm: HbmConfig) -> Gpu | None:
        """The GPU this tier is to use; None where it is emulated, or where there is no such GPU."""
        try:
            return self.gpus.get(self.device(hbm).index)
        except ValueError:
            return None

    def is_emulated(self, hbm: HbmConfig) -> bool:
        """In host memory."""
        return hbm.device == "host" or (hbm.device == "auto" and self.gpu(hbm) is None)


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
    gpus: Gpus | None = None,
    adopted_bytes: Mapping[str, int] | None = None,
) -> MachineProbe:
    """Looks now. `adopted_bytes` names, by folder, what an earlier daemon's mappings hold there.
    GPUs are looked for only where the configuration may use one."""
    adopted = adopted_bytes or {}
    tiers = config.tiers
    if gpus is None:
        gpus = look() if tiers.hbm is not None and tiers.hbm.device != "host" else Gpus()
    memory = psutil.virtual_memory()
    probe = MachineProbe(int(memory.total), int(memory.available), gpus=gpus)
    volumes = {tiers.dram.path: _volume(tiers.dram.path, adopted.get(tiers.dram.path, 0))}
    if tiers.hbm is not None and probe.is_emulated(tiers.hbm):
        volumes[tiers.hbm.path] = _volume(tiers.hbm.path, adopted.get(tiers.hbm.path, 0))
    for _, tier in _on_volumes(config):
        volumes[tier.path] = _volume(tier.path, _held_under(tier.path))
    return replace(probe, volumes=volumes)


def resolve_sizes(config: Config, probe: MachineProbe) -> Config:
    """The same configuration with every share as bytes: of host memory, GPU memory, or volume.

    A share of a GPU that is not there stays a share; `check_against_machine` says so.
    """
    tiers = config.tiers
    hbm = tiers.hbm
    if hbm is not None:
        if probe.is_emulated(hbm):
            hbm = _sized(hbm, probe.memory_total_bytes)
        elif (gpu := probe.gpu(hbm)) is not None:
            hbm = _sized(hbm, gpu.total_bytes)
    dram = _sized(tiers.dram, probe.memory_total_bytes)
    update: dict[str, TierConfig | None] = {"hbm": hbm, "dram": dram}
    for name, tier in _on_volumes(config):
        update[name] = _sized(tier, probe.volumes[tier.path].total_bytes)
    resolved = tiers.model_copy(update=update)
    return config.model_copy(update={"tiers": resolved})


def check_against_machine(config: Config, probe: MachineProbe) -> list[Problem]:
    """Why this configuration cannot start here; empty when it can."""
    config = resolve_sizes(config, probe)
    tiers = config.tiers
    problems: list[Problem] = []
    in_memory: list[tuple[str, HbmConfig | DramConfig]] = [("tiers.dram", tiers.dram)]
    if tiers.hbm is not None:
        if probe.is_emulated(tiers.hbm):
            in_memory.append(("tiers.hbm", tiers.hbm))
        else:
            problems += _check_gpu(tiers.hbm, probe)
    problems += _check_shared_memory(in_memory, probe)
    problems += _check_memory(in_memory, probe)
    for name, tier in _on_volumes(config):
        problems += _check_volume(name, tier, probe.volumes[tier.path])
    return problems


def _on_volumes(config: Config) -> list[tuple[str, VolumeTierConfig]]:
    """The tiers in folders, by name."""
    present = config.tiers.present()
    return [(row.name, tier) for row, tier in present if isinstance(tier, VolumeTierConfig)]


def _sized(tier: _Tier, total_bytes: int) -> _Tier:
    if not isinstance(tier.size, Share):
        return tier
    return tier.model_copy(update={"size": tier.size.of(total_bytes)})


def _check_gpu(hbm: HbmConfig, probe: MachineProbe) -> list[Problem]:
    try:
        index = probe.device(hbm).index
    except ValueError as error:
        return [Problem("tiers.hbm.device", f"{error}; give host to emulate it")]
    gpu = probe.gpus.get(index)
    assert gpu is not None
    usable = max(0, gpu.free_bytes - CONTEXT_BYTES)
    if hbm.size_bytes <= usable:
        return []
    said = (
        f"{format_size(hbm.size_bytes)} is more than the {format_size(usable)} that cuda:{index} "
        f"can give: of its {format_size(gpu.total_bytes)}, {format_size(gpu.free_bytes)} are free, "
        f"and CUDA itself takes {format_size(CONTEXT_BYTES)} for the worker; give less, and leave "
        "room for the model"
    )
    return [Problem("tiers.hbm.size", said)]


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


def _check_volume(name: str, tier: VolumeTierConfig, volume: Volume) -> list[Problem]:
    needed = tier.volume_bytes
    if needed <= volume.usable_bytes:
        return []
    kept = needed - tier.size_bytes
    wanted = f" and min_free {format_size(kept)} do" if kept else " does"
    said = (
        f"{format_size(tier.size_bytes)}{wanted} not fit on the volume of {tier.path}, where "
        f"{format_size(volume.usable_bytes)} can be used; give less, free some room, or set path "
        "to another volume"
    )
    return [Problem(f"tiers.{name}.size", said)]


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

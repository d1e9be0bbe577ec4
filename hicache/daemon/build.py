"""From a configuration to the parts of a daemon: tiers, workers, cache engine. Wiring, no policy.

Adding a tier means one more `_…_tier` here, its link's WorkerConfig, and its row of config.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hicache.config import Config, TiersConfig
from hicache.config.models import TierConfig
from hicache.config.units import Share
from hicache.daemon.upkeep.memory_pressure import Shedding
from hicache.engine.core import CacheEngine
from hicache.engine.plan import Event
from hicache.engine.planner.cost import PrefillPrior
from hicache.engine.planner.planner import PlannerSettings
from hicache.engine.policies.catalog import policies_of
from hicache.engine.settings import EngineSettings
from hicache.tiers.arena import Arena, is_adoptable, remove_stale
from hicache.tiers.block import TierSpec, TierTraits
from hicache.tiers.disk.format import record_pages, usable_bytes
from hicache.tiers.dram import DramTier
from hicache.tiers.hbm import Device, HostPool
from hicache.tiers.pool import SlotPool
from hicache.transfer.worker_messages import WorkerConfig

ARENA_PREFIX = "hicache-"
_DISK_TRAITS = TierTraits(persistent=True, deletion_is_io=True, keeps_whole_prefixes=True)
Progress = Callable[[str, int, int], None]
"""(what, bytes done, bytes in all)."""


@dataclass(slots=True)
class Parts:
    """What a daemon is made of. Tiers fastest first; `media` says in words what each one is."""

    tiers: list[TierSpec] = field(default_factory=list)
    pools: list[SlotPool] = field(default_factory=list)
    media: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    mapped: list[DramTier] = field(default_factory=list)
    workers: list[WorkerConfig] = field(default_factory=list)
    links: list[tuple[int, int]] = field(default_factory=list)

    @property
    def arenas(self) -> dict[str, Arena]:
        """The mapped tiers' arenas by tier name."""
        named = [spec.name for spec in self.tiers if spec.mapped]
        return {name: tier.arena for name, tier in zip(named, self.mapped, strict=True)}

    def shedding(self, do: Callable[[Event[Any]], Any]) -> Shedding:
        """What gives memory of the dram tier back; `do` hands events to the cache engine."""
        number = next(n for n, spec in enumerate(self.tiers) if spec.name == "dram")
        is_pinned = any(worker.kind == "cuda" for worker in self.workers)
        return Shedding(self.arenas["dram"], self.pools[number], is_pinned, do)

    def close(self) -> None:
        """Unmap and remove the arenas."""
        for tier in self.mapped:
            tier.close()


def assemble(config: Config, device: Device | None, progress: Progress) -> Parts:
    """Make the tiers (memory is allocated and touched here, with progress). `device` is where `hbm`
    is to live, None where there is no such tier.

    Raises ArenaError with a sentence when the memory cannot be had; nothing is left behind then.
    """
    parts = Parts()
    with contextlib.ExitStack() as undo:
        undo.callback(parts.close)  # at Ctrl-C, too: touching the memory takes a while
        _add_tiers(parts, config.tiers, device, config.planner.probe_links, progress)
        undo.pop_all()
    for number, worker in enumerate(parts.workers):
        read, write = paces_of(config)[worker.far]
        parts.workers[number] = replace(worker, read_bytes_per_s=read, write_bytes_per_s=write)
    parts.links = _links(parts.tiers, parts.workers)
    return parts


def remove_dead_arenas(config: Config) -> dict[str, int]:
    """Give back the memory of daemons that were killed, before free memory is counted: but for what
    this one will take over. Returns the bytes of that, by folder."""
    kept: dict[str, int] = {}
    dram, hbm = config.tiers.dram, config.tiers.hbm
    wanted = [(dram.path, "dram", dram.size_bytes, dram.huge_pages)]
    if hbm is not None and not isinstance(hbm.size, Share):
        wanted.append((hbm.path, "hbm", hbm.size_bytes, False))

    def is_kept(path: Path) -> bool:
        for position, (folder, tier, num_bytes, huge_pages) in enumerate(wanted):
            is_named_so = path.parent == Path(folder) and path.name.startswith(_prefix(tier))
            if is_named_so and is_adoptable(path, num_bytes, huge_pages=huge_pages):
                del wanted[position]  # one of each is enough
                kept[folder] = kept.get(folder, 0) + path.stat().st_blocks * 512
                return True
        return False

    for folder in dict.fromkeys(folder for folder, *_ in wanted):
        remove_stale(folder, ARENA_PREFIX, is_kept)
    return kept


def _prefix(tier: str) -> str:
    return f"{ARENA_PREFIX}{tier}-"


def engine_settings(config: Config) -> EngineSettings:
    """The cache engine's own piece of the configuration."""
    planner = config.planner
    default = PrefillPrior()
    disk = config.tiers.disk
    budget = disk.write_budget_bytes_per_day if disk is not None else None
    return EngineSettings(
        write_policy=config.write_policy,
        selective_hits=config.selective_hits,
        planner=PlannerSettings(
            planner.mode,
            planner.recompute_band,
            planner.doubt_band,
            planner.exploration,
            planner.deadline_share,
            planner.min_deadline_s,
        ),
        prior=PrefillPrior(
            default.fixed_s if planner.prior_fixed_s is None else planner.prior_fixed_s,
            default.per_token_s if planner.prior_per_token_s is None else planner.prior_per_token_s,
            planner.prior_per_token_squared_s or default.per_pair_s,
            is_guess=planner.prior_per_token_s is None,
        ),
        flop_per_s=planner.prior_flop_rate or 0.0,
        min_return=disk.min_return if disk is not None else 0.0,
        write_bytes_per_s=math.inf if budget is None else budget / 86400,
        max_moving_bytes=min(config.limits.max_queued_bytes, 256 << 20),
        max_pinned=config.limits.max_pinned,
    )


def paces_of(config: Config) -> dict[str, tuple[float, float]]:
    """Bytes per second from and to each tier that has a worker: what `debug` allows."""
    speed = config.debug.bytes_per_s
    return {
        "hbm": (speed("hbm_to_dram"), speed("dram_to_hbm")),
        "disk": (speed("disk_to_dram"), speed("dram_to_disk")),
    }


def new_engine(config: Config, parts: Parts) -> CacheEngine:
    """A cache engine over these parts."""
    tiers: list[TierConfig] = [getattr(config.tiers, spec.name) for spec in parts.tiers]
    settings = engine_settings(config)
    is_gated = settings.min_return > 0 or settings.write_bytes_per_s < math.inf
    new_policy, history = policies_of([tier.eviction for tier in tiers], wants_model=is_gated)
    return CacheEngine(
        parts.tiers,
        parts.pools,
        parts.links,
        settings,
        random.random,
        new_policy,
        history,
    )


def tier_specs(config: Config, specs: Sequence[TierSpec]) -> list[TierSpec]:
    """The tiers with the configuration's watermarks, for a live change."""
    changed = []
    for spec in specs:
        tier: TierConfig = getattr(config.tiers, spec.name)
        changed.append(_spec(spec.name, spec.capacity_bytes, tier, spec.traits))
    return changed


def _add_tiers(
    parts: Parts, tiers: TiersConfig, device: Device | None, probe: bool, progress: Progress
) -> None:
    dram = DramTier(
        tiers.dram.path,
        _prefix("dram"),
        tiers.dram.size_bytes,
        huge_pages=tiers.dram.huge_pages,
        progress=_report(progress, "dram") if tiers.dram.pretouch else None,
    )
    try:
        if device is not None:
            _add_hbm(parts, tiers, device, dram.arena, probe, progress)
    finally:
        parts.tiers.append(
            _spec("dram", dram.pool.capacity_bytes, tiers.dram, TierTraits(mapped=True))
        )
        parts.pools.append(dram.pool)
        parts.mapped.append(dram)
        parts.media["dram"] = "shared memory"
    if tiers.disk is not None:
        _add_disk(parts, tiers, dram.arena, probe)


def _add_hbm(
    parts: Parts,
    tiers: TiersConfig,
    device: Device,
    dram: Arena,
    probe: bool,
    progress: Progress,
) -> None:
    assert tiers.hbm is not None
    parts.notes["hbm"] = device.reason
    if device.kind == "host":
        pool = HostPool(
            tiers.hbm.path,
            _prefix("hbm"),
            tiers.hbm.size_bytes,
            progress=_report(progress, "hbm"),
        )
        parts.mapped.append(pool)
        parts.pools.append(pool.pool)
        parts.media["hbm"] = "host memory (emulated)"
        far: dict[str, Any] = {"kind": "memory", "far_path": str(pool.path)}
    else:
        parts.pools.append(SlotPool(tiers.hbm.size_bytes))
        parts.media["hbm"] = f"GPU {device.index}"
        far = {"kind": "cuda", "gpu": device.index, "page_kernels": tiers.hbm.page_kernels}
    gpu = max(0, device.index)
    capacity = parts.pools[-1].capacity_bytes
    parts.tiers.append(_spec("hbm", capacity, tiers.hbm, TierTraits(mapped=device.kind == "host")))
    parts.workers.append(
        WorkerConfig(
            device=f"gpu:{gpu}",
            title=f"hicache-gpu-{gpu}",
            near="dram",
            near_path=str(dram.path),
            far="hbm",
            capacity_bytes=capacity,
            probe_bytes=(8 << 20) if probe else 0,
            **far,
        )
    )


def _add_disk(parts: Parts, tiers: TiersConfig, dram: Arena, probe: bool) -> None:
    disk = tiers.disk
    assert disk is not None
    pool = SlotPool(usable_bytes(disk.size_bytes, disk.batch_bytes), pages_of=record_pages)
    parts.pools.append(pool)
    parts.tiers.append(_spec("disk", pool.capacity_bytes, disk, _DISK_TRAITS))
    parts.media["disk"] = "LMDB"
    parts.workers.append(
        WorkerConfig(
            device=f"disk:{disk.path}",
            title="hicache-disk-0",
            kind="disk",
            near="dram",
            near_path=str(dram.path),
            far="disk",
            far_path=str(disk.path),
            capacity_bytes=disk.size_bytes,
            durability=disk.durability,
            read_ahead=disk.read_ahead,
            min_free_bytes=disk.min_free_bytes,
            usable_bytes=pool.capacity_bytes,
            batch_bytes=disk.batch_bytes,
            probe_bytes=(8 << 20) if probe else 0,
        )
    )


def _links(tiers: Sequence[TierSpec], workers: Sequence[WorkerConfig]) -> list[tuple[int, int]]:
    number = {tier.name: index for index, tier in enumerate(tiers)}
    links = []
    for worker in workers:
        near, far = number[worker.near], number[worker.far]
        links += [(near, far), (far, near)]
    return links


def _spec(name: str, capacity: int, tier: TierConfig, traits: TierTraits) -> TierSpec:
    return TierSpec(name, capacity, traits, tier.high_watermark, tier.low_watermark)


def _report(progress: Progress, what: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(what, done, total)

"""Builds a daemon's parts from a configuration: tiers, workers, cache engine. Wiring, no policy.

Tiers come from the catalogue (tiers/catalog.py): a kind's row says what opens it.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hicache.config import Config, DramConfig, HbmConfig
from hicache.config.eviction import policy_named
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
from hicache.tiers.block import TierSpec, TierTraits, slot_bytes_for
from hicache.tiers.catalog import builder_of, near_kind
from hicache.tiers.hbm_probe import Gpus
from hicache.tiers.pool import SlotPool
from hicache.tiers.tier import MappedTier, OpenedTier, TierKind, TierSite
from hicache.transfer.media.codec import Codec, codec_of
from hicache.transfer.worker_messages import WorkerConfig

ARENA_PREFIX = "hicache-"
PROBE_BYTES = 8 << 20
Progress = Callable[[str, int, int], None]
"""(what, bytes done, bytes in all)."""


@dataclass(slots=True)
class Parts:
    """A daemon's parts. Tiers fastest first; `media` describes each one for people, `mapped` holds
    those with an arena, `codecs` each one's codec."""

    tiers: list[TierSpec] = field(default_factory=list)
    pools: list[SlotPool] = field(default_factory=list)
    media: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    mapped: dict[str, MappedTier] = field(default_factory=dict)
    codecs: dict[str, Codec] = field(default_factory=dict)
    workers: list[WorkerConfig] = field(default_factory=list)
    links: list[tuple[int, int]] = field(default_factory=list)

    @property
    def arenas(self) -> dict[str, Arena]:
        """The mapped tiers' arenas by tier name."""
        return {name: tier.arena for name, tier in self.mapped.items()}

    def slot_sizes(self, block_bytes: int) -> dict[str, int]:
        """The size of a block's slot in each tier, in the tiers' order."""
        return {
            tier: slot_bytes_for(codec.stored_bytes(block_bytes))
            for tier, codec in self.codecs.items()
        }

    def shedding(self, do: Callable[[Event[Any]], Any]) -> Shedding:
        """The near tier's shedding; `do` passes events to the cache engine."""
        near = near_kind().name
        number = next(n for n, spec in enumerate(self.tiers) if spec.name == near)
        is_pinned = any(worker.spec.traits.pins_arena for worker in self.workers)
        return Shedding(near, self.arenas[near], self.pools[number], is_pinned, do)

    def add(self, row: TierKind, section: TierConfig, opened: OpenedTier) -> None:
        """Add a tier, slower than those before it."""
        capacity = opened.pool.capacity_bytes
        self.tiers.append(_spec(row.name, capacity, section, opened.traits))
        self.pools.append(opened.pool)
        self.media[row.name] = opened.words
        self.codecs[row.name] = codec_of(row.codec)
        if opened.note:
            self.notes[row.name] = opened.note

    def close(self) -> None:
        """Unmap and remove the arenas."""
        for tier in self.mapped.values():
            tier.close()


def assemble(config: Config, gpus: Gpus, progress: Progress) -> Parts:
    """Open the tiers on a machine with these GPUs; memory is allocated and mapped here, with
    progress. Raises ArenaError with a sentence when memory cannot be allocated, and leaves nothing
    behind."""
    parts = Parts()
    with contextlib.ExitStack() as undo:
        undo.callback(parts.close)  # also on Ctrl-C: mapping the memory takes long
        _open_tiers(parts, config, gpus, progress)
        undo.pop_all()
    parts.links = _links(parts.tiers, parts.workers)
    return parts


def remove_dead_arenas(config: Config) -> dict[str, int]:
    """Free the memory of daemons that were killed, before free memory is counted, except arenas
    that this daemon will take over. Returns the bytes of these, by folder."""
    kept: dict[str, int] = {}
    wanted = [
        (section.path, row.name, section.size_bytes, getattr(section, "huge_pages", False))
        for row, section in config.tiers.present()
        if isinstance(section, DramConfig | HbmConfig) and not isinstance(section.size, Share)
    ]

    def is_kept(path: Path) -> bool:
        for position, (folder, tier, num_bytes, huge_pages) in enumerate(wanted):
            is_named_so = path.parent == Path(folder) and path.name.startswith(_prefix(tier))
            if is_named_so and is_adoptable(path, num_bytes, huge_pages=huge_pages):
                del wanted[position]  # one arena for each tier
                kept[folder] = kept.get(folder, 0) + path.stat().st_blocks * 512
                return True
        return False

    for folder in dict.fromkeys(folder for folder, *_ in wanted):
        remove_stale(folder, ARENA_PREFIX, is_kept)
    return kept


def _prefix(tier: str) -> str:
    return f"{ARENA_PREFIX}{tier}-"


def engine_settings(config: Config) -> EngineSettings:
    """The cache engine's part of the configuration."""
    planner = config.planner
    default = PrefillPrior()
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
        max_moving_bytes=config.limits.max_queued_bytes,
        max_pinned=config.limits.max_pinned,
    )


def rates_of(config: Config) -> dict[str, tuple[float, float]]:
    """Tier → limits of bytes per second from and to it (`debug`), for tiers with a worker."""
    present = config.tiers.present()
    return {row.name: _rates(config, row.name) for row, _ in present if not row.is_near}


def _rates(config: Config, tier: str) -> tuple[float, float]:
    speed, near = config.debug.bytes_per_s, near_kind().name
    return speed(f"{tier}_to_{near}"), speed(f"{near}_to_{tier}")


def new_engine(config: Config, parts: Parts) -> CacheEngine:
    """A cache engine over these parts."""
    tiers: list[TierConfig] = [getattr(config.tiers, spec.name) for spec in parts.tiers]
    settings = engine_settings(config)
    is_gated = any(spec.is_gated for spec in parts.tiers)
    chosen = [policy_named(tier.eviction) for tier in tiers]
    new_policy, history = policies_of(chosen, wants_model=is_gated)
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


def _open_tiers(parts: Parts, config: Config, gpus: Gpus, progress: Progress) -> None:
    """Open every configured tier, the near one first, since the others' workers map its arena."""
    near, present = near_kind(), config.tiers.present()
    opened: dict[str, OpenedTier] = {}
    for row, section in sorted(present, key=lambda pair: not pair[0].is_near):
        site = TierSite(_prefix(row.name), gpus, partial(progress, row.name))
        tier = opened[row.name] = builder_of(row)(section, site)
        if tier.mapping is not None:
            parts.mapped[row.name] = tier.mapping
    arena = parts.mapped[near.name]
    for row, section in present:
        parts.add(row, section, opened[row.name])
        device = opened[row.name].device
        if device is not None:
            read, write = _rates(config, row.name)
            parts.workers.append(
                WorkerConfig(
                    replace(device, codec=row.codec),
                    near.name,
                    str(arena.path),
                    row.name,
                    probe_bytes=PROBE_BYTES if config.planner.probe_links else 0,
                    read_bytes_per_s=read,
                    write_bytes_per_s=write,
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
    budget = getattr(tier, "write_budget_bytes_per_day", None)
    return TierSpec(
        name,
        capacity,
        traits,
        tier.high_watermark,
        tier.low_watermark,
        min_return=getattr(tier, "min_return", 0.0),
        write_bytes_per_s=math.inf if budget is None else budget / 86400,
    )

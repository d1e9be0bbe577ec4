"""The kinds of tiers there are, one row each. Whatever differs between kinds is behind its row:
other modules go through the list and ask a row, and never compare a tier's name.

A row names its model and its builder by paths, loaded when a configuration has that tier, so this
module stays light. `register` adds a kind from outside; it must run before the configuration is
read, in every process that reads one. Workers need no row: they are told their medium.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Final

from hicache.tiers.block import TierTraits
from hicache.tiers.tier import Builder, TierKind

ON_DISK: Final = TierTraits(persistent=True, deletion_is_io=True, keeps_whole_prefixes=True)

_rows: list[TierKind] = [
    TierKind(
        "hbm",
        rank=10,
        traits=TierTraits(),
        section="hicache.config.models:HbmConfig",
        builder="hicache.tiers.hbm:open_hbm",
        event_medium="GPU",
        summary="GPU memory, or its emulation.",
    ),
    TierKind(
        "dram",
        rank=20,
        traits=TierTraits(mapped=True),
        section="hicache.config.models:DramConfig",
        builder="hicache.tiers.dram:open_dram",
        event_medium="CPU",
        summary="Host memory shared with the clients.",
        is_near=True,
    ),
    TierKind(
        "disk",
        rank=30,
        traits=ON_DISK,
        section="hicache.config.models:DiskConfig",
        builder="hicache.tiers.disk.builder:open_disk",
        event_medium="STORAGE",
        summary="A local disk, kept across restarts.",
    ),
]


def register(row: TierKind) -> None:
    """Add a kind of tier. Raises ValueError when its name or its rank is taken."""
    for known in _rows:
        if row.name == known.name or row.rank == known.rank:
            raise ValueError(
                f"tier {row.name!r} (rank {row.rank}): {known.name!r} is there already"
            )
    _rows.append(row)
    _rows.sort(key=lambda row: row.rank)


def kinds() -> tuple[TierKind, ...]:
    """All rows, fastest first."""
    return tuple(_rows)


def near_kind() -> TierKind:
    """The kind that every worker copies from and to: its arena is there in every daemon."""
    return next(row for row in _rows if row.is_near)


def event_media() -> dict[str, str]:
    """The medium of each tier in KV events."""
    return {row.name: row.event_medium for row in _rows}


def builder_of(row: TierKind) -> Builder:
    """What opens tiers of this kind."""
    builder: Builder = resolve_name(row.builder)
    return builder


def section_of(row: TierKind) -> type:
    """The model of this kind's section of the configuration."""
    section: type = resolve_name(row.section)
    return section

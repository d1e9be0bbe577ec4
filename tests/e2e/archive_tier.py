"""A fourth kind of tier that exists only here: slow, persistent, shared between hosts. A block is a
file in a folder. Its row is in `archive_daemon.py`, its medium in `archive_medium.py`."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pydantic import Field

from hicache.config import VolumeTierConfig
from hicache.tiers.block import TierTraits
from hicache.tiers.pool import SlotPool
from hicache.tiers.tier import DeviceSpec, DeviceTraits, OpenedTier, TierSite

TRAITS = TierTraits(
    persistent=True, deletion_is_io=True, keeps_whole_prefixes=True, shared_between_hosts=True
)


class ArchiveConfig(VolumeTierConfig):
    """The section `tiers.archive`."""

    fsync: bool = Field(default=False, description="Sync each file before it counts as stored.")


@dataclass(frozen=True, slots=True)
class ArchiveOptions:
    """What the worker is told."""

    path: str
    fsync: bool


def open_archive(section: ArchiveConfig, site: TierSite) -> OpenedTier:
    """See Builder."""
    device = DeviceSpec(
        f"archive:{section.path}",
        "hicache-archive",
        "tests.e2e.archive_medium:ArchiveMedium",
        section.size_bytes,
        asdict(ArchiveOptions(section.path, section.fsync)),
        DeviceTraits(persistent=True),
    )
    return OpenedTier(SlotPool(section.size_bytes), TRAITS, "a shared folder", device=device)

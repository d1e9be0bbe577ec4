"""Opens the `disk` tier in the daemon: its free list, and what its worker is told. The daemon never
opens LMDB itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from hicache.tiers.block import TierTraits
from hicache.tiers.disk.format import record_pages, usable_bytes
from hicache.tiers.pool import SlotPool
from hicache.tiers.tier import DeviceSpec, DeviceTraits, OpenedTier, TierSite

TRAITS = TierTraits(persistent=True, deletion_is_io=True, keeps_whole_prefixes=True)
MAX_COMMITTED = 1024
"""Blocks of one commit: 32 MiB of blocks of 32 KiB. A commit's syncs cost the same however large
it is."""


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """What the worker is told beyond the capacity. `usable_bytes` of blocks fit, all of them where
    it is 0."""

    path: str
    durability: Literal["fast", "batched", "sync"] = "batched"
    read_ahead: bool = True
    min_free_bytes: int = 0
    usable_bytes: int = 0
    lock_wait_s: float = 5.0

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise ValueError(f"the path {self.path!r} must be absolute")


def open_disk(section: Any, site: TierSite) -> OpenedTier:
    """See Builder. `section`: a DiskConfig."""
    pool = SlotPool(usable_bytes(section.size_bytes, section.batch_bytes), pages_of=record_pages)
    options = DiskOptions(
        section.path,
        section.durability,
        section.read_ahead,
        section.min_free_bytes,
        pool.capacity_bytes,
    )
    traits = DeviceTraits(
        persistent=True,
        batch_moves=DeviceTraits().batch_moves if section.durability == "sync" else MAX_COMMITTED,
        batch_bytes=section.batch_bytes,
    )
    device = DeviceSpec(
        f"disk:{section.path}",
        "hicache-disk-0",
        "hicache.transfer.media.disk:DiskMedium",
        section.size_bytes,
        asdict(options),
        traits,
    )
    return OpenedTier(pool, TRAITS, "LMDB", device=device)

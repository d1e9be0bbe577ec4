"""The `dram` tier: slots in one shared-memory arena that clients map.

The daemon's loop opens and closes it; workers and clients attach to its arena by path. A closed
tier leaves no file and no memory; a killed daemon's arena is taken over by the next one on the host
where it has the same size, and removed where it has not.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from hicache.tiers.arena import Arena, ArenaError, Progress, remove_stale, stale_arenas
from hicache.tiers.block import TierTraits
from hicache.tiers.pool import SlotPool
from hicache.tiers.tier import OpenedTier, TierSite


class DramTier:
    """An arena in `directory` named `<prefix><epoch>`, and its free list.

    `removed` names the files of dead owners that were deleted when it was opened.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        prefix: str,
        capacity_bytes: int,
        *,
        huge_pages: bool = False,
        progress: Progress | None = None,
    ) -> None:
        adopted = _adopt(directory, prefix, capacity_bytes, huge_pages, progress)
        self.removed = remove_stale(directory, prefix)
        path = Path(directory) / f"{prefix}{os.urandom(6).hex()}"
        self.arena = adopted or Arena.create(
            path, capacity_bytes, huge_pages=huge_pages, pretouch=progress
        )
        self.pool = SlotPool(self.arena.data_bytes)

    @property
    def path(self) -> Path:
        return self.arena.path

    def close(self) -> None:
        """Give the memory back, unmap, remove the file; clients that map it keep an empty one."""
        self.arena.empty()
        self.arena.unlink()
        self.arena.close()


def open_dram(section: Any, site: TierSite) -> OpenedTier:
    """See Builder. `section`: a DramConfig."""
    tier = DramTier(
        section.path,
        site.prefix,
        section.size_bytes,
        huge_pages=section.huge_pages,
        progress=site.progress if section.pretouch else None,
    )
    return OpenedTier(tier.pool, TierTraits(mapped=True), "shared memory", mapping=tier)


def _adopt(
    directory: str | os.PathLike[str],
    prefix: str,
    capacity_bytes: int,
    huge_pages: bool,
    progress: Progress | None,
) -> Arena | None:
    """A dead owner's arena of this size; None where there is none that can be taken over."""
    for path in stale_arenas(directory, prefix):
        with contextlib.suppress(ArenaError):
            return Arena.adopt(path, capacity_bytes, huge_pages=huge_pages, pretouch=progress)
    return None

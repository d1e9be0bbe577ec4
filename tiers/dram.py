"""The `dram` tier: slots in one shared-memory arena that clients map.

The daemon's loop opens and closes it; workers and clients attach to its arena by path. A closed
tier leaves no file; a killed daemon's file is found stale and removed by the next one on the host.
"""

from __future__ import annotations

import os
from pathlib import Path

from hicache.tiers.arena import Arena, Progress, remove_stale
from hicache.tiers.slots import SlotPool


class DramTier:
    """An arena in `directory` named `<prefix><epoch>`, and its free list.

    `removed` names the files of dead owners that opening it cleared away first.
    """

    medium = "shared memory"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        prefix: str,
        capacity_bytes: int,
        *,
        huge_pages: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.removed = remove_stale(directory, prefix)
        path = Path(directory) / f"{prefix}{os.urandom(6).hex()}"
        self.arena = Arena.create(path, capacity_bytes, huge_pages=huge_pages, pretouch=progress)
        self.pool = SlotPool(self.arena.data_bytes, reshaped=self.arena.raise_range)

    @property
    def path(self) -> Path:
        return self.arena.path

    def close(self) -> None:
        """Unmap and remove the file; clients that map it keep their mapping."""
        self.arena.unlink()
        self.arena.close()

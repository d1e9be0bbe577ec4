"""Rows that a durable tier's worker streams at start, gathered until the tree can take them.

Used from the daemon's loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hicache.engine import plan as p
from hicache.engine.core import CacheEngine
from hicache.tiers.block import slot_bytes_for


class Restoring:
    """Rows by tier and namespace. `do` hands an event to the cache engine and its moves on."""

    def __init__(self, engine: CacheEngine, do: Callable[[p.Event[Any]], Any]) -> None:
        self._do = do
        self._rows: dict[str, dict[bytes, list[p.StoredBlock]]] = {}
        self.num_restored = 0

    def add(self, tier: str, namespace: bytes, rows: Sequence[p.StoredBlock]) -> None:
        """More rows of one namespace, in any order."""
        self._rows.setdefault(tier, {}).setdefault(namespace, []).extend(rows)

    def drop(self, tier: str) -> None:
        """The worker died while it was telling."""
        self._rows.pop(tier, None)

    def finish(self, tier: str, now_s: float) -> list[tuple[int, bytes]]:
        """All rows are here. Returns (slot bytes, key) of those that found no place."""
        homeless = []
        for digest, rows in self._rows.pop(tier, {}).items():
            block_bytes, step = rows[0].block_bytes, len(rows[0].tokens)
            if step % 4 or not step:
                refused = {row.key for row in rows}
            else:
                number = self._do(p.OpenNamespace(digest, step // 4, block_bytes))
                refused = set(self._do(p.Restore(tier, number, rows, now_s)))
            self.num_restored += len(rows) - len(refused)
            homeless += [
                (slot_bytes_for(row.block_bytes), row.key) for row in rows if row.key in refused
            ]
        return homeless

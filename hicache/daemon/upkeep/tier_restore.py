"""Passes persistent tiers' stored blocks to the cache engine at start, and blocks' uses back to
their workers every few minutes.

Used from the daemon's loop only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from hicache.engine import plan as p
from hicache.tiers.block import StoredRows

NOTE_S: Final = 300.0
"""The interval of writing uses: a daemon that is killed loses those of the last five minutes."""
NOTED_AT_ONCE: Final = 500
"""Uses per tick of the daemon: 1–2 ms."""


log = logging.getLogger("hicache")


class Restoring:
    """`do` passes an event to the cache engine, and its plan on. `slot_sizes`: block bytes → slot
    size in each tier."""

    def __init__(
        self, do: Callable[[p.Event[Any]], Any], slot_sizes: Callable[[int], Mapping[str, int]]
    ) -> None:
        self._do, self._slot_sizes = do, slot_sizes
        self.zero_s = time.time() - time.monotonic()
        self._tenths: dict[str, int] = {}
        self._look_s = time.monotonic() + NOTE_S

    def take(self, tier: str, rows: StoredRows, now_s: float) -> list[tuple[int, bytes]]:
        """Restore rows. Returns (slot bytes, key) of those without a place."""
        sizes = self._slot_sizes(rows.block_bytes)
        opened = p.OpenNamespace(
            rows.namespace, rows.step // 4, rows.block_bytes, slot_bytes=tuple(sizes.values())
        )
        unplaced = self._do(p.Restore(tier, self._do(opened), rows, now_s, self.zero_s))
        return [(sizes[tier], key) for key in unplaced]

    def note_progress(self, tier: str, what: str, done: int, total: int, unit: str) -> str:
        """A note about the progress, which is logged at every tenth."""
        note = f"{what}: {done / max(1, total):.0%} of {total:,} {unit}"
        tenth = 10 * done // max(1, total)
        if tenth != self._tenths.get(tier):
            self._tenths[tier] = tenth
            log.info("%s is %s", tier, note)
        return note

    def uses(self, tiers: Iterable[str], now_s: float) -> dict[str, list[p.Use]]:
        """The uses to write in this tick, by tier."""
        again = now_s >= self._look_s
        if again:
            self._look_s = now_s + NOTE_S
        return {tier: self._do(p.TakeUses(tier, NOTED_AT_ONCE, again)) for tier in tiers}

    def all_uses(self, tiers: Iterable[str]) -> dict[str, list[p.Use]]:
        """All uses not written yet, at the end, by tier. Sorted by key, like the file's pages."""
        uses = {tier: self._do(p.TakeUses(tier, 1 << 31, again=True)) for tier in tiers}
        return {tier: sorted(some, key=lambda use: use.key) for tier, some in uses.items()}

"""Which blocks a router behind vLLM hears of: vLLM's own hashes, in hicache's tiers.

The daemon is not asked for this. What vLLM's process learns anyway is told on: blocks it stored lie
in memory, and each match says in which tiers a prompt's blocks lie now, or do not any more. So a
router may be late to hear that a block has moved or gone, until a request asks for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

MEDIA: Final = {"hbm": "CPU", "dram": "CPU", "disk": "STORAGE"}
"""vLLM's words for where a block lies. "GPU" is vLLM's own cache, of which it speaks itself."""
STORED_IN: Final = "CPU"
MAX_KNOWN: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class News:
    """Blocks that are in `medium` now, or (`is_gone`) are not any more."""

    hashes: tuple[Any, ...]
    parent: Any
    medium: str
    is_gone: bool


class Announcements:
    """What was told, so that nothing is told twice; the oldest of very many are forgotten."""

    def __init__(self) -> None:
        self._medium_of: OrderedDict[Any, str] = OrderedDict()
        self._news: list[News] = []

    def stored(self, hashes: Sequence[Any], fresh: int) -> None:
        """All ranks have handed these over, consecutive blocks of one prompt. The last `fresh` were
        not held before; where the others lie is not known."""
        if fresh and hashes:
            start = max(0, len(hashes) - fresh)
            self._place(hashes[start:], STORED_IN, hashes[start - 1] if start else None)

    def seen(self, hashes: Sequence[Any], runs: Sequence[tuple[str, int]]) -> None:
        """A match found the first blocks of a prompt in these tiers, and no more of it."""
        start = 0
        for tier, count in runs:
            parent = hashes[start - 1] if 0 < start <= len(hashes) else None
            self._place(hashes[start : start + count], MEDIA.get(tier, "EXTERNAL"), parent)
            start += count
        gone: dict[str, list[Any]] = {}
        for name in hashes[start:]:
            medium = self._medium_of.pop(name, None)
            if medium is not None:
                gone.setdefault(medium, []).append(name)
        self._news += [News(tuple(names), None, medium, True) for medium, names in gone.items()]

    def take(self) -> Iterator[News]:
        """What is new since the last time."""
        news, self._news = self._news, []
        yield from news

    def _place(self, hashes: Sequence[Any], medium: str, parent: Any) -> None:
        moved: dict[str, list[Any]] = {}
        fresh: list[Any] = []
        for name in hashes:
            before = self._medium_of.get(name)
            if before == medium:
                continue
            if before is not None:
                moved.setdefault(before, []).append(name)
            self._medium_of[name] = medium
            fresh.append(name)
        if fresh:
            first = hashes.index(fresh[0])
            self._news.append(
                News(tuple(fresh), hashes[first - 1] if first else parent, medium, False)
            )
        self._news += [News(tuple(names), None, left, True) for left, names in moved.items()]
        while len(self._medium_of) > MAX_KNOWN:
            self._medium_of.popitem(last=False)

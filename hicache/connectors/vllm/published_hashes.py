"""The block hashes that vLLM publishes for routers: its own hashes, with their place in the tiers.

This costs no request to the daemon. It uses what vLLM's process learns anyway: blocks it stored are
in memory, and each match says in which tiers a prompt's blocks are now. So a router learns that a
block was moved or evicted only after a request has matched its prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

MEDIA: Final = {"hbm": "CPU", "dram": "CPU", "disk": "STORAGE"}
"""vLLM's names of media. "GPU" is vLLM's own cache, for which it publishes events itself."""
STORED_IN: Final = "CPU"
MAX_KNOWN: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class PublishedChange:
    """Blocks that are in `medium` now or, if `is_gone`, were removed from it."""

    hashes: tuple[Any, ...]
    parent: Any
    medium: str
    is_gone: bool


class PublishedHashes:
    """Remembers what was published, so that nothing is published twice. Beyond MAX_KNOWN hashes the
    oldest are dropped."""

    def __init__(self) -> None:
        self._medium_of: OrderedDict[Any, str] = OrderedDict()
        self._changes: list[PublishedChange] = []

    def stored(self, hashes: Sequence[Any], fresh: int) -> None:
        """All ranks have stored these consecutive blocks of one prompt. The daemon did not have the
        last `fresh` before; the tier of the others is not known."""
        if fresh and hashes:
            start = max(0, len(hashes) - fresh)
            self._place(hashes[start:], STORED_IN, hashes[start - 1] if start else None)

    def seen(self, hashes: Sequence[Any], runs: Sequence[tuple[str, int]]) -> None:
        """A match found the first blocks of a prompt in these tiers, and none after them."""
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
        self._changes += [
            PublishedChange(tuple(names), None, medium, True) for medium, names in gone.items()
        ]

    def take(self) -> Iterator[PublishedChange]:
        """The changes since the last call."""
        changes, self._changes = self._changes, []
        yield from changes

    def _removed(self, from_media: dict[str, list[Any]]) -> list[PublishedChange]:
        media = from_media.items()
        return [PublishedChange(tuple(names), None, medium, True) for medium, names in media]

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
            self._changes.append(
                PublishedChange(tuple(fresh), hashes[first - 1] if first else parent, medium, False)
            )
        self._changes += [
            PublishedChange(tuple(names), None, left, True) for left, names in moved.items()
        ]
        while len(self._medium_of) > MAX_KNOWN:
            self._medium_of.popitem(last=False)

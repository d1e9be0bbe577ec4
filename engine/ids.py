"""Block ids: small integers, handed out as consecutive ranges wherever they can be.

Consecutive ids let the rest of the cache engine index its arrays with slices. Free ids are kept as
extents that join with their neighbours when they are given back:

    ids      0 ── 511   512 ── 600   601 ── 1023
             in use     free         in use            give 0 ── 511 back: free 0 ── 600

A request takes the front of the extent used last that is large enough; only when none of the ones
looked at is, several are put together. Owned by the daemon's one loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from operator import attrgetter
from typing import Final

import numpy as np

from hicache.tiers.block import Ids

Span = slice | Ids
"""Block ids as an index into the arrays: a slice where they are consecutive, which is faster."""

_LOOKED_AT: Final = 8
_start_of: Final = attrgetter("start")


def ids_of(span: Span) -> Ids:
    """The ids themselves, shape [n]."""
    if isinstance(span, slice):
        return np.arange(span.start, span.stop, dtype=np.int32)
    return span


def size_of(span: Span) -> int:
    """How many ids."""
    return span.stop - span.start if isinstance(span, slice) else len(span)


def part_of(span: Span, first: int, last: int) -> Span:
    """Positions first … last-1 of a span."""
    if isinstance(span, slice):
        return slice(span.start + first, span.start + last)
    return span[first:last]


def joined(front: Span, back: Span) -> Span:
    """Two spans in a row, a slice if they meet."""
    if isinstance(front, slice) and isinstance(back, slice) and front.stop == back.start:
        return slice(front.start, back.stop)
    return np.concatenate((ids_of(front), ids_of(back)))


def together(spans: Iterable[Span]) -> list[Span]:
    """The same ids, in whatever order, in as few spans as slices that meet allow."""
    slices: list[slice] = []
    others: list[Span] = []
    for span in spans:
        if isinstance(span, slice):
            slices.append(span)
        else:
            others.append(span)
    slices.sort(key=_start_of)
    for span in slices:
        if others and isinstance(last := others[-1], slice) and last.stop == span.start:
            others[-1] = slice(last.start, span.stop)
        else:
            others.append(span)
    return others


class IdSpace:
    """Free ids below `size`."""

    def __init__(self) -> None:
        self.size = 0
        self.num_free = 0
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._recent: list[int] = []  # starts of extents, the last used at the end; some are stale

    def grow(self, size: int) -> None:
        """Ids up to `size` exist from now on."""
        self._add(self.size, size)
        self.size = size

    def take(self, count: int) -> Span:
        """`count` ids; the caller has seen that `num_free` suffices."""
        assert 0 < count <= self.num_free
        recent = self._recent
        looked_at = 0
        position = len(recent) - 1
        while position >= 0 and looked_at < _LOOKED_AT:
            start = recent[position]
            end = self._end_of.get(start)
            if end is None:
                del recent[position]
            elif end - start >= count:
                self._cut(position, start, end, count)
                return slice(start, start + count)
            else:
                looked_at += 1
            position -= 1
        return self._gather(count)

    def give(self, span: Span) -> None:
        """These ids are free again."""
        if isinstance(span, slice):
            self._add(span.start, span.stop)
            return
        if len(span) == 0:
            return
        ids = np.sort(span)
        cuts = np.flatnonzero(ids[1:] - ids[:-1] != 1) + 1
        bounds = [0, *cuts.tolist(), len(ids)]
        for first, last in itertools.pairwise(bounds):
            self._add(int(ids[first]), int(ids[last - 1]) + 1)

    def _add(self, start: int, end: int) -> None:
        self.num_free += end - start
        before = self._start_of.pop(start, None)
        if before is not None:
            del self._end_of[before]
            start = before
        after = self._end_of.pop(end, None)
        if after is not None:
            del self._start_of[after]
            end = after
        self._end_of[start] = end
        self._start_of[end] = start
        self._recent.append(start)
        if len(self._recent) > 4 * len(self._end_of) + 1024:  # most are stale
            self._recent = list(self._end_of)

    def _cut(self, position: int, start: int, end: int, count: int) -> None:
        """Take the front of an extent."""
        self.num_free -= count
        del self._end_of[start]
        if end - start == count:
            del self._start_of[end]
            del self._recent[position]
            return
        self._end_of[start + count] = end
        self._start_of[end] = start + count
        self._recent[position] = start + count

    def _gather(self, count: int) -> Ids:
        """Put extents together, the last used first."""
        parts = []
        while count:
            start = self._recent[-1]
            end = self._end_of.get(start)
            if end is None:
                self._recent.pop()
                continue
            part = min(count, end - start)
            self._cut(len(self._recent) - 1, start, end, part)
            parts.append(np.arange(start, start + part, dtype=np.int32))
            count -= part
        return np.concatenate(parts)

    def validate(self) -> None:
        """Extents do not touch, and add up."""
        last_end = -1
        total = 0
        for start in sorted(self._end_of):
            end = self._end_of[start]
            assert last_end < start < end <= self.size, "extents touch or overlap"
            assert self._start_of[end] == start
            assert start in self._recent
            last_end = end
            total += end - start
        assert total == self.num_free
        assert len(self._start_of) == len(self._end_of)

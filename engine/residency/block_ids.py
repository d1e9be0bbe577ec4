"""Block ids: small integers, allocated as consecutive ranges wherever possible.

Consecutive ids let the rest of the cache engine index its arrays with slices. Free ids are kept as
extents, which are joined with adjacent ones when ids are freed:

    ids      0 ── 511   512 ── 600   601 ── 1023
             in use     free         in use            after freeing 0 ── 511: free 0 ── 600

An allocation takes the front of an extent that is long enough, if possible one not much longer, of
several the one freed last. Owned by the daemon's one loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.tiers.block import Ids

Span = slice | Ids
"""Block ids as an index into the arrays: a slice if they are consecutive, which is faster."""

_LOOKED_AT: Final = 8
_FEW: Final = 16
_start_of: Final = attrgetter("start")


def ids_of(span: Span) -> Ids:
    """The ids themselves, shape [n]."""
    if isinstance(span, slice):
        return np.arange(span.start, span.stop, dtype=np.int32)
    return span


def size_of(span: Span) -> int:
    """The number of ids."""
    return span.stop - span.start if isinstance(span, slice) else len(span)


def part_of(span: Span, first: int, last: int) -> Span:
    """Positions first … last-1 of a span."""
    if isinstance(span, slice):
        return slice(span.start + first, span.start + last)
    return span[first:last]


def cut_at(span: Span, at: int) -> tuple[Span, Span]:
    """The first `at` ids of a span, and the others."""
    if isinstance(span, slice):
        start = span.start
        middle = start + at
        return slice(start, middle), slice(middle, span.stop)
    return span[:at], span[at:]


def joined(front: Span, back: Span) -> Span:
    """Two spans in a row; a slice if they are adjacent."""
    if isinstance(front, slice) and isinstance(back, slice) and front.stop == back.start:
        return slice(front.start, back.stop)
    return np.concatenate((ids_of(front), ids_of(back)))


def ids_along(spans: Sequence[Span]) -> Ids:
    """The ids of all these spans, in order, shape [n]."""
    if len(spans) == 1:
        return ids_of(spans[0])
    slices = [span for span in spans if isinstance(span, slice)]
    if len(slices) == len(spans) > _FEW:
        starts = np.array([span.start for span in slices], np.int32)
        sizes = np.array([span.stop for span in slices], np.int32) - starts
        ends = np.cumsum(sizes, dtype=np.int32)
        ids = np.arange(ends[-1], dtype=np.int32)
        ids += np.repeat(starts - (ends - sizes), sizes)
        return ids
    return np.concatenate([ids_of(span) for span in spans]) if spans else np.empty(0, np.int32)


def in_few(spans: Iterable[Span]) -> list[Span]:
    """The same ids in the same order, with short spans combined into arrays."""
    met: list[Span] = []
    for span in spans:
        last = met[-1] if met else None
        if isinstance(span, slice) and isinstance(last, slice) and last.stop == span.start:
            met[-1] = slice(last.start, span.stop)
        else:
            met.append(span)
    return met if len(met) <= _FEW else [ids_along(met)]


def together(spans: Sequence[Span]) -> list[Span]:
    """The same ids in any order, with adjacent slices joined."""
    slices = [span for span in spans if isinstance(span, slice)]
    met: list[Span] = [span for span in spans if not isinstance(span, slice)]
    slices.sort(key=_start_of)
    start = stop = -1
    for span in slices:
        if span.start != stop:
            if stop >= 0:
                met.append(slice(start, stop))
            start = span.start
        stop = span.stop
    if slices:
        met.append(slice(start, stop))
    return met


class IdSpace:
    """Free ids below `size`. `given` marks ids that were freed; it is None until `mark_given`,
    whose caller clears the marks that it has handled."""

    def __init__(self) -> None:
        self.given: npt.NDArray[np.bool_] | None = None
        self.size = 0
        self.num_free = 0
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._listed: list[list[int]] = [[] for _ in range(33)]
        """Starts of extents by the bits of their length, the last freed at the end; some stale."""
        self._num_listed = 0

    def grow(self, size: int) -> None:
        """Ids up to `size` exist from now on."""
        self._add(self.size, size)
        self.size = size
        if self.given is not None:
            self.mark_given()

    def mark_given(self) -> None:
        """Start marking freed ids, at one byte per id."""
        marks = np.zeros(self.size, np.bool_)
        if self.given is not None:
            marks[: len(self.given)] = self.given
        self.given = marks

    def take(self, count: int) -> slice | None:
        """Allocate `count` consecutive ids; None where no such extent is found."""
        assert count > 0
        for length in range(count.bit_length(), self.size.bit_length() + 1):
            starts = self._listed[length]
            if not starts:
                continue
            looked_at = 0
            for position in range(len(starts) - 1, -1, -1):
                start = starts[position]
                end = self._end_of.get(start, start)
                if (end - start).bit_length() != length:
                    self._unlist(length, position)
                elif end - start >= count:
                    self._unlist(length, position)
                    self._cut(start, end, count)
                    return slice(start, start + count)
                else:
                    looked_at += 1
                    if looked_at == _LOOKED_AT:
                        break
        return None

    def gather(self, count: int) -> Ids:
        """Allocate `count` ids from several extents, the longest first. There must be as many."""
        assert count <= self.num_free
        parts = []
        for length in range(self.size.bit_length(), -1, -1):
            starts = self._listed[length]
            while starts and count:
                start = starts[-1]
                self._unlist(length, -1)
                end = self._end_of.get(start, start)
                if (end - start).bit_length() == length:
                    part = min(count, end - start)
                    self._cut(start, end, part)
                    parts.append(np.arange(start, start + part, dtype=np.int32))
                    count -= part
        return np.concatenate(parts)

    def give(self, span: Span) -> None:
        """Free these ids."""
        if self.given is not None:
            self.given[span] = True
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
        """Free an extent, joined with adjacent ones."""
        self.num_free += end - start
        before = self._start_of.pop(start, None)
        if before is not None:
            del self._end_of[before]
            start = before
        after = self._end_of.pop(end, None)
        if after is not None:
            del self._start_of[after]
            end = after
        self._list(start, end)

    def _cut(self, start: int, end: int, count: int) -> None:
        """Allocate the front of an extent."""
        self.num_free -= count
        del self._end_of[start]
        del self._start_of[end]
        if end - start > count:
            self._list(start + count, end)

    def _list(self, start: int, end: int) -> None:
        self._end_of[start] = end
        self._start_of[end] = start
        self._listed[(end - start).bit_length()].append(start)
        self._num_listed += 1
        if self._num_listed > 4 * len(self._end_of) + 1024:  # most are stale
            for starts in self._listed:
                starts.clear()
            for start, end in self._end_of.items():
                self._listed[(end - start).bit_length()].append(start)
            self._num_listed = len(self._end_of)

    def _unlist(self, length: int, position: int) -> None:
        del self._listed[length][position]
        self._num_listed -= 1

    def validate(self) -> None:
        """Check that extents are not adjacent, add up, and can be found."""
        last_end = -1
        total = 0
        for start in sorted(self._end_of):
            end = self._end_of[start]
            assert last_end < start < end <= self.size, "extents touch or overlap"
            assert self._start_of[end] == start
            assert start in self._listed[(end - start).bit_length()]
            last_end = end
            total += end - start
        assert total == self.num_free
        assert len(self._start_of) == len(self._end_of)
        assert self._num_listed == sum(map(len, self._listed))

"""The free list of one tier: slots of mixed sizes out of one run of pages.

The capacity is cut in slabs. While in use, a slab (or, for slots that do not fit one well, a few
adjacent slabs) is a *region* of one slot-size class; a region whose slots are all free dissolves
into free slabs again, so room moves between classes one slab at a time and never fragments more:

    pages   0              slab              2·slab             3·slab            4·slab
            | region: class 8 KiB | region: class 6 MiB, two slabs  |  free slab  | …

Owned by the daemon's loop through the cache engine; one thread, no I/O. A failed call changes
nothing. A class can hold no slot larger than `max_slot_bytes`; `allocate` answers none then.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from hicache.tiers.block import MAX_TIER_BYTES, PAGE_BYTES, Ids

DEFAULT_SLAB_BYTES = 64 << 20
MIN_SLABS = 8
MAX_WASTE = 1 / 16
"""A region may leave this share of its pages unused before more slabs are joined to it."""

MAX_CLASSES = 127
FREE = 0  # in `_state`; a class marks its slots with two codes of its own, used and quarantined
NO_SLOTS = np.empty(0, np.int32)


class _Region:
    """Adjacent slabs of one class. `free[head:]` are its free slots, ascending once sorted."""

    __slots__ = ("cls", "first_slab", "free", "head", "is_sorted", "num_slabs", "num_slots")

    def __init__(self, cls: _Class, first_slab: int, num_slabs: int, slab_pages: int) -> None:
        first, stride = first_slab * slab_pages, cls.stride
        self.cls, self.first_slab, self.num_slabs = cls, first_slab, num_slabs
        self.num_slots = num_slabs * slab_pages // stride
        self.free: Ids = np.arange(first, first + self.num_slots * stride, stride, dtype=np.int32)
        self.head = 0
        self.is_sorted = True

    @property
    def num_free(self) -> int:
        return len(self.free) - self.head

    def take(self, count: int) -> Ids:
        if not self.is_sorted:
            self.free = np.sort(self.free[self.head :])
            self.head, self.is_sorted = 0, True
        part = self.free[self.head : self.head + count]
        self.head += len(part)
        return part

    def give(self, slots: Ids) -> None:
        self.free = np.concatenate((slots, self.free[self.head :]))
        self.head, self.is_sorted = 0, False


_by_place = attrgetter("first_slab")


class _Class:
    """One slot size: its regions that have a free slot, lowest first, and its counts."""

    __slots__ = (
        "num_free",
        "num_quarantined",
        "num_slabs",
        "num_used",
        "open",
        "quarantined",
        "spans",
        "stride",
        "used",
    )

    def __init__(self, code: int, stride: int, spans: list[int]) -> None:
        self.used, self.quarantined = code, code + 1
        self.stride = stride
        self.spans = spans  # how many slabs a region takes: the best first, then what still fits
        self.open: list[_Region] = []
        self.num_free = self.num_used = self.num_quarantined = self.num_slabs = 0


class SlotPool:
    """Slots of one tier. `reshaped(first page, pages)` is called before a region's slots are
    handed out for the first time: slots of another size may have covered these pages, so a mapped
    tier raises their generations there (`Arena.raise_range`).

    `pages_of(slot bytes)` says how many pages a slot takes in a medium that adds something of its
    own to each (`record_pages` of the disk tier); what it adds counts neither as used nor as room.
    """

    def __init__(
        self,
        capacity_bytes: int,
        slab_bytes: int | None = None,
        *,
        pages_of: Callable[[int], int] = lambda slot_bytes: slot_bytes // PAGE_BYTES,
        reshaped: Callable[[int, int], None] | None = None,
    ) -> None:
        if not PAGE_BYTES <= capacity_bytes <= MAX_TIER_BYTES:
            raise ValueError(
                f"a tier holds {PAGE_BYTES} … {MAX_TIER_BYTES} bytes, not {capacity_bytes}"
            )
        num_pages = capacity_bytes // PAGE_BYTES
        if slab_bytes is None:
            num_slabs = max(min(MIN_SLABS, num_pages), -(-capacity_bytes // DEFAULT_SLAB_BYTES))
            slab_bytes = num_pages // num_slabs * PAGE_BYTES
        if not PAGE_BYTES <= slab_bytes <= capacity_bytes:
            raise ValueError(f"a slab of {slab_bytes} bytes in a tier of {capacity_bytes}")
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.quarantined_bytes = 0
        self.slab_pages = slab_bytes // PAGE_BYTES
        self.num_slabs = num_pages // self.slab_pages
        self._pages_of = pages_of
        self._reshaped = reshaped
        self._free_slabs = bytearray(b"\x01" * self.num_slabs)
        self._num_free_slabs = self.num_slabs
        self._region_of: list[_Region | None] = [None] * self.num_slabs
        # One byte per page, meaningful where a slot starts; the kernel backs it as it is touched.
        self._state: npt.NDArray[np.uint8] = np.zeros(self.num_slabs * self.slab_pages, np.uint8)
        self._classes: dict[int, _Class] = {}

    @property
    def max_slot_bytes(self) -> int:
        """The largest slot an empty tier could hold, where a slot takes its own pages only."""
        return self.num_slabs * self.slab_pages * PAGE_BYTES

    def allocate(self, slot_bytes: int, count: int) -> Ids:
        """Up to `count` slots of the class, from regions in use first, the lowest pages first."""
        cls = self._class(slot_bytes)
        parts: list[Ids] = []
        wanted = count
        while wanted > 0:
            if not cls.open and not self._open_region(cls):
                break
            region = cls.open[0]
            part = region.take(wanted)
            if not region.num_free:
                del cls.open[0]
            parts.append(part)
            wanted -= len(part)
        if not parts:
            return NO_SLOTS.copy()
        slots = np.concatenate(parts)
        self._state[slots] = cls.used
        cls.num_free -= len(slots)
        cls.num_used += len(slots)
        self.used_bytes += len(slots) * slot_bytes
        return slots

    def available(self, slot_bytes: int) -> int:
        """How many slots of the class `allocate` could hand out now."""
        cls = self._class(slot_bytes)
        if not cls.spans:
            return 0
        best, least = cls.spans[0], cls.spans[-1]
        if best == 1:
            return cls.num_free + self._num_free_slabs * (self.slab_pages // cls.stride)
        room = cls.num_free
        for run in bytes(self._free_slabs).split(b"\x00"):
            whole, rest = divmod(len(run), best)
            room += whole * (best * self.slab_pages // cls.stride)
            room += rest * self.slab_pages // cls.stride if rest >= least else 0
        return room

    def free(self, slot_bytes: int, slots: Ids) -> None:
        """Give slots back. Raises ValueError, and changes nothing, when one is not in use."""
        cls = self._class(slot_bytes)
        slots = self._checked(slots, cls.used, f"used slots of {slot_bytes} bytes")
        cls.num_used -= len(slots)
        self.used_bytes -= len(slots) * slot_bytes
        self._give_back(cls, slots)

    def quarantine(self, slot_bytes: int, slots: Ids) -> None:
        """Take used slots out of use without offering them again."""
        cls = self._class(slot_bytes)
        slots = self._checked(slots, cls.used, f"used slots of {slot_bytes} bytes")
        self._state[slots] = cls.quarantined
        cls.num_used -= len(slots)
        cls.num_quarantined += len(slots)
        self.used_bytes -= len(slots) * slot_bytes
        self.quarantined_bytes += len(slots) * slot_bytes

    def end_quarantine(self, slot_bytes: int, slots: Ids) -> None:
        """The writer is known to be gone: the slots are free."""
        cls = self._class(slot_bytes)
        slots = self._checked(slots, cls.quarantined, f"quarantined slots of {slot_bytes} bytes")
        cls.num_quarantined -= len(slots)
        self.quarantined_bytes -= len(slots) * slot_bytes
        self._give_back(cls, slots)

    def donor_class(self, slot_bytes: int) -> int | None:
        """The class holding most slabs, other than this one; None when there is no other."""
        others = [(c.num_slabs, size) for size, c in self._classes.items() if size != slot_bytes]
        num_slabs, size = max(others, default=(0, 0))
        return size if num_slabs else None

    def validate(self) -> None:
        """Recount everything from the ground; AssertionError tells what differs."""
        owned = bytearray(b"\x01" * self.num_slabs)
        marked = np.count_nonzero(self._state)
        for size, cls in self._classes.items():
            counts = [0, 0, 0, 0]
            for region in self._regions(cls):
                first = region.first_slab * self.slab_pages
                for slab in range(region.first_slab, region.first_slab + region.num_slabs):
                    assert owned[slab], f"slab {slab} is in two regions"
                    assert self._region_of[slab] is region, f"slab {slab} is in another region"
                    owned[slab] = 0
                pages = np.arange(first, first + region.num_slots * cls.stride, cls.stride)
                state = self._state[pages]
                free = sorted(region.free[region.head :].tolist())
                assert free == pages[state == FREE].tolist(), f"free list of the region at {first}"
                assert len(free) < region.num_slots, f"the region at {first} holds nothing"
                assert (region in cls.open) == bool(free), f"the region at {first} wrongly listed"
                counts[0] += len(free)
                counts[1] += int(np.count_nonzero(state == cls.used))
                counts[2] += int(np.count_nonzero(state == cls.quarantined))
                counts[3] += region.num_slabs
            kept = [cls.num_free, cls.num_used, cls.num_quarantined, cls.num_slabs]
            assert kept == counts, f"class {size}: {kept}, counted {counts}"
            assert cls.open == sorted(cls.open, key=_by_place), f"class {size}: out of order"
            marked -= cls.num_used + cls.num_quarantined
        assert owned == self._free_slabs, "the free slabs are not those that no region owns"
        assert self._num_free_slabs == sum(owned), "free slabs miscounted"
        assert not marked, f"{marked} slots are marked outside every region"
        classes = self._classes.items()
        assert self.used_bytes == sum(size * c.num_used for size, c in classes), "used bytes"
        quarantined = sum(size * c.num_quarantined for size, c in classes)
        assert self.quarantined_bytes == quarantined, "quarantined bytes"

    # --- regions -------------------------------------------------------------------------------

    def _regions(self, cls: _Class) -> list[_Region]:
        regions = {id(r): r for r in self._region_of if r is not None and r.cls is cls}
        return list(regions.values())

    def _class(self, slot_bytes: int) -> _Class:
        cls = self._classes.get(slot_bytes)
        if cls is None:
            if slot_bytes <= 0 or slot_bytes % PAGE_BYTES:
                raise ValueError(f"{slot_bytes} bytes are not a whole number of pages")
            stride = self._pages_of(slot_bytes)
            cls = _Class(self._free_code(), stride, self._spans(stride))
            self._classes[slot_bytes] = cls
        return cls

    def _free_code(self) -> int:
        """A code for a new class, one that holds nothing making room where there are too many."""
        if len(self._classes) == MAX_CLASSES:
            idle = [size for size, cls in self._classes.items() if not cls.num_slabs]
            if not idle:
                raise ValueError(f"more than {MAX_CLASSES} slot sizes in one tier")
            return self._classes.pop(idle[0]).used
        return 1 + 2 * len(self._classes)

    def _spans(self, stride: int) -> list[int]:
        """Numbers of slabs a region of this class may take, best first; none when nothing fits."""
        least = -(-stride // self.slab_pages)
        if least > self.num_slabs:
            return []
        most = max(least, min(least + 7, self.num_slabs // 4))
        best = least
        for span in range(least, most + 1):
            pages = span * self.slab_pages
            best = span
            if pages % stride <= pages * MAX_WASTE:
                break
        else:
            best = least
        return list(range(best, least - 1, -1))

    def _open_region(self, cls: _Class) -> bool:
        for span in cls.spans:
            first = self._free_slabs.find(b"\x01" * span)
            if first < 0:
                continue
            region = _Region(cls, first, span, self.slab_pages)
            self._free_slabs[first : first + span] = bytes(span)
            self._region_of[first : first + span] = [region] * span
            self._num_free_slabs -= span
            cls.num_slabs += span
            cls.num_free += region.num_slots
            cls.open.append(region)
            if self._reshaped is not None:
                self._reshaped(first * self.slab_pages, span * self.slab_pages)
            return True
        return False

    def _checked(self, slots: Ids, code: int, what: str) -> Ids:
        """The slots, sorted, all different and all marked with this code; ValueError otherwise."""
        slots = np.sort(np.asarray(slots, dtype=np.int32))
        if not len(slots):
            return slots
        if slots[0] < 0 or slots[-1] >= len(self._state):
            raise ValueError(f"slots {slots[0]} … {slots[-1]} are not all in this tier")
        if np.count_nonzero(self._state[slots] == code) < len(slots):
            wrong = slots[self._state[slots] != code]
            raise ValueError(f"not {what}: slots {wrong[:8].tolist()}")
        if np.count_nonzero(slots[1:] == slots[:-1]):
            raise ValueError("the same slot is named twice")
        return slots

    def _give_back(self, cls: _Class, slots: Ids) -> None:
        """Slots (sorted) become free; a region left without a used slot dissolves."""
        self._state[slots] = FREE
        cls.num_free += len(slots)
        start = 0
        while start < len(slots):
            region = self._region_of[int(slots[start]) // self.slab_pages]
            assert region is not None
            end_page = (region.first_slab + region.num_slabs) * self.slab_pages
            end = len(slots) if slots[-1] < end_page else int(np.searchsorted(slots, end_page))
            was_full = not region.num_free
            if region.num_free + end - start == region.num_slots:
                self._dissolve(cls, region, was_full)
            else:
                region.give(slots[start:end])
                if was_full:
                    insort(cls.open, region, key=_by_place)
            start = end

    def _dissolve(self, cls: _Class, region: _Region, was_full: bool) -> None:
        first, span = region.first_slab, region.num_slabs
        if not was_full:
            cls.open.remove(region)
        self._region_of[first : first + span] = [None] * span
        self._free_slabs[first : first + span] = b"\x01" * span
        self._num_free_slabs += span
        cls.num_slabs -= span
        cls.num_free -= region.num_slots

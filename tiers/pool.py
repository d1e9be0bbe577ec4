"""The free list of one tier: slots of mixed sizes out of one run of pages.

The capacity is cut in slabs. While in use, a slab (or, for slots that do not fit one well, a few
adjacent slabs) is a *region* of one slot-size class; a region whose slots are all free dissolves
into free slabs again, so room moves between classes one slab at a time and never fragments more:

    pages   0              slab              2·slab             3·slab            4·slab
            | region: class 8 KiB | region: class 6 MiB, two slabs  |  free slab  | …

A region that does not empty by itself can be emptied for another class: after `close` none of its
slots is allocated, and what becomes free there is kept for that class (`SlabClearing`).

Free slabs can be withheld when the machine needs their memory: they are not allocated and do not
count in `capacity_bytes` until they are restored.

Owned by the daemon's loop through the cache engine; one thread, no I/O. A failed call changes
nothing. `allocate` returns no slots of a class whose slots cannot fit (`can_hold`).
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from hicache.tiers.block import MAX_TIER_BYTES, PAGE_BYTES, Ids, SlabClearing

DEFAULT_SLAB_BYTES = 64 << 20
MIN_SLABS = 8
MAX_WASTE = 1 / 16
"""A region may leave this share of its pages unused before more slabs are joined to it."""

MAX_CLASSES = 127
"""Most slot sizes in use at a time; a further one gets no slots."""
FREE = 0  # in `_state`; a class marks its slots with two codes of its own, used and quarantined
NO_SLOTS = np.empty(0, np.int32)


class _Region:
    """Adjacent slabs of one class. `free[head:]` are its free slots, ascending once sorted. Those
    of a closed region are not allocated and not counted by its class."""

    __slots__ = (
        "cls",
        "first_slab",
        "free",
        "head",
        "is_closed",
        "is_sorted",
        "num_slabs",
        "num_slots",
    )

    def __init__(self, cls: _Class, first_slab: int, num_slabs: int, slab_pages: int) -> None:
        first, stride = first_slab * slab_pages, cls.stride
        self.cls, self.first_slab, self.num_slabs = cls, first_slab, num_slabs
        self.num_slots = num_slabs * slab_pages // stride
        self.free: Ids = np.arange(first, first + self.num_slots * stride, stride, dtype=np.int32)
        self.head = 0
        self.is_sorted = True
        self.is_closed = False

    @property
    def num_free(self) -> int:
        return len(self.free) - self.head

    @property
    def used_bytes(self) -> int:
        return (self.num_slots - self.num_free) * self.cls.slot_bytes

    def take(self, count: int) -> Ids:
        """A view, good until slots are given back."""
        if not self.is_sorted:
            self.free[self.head :].sort()
            self.is_sorted = True
        part = self.free[self.head : self.head + count]
        self.head += len(part)
        return part

    def give(self, slots: Ids) -> None:
        """Take back slots, which are in ascending order."""
        old, self.head = self.head, self.head - len(slots)
        self.free[self.head : old] = slots
        follows = old == self.num_slots or slots[-1] < self.free[old]
        self.is_sorted = self.is_sorted and bool(follows)


_by_place = attrgetter("first_slab")


class _Class:
    """One slot size: its regions that have a free slot, lowest first, and its counts."""

    __slots__ = (
        "num_free",
        "num_quarantined",
        "num_slabs",
        "num_used",
        "open",
        "per_slab",
        "quarantined",
        "slot_bytes",
        "spans",
        "stride",
        "used",
    )

    def __init__(
        self, slot_bytes: int, code: int, stride: int, spans: list[int], slab_pages: int
    ) -> None:
        self.slot_bytes = slot_bytes
        self.per_slab = slab_pages // stride if spans[:1] == [1] else 0  # 0: of no one slab
        self.used, self.quarantined = code, code + 1
        self.stride = stride
        self.spans = spans  # how many slabs a region takes: the best first, then what still fits
        self.open: list[_Region] = []
        self.num_free = self.num_used = self.num_quarantined = self.num_slabs = 0


class SlotPool:
    """Slots of one tier.

    `reshaped` lists the (first page, pages) of regions opened since the list was last cleared:
    slots of another size may have covered these pages, so a mapped tier raises their generations
    before anything is written there (race 2 of `tiers/arena.py`). Each plan of the cache engine
    takes the list.

    `pages_of(slot bytes)` says how many pages a slot takes in a medium that adds something of its
    own to each (`record_pages` of the disk tier); what it adds counts neither as used nor as room.
    """

    def __init__(
        self,
        capacity_bytes: int,
        slab_bytes: int | None = None,
        *,
        pages_of: Callable[[int], int] = lambda slot_bytes: slot_bytes // PAGE_BYTES,
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
        self.clearing: SlabClearing | None = None
        self.withheld: set[int] = set()  # by their first pages
        self.slab_pages = slab_bytes // PAGE_BYTES
        self.slab_bytes = self.slab_pages * PAGE_BYTES
        self.num_slabs = num_pages // self.slab_pages
        self.reshaped: list[tuple[int, int]] = []
        self._pages_of = pages_of
        self._free_slabs = bytearray(b"\x01" * self.num_slabs)
        self._num_free_slabs = self.num_slabs
        self._region_of: list[_Region | None] = [None] * self.num_slabs
        # One byte per page, meaningful where a slot starts; the kernel backs it as it is touched.
        self._state: npt.NDArray[np.uint8] = np.zeros(self.num_slabs * self.slab_pages, np.uint8)
        self._classes: dict[int, _Class] = {}

    def can_hold(self, slot_bytes: int) -> bool:
        """Whether a slot of the class would fit if the tier were empty."""
        return bool(self._spans(self._stride(slot_bytes)))

    def num_used(self, slot_bytes: int) -> int:
        """The number of slots of the class in use."""
        cls = self._classes.get(slot_bytes)
        return 0 if cls is None else cls.num_used

    def allocate(self, slot_bytes: int, count: int) -> Ids:
        """Allocate up to `count` slots, from regions in use first, the lowest pages first."""
        cls = self._class(slot_bytes)
        if cls is None:
            return NO_SLOTS.copy()
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
        """The number of slots of the class that `allocate` could return now."""
        cls = self._classes.get(slot_bytes)
        if cls is not None and cls.per_slab and self.clearing is None:  # nearly always
            return cls.num_free + self._num_free_slabs * cls.per_slab
        cls = cls or self._class(slot_bytes)
        if cls is None or not cls.spans:
            return 0
        cleared = self._cleared_for(cls)
        best, room = cls.spans[0], cls.num_free
        if cls.per_slab:
            return room + (self._num_free_slabs + len(cleared)) * cls.per_slab
        least, slabs = cls.spans[-1], self._free_slabs
        if cleared:
            slabs = slabs.copy()
            slabs[cleared.start : cleared.stop] = b"\x01" * len(cleared)
        for run in bytes(slabs).split(b"\x00"):
            whole, rest = divmod(len(run), best)
            room += whole * (best * self.slab_pages // cls.stride)
            room += rest * self.slab_pages // cls.stride if rest >= least else 0
        return room

    def free(self, slot_bytes: int, slots: Ids) -> None:
        """Free slots. Raises ValueError, and changes nothing, when one is not in use."""
        cls = self._class_in_use(slot_bytes)
        slots = self._checked(slots, cls.used, f"used slots of {slot_bytes} bytes")
        cls.num_used -= len(slots)
        self.used_bytes -= len(slots) * slot_bytes
        self._give_back(cls, slots)

    def quarantine(self, slot_bytes: int, slots: Ids) -> None:
        """Take used slots out of use: they are not allocated until the quarantine ends."""
        cls = self._class_in_use(slot_bytes)
        slots = self._checked(slots, cls.used, f"used slots of {slot_bytes} bytes")
        self._state[slots] = cls.quarantined
        cls.num_used -= len(slots)
        cls.num_quarantined += len(slots)
        self.used_bytes -= len(slots) * slot_bytes
        self.quarantined_bytes += len(slots) * slot_bytes

    def end_quarantine(self, slot_bytes: int, slots: Ids) -> None:
        """No process writes these slots any more: they are free."""
        cls = self._class_in_use(slot_bytes)
        slots = self._checked(slots, cls.quarantined, f"quarantined slots of {slot_bytes} bytes")
        cls.num_quarantined -= len(slots)
        self.quarantined_bytes -= len(slots) * slot_bytes
        self._give_back(cls, slots)

    def clearings(self, slot_bytes: int, count: int) -> list[SlabClearing]:
        """Up to `count` runs of slabs that would hold a slot of the class once they are empty, the
        least used first, those used alike spread over the tier. Slabs of the class itself, those
        with quarantined slots and withheld ones are not among them. None while one is under way
        already."""
        cls = self._class(slot_bytes)
        others = any(other.num_slabs for other in self._classes.values() if other is not cls)
        if cls is None or not cls.spans or not others or self.clearing is not None:
            return []
        costs = np.array([self._clearing_cost(region, cls) for region in self._region_of])
        costs[[page // self.slab_pages for page in self.withheld]] = math.inf
        sums = np.lib.stride_tricks.sliding_window_view(costs, cls.spans[-1]).sum(axis=1)
        order = np.argsort(sums, kind="stable")[: np.count_nonzero(np.isfinite(sums))]
        if len(order) > count:
            limit = sums[order[count - 1]]
            cheaper, alike = order[sums[order] < limit], order[sums[order] == limit]
            spread = np.linspace(0, len(alike) - 1, count - len(cheaper)).astype(np.intp)
            order = np.concatenate((cheaper, alike[spread]))
        found = [self._clearing_at(slot_bytes, first, cls.spans[-1]) for first in order.tolist()]
        return list(dict.fromkeys(found))

    def close(self, clearing: SlabClearing) -> None:
        """Allocate nothing of these slabs until they are empty, and then only to the class that
        they are emptied for. Its first allocation there ends the clearing; so does `reopen`."""
        assert self.clearing is None, "two clearings at a time"
        self.clearing = clearing
        for slab in self._slabs_of(clearing):
            region = self._region_of[slab]
            if region is None:
                self._free_slabs[slab] = 0
                self._num_free_slabs -= 1
            elif not region.is_closed:
                region.is_closed = True
                region.cls.num_free -= region.num_free
                if region.num_free:
                    region.cls.open.remove(region)

    def reopen(self) -> None:
        """End the clearing, empty or not: every class may have what is free there."""
        assert self.clearing is not None
        for slab in self._slabs_of(self.clearing):
            region = self._region_of[slab]
            if region is None:
                self._free_slabs[slab] = 1
                self._num_free_slabs += 1
            elif region.is_closed:
                region.is_closed = False
                region.cls.num_free += region.num_free
                if region.num_free:
                    insort(region.cls.open, region, key=_by_place)
        self.clearing = None

    @property
    def clearing_bytes(self) -> int:
        """The bytes still in use in the slabs being emptied."""
        if self.clearing is None:
            return 0
        slabs = self._slabs_of(self.clearing)
        regions = {id(r): r for r in self._region_of[slabs.start : slabs.stop] if r is not None}
        return sum(region.used_bytes for region in regions.values())

    def withhold(self, count: int) -> list[int]:
        """Take up to `count` free slabs out of use, the last ones first. Returns the pages they
        begin at. A clearing for slots as large as a slab ends with it, once it is empty."""
        cleared = self._cleared_for_slabs()
        if cleared:
            self.reopen()
        pages: list[int] = []
        for slab in range(self.num_slabs - 1, -1, -1):
            if len(pages) < count and self._free_slabs[slab]:
                self._free_slabs[slab] = 0
                pages.append(slab * self.slab_pages)
        self._num_free_slabs -= len(pages)
        self.withheld |= set(pages)
        self.capacity_bytes -= len(pages) * self.slab_bytes
        return pages

    def restore(self, first_page: int) -> None:
        """A slab that was withheld is room again."""
        self.withheld.remove(first_page)
        self._free_slabs[first_page // self.slab_pages] = 1
        self._num_free_slabs += 1
        self.capacity_bytes += self.slab_bytes

    def _cleared_for_slabs(self) -> bool:
        cls = self._classes.get(self.slab_bytes)
        return cls is not None and len(self._cleared_for(cls)) > 0

    def validate(self) -> None:
        """Recount everything from the ground; AssertionError tells what differs."""
        owned = bytearray(b"\x01" * self.num_slabs)
        held = () if self.clearing is None else self._slabs_of(self.clearing)
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
                is_open = bool(free) and not region.is_closed
                assert (region in cls.open) == is_open, f"the region at {first} wrongly listed"
                slabs = range(region.first_slab, region.first_slab + region.num_slabs)
                assert all((slab in held) == region.is_closed for slab in slabs), "wrongly closed"
                counts[0] += 0 if region.is_closed else len(free)
                counts[1] += int(np.count_nonzero(state == cls.used))
                counts[2] += int(np.count_nonzero(state == cls.quarantined))
                counts[3] += region.num_slabs
            kept = [cls.num_free, cls.num_used, cls.num_quarantined, cls.num_slabs]
            assert kept == counts, f"class {size}: {kept}, counted {counts}"
            assert cls.open == sorted(cls.open, key=_by_place), f"class {size}: out of order"
            marked -= cls.num_used + cls.num_quarantined
        for slab in (*held, *(page // self.slab_pages for page in self.withheld)):
            owned[slab] = 0
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

    def _slabs_of(self, clearing: SlabClearing) -> range:
        return range(clearing.first_page // self.slab_pages, clearing.end_page // self.slab_pages)

    def _clearing_cost(self, region: _Region | None, cls: _Class) -> float:
        """Bytes in use in a slab's region; infinite where it cannot be emptied for the class."""
        if region is None:
            return 0.0
        if region.cls is cls:
            return math.inf
        if region.cls.num_quarantined:
            first, span = region.first_slab * self.slab_pages, region.num_slabs * self.slab_pages
            if (self._state[first : first + span] == region.cls.quarantined).any():
                return math.inf
        return float(region.used_bytes)

    def _clearing_at(self, slot_bytes: int, first: int, span: int) -> SlabClearing:
        """`span` slabs from `first` on, and the whole regions that reach into them."""
        at_first, at_last = self._region_of[first], self._region_of[first + span - 1]
        end = first + span
        if at_first is not None:
            first = at_first.first_slab
        if at_last is not None:
            end = at_last.first_slab + at_last.num_slabs
        return SlabClearing(slot_bytes, first * self.slab_pages, end * self.slab_pages)

    def _cleared_for(self, cls: _Class) -> range:
        """The slabs of the clearing, if it is empty and for this class; no slabs otherwise."""
        clearing = self.clearing
        if clearing is None or clearing.slot_bytes != cls.slot_bytes:
            return range(0)
        slabs = self._slabs_of(clearing)
        return range(0) if any(self._region_of[slabs.start : slabs.stop]) else slabs

    def _stride(self, slot_bytes: int) -> int:
        if slot_bytes <= 0 or slot_bytes % PAGE_BYTES:
            raise ValueError(f"{slot_bytes} bytes are not a whole number of pages")
        return self._pages_of(slot_bytes)

    def _class(self, slot_bytes: int) -> _Class | None:
        """The class of a slot size; None for a new one while too many others hold slots."""
        cls = self._classes.get(slot_bytes)
        if cls is None:
            stride, code = self._stride(slot_bytes), self._free_code()
            if code is None:
                return None
            spans = self._spans(stride)
            cls = _Class(slot_bytes, code, stride, spans, self.slab_pages)
            self._classes[slot_bytes] = cls
        return cls

    def _class_in_use(self, slot_bytes: int) -> _Class:
        cls = self._classes.get(slot_bytes)
        if cls is None:
            raise ValueError(f"no slots of {slot_bytes} bytes are in use")
        return cls

    def _free_code(self) -> int | None:
        """A code for a new class. Where there are too many, one that holds nothing is removed."""
        if len(self._classes) < MAX_CLASSES:
            return 1 + 2 * len(self._classes)
        idle = (size for size, cls in self._classes.items() if not cls.num_slabs)
        size = next(idle, None)
        return None if size is None else self._classes.pop(size).used

    def _spans(self, stride: int) -> list[int]:
        """Numbers of slabs a region of this class may take, best first; none when nothing fits.
        Best is the smallest that wastes little, or where none does, the one that wastes least."""
        least = -(-stride // self.slab_pages)
        if least > self.num_slabs:
            return []
        most = max(least, min(least + 7, self.num_slabs // 4))
        waste = {span: span * self.slab_pages % stride / span for span in range(least, most + 1)}
        little = [span for span in waste if waste[span] <= self.slab_pages * MAX_WASTE]
        best = little[0] if little else min(waste, key=waste.__getitem__)
        return list(range(best, least - 1, -1))

    def _open_region(self, cls: _Class) -> bool:
        if self._cleared_for(cls):
            self.reopen()
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
            self.reshaped.append((first * self.slab_pages, span * self.slab_pages))
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
        start = 0
        while start < len(slots):
            region = self._region_of[int(slots[start]) // self.slab_pages]
            assert region is not None
            end_page = (region.first_slab + region.num_slabs) * self.slab_pages
            end = len(slots) if slots[-1] < end_page else int(np.searchsorted(slots, end_page))
            if region.num_free + end - start == region.num_slots:
                self._dissolve(cls, region)
            else:
                is_listed = region.is_closed or region.num_free > 0
                region.give(slots[start:end])
                if not region.is_closed:
                    cls.num_free += end - start
                if not is_listed:
                    insort(cls.open, region, key=_by_place)
            start = end

    def _dissolve(self, cls: _Class, region: _Region) -> None:
        """Its slabs become free; those of a closed region stay with the clearing."""
        first, span = region.first_slab, region.num_slabs
        self._region_of[first : first + span] = [None] * span
        cls.num_slabs -= span
        if region.is_closed:
            return
        if region.num_free:
            cls.open.remove(region)
            cls.num_free -= region.num_free
        self._free_slabs[first : first + span] = b"\x01" * span
        self._num_free_slabs += span

"""SlotPool against a naive model: sets of page ranges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from hicache.tiers import block
from hicache.tiers.block import PAGE_BYTES
from hicache.tiers.pool import MAX_CLASSES, SlotPool

MIB = 1 << 20
PAGES = st.sampled_from([1, 2, 3, 5, 8, 13, 40])


class PoolMachine(RuleBasedStateMachine):
    """Allocate, free, quarantine in any order; no two live slots ever overlap."""

    @initialize(
        capacity=st.integers(1, 200), slab=st.none() | st.integers(1, 24), spare=st.booleans()
    )
    def open(self, capacity: int, slab: int | None, spare: bool) -> None:
        slab_bytes = None if slab is None else min(slab, capacity) * PAGE_BYTES
        self.spare = int(spare)
        self.pool = SlotPool(
            capacity * PAGE_BYTES,
            slab_bytes,
            pages_of=lambda slot_bytes: slot_bytes // PAGE_BYTES + self.spare,
        )
        self.used: dict[int, int] = {}  # slot → pages
        self.quarantined: dict[int, int] = {}
        self.last_size: dict[int, int] = {}  # page → the slot size that last covered it

    @rule(pages=PAGES, count=st.integers(0, 40))
    def allocate(self, pages: int, count: int) -> None:
        offered = self.pool.available(pages * PAGE_BYTES)
        clearing = self.pool.clearing
        slots = self.pool.allocate(pages * PAGE_BYTES, count)
        while self.pool.reshaped:
            first, num_pages = self.pool.reshaped.pop()
            for page in range(first, first + num_pages):
                self.last_size.pop(page, None)
        assert slots.dtype == np.int32
        assert len(slots) == min(count, offered)
        if clearing is not None and self.pool.clearing is None:
            assert clearing.slot_bytes == pages * PAGE_BYTES
        elif clearing is not None:
            held = range(clearing.first_page, clearing.end_page)
            assert not any(slot in held for slot in slots.tolist())
        for slot in slots.tolist():
            assert slot + pages <= self.pool.capacity_bytes // PAGE_BYTES
            for page in range(slot, slot + pages):
                assert self.last_size.get(page, pages) == pages
                self.last_size[page] = pages
            self.used[slot] = pages

    @rule(data=st.data(), quarantine=st.booleans())
    def give_up(self, data: Any, quarantine: bool) -> None:
        slots = self._some(data, self.used)
        if quarantine:
            for pages, group in _by_size(self.used, slots).items():
                self.pool.quarantine(pages * PAGE_BYTES, group)
            self.quarantined |= {slot: self.used[slot] for slot in slots}
        else:
            for pages, group in _by_size(self.used, slots).items():
                self.pool.free(pages * PAGE_BYTES, group)
        for slot in slots:
            del self.used[slot]

    @rule(pages=PAGES, count=st.integers(1, 5), data=st.data())
    def close(self, pages: int, count: int, data: Any) -> None:
        """Begin to empty slabs; perhaps empty them, and see that the class has got room."""
        found = self.pool.clearings(pages * PAGE_BYTES, count)
        assert len(found) <= count
        if self.pool.clearing is not None:
            assert not found
        if not found:
            return
        clearing = data.draw(st.sampled_from(found))
        inside = range(clearing.first_page, clearing.end_page)
        assert len(inside) >= pages + self.spare
        assert not any(slot in inside for slot in self.quarantined)
        assert not any(slot in inside for slot, size in self.used.items() if size == pages)
        self.pool.close(clearing)
        slots = [slot for slot in self.used if slot in inside]
        assert self.pool.clearing_bytes == sum(self.used[slot] for slot in slots) * PAGE_BYTES
        if data.draw(st.booleans()):
            for size, group in _by_size(self.used, slots).items():
                self.pool.free(size * PAGE_BYTES, group)
            for slot in slots:
                del self.used[slot]
            assert self.pool.clearing_bytes == 0
            assert self.pool.available(pages * PAGE_BYTES) > 0

    @precondition(lambda self: hasattr(self, "pool") and self.pool.clearing is not None)
    @rule()
    def reopen(self) -> None:
        self.pool.reopen()

    @rule(data=st.data())
    def end_quarantine(self, data: Any) -> None:
        slots = self._some(data, self.quarantined)
        for pages, group in _by_size(self.quarantined, slots).items():
            self.pool.end_quarantine(pages * PAGE_BYTES, group)
        for slot in slots:
            del self.quarantined[slot]

    @rule(pages=PAGES, slot=st.integers(-2, 210))
    def free_wrongly(self, pages: int, slot: int) -> None:
        if self.used.get(slot) != pages:
            with pytest.raises(ValueError, match="slot"):
                self.pool.free(pages * PAGE_BYTES, np.array([slot], np.int32))

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.validate()
        assert self.pool.used_bytes == sum(self.used.values()) * PAGE_BYTES
        assert self.pool.quarantined_bytes == sum(self.quarantined.values()) * PAGE_BYTES
        taken: set[int] = set()
        for slot, pages in (self.used | self.quarantined).items():
            covers = set(range(slot, slot + pages + self.spare))
            assert not taken & covers
            taken |= covers

    def _some(self, data: Any, slots: dict[int, int]) -> list[int]:
        if not slots:
            return []
        chosen = data.draw(st.lists(st.sampled_from(sorted(slots)), unique=True))
        return list(chosen)


def _by_size(sizes: dict[int, int], slots: list[int]) -> dict[int, block.Ids]:
    groups: dict[int, list[int]] = {}
    for slot in slots:
        groups.setdefault(sizes[slot], []).append(slot)
    return {pages: np.array(group, np.int32) for pages, group in groups.items()}


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30)


def test_a_protocol_user_may_hold_it() -> None:
    pool: block.SlotAllocator = SlotPool(MIB)
    assert pool.available(PAGE_BYTES) == MIB // PAGE_BYTES


def test_slots_come_consecutive_and_lowest_first() -> None:
    pool = SlotPool(256 * MIB)
    slots = pool.allocate(2 * MIB, 40)
    assert slots.tolist() == [512 * i for i in range(40)]
    pool.free(2 * MIB, slots[[3, 9, 4]])
    assert pool.allocate(2 * MIB, 2).tolist() == [3 * 512, 4 * 512]


def test_eight_mib_blocks_fit_in_a_256_mib_tier() -> None:
    pool = SlotPool(256 * MIB)
    assert pool.available(8 * MIB) == 32
    assert pool.available(48 * MIB) == 4
    assert len(pool.allocate(48 * MIB, 9)) == 4
    assert pool.can_hold(256 * MIB)
    assert not pool.can_hold(256 * MIB + PAGE_BYTES)


def test_little_room_is_lost_on_odd_sizes() -> None:
    pool = SlotPool(512 * MIB)
    for slot_bytes in (180 * PAGE_BYTES, 5 * MIB, 3 * MIB, 11 * MIB):
        assert pool.available(slot_bytes) * slot_bytes > 0.9 * pool.capacity_bytes, slot_bytes


def test_where_no_region_fits_well_the_best_is_taken() -> None:
    pool = SlotPool(56 * MIB)  # slabs of 7 MiB, of which a slot of 4 leaves 3
    assert pool.available(4 * MIB) == 12
    assert len(pool.allocate(4 * MIB, 3)) == 3
    assert len(pool.allocate(4 * MIB, 20)) == 9


def test_a_slot_larger_than_the_tier_is_never_offered() -> None:
    pool = SlotPool(MIB)
    assert pool.available(2 * MIB) == 0
    assert len(pool.allocate(2 * MIB, 1)) == 0


def test_an_emptied_slab_serves_another_class() -> None:
    pool = SlotPool(MIB)
    small = pool.allocate(PAGE_BYTES, 256)
    assert pool.available(2 * PAGE_BYTES) == 0
    pool.free(PAGE_BYTES, small[:32])
    assert pool.available(2 * PAGE_BYTES) == 16


def test_the_least_used_slab_is_emptied_first_and_serves_nobody_meanwhile() -> None:
    pool = SlotPool(MIB)
    small = pool.allocate(PAGE_BYTES, 256)
    pool.free(PAGE_BYTES, np.concatenate((small[33:40], small[64:66])))
    first = pool.clearings(2 * PAGE_BYTES, 1)
    assert [(c.first_page, c.end_page) for c in first] == [(32, 64)]
    pool.close(first[0])
    assert pool.clearing_bytes == 25 * PAGE_BYTES
    assert pool.available(PAGE_BYTES) == 2
    assert not pool.clearings(3 * PAGE_BYTES, 1)
    pool.free(PAGE_BYTES, np.concatenate((small[32:33], small[40:64])))
    assert pool.available(PAGE_BYTES) == len(pool.allocate(PAGE_BYTES, 9)) == 2
    assert pool.available(2 * PAGE_BYTES) == 16
    assert pool.allocate(2 * PAGE_BYTES, 1).tolist() == [32]
    assert pool.clearing is None


def test_a_clearing_that_fails_gives_its_room_back() -> None:
    pool = SlotPool(MIB)
    small = pool.allocate(PAGE_BYTES, 256)
    pool.close(pool.clearings(2 * PAGE_BYTES, 1)[0])
    pool.free(PAGE_BYTES, small[3:6])
    assert pool.available(PAGE_BYTES) == 0
    pool.reopen()
    assert pool.allocate(PAGE_BYTES, 9).tolist() == [3, 4, 5]


def test_slabs_with_quarantined_slots_and_slabs_of_the_class_itself_are_not_emptied() -> None:
    pool = SlotPool(MIB)
    small = pool.allocate(PAGE_BYTES, 32 * 6)
    large = pool.allocate(2 * PAGE_BYTES, 32)
    pool.free(2 * PAGE_BYTES, large[1:16])
    pool.quarantine(PAGE_BYTES, small[[0, 40, 191]])
    assert [c.first_page for c in pool.clearings(2 * PAGE_BYTES, 9)] == [64, 96, 128]
    assert [c.first_page for c in pool.clearings(PAGE_BYTES, 1)] == [192]


def test_a_slot_of_several_slabs_needs_as_many_side_by_side() -> None:
    pool = SlotPool(MIB)
    small = pool.allocate(PAGE_BYTES, 256)
    pool.free(PAGE_BYTES, small[40:60])
    pool.free(PAGE_BYTES, small[64:80])
    (found,) = pool.clearings(48 * PAGE_BYTES, 1)
    assert (found.first_page, found.end_page) == (32, 96)
    pool.close(found)
    pool.free(PAGE_BYTES, np.concatenate((small[32:40], small[60:64])))
    assert pool.available(48 * PAGE_BYTES) == 0
    pool.free(PAGE_BYTES, small[80:96])
    assert pool.available(48 * PAGE_BYTES) == 1


def test_naming_a_slot_twice_changes_nothing() -> None:
    pool = SlotPool(MIB)
    slots = pool.allocate(PAGE_BYTES, 2)
    with pytest.raises(ValueError, match="twice"):
        pool.free(PAGE_BYTES, slots[[0, 0]])
    pool.validate()
    assert pool.used_bytes == 2 * PAGE_BYTES


def test_freeing_slots_of_another_size_changes_nothing() -> None:
    pool = SlotPool(MIB)
    slots = np.concatenate([pool.allocate(n * PAGE_BYTES, 1) for n in (1, 2, 1)])
    with pytest.raises(ValueError, match="not used slots of 4096 bytes"):
        pool.free(PAGE_BYTES, slots)
    pool.validate()


def test_more_sizes_than_codes_come_and_go() -> None:
    pool = SlotPool(MIB)
    for pages in [*range(1, 200), *range(1, 200)]:
        pool.free(pages * PAGE_BYTES, pool.allocate(pages * PAGE_BYTES, 1))
    pool.validate()


def test_one_size_too_many_finds_no_room_until_another_has_gone() -> None:
    """The 128th size made whatever it was asked raise, which a client saw as a fault of ours."""
    pool = SlotPool(20_000 * PAGE_BYTES, PAGE_BYTES)
    held = {n * PAGE_BYTES: pool.allocate(n * PAGE_BYTES, 1) for n in range(1, MAX_CLASSES + 1)}
    assert all(len(slots) == 1 for slots in held.values())
    another = (MAX_CLASSES + 1) * PAGE_BYTES
    assert pool.can_hold(another)
    assert (pool.num_used(another), pool.available(another)) == (0, 0)
    assert len(pool.allocate(another, 1)) == 0
    assert pool.clearings(another, 4) == []
    with pytest.raises(ValueError, match="no slots of"):
        pool.free(another, np.array([0], np.int32))
    pool.validate()
    pool.free(5 * PAGE_BYTES, held.pop(5 * PAGE_BYTES))
    assert len(pool.allocate(another, 1)) == 1
    pool.validate()


def test_pages_are_reported_before_slots_of_another_size_cover_them() -> None:
    """A reader checks only the generation at its slot's first page; a smaller slot inside the old
    one would not raise that, so a new region raises all of its pages."""
    pool = SlotPool(MIB)
    slots = pool.allocate(4 * PAGE_BYTES, 1)
    pool.free(4 * PAGE_BYTES, slots)
    pool.allocate(PAGE_BYTES, 3)
    assert pool.reshaped == [(0, 32), (0, 32)]


def test_withheld_slabs_are_no_room_until_they_are_restored() -> None:
    slab = 4 * PAGE_BYTES
    pool = SlotPool(8 * slab, slab)
    used = pool.allocate(PAGE_BYTES, 1)
    given = pool.withhold(99)
    pool.validate()
    assert len(given) == 7
    assert pool.capacity_bytes == slab
    assert pool.available(PAGE_BYTES) == slab // PAGE_BYTES - 1
    assert not len(pool.allocate(2 * PAGE_BYTES, 1))
    pool.free(PAGE_BYTES, used)
    for page in given:
        pool.restore(page)
    pool.validate()
    assert (pool.capacity_bytes, pool.withheld) == (8 * slab, set())
    assert pool.available(PAGE_BYTES) == 8 * slab // PAGE_BYTES

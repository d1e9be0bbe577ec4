"""The transition table of copies: every allowed change, every illegal one, and what is counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.engine.residency.block_ids import Span, ids_of
from hicache.engine.residency.blocks import BlockTable, CopyState, IllegalTransition
from hicache.tiers.block import Ids, TierSpec, TierTraits
from hicache.tiers.pool import SlotPool

A, F, R, D, C = (
    CopyState.ABSENT,
    CopyState.FILLING,
    CopyState.READY,
    CopyState.DRAINING,
    CopyState.CANCELLED,
)

ALLOWED = {
    (A, F): "a slot was given",
    (F, R): "the copy came",
    (F, C): "no request waits for it any more",
    (F, A): "the copy failed",
    (C, F): "a request waits for it again",
    (C, R): "it came anyway",
    (C, A): "it failed",
    (R, D): "it is leaving",
    (D, R): "it was rescued",
    (D, A): "it is gone",
}
WAY_TO: dict[CopyState, tuple[CopyState, ...]] = {
    A: (),
    F: (F,),
    R: (F, R),
    D: (F, R, D),
    C: (F, C),
}
EVERY_PAIR = [(old, new) for old in CopyState for new in CopyState]


def table() -> BlockTable:
    tiers = [TierSpec(name, 64 * 4096, TierTraits(mapped=True)) for name in ("hbm", "dram")]
    return BlockTable(tiers, [SlotPool(tier.capacity_bytes, 4096) for tier in tiers])


def in_state(blocks: BlockTable, state: CopyState, tier: int = 1) -> Ids:
    """One block of node 0 whose copy has been brought to this state."""
    ids = ids_of(blocks.allocate(1))
    blocks.node[ids] = 0
    for step in WAY_TO[state]:
        blocks.change(tier, ids, step)
    return ids


def snapshot(blocks: BlockTable) -> list[object]:
    return [blocks.counts.tolist(), blocks.state[1].tolist(), blocks.tags.tolist()]


@pytest.mark.parametrize(("old", "new"), sorted(ALLOWED))
def test_allowed_changes_move_one_count(old: CopyState, new: CopyState) -> None:
    blocks = table()
    ids = in_state(blocks, old)
    before = blocks.counts[1].copy()
    blocks.change(1, ids, new)
    assert blocks.state[1][ids[0]] == new
    moved = blocks.counts[1] - before
    assert moved[old] == -1
    assert moved[new] == 1
    assert not blocks.counts[0, 1:].any()
    blocks.validate()


@pytest.mark.parametrize(("old", "new"), [pair for pair in EVERY_PAIR if pair not in ALLOWED])
def test_any_other_change_raises_and_changes_nothing(old: CopyState, new: CopyState) -> None:
    blocks = table()
    fine = next(state for state in CopyState if (state, new) in ALLOWED)
    ids = np.concatenate([in_state(blocks, fine), in_state(blocks, old)])
    before = snapshot(blocks)
    with pytest.raises(IllegalTransition, match=f"{old.name} → {new.name} in dram"):
        blocks.change(1, ids, new)
    assert snapshot(blocks) == before
    blocks.validate()


@pytest.mark.parametrize(
    ("state", "readable", "leaving"),
    [(A, 0, 0), (F, 0, 0), (C, 0, 0), (R, 1, 0), (D, 1, 1)],
)
def test_tags_say_what_can_be_read_and_what_is_leaving(
    state: CopyState, readable: int, leaving: int
) -> None:
    blocks = table()
    ids = in_state(blocks, state, tier=1)
    assert int(blocks.tags[ids[0]]) == readable << 1 | leaving << 9


def test_vacate_drains_a_ready_copy_first_and_gives_the_slot_back() -> None:
    blocks = table()
    ids = ids_of(blocks.allocate(3))
    blocks.node[ids] = 0
    slots = blocks.pools[0].allocate(4096, 3)
    blocks.fill(0, ids, slots)
    blocks.change(0, ids[:2], CopyState.READY)
    blocks.vacate(0, ids, 4096)
    assert not blocks.tags[ids].any()
    assert blocks.pools[0].used_bytes == 0
    blocks.vacate(0, ids[:0], 4096)  # nothing: no error
    blocks.validate()


def test_a_block_in_use_cannot_be_freed() -> None:
    blocks = table()
    ids = in_state(blocks, R)
    with pytest.raises(AssertionError, match="a block with copies was freed"):
        blocks.free(ids)
    blocks.change(1, ids, D)
    blocks.change(1, ids, A)
    blocks.pin(ids)
    with pytest.raises(AssertionError, match="a leased block was freed"):
        blocks.free(ids)
    blocks.unpin(ids)
    blocks.free(ids)
    assert len(blocks) == 0
    blocks.validate()


def test_a_leaf_is_leased_as_far_as_the_last_lease_reaches() -> None:
    blocks = table()
    leaf = blocks.allocate(10)
    assert isinstance(leaf, slice)
    blocks.place(leaf, 0, 3)
    front, scattered = slice(leaf.start, leaf.start + 4), ids_of(leaf)[[7, 2]]
    every: list[tuple[list[Span], int]] = [
        ([], 0),
        ([front], 4),
        ([front, scattered], 8),
        ([scattered, front], 8),
    ]
    for pins, reach in every:
        for pin in pins:
            blocks.pin(pin)
        for first in range(10):
            assert blocks.is_tail_pinned(leaf, first) == (first < reach)
            assert blocks.is_tail_pinned(ids_of(leaf), first) == (first < reach)
        for pin in pins:
            blocks.unpin(pin)
    blocks.validate()


def test_ids_are_consecutive_where_they_can_be() -> None:
    blocks = table()
    ids = ids_of(blocks.allocate(5000))
    assert (ids == np.arange(5000)).all()
    blocks.free(ids)
    assert (ids_of(blocks.allocate(5000)) == ids).all()


def test_a_story_names_every_copy() -> None:
    blocks = table()
    story = blocks.story(int(in_state(blocks, R)[0]))
    assert "hbm=absent" in story
    assert "dram=ready" in story


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 2000)), max_size=12))
def test_ids_are_never_handed_out_twice(steps: list[tuple[bool, int]]) -> None:
    blocks = table()
    held: list[int] = []
    for is_free, count in steps:
        if is_free:
            gone, held = held[:count], held[count:]
            blocks.free(np.array(gone, np.int32))
        else:
            ids = ids_of(blocks.allocate(count))
            blocks.node[ids] = 0
            held += ids.tolist()
        assert len(set(held)) == len(held) == len(blocks)
        blocks.validate()

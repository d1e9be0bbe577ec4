"""A durable tier's rows, in whatever order they come: what reaches the root is a hit again."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.engine import plan as p
from hicache.engine.settings import EngineSettings
from tests.engine.world import (
    BLOCK_BYTES,
    MAPPED,
    ON_DISK,
    ROOT,
    STEP,
    World,
    keys_of,
    row,
    tokens_of,
)
from tests.tiers.blocks import Row

DISK = (("dram", 64, MAPPED), ("disk", 64, ON_DISK))

prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=12)


def rows_of(prompts: Sequence[Sequence[int]]) -> list[Row]:
    """One row for every block of every prompt; its hits are its depth."""
    rows: dict[bytes, Row] = {}
    for blocks in prompts:
        tokens = tokens_of(*blocks)
        keys = keys_of(tokens)
        for depth, key in enumerate(keys):
            parent = keys[depth - 1] if depth else ROOT
            symbol = tokens[depth * STEP : (depth + 1) * STEP]
            rows[key] = row(key, parent, symbol, BLOCK_BYTES, depth)
    return list(rows.values())


def restored(world: World, rows: Sequence[Row]) -> list[bytes]:
    """As after a restart: the tier comes up, and its rows are told."""
    return world.restore(rows)


def hit(world: World, blocks: Sequence[int]) -> int:
    return world.match(tokens_of(*blocks, 9)).hit_blocks


@given(prompts, st.data())
def test_shuffled_rows_with_some_lost(stored: list[list[int]], data: st.DataObject) -> None:
    rows = rows_of(stored)
    lost = data.draw(st.sets(st.sampled_from([r.key for r in rows]))) if rows else set()
    random.Random(data.draw(st.integers(0, 1 << 30))).shuffle(rows)
    world = World(DISK)
    homeless = restored(world, [r for r in rows if r.key not in lost])
    whole = set()
    for blocks in stored:
        for key in keys_of(tokens_of(*blocks)):
            if key in lost:
                break
            whole.add(key)
    assert sorted(homeless) == sorted({r.key for r in rows} - lost - whole)
    for blocks in stored:
        assert hit(world, blocks) == sum(key in whole for key in keys_of(tokens_of(*blocks)))
    assert world.engine.residency.pools[1].used_bytes == len(whole) * BLOCK_BYTES


@given(prompts, prompts, st.integers(0, 1 << 30), st.integers(1, 12))
def test_little_room_and_blocks_that_are_known(
    stored: list[list[int]], known: list[list[int]], seed: int, room: int
) -> None:
    rows = rows_of(stored)
    random.Random(seed).shuffle(rows)
    world = World((("dram", 64, MAPPED), ("disk", room, ON_DISK)))
    for blocks in known:
        world.store(tokens_of(*blocks))
    homeless = restored(world, rows)
    residency = world.engine.residency
    assert len(set(homeless)) == len(homeless)
    used = residency.pools[1].used_bytes // BLOCK_BYTES
    assert used == len(rows) - len(homeless) <= room
    assert used == room or not homeless


def test_long_paths_become_long_nodes() -> None:
    rows = rows_of([[1] * 20, [1] * 10 + [2] * 8])
    rows.reverse()
    world = World(DISK)
    assert restored(world, rows) == []
    residency = world.engine.residency
    nodes = [n for n in residency.index.subtree(residency.namespaces[0].root) if not n.is_root]
    assert sorted(len(node) for node in nodes) == [8, 10, 10]
    depths = residency.blocks.depth[residency.blocks.live_ids()]
    assert (residency.blocks.hits[residency.blocks.live_ids()] == depths).all()


def test_rows_that_lead_in_a_circle_are_homeless() -> None:
    world = World(DISK)
    one, two = bytes([1]) * 32, bytes([2]) * 32
    circle = [
        row(one, two, tokens_of(1)),
        row(two, one, tokens_of(2)),
    ]
    assert sorted(restored(world, circle)) == [one, two]


@pytest.mark.thorough
@given(prompts, st.integers(0, 1 << 30), st.booleans())
def test_rows_of_blocks_that_are_known(
    stored: list[list[int]], seed: int, is_dram_lost: bool
) -> None:
    """The tier's worker died and is back; what is known stays where it is and gains its copy."""
    tiers = (("dram", 128, MAPPED), ("disk", 128, ON_DISK))
    world = World(tiers, EngineSettings(write_policy="write_through"))
    for blocks in stored:
        world.store(tokens_of(*blocks))
        world.finish_all()
    rows = list(world.rows.values())
    random.Random(seed).shuffle(rows)
    world.lose("disk")
    if is_dram_lost:
        world.lose("dram")
        world.do(p.TierUp("dram", world.now_s))
    world.do(p.TierUp("disk", world.now_s))
    assert restored(world, rows) == []
    for blocks in stored:
        held = "disk" if is_dram_lost else "dram+disk"
        assert world.tiers_of(tokens_of(*blocks)) == [held] * len(blocks)
        assert hit(world, blocks) == len(blocks)

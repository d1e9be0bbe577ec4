"""The shared mapping: allocation that fails in words, generations, stale files, copies."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.tiers import arena as arena_module
from hicache.tiers.arena import Arena, ArenaError, remove_stale, stale_arenas
from hicache.tiers.block import PAGE_BYTES
from hicache.tiers.hbm import pick_device

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


def test_attached_sees_what_the_owner_wrote(tmp_path: Path) -> None:
    owner = Arena.create(tmp_path / "a", 3 * MIB + 1)
    assert owner.data_bytes == 3 * MIB + PAGE_BYTES
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    other = Arena.attach(tmp_path / "a")
    owner.view(5, 10)[:] = 7
    assert other.view(5, 11).tolist() == [7] * 10 + [0]
    assert other.epoch == owner.epoch
    assert len(owner.epoch) == 32
    other.close()
    owner.unlink()
    owner.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("slot", "num_bytes"), [(-1, 1), (16, 1), (15, PAGE_BYTES + 1), (0, -1)])
def test_a_view_never_leaves_the_data(tmp_path: Path, slot: int, num_bytes: int) -> None:
    arena = Arena.create(tmp_path / "a", 16 * PAGE_BYTES)
    with pytest.raises(ValueError, match="leaves the arena"):
        arena.view(slot, num_bytes)
    assert arena.view(15, PAGE_BYTES).nbytes == PAGE_BYTES


def test_too_little_room_is_a_sentence_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match=r"needs \d+ bytes and .* has \d+ free: make the tier"):
        Arena.create(tmp_path / "a", 1 << 42)
    assert not list(tmp_path.iterdir())


def test_a_failing_allocation_is_a_sentence_and_leaves_no_file(tmp_path: Path) -> None:
    """Room that vanishes between looking and allocating; here, a limit on file sizes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * MIB, hard))
    try:
        with pytest.raises(ArenaError, match=r"needs \d+ bytes: File too large after 0 bytes"):
            Arena.create(tmp_path / "a", 16 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(ArenaError, match="exists already"):
        Arena.create(tmp_path / "a", MIB)
    assert (tmp_path / "a").read_text() == "mine"
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArenaError):
        Arena.create(tmp_path / "link", MIB)


def test_attaching_to_something_else_is_refused(tmp_path: Path) -> None:
    for name, content in {"short": b"x", "other": b"x" * 9000, "zero": bytes(9000)}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ArenaError, match="not an arena"):
            Arena.attach(tmp_path / name)
    with pytest.raises(ArenaError, match="cannot open"):
        Arena.attach(tmp_path / "absent")
    Arena.create(tmp_path / "a", MIB).close()
    os.truncate(tmp_path / "a", MIB // 2)
    with pytest.raises(ArenaError, match="shorter"):
        Arena.attach(tmp_path / "a")


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    Arena.create(tmp_path / "a", MIB, pretouch=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > MIB


def test_generations_are_seen_by_others(tmp_path: Path) -> None:
    owner, slots = Arena.create(tmp_path / "a", MIB), np.array([0, 7, 255], np.int32)
    reader = Arena.attach(tmp_path / "a")
    before = reader.generations(slots)
    owner.raise_generations(slots[1:])
    assert (reader.generations(slots) - before).tolist() == [0, 1, 1]
    owner.raise_range(0, 8)
    assert (reader.generations(slots) - before).tolist() == [1, 2, 1]
    assert before.tolist() == [0, 0, 0], "a copy, not a view"


def test_closing_with_views_held_is_fine(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "a", MIB)
    view = arena.view(0, 100)
    arena.close()
    arena.close()
    view[:] = 1  # still mapped: a client may be in the middle of a copy


def test_populating_changes_nothing_and_may_be_cut_short(tmp_path: Path) -> None:
    owner = Arena.create(tmp_path / "a", 5 * MIB)
    owner.data[:] = 9
    other = Arena.attach(tmp_path / "a")
    other.populate()
    assert (other.data == 9).all()
    other.close()
    other.populate()


HOLD = """
import sys
from hicache.tiers.arena import Arena
arena = Arena.create(sys.argv[1], 1 << 20)
print("made", flush=True)
sys.stdin.read()
"""


def test_only_dead_owners_arenas_are_stale(tmp_path: Path) -> None:
    mine = Arena.create(tmp_path / "h-mine", MIB)
    (tmp_path / "h-foreign").write_bytes(b"something else")
    (tmp_path / "h-half").touch()  # its maker died before it was whole
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "h-child")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        assert child.stdout.readline() == b"made\n"
        assert stale_arenas(tmp_path, "h-") == [tmp_path / "h-half"]
        child.kill()
        child.wait()
        assert stale_arenas(tmp_path, "h-") == [tmp_path / "h-child", tmp_path / "h-half"]
    assert len(remove_stale(tmp_path, "h-")) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["h-foreign", "h-mine"]
    mine.close()


WORK = """
import sys
from hicache.tiers.arena import Arena
arena = Arena.attach(sys.argv[1])
arena.hold()
Arena.attach(sys.argv[1]).close()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_dead_owners_arena_is_taken_over(tmp_path: Path) -> None:
    """The same memory for all its mappings, with all generations raised and another epoch."""
    first = Arena.create(tmp_path / "a", MIB)
    client = Arena.attach(tmp_path / "a")
    slots = np.array([0, 7], np.int32)
    first.raise_generations(slots)
    before, epoch = client.generations(slots), first.epoch
    with pytest.raises(ArenaError, match="taken over"):
        Arena.adopt(tmp_path / "a", MIB)
    first.close()
    with pytest.raises(ArenaError, match="another size"):
        Arena.adopt(tmp_path / "a", 2 * MIB)
    second = Arena.adopt(tmp_path / "a", MIB)
    assert (client.generations(slots) == before + 1).all()
    assert second.epoch != epoch
    assert second.inherited == []
    second.view(7, 5)[:] = 9
    assert client.view(7, 5).tolist() == [9] * 5
    client.close()
    second.close()


def test_what_clients_may_still_write_is_inherited(tmp_path: Path) -> None:
    """Until they report that they have finished, or the slot gets another block; also over several
    deaths. An arena with an unknown writer is not taken over."""
    first = Arena.create(tmp_path / "a", MIB)
    first.mark(np.array([4, 8, 12], np.int32), 2 * PAGE_BYTES, 77)
    first.unmark(np.array([8], np.int32))
    first.raise_generations(np.array([12], np.int32))
    first.close()
    for _ in range(2):
        second = Arena.adopt(tmp_path / "a", MIB)
        assert second.inherited == [(4, 2, 77)]
        second.close()
    third = Arena.adopt(tmp_path / "a", MIB)
    third.mark(np.array([20], np.int32), PAGE_BYTES, 0)
    third.close()
    with pytest.raises(ArenaError, match="an unknown process"):
        Arena.adopt(tmp_path / "a", MIB)


def test_an_arena_that_a_worker_holds_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "WORKERS_S", 0.1)
    Arena.create(tmp_path / "a", MIB).close()
    child = subprocess.Popen(
        [sys.executable, "-c", WORK, str(tmp_path / "a")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(ArenaError, match="taken over"):
            Arena.adopt(tmp_path / "a", MIB)
        child.kill()
        child.wait()
    Arena.adopt(tmp_path / "a", MIB).close()


def test_an_empty_arena_holds_no_memory_although_others_map_it(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "a", 8 * MIB)
    client = Arena.attach(tmp_path / "a")
    client.view(3, 5)[:] = 7
    before = client.generations(np.array([3], np.int32))
    arena.empty()
    assert arena.memory_bytes < MIB
    assert client.generations(np.array([3], np.int32)) != before
    assert client.view(3, 5).tolist() == [0] * 5
    client.close()
    arena.close()


@given(data=st.data())
def test_copies_of_many_slots(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Neighbouring slots are copied in one go, whatever their order and padding."""
    pages = data.draw(st.integers(1, 3))
    block_bytes = data.draw(st.integers(1, pages * PAGE_BYTES))
    places = data.draw(st.lists(st.integers(0, 9), unique=True, max_size=10))
    slots = np.array(places, np.int32) * pages
    path = tmp_path_factory.mktemp("arena") / "a"
    arena = Arena.create(path, 10 * pages * PAGE_BYTES)
    blocks = np.random.default_rng(0).integers(0, 256, (len(slots), block_bytes), np.uint8)
    arena.copy_in(slots, blocks, pages * PAGE_BYTES)
    for slot, row in zip(slots.tolist(), blocks, strict=True):
        assert np.array_equal(arena.view(slot, block_bytes), row)
    out = np.zeros_like(blocks)
    arena.copy_out(slots, out, pages * PAGE_BYTES)
    assert np.array_equal(out, blocks)
    arena.close()
    path.unlink()


def test_copies_check_their_shapes(tmp_path: Path) -> None:
    arena, slots = Arena.create(tmp_path / "a", MIB), np.array([0, 255], np.int32)
    with pytest.raises(ValueError, match="2 slots"):
        arena.copy_in(slots, np.zeros((3, 8), np.uint8), PAGE_BYTES)
    with pytest.raises(ValueError, match="2 slots"):
        arena.copy_out(slots, np.zeros((2, 5000), np.uint8), PAGE_BYTES)
    with pytest.raises(ValueError, match="leaves the arena"):
        arena.copy_in(slots, np.zeros((2, 5000), np.uint8), 2 * PAGE_BYTES)


def test_the_device_is_picked_with_a_reason() -> None:
    assert pick_device("host", [0], "").is_emulated
    assert pick_device("auto", [2, 1], "").index == 1
    assert pick_device("cuda:2", [1, 2], "").index == 2
    assert pick_device("auto", [], "there is no GPU").reason.endswith("there is no GPU")
    with pytest.raises(ValueError, match="auto, host, or cuda:N"):
        pick_device("gpu", [0], "")
    with pytest.raises(ValueError, match="there is only cuda:0"):
        pick_device("cuda:77", [0], "")
    with pytest.raises(ValueError, match="no luck"):
        pick_device("cuda:0", [], "no luck")

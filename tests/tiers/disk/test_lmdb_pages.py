"""Values found in LMDB's file by our own walk, beside what LMDB says; and nothing worse than "ask
LMDB" where pages are damaged."""

from __future__ import annotations

import os
import random
from pathlib import Path

import lmdb
import pytest

from hicache.tiers.disk.environment import DATA_FILE, Environment, open_environment
from hicache.tiers.disk.lmdb_pages import Extent, Tree, is_known, locate

MIB = 1 << 20
SMALL, LARGE = 100, 9000  # within a leaf, and in a run of pages of its own


def key(number: int) -> bytes:
    return random.Random(number).randbytes(32)


def value(number: int, generation: int) -> bytes:
    chance = random.Random(number << 8 | generation)
    return chance.randbytes(chance.choice([SMALL, LARGE]))


def open_at(folder: Path) -> Environment:
    return open_environment(folder, 64 * MIB, is_synced=False)


def walked(fd: int, txn: lmdb.Transaction, numbers: range) -> dict[bytes, bytes]:
    tree = Tree.of(txn, b"blocks")
    if tree is None:
        return {}
    found = locate(fd, tree, [key(number) for number in numbers])
    return {
        name: os.pread(fd, said.num_bytes, said.offset) if isinstance(said, Extent) else said
        for name, said in found.items()
    }


def told(txn: lmdb.Transaction, opened: Environment, numbers: range) -> dict[bytes, bytes]:
    shown = {key(number): txn.get(key(number), db=opened.blocks) for number in numbers}
    return {name: bytes(content) for name, content in shown.items() if content is not None}


@pytest.mark.parametrize("num_keys", [1, 3, 60, 1000])
def test_what_lmdb_says_also_of_the_past(tmp_path: Path, num_keys: int) -> None:
    """A transaction from before goes on seeing what it saw, whatever is written meanwhile."""
    numbers = range(num_keys)
    opened = open_at(tmp_path)
    fd = opened.data.fileno()
    assert is_known(fd)
    past = opened.env.begin(buffers=True)
    then = told(past, opened, numbers)
    for generation in range(4):
        chance = random.Random(generation)
        with opened.env.begin(write=True) as txn:
            for number in chance.sample(numbers, max(1, num_keys // 2)):
                txn.delete(key(number), db=opened.blocks)
            for number in chance.sample(numbers, max(1, num_keys * 2 // 3)):
                txn.put(key(number), value(number, generation), db=opened.blocks)
        assert walked(fd, past, numbers) == then
        past.abort()
        past = opened.env.begin(buffers=True)
        then = told(past, opened, numbers)
        assert walked(fd, past, numbers) == then
        assert not walked(fd, past, range(num_keys, num_keys + 50))
    past.abort()
    opened.close()


def test_nothing_in_an_empty_tree(tmp_path: Path) -> None:
    opened = open_at(tmp_path)
    with opened.env.begin(buffers=True) as txn:
        assert Tree.of(txn, b"blocks") is None
        assert Tree.of(txn, b"of another") is None
    opened.close()


@pytest.mark.parametrize("seed", range(20))
def test_damaged_pages_are_left_to_lmdb(tmp_path: Path, seed: int) -> None:
    """Whatever the file holds, a key is found at some place or left out; nothing raises."""
    chance = random.Random(seed)
    numbers = range(300)
    opened = open_at(tmp_path)
    with opened.env.begin(write=True) as txn:
        for number in numbers:
            txn.put(key(number), value(number, 0), db=opened.blocks)
    with opened.env.begin(buffers=True) as txn:
        tree = Tree.of(txn, b"blocks")
        assert tree is not None
    copy = tmp_path / "copy"
    raw = bytearray((tmp_path / DATA_FILE).read_bytes())
    opened.close()
    for page in range(2, len(raw) // 4096):
        if int.from_bytes(raw[page * 4096 + 10 : page * 4096 + 12], "little") & 3:  # of a tree
            for _ in range(chance.randrange(1, 40)):
                raw[page * 4096 + chance.randrange(8, 4096)] = chance.randrange(256)
    copy.write_bytes(raw[: chance.randrange(len(raw))] if seed % 2 else raw)
    fd = os.open(copy, os.O_RDONLY)
    names = [key(number) for number in numbers]
    assert set(locate(fd, tree, names)) <= set(names)
    for root in range(len(raw) // 4096 + 2):
        assert set(locate(fd, Tree(root, 1 + root % 3), names)) <= set(names)
    os.close(fd)


def test_another_layout_is_not_read(tmp_path: Path) -> None:
    opened = open_at(tmp_path)
    opened.close()
    raw = bytearray((tmp_path / DATA_FILE).read_bytes())
    raw[20] = 2  # its data version
    for content in (raw, raw[:100], b""):
        (tmp_path / "other").write_bytes(content)
        fd = os.open(tmp_path / "other", os.O_RDONLY)
        assert not is_known(fd)
        os.close(fd)

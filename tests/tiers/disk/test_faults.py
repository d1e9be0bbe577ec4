"""The n-th system call fails, for every n until a run passes untouched: write, read, sync, open.

What was stored before is whole after each of them, what was being stored is whole or absent, and
the next process (or this one, where it may go on) stores and finds blocks again.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from hicache.tiers.disk import disk_tier as disk
from hicache.tiers.disk.disk_tier import DiskTier
from hicache.tiers.disk.lmdb_pages import Extent
from hicache.tiers.disk.reader import fill
from hicache.tiers.errors import (
    TierBroken,
    TierCorrupt,
    TierDamaged,
    TierError,
    TierFull,
    TierMissing,
)
from tests.tiers.blocks import content, name
from tests.tiers.faults import Faults, Kind

MIB = 1 << 20
BLOCK, SLOT = 40_000, 40_960
MOST = 200


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faults]:
    faults = Faults(tmp_path_factory.getbasetemp())
    yield faults
    faults.close()


def put(tier: DiskTier, *numbers: int) -> None:
    tier.put(SLOT, [(name(n), content(n, BLOCK)) for n in numbers])


def stored(tier: DiskTier, *numbers: int) -> list[bool]:
    """Which are there; what is there is right."""
    views = [np.zeros(BLOCK, np.uint8) for _ in numbers]
    wanted = [(name(n), view) for n, view in zip(numbers, views, strict=True)]
    problems = tier.read(SLOT, wanted)
    for number, view, problem in zip(numbers, views, problems, strict=True):
        assert isinstance(problem, TierMissing) or np.array_equal(view, content(number, BLOCK))
    return [problem is None for problem in problems]


def rounds(path: Path) -> Iterator[tuple[int, Path]]:
    for nth in itertools.count(1):
        assert nth < MOST, "no run passed untouched"
        yield nth, path / str(nth)
        shutil.rmtree(path / str(nth), ignore_errors=True)


@pytest.mark.parametrize("durability", ["fast", "batched"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("kind", get_args(Kind))
def test_while_a_block_is_stored_and_another_given_up(
    tmp_path: Path, faults: Faults, kind: Kind, error: int, durability: disk.Durability
) -> None:
    for nth, path in rounds(tmp_path):
        tier = DiskTier(path, 16 * MIB, durability=durability)
        put(tier, 10, 11)
        problem = None
        with faults.fail_at(kind, nth, error):
            try:
                put(tier, 1, 2, 3)
                tier.delete(SLOT, [name(11).key])
            except TierError as raised:
                problem = raised
        assert not isinstance(problem, TierDamaged), "a call that fails says nothing of the blocks"
        if kind == "write" and error == errno.ENOSPC and problem is not None:
            assert isinstance(problem, TierFull | TierBroken)
        try:
            assert stored(tier, 1, 2, 3) in ([True] * 3, [False] * 3)
            assert stored(tier, 10) == [True]
            put(tier, 20)
        except TierBroken:  # LMDB gave its environment up: the worker ends here
            tier._release()
        else:
            tier.close()
        with DiskTier(path, 16 * MIB, durability=durability) as again:
            assert not again.notes
            assert stored(again, 10) == [True]
            assert stored(again, 1, 2, 3) in ([True] * 3, [False] * 3)
            if problem is None:
                assert stored(again, 1, 2, 3, 11) == [True] * 3 + [False]
            put(again, 21)
            assert stored(again, 21) == [True]
        if not faults.has_failed:
            assert problem is None
            return


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOMEM])
@pytest.mark.parametrize("for_good", [False, True])
def test_while_blocks_are_read(tmp_path: Path, faults: Faults, error: int, for_good: bool) -> None:
    """A read that fails once is made again, or LMDB is asked. One that goes on failing is a miss,
    and the block is removed where the device said that it cannot give its bytes."""
    numbers = range(6)
    for nth, path in rounds(tmp_path):
        with DiskTier(path, 16 * MIB) as tier:
            put(tier, *numbers)
            views = [np.zeros(BLOCK, np.uint8) for _ in numbers]
            wanted = [(name(n), view) for n, view in zip(numbers, views, strict=True)]
            with faults.fail_at("read", nth, error, for_good=for_good):
                problems = tier.read(SLOT, wanted)
            assert for_good or problems == [None] * len(numbers)
            for number, problem in enumerate(problems):
                if problem is None:
                    assert np.array_equal(views[number], content(number, BLOCK))
                else:
                    assert isinstance(problem, TierCorrupt) == (error == errno.EIO)
            left = [not isinstance(problem, TierCorrupt) for problem in problems]
            assert stored(tier, *numbers) == left
        if not faults.has_failed:
            assert problems == [None] * len(numbers)
            return


def test_a_file_cut_short_is_no_sigbus(tmp_path: Path) -> None:
    (tmp_path / "cut").write_bytes(bytes(100))
    fd = os.open(tmp_path / "cut", os.O_RDONLY)
    for place in (Extent(50, 100), Extent(1 << 60, 100)):
        with pytest.raises(TierCorrupt, match="the file is shorter"):
            fill(np.zeros(100, np.uint8), place, fd)
    os.close(fd)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EMFILE])
@pytest.mark.parametrize("kind", get_args(Kind))
def test_while_the_device_is_opened_and_left(
    tmp_path: Path, faults: Faults, kind: Kind, error: int
) -> None:
    for nth, path in rounds(tmp_path):
        with DiskTier(path, 16 * MIB) as tier:
            put(tier, 10)
        problem = None
        with faults.fail_at(kind, nth, error):
            try:
                with DiskTier(path, 16 * MIB) as tier:
                    put(tier, 1)
            except TierError as raised:
                problem = raised
        assert not isinstance(problem, TierDamaged)
        with DiskTier(path, 16 * MIB) as again:
            assert not again.notes, "nothing is set aside for a call that failed"
            assert stored(again, 10) == [True]
            assert stored(again, 1) == [True] or problem is not None
        if not faults.has_failed:
            return

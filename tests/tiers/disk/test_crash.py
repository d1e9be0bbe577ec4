"""A writer killed at any moment: what it acknowledged is whole, the rest is whole or absent."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hicache.tiers.block import PAGE_BYTES
from hicache.tiers.disk.disk_tier import DiskTier
from hicache.tiers.errors import TierMissing
from tests.tiers.blocks import content, listed, name

pytestmark = pytest.mark.thorough

MIB = 1 << 20
ROOT = Path(__file__).parents[3]
SLOT = 16 * PAGE_BYTES
BATCH = 8

WRITER = f"""
import sys
from hicache.tiers.disk.disk_tier import DiskTier
from tests.tiers.blocks import content, name
tier = DiskTier(sys.argv[1], {8 * MIB}, durability=sys.argv[2], lock_wait_s=10)
number = int(sys.argv[3])
while True:
    if number >= {8 * BATCH}:
        old = range(number - {8 * BATCH}, number - {7 * BATCH})
        tier.delete({SLOT}, [name(n).key for n in old])
        print("gone", old[0], flush=True)
    numbers = range(number, number + {BATCH})
    tier.put({SLOT}, [(name(n), content(n, {SLOT})) for n in numbers])
    print("kept", number, flush=True)
    number += {BATCH}
"""


def kill_a_writer(path: Path, durability: str, first: int, lines: int) -> tuple[set[int], int]:
    """Run it until it has acknowledged some batches, then kill -9. (acked numbers, next number)."""
    argv = [sys.executable, "-c", WRITER, str(path), durability, str(first)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=ROOT) as child:
        assert child.stdout is not None
        acked: set[int] = set()
        next_number = first
        for seen, line in enumerate(child.stdout):
            if seen == lines:
                child.kill()  # whatever it is in the middle of; the pipe still tells what it acked
            if not line.endswith(b"\n"):
                break  # it was killed in the middle of a line (PYTHONUNBUFFERED writes words)
            what, number = line.split()
            numbers = set(range(int(number), int(number) + BATCH))
            if what == b"kept":
                acked |= numbers
                next_number = int(number) + BATCH
            else:
                acked -= numbers
        return acked, next_number


def check(path: Path, durability: str, acked: set[int], next_number: int) -> None:
    with DiskTier(path, 8 * MIB, lock_wait_s=10) as tier:
        assert not tier.notes
        told = {row.tokens for row in listed(tier)}
        maybe_gone = set(range(next_number - 8 * BATCH, next_number - 7 * BATCH))
        for number in range(max(0, next_number - 10 * BATCH), next_number + 2 * BATCH):
            view = np.zeros(SLOT, np.uint8)
            (problem,) = tier.read(SLOT, [(name(number), view)])
            assert (problem is None) == (name(number).tokens in told)
            if problem is None:
                assert np.array_equal(view, content(number, SLOT))
            else:
                assert isinstance(problem, TierMissing), problem
                assert number not in acked or number in maybe_gone


def run_rounds(path: Path, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    number = 0
    for _ in range(rounds):
        durability = rng.choice(["fast", "batched"])
        acked, number = kill_a_writer(path, durability, number, rng.randrange(1, 40))
        check(path, durability, acked, number)


def test_a_few_kills(tmp_path: Path) -> None:
    run_rounds(tmp_path / "d", 3, seed=1)


@pytest.mark.e2e
def test_twenty_kills(tmp_path: Path) -> None:
    run_rounds(tmp_path / "d", 20, seed=7)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_hundred_kills(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    run_rounds(tmp_path / "d", 200, seed)

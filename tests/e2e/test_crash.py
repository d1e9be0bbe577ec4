"""Kill -9 of the daemon and of its disk worker at random moments while a child stores.

After each round: the files are whole (`verify`), every block acknowledged as durable is served bit
by bit, any other is served right or not at all, and what `stats` says is used is what is there. The
daemon runs with `debug`, so every counter of the cache engine is recomputed at each tick.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from hicache.commands import disk_tools
from hicache.tiers.block import slot_bytes_for
from tests.e2e.daemon_process import ROOT, SPEC, DaemonProcess, prompt, read, wait_for
from tests.e2e.storer import NUM_BLOCKS

pytestmark = pytest.mark.e2e

SMALL = replace(SPEC, block_bytes=16 << 10)
ROUNDS = 20
RECENT = 40  # seeds looked at after each round; after the last one, all


class Storer:
    """The child; its acknowledgements come over a pipe, which outlives it."""

    def __init__(self, server: DaemonProcess, first_seed: int) -> None:
        spec = json.dumps(SMALL.to_wire())
        command = [sys.executable, "-m", "tests.e2e.storer", server.endpoint, spec, str(first_seed)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True)
        self.acked: list[int] = []

    def wait_for_acks(self, num: int) -> None:
        assert self.process.stdout is not None
        self.acked += [int(self.process.stdout.readline()) for _ in range(num)]

    def end(self) -> list[int]:
        """Every seed that it was told is durable."""
        self.process.kill()
        out, _ = self.process.communicate()
        self.acked += [int(line) for line in out.splitlines(keepends=True) if line.endswith("\n")]
        return self.acked


def check(server: DaemonProcess, acked: set[int], next_seed: int) -> None:
    """All that was promised is there, and nothing that is wrong."""
    files = disk_tools.verify(server.disk, lambda *_: None)
    assert all(report.is_clean for report in files), files
    server.start()
    disk = server.tier("disk")
    assert disk["blocks"] == sum(report.blocks for report in files)
    assert disk["used_bytes"] == disk["blocks"] * slot_bytes_for(SMALL.block_bytes)
    client = server.client(SMALL)
    for seed in range(max(0, next_seed - RECENT), next_seed + 5):
        came = read(client, prompt(seed, NUM_BLOCKS), SMALL)
        assert came == NUM_BLOCKS or seed not in acked, f"{seed}: {came} of {NUM_BLOCKS} blocks"
    server.forget_clients()


def run_rounds(num_rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    durability = chance.choice(["fast", "batched"])
    with DaemonProcess(hbm=None, disk={"durability": durability}) as server:
        acked: set[int] = set()
        next_seed = 0
        for _ in range(num_rounds):
            storer = Storer(server, next_seed)
            storer.wait_for_acks(chance.randrange(1, 8))
            if chance.random() < 0.5:
                psutil.Process(server.worker("disk")).kill()
                if chance.random() < 0.5:
                    storer.wait_for_acks(chance.randrange(1, 4))
            server.kill()
            acked.update(storer.end())
            next_seed = max(acked) + 2
            check(server, acked, next_seed)
        client = server.client(SMALL)
        assert all(read(client, prompt(s, NUM_BLOCKS), SMALL) == NUM_BLOCKS for s in acked)
        wait_for(lambda: server.ask("health")["healthy"], "a healthy daemon")


@pytest.mark.timeout(600)
def test_twenty_kills() -> None:
    run_rounds(ROUNDS, seed=5)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_five_hundred_kills() -> None:
    for _ in range(500 // ROUNDS):
        seed = random.randrange(1 << 32)
        print("seed", seed)
        run_rounds(ROUNDS, seed)

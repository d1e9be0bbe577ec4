"""`hicache verify` through a daemon that serves: what rotted is removed, nothing else notices."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tests.e2e.household import Household, blocks_of, hicache, prompt, read, store, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

NUM_BLOCKS = 4


def spoil(file: Path, content: bytes) -> None:
    """Flip a bit of these bytes, wherever they lie."""
    with file.open("r+b") as data:
        at = data.read().find(content[1000:1100])
        assert at > 0
        data.seek(at)
        data.write(bytes([content[1000] ^ 1]))


def test_what_rots_is_found_and_removed_while_requests_are_served() -> None:
    with Household(hbm=None) as house:
        client = house.client()
        for seed in range(10):
            assert store(client, prompt(seed, NUM_BLOCKS), durable=True) == NUM_BLOCKS
        house.stop()
        house.start()
        house.forget_clients()
        client = house.client()
        assert hicache("verify", "--endpoint", house.endpoint).returncode == 0
        (file,) = house.disk.glob("class-*/data.mdb")
        spoil(file, blocks_of(prompt(3, NUM_BLOCKS))[1].tobytes())
        spoil(file, blocks_of(prompt(7, NUM_BLOCKS))[3].tobytes())
        lease = client.match(prompt(7, NUM_BLOCKS))
        assert read(client, prompt(5, NUM_BLOCKS)) == NUM_BLOCKS

        found = hicache("verify", "--json", "--rate", "1GB", "--endpoint", house.endpoint)
        assert found.returncode == 1, found.stderr
        (disk,) = json.loads(found.stdout)["devices"]
        assert (disk["blocks"], disk["num_bad"], disk["error"]) == (10 * NUM_BLOCKS, 2, "")
        assert house.tier("disk")["corrupt"] == 2
        assert "a scrub removed block" in house.said()
        assert [client.match(prompt(s, NUM_BLOCKS)).hit_blocks for s in (3, 5, 7)] == [1, 4, 3]
        client.release(lease)
        again = hicache("verify", "--endpoint", house.endpoint)
        assert again.returncode == 0, again.stdout
        for seed in (3, 7):  # stored again, and what hung below it comes back
            assert store(client, prompt(seed, NUM_BLOCKS), durable=True) == NUM_BLOCKS
            assert read(client, prompt(seed, NUM_BLOCKS)) == NUM_BLOCKS


def test_the_worker_dies_in_the_middle_of_a_scrub() -> None:
    with Household(hbm=None) as house:
        client = house.client()
        assert store(client, prompt(1, 32), durable=True) == 32
        house.ask("verify", start=True, bytes_per_s=1e5)
        (disk,) = house.ask("verify")["devices"]
        assert disk["is_running"]
        psutil.Process(house.worker("disk")).kill()
        wait_for(lambda: not house.ask("verify")["devices"][0]["is_running"], "its end")
        assert "went down" in house.ask("verify")["devices"][0]["error"]
        wait_for(lambda: house.ask("health")["healthy"], "the tier")
        assert hicache("verify", "--rate", "1GB", "--endpoint", house.endpoint).returncode == 0


def test_stopped_in_the_middle_of_a_scrub() -> None:
    with Household(hbm=None) as house:
        assert store(house.client(), prompt(1, 32), durable=True) == 32
        house.ask("verify", start=True, bytes_per_s=1e5)
        house.stop()
        house.start()


def test_nobody_to_ask() -> None:
    assert hicache("verify", "--endpoint", "ipc:///nowhere/h.sock").returncode == 2
    with Household(hbm=None, disk=None) as house:
        assert hicache("verify", "--endpoint", house.endpoint).returncode == 2

"""`hicache verify` through a daemon that serves: what rotted is removed, nothing else notices."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tests.e2e.daemon_process import (
    DaemonProcess,
    blocks_of,
    hicache,
    prompt,
    read,
    store,
    wait_for,
)

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
    with DaemonProcess(hbm=None) as server:
        client = server.client()
        for seed in range(10):
            assert store(client, prompt(seed, NUM_BLOCKS), durable=True) == NUM_BLOCKS
        server.stop()
        server.start()
        server.forget_clients()
        client = server.client()
        assert hicache("verify", "--endpoint", server.endpoint).returncode == 0
        (file,) = server.disk.glob("class-*/data.mdb")
        spoil(file, blocks_of(prompt(3, NUM_BLOCKS))[1].tobytes())
        spoil(file, blocks_of(prompt(7, NUM_BLOCKS))[3].tobytes())
        lease = client.match(prompt(7, NUM_BLOCKS))
        assert read(client, prompt(5, NUM_BLOCKS)) == NUM_BLOCKS

        found = hicache("verify", "--json", "--rate", "1GB", "--endpoint", server.endpoint)
        assert found.returncode == 1, found.stderr
        (disk,) = json.loads(found.stdout)["devices"]
        assert (disk["blocks"], disk["num_bad"], disk["error"]) == (10 * NUM_BLOCKS, 2, "")
        assert server.tier("disk")["corrupt"] == 2
        assert "a scrub removed block" in server.said()
        assert [client.match(prompt(s, NUM_BLOCKS)).hit_blocks for s in (3, 5, 7)] == [1, 4, 3]
        client.release(lease)
        again = hicache("verify", "--endpoint", server.endpoint)
        assert again.returncode == 0, again.stdout
        for seed in (3, 7):  # stored again, and what hung below it comes back
            assert store(client, prompt(seed, NUM_BLOCKS), durable=True) == NUM_BLOCKS
            assert read(client, prompt(seed, NUM_BLOCKS)) == NUM_BLOCKS


def test_the_worker_dies_in_the_middle_of_a_scrub() -> None:
    with DaemonProcess(hbm=None) as server:
        client = server.client()
        assert store(client, prompt(1, 32), durable=True) == 32
        server.ask("verify", start=True, bytes_per_s=1e5)
        (disk,) = server.ask("verify")["devices"]
        assert disk["is_running"]
        psutil.Process(server.worker("disk")).kill()
        wait_for(lambda: not server.ask("verify")["devices"][0]["is_running"], "its end")
        assert "went down" in server.ask("verify")["devices"][0]["error"]
        wait_for(lambda: server.ask("health")["healthy"], "the tier")
        assert hicache("verify", "--rate", "1GB", "--endpoint", server.endpoint).returncode == 0


def test_stopped_in_the_middle_of_a_scrub() -> None:
    with DaemonProcess(hbm=None) as server:
        assert store(server.client(), prompt(1, 32), durable=True) == 32
        server.ask("verify", start=True, bytes_per_s=1e5)
        server.stop()
        server.start()


def test_nobody_to_ask() -> None:
    assert hicache("verify", "--endpoint", "ipc:///nowhere/h.sock").returncode == 2
    with DaemonProcess(hbm=None, disk=None) as server:
        assert hicache("verify", "--endpoint", server.endpoint).returncode == 2

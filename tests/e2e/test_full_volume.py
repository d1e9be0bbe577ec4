"""The volume of the disk tier is full while the daemon serves: the disk takes nothing, and nobody
notices but the operator."""

from __future__ import annotations

import itertools
import resource
import shutil

import psutil
import pytest

from tests.e2e.daemon_process import DaemonProcess, blocks_of, prompt, read, store, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


def test_a_full_volume_costs_no_put() -> None:
    """The disk worker may not let its files grow any more (a limit of its process, as a full volume
    would). Every put is stored at the expense of the coldest, `health` says what is wrong, what is
    on disk is served; when there is room again the disk takes blocks again by itself."""
    with DaemonProcess(hbm=None, dram={"size": "8MiB"}, disk={"size": "256MiB"}) as server:
        client = server.client()
        for seed in range(6):
            assert store(client, prompt(seed, 8)) == 8
        server.settle()
        assert server.tier("disk")["blocks"] > 0
        worker = psutil.Process(server.stats()["workers"][f"disk:{server.disk}"])
        growth, most = worker.rlimit(resource.RLIMIT_FSIZE)
        file_bytes = max(file.stat().st_size for file in server.disk.rglob("data.mdb"))
        worker.rlimit(resource.RLIMIT_FSIZE, (file_bytes, most))

        dropped = server.stats()["dropped_blocks"]
        seeds = itertools.count(100)
        while server.stats()["dropped_blocks"] == dropped:
            assert store(client, prompt(next(seeds), 8)) == 8
        health = server.ask("health")
        assert not health["healthy"]
        assert health["tiers"]["disk"] == "read-only"
        assert "takes no new blocks" in health["problems"]["disk"]
        for _ in range(20):
            seed = next(seeds)
            assert store(client, prompt(seed, 8)) == 8
            assert read(client, prompt(seed, 8)) == 8
        assert client.match(prompt(0, 8)).runs == (("disk", 8),)

        worker.rlimit(resource.RLIMIT_FSIZE, (growth, most))

        def is_taken() -> bool:
            assert store(client, prompt(next(seeds), 8)) == 8
            return bool(server.ask("health")["healthy"])

        wait_for(is_taken, "a disk that takes blocks again", 90.0)
        assert read(client, prompt(0, 8)) == 8
        assert server.stats()["errors"] == {}


def test_a_deleted_folder() -> None:
    """Somebody deletes the disk tier's folder while it is open. The other tiers serve on, and the
    disk begins anew by itself."""
    with DaemonProcess(hbm=None, dram={"size": "8MiB"}, disk={"size": "256MiB"}) as server:
        client = server.client()
        for seed in range(6):
            assert store(client, prompt(seed, 8), durable=True) == 8
        shutil.rmtree(server.disk)
        seeds = itertools.count(100)

        def is_durable() -> bool:
            tokens = prompt(next(seeds), 8)
            is_stored = client.put(tokens, blocks_of(tokens), durable=True).durable
            assert read(client, tokens) == 8
            return is_stored

        wait_for(is_durable, "a disk that begins anew")
        assert server.disk.exists()
        wait_for(lambda: server.ask("health")["healthy"], "a healthy daemon")

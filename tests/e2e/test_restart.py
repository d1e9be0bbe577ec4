"""A daemon that stops, or is killed, and comes back on the same paths."""

from __future__ import annotations

import json
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from hicache.client import Client, DaemonAbsent
from hicache.tiers.disk.disk_tier import DiskTier
from tests.e2e.daemon_process import (
    MIB,
    SPEC,
    DaemonProcess,
    KilledClient,
    blocks_of,
    hicache,
    prompt,
    read,
    store,
    wait_for,
)
from tests.tiers.blocks import listed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


def test_killed_and_started_again() -> None:
    """What was acked as durable is served bit by bit after kill -9; the clients, which lived on,
    say hello again by themselves; what they held of the old epoch is a miss."""
    with DaemonProcess() as server:
        client, other = server.client(), server.client(transport="frames")
        prompts = [prompt(seed, 6) for seed in range(8)]
        for tokens in prompts:
            assert client.put(tokens, blocks_of(tokens), durable=True).durable
        assert read(other, prompts[0]) == 6
        old = client.match(prompts[1])
        ping = client.ping()
        assert old.lease
        assert ping is not None
        server.kill()
        assert not client.match(prompts[0]).is_answered
        assert client.fetch(old, blocks_of(prompts[1])).blocks == 0
        client.release(old)
        server.start()
        for one in (client, other):
            wait_for(partial(answers, one), "the client's return")
        again = client.ping()
        assert again is not None
        assert again.epoch != ping.epoch
        assert client.fetch(old, blocks_of(prompts[1])).blocks == 0
        for tokens in prompts:
            assert read(client, tokens) == 6
            assert read(other, tokens) == 6


def answers(client: Client) -> bool:
    return client.match(prompt(0, 1)).is_answered


def test_killed_while_it_stores() -> None:
    """Killed at any moment of its traffic: afterwards each block is whole or absent, and all that
    was acked as durable is there."""
    with DaemonProcess(hbm=None, write_policy="write_through") as server:
        acked: list[int] = []
        seed = 0
        for kill_after in (3, 8):
            client = server.client()
            for _ in range(kill_after):
                tokens = prompt(seed, 6)
                durable = seed % 2 == 0
                result = client.put(tokens, blocks_of(tokens), durable=durable)
                if durable and result.durable:
                    acked.append(seed)
                seed += 1
            server.kill()
            server.forget_clients()
            server.start()
            client = server.client()
            for known in range(seed):
                came = read(client, prompt(known, 6))
                assert came == 6 or known not in acked
        assert len(acked) >= 5


@pytest.mark.parametrize("write_policy", ["write_back", "write_through"])
def test_stopped_in_order(write_policy: str) -> None:
    """SIGTERM writes down what only memory holds: after the restart everything is a hit, for all
    of it fits on disk."""
    with DaemonProcess(write_policy=write_policy) as server:
        client = server.client()
        prompts = [prompt(seed, 8) for seed in range(30)]  # 60 MiB
        for tokens in prompts:
            assert store(client, tokens) == 8
        server.stop()
        assert not list(server.arena_folder.iterdir())
        server.start()
        assert server.tier("disk")["blocks"] == 8 * 30
        wait_for(partial(answers, client), "the client's return")
        server.forget_clients()
        client = server.client()
        for tokens in prompts:
            match = client.match(tokens)
            client.release(match)
            assert match.hit_blocks == 8
            assert read(client, tokens) == 8


def test_uses_outlive_a_stop() -> None:
    """How often blocks were hit is on disk after a stop, and is counted on from there."""
    with DaemonProcess(hbm=None) as server:
        client = server.client()
        for seed in range(3):
            assert client.put(prompt(seed, 4), blocks_of(prompt(seed, 4)), durable=True).durable
        for seed in (1, 1, 2):
            assert read(client, prompt(seed, 4)) == 4
        server.stop()
        assert hits_on_disk(server.disk) == [0] * 4 + [1] * 4 + [2] * 4
        server.start()
        server.forget_clients()
        assert read(server.client(), prompt(2, 4)) == 4
        server.stop()
        assert hits_on_disk(server.disk) == [0] * 4 + [2] * 8
        server.start()


def hits_on_disk(path: Path) -> list[int]:
    with DiskTier(path, 256 << 20) as tier:
        return sorted(row.hits for row in listed(tier))


def test_another_size_at_the_next_start() -> None:
    """A smaller disk keeps what was hit, in whole prefixes and within its size; a larger one then
    keeps all of that and takes more."""
    changes: dict[str, Any] = {"hbm": None, "dram": {"size": "16MiB"}}
    disk = {"batch": "4MiB", "high_watermark": 1.0, "low_watermark": 0.99}
    with DaemonProcess(**changes, disk={**disk, "size": "64MiB"}) as server:
        client = server.client()
        for seed in range(20):
            assert client.put(prompt(seed, 8), blocks_of(prompt(seed, 8)), durable=True).durable
        stored_s = time.time()
        # The disk knows to the second when a block was used last.
        wait_for(lambda: time.time() > stored_s + 2.0, "another second")
        for seed in range(5, 10):
            assert read(client, prompt(seed, 8)) == 8
        hits = [8] * 20
        for size in ("32MiB", "128MiB"):
            server.stop()
            server.forget_clients()
            server.configure(**changes, disk={**disk, "size": size})
            server.start()
            wait_for(lambda: server.ask("health")["healthy"], "the disk's blocks")
            client = server.client()
            before, hits = hits, [held(client, seed) for seed in range(20)]
            assert sum(hits) == server.tier("disk")["blocks"] > 0
            assert bytes_under(server.disk) <= int(size[:-3]) << 20
            if size == "32MiB":
                assert hits[5:10] == [8] * 5
                assert sum(hits) < sum(before)
            else:
                assert hits == before
        assert all(read(client, prompt(seed, 8)) == hits[seed] for seed in range(20))
        for seed in range(100, 120):
            assert client.put(prompt(seed, 8), blocks_of(prompt(seed, 8)), durable=True).durable
        assert server.tier("disk")["blocks"] == sum(hits) + 20 * 8
        said = server.said()
        assert "of the coldest blocks removed" in said
        assert re.search(r"opening: \d+% of [\d,]+ bytes", said)


def held(client: Client, seed: int) -> int:
    match = client.match(prompt(seed, 8))
    client.release(match)
    return match.hit_blocks


def bytes_under(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def test_stopped_when_the_disk_is_full() -> None:
    """More than the disk holds: after the restart all blocks that were on disk are hits, in whole
    prefixes, and none is wrong."""
    with DaemonProcess(
        hbm={"size": "8MiB"}, dram={"size": "16MiB"}, disk={"size": "32MiB", "batch": "4MiB"}
    ) as server:
        client = server.client()
        for seed in range(40):
            assert store(client, prompt(seed, 8)) > 0
        server.stop()
        server.start()
        server.forget_clients()
        client = server.client()
        on_disk = server.tier("disk")["blocks"]
        assert on_disk > 0
        found = 0
        for seed in range(40):
            match = client.match(prompt(seed, 8))
            client.release(match)
            found += match.hit_blocks
        assert found == on_disk
        for seed in range(40):
            read(client, prompt(seed, 8))


@pytest.mark.parametrize("damage", ["bytes", "everywhere", "cut short", "emptied"])
def test_a_damaged_disk(damage: str) -> None:
    """Somebody wrote into the file while the daemon was away: never wrong bytes. What cannot be
    read is a miss; what is stored afterwards is found, in this run and the next."""
    with DaemonProcess(hbm=None) as server:
        client = server.client()
        seeds = range(12)
        for seed in seeds:
            store(client, prompt(seed, 4))
        server.stop()
        (file,) = server.disk.glob("class-*/data.mdb")
        spoil(file, damage)
        server.start()
        server.forget_clients()
        client = server.client()
        for seed in seeds:
            read(client, prompt(seed, 4))
        wait_for(lambda: server.ask("health")["healthy"], "a disk tier that is up")
        fresh = prompt(50, 4)

        def is_stored() -> bool:
            result = client.put(fresh, blocks_of(fresh), durable=True)
            if result.durable:
                return True
            client.clear()
            return False

        wait_for(is_stored, "a durable put")
        server.stop()
        server.start()
        wait_for(partial(answers, client), "the client's return")
        assert read(client, fresh) == 4
        for seed in seeds:
            read(client, prompt(seed, 4))


def spoil(file: Path, how: str) -> None:
    random = np.random.default_rng(7)
    size = file.stat().st_size
    if how == "cut short":
        with file.open("r+b") as data:
            data.truncate(size // 2)
        return
    if how == "emptied":
        file.write_bytes(b"")
        return
    # LMDB's first two pages say where everything is; values are all the rest but a few pages.
    first = 8192 if how == "bytes" else 0
    num_places = 40 if how == "bytes" else 2000
    with file.open("r+b") as data:
        for place in random.integers(first, size - 8, num_places).tolist():
            data.seek(place)
            data.write(random.bytes(8))


def test_a_second_daemon_on_the_same_disk() -> None:
    """Another socket but the same disk path: its disk tier stays down and its note names who holds
    it; without it the second one serves from memory. The first loses nothing."""
    with DaemonProcess(hbm=None) as first:
        client = first.client()
        tokens = prompt(1, 6)
        assert client.put(tokens, blocks_of(tokens), durable=True).durable
        with DaemonProcess(hbm=None, disk={"path": str(first.disk)}, autostart=False) as second:
            second.launch()

            def is_refused() -> bool:
                assert second.process is not None
                if second.process.poll() is not None:
                    return True
                try:
                    note = second.tier("disk")["note"]
                except DaemonAbsent:
                    return False
                return str(first.worker("disk")) in note or str(first.pid) in note

            wait_for(is_refused, "the refusal")
            assert second.process is not None
            if second.process.poll() is None:
                assert second.ask("health")["healthy"] is False
                guest = second.client()
                assert guest.match(tokens).hit_blocks == 0
                assert store(guest, prompt(2, 4)) == 4
                assert read(guest, prompt(2, 4)) == 4
        assert read(client, tokens) == 6
        first.stop()
        first.start()
        wait_for(partial(answers, client), "the client's return")
        assert read(client, tokens) == 6


def test_arenas_of_a_killed_daemon_are_taken_over() -> None:
    """kill -9 leaves its shared memory behind, and clients map it. The next daemon goes on with the
    same files, so that no more memory is taken than before; nothing in them is believed."""
    with DaemonProcess(disk=None) as server:
        client, tokens = server.client(), prompt(1, 6)
        assert store(client, tokens) == 6
        assert read(client, tokens) == 6
        left = {path: path.stat().st_ino for path in server.arena_folder.iterdir()}
        for _ in range(2):
            server.kill()
            server.start()
            now = {path: path.stat().st_ino for path in server.arena_folder.iterdir()}
            assert now == left
            assert read(client, tokens) == 0
            assert store(client, tokens) == 6
            assert read(client, tokens) == 6
        assert server.used()["dram"][1] == 0


def test_an_arena_of_another_size_is_emptied_although_a_client_maps_it() -> None:
    """It cannot be taken over. Its memory goes back at once, not when its last client lets go; and
    so it does at a clean stop."""
    with DaemonProcess(hbm=None, disk=None) as server:
        client, tokens = server.client(), prompt(1, 6)
        assert store(client, tokens) == 6
        (run,) = client.fetch_runs(match := client.match(tokens))
        mapped = client._connection.arenas["dram"]
        assert mapped.memory_bytes > 60 * MIB
        server.kill()
        server.configure(hbm=None, disk=None, dram={"size": "48MiB"})
        server.start()
        assert mapped.memory_bytes < MIB
        assert not run.verify()
        client.release(match)
        assert store(client, tokens) == 6
        mapped = client._connection.arenas["dram"]
        server.stop()
        assert mapped.memory_bytes < MIB
        server.start()


@pytest.mark.timeout(180)
def test_slots_that_a_client_may_still_write_are_set_aside_by_the_next_daemon() -> None:
    """A client is stopped in the middle of a put, and the daemon is killed. The next one, with the
    same arena, hands out nothing where the client may write: it goes on writing, and no block of
    anybody is harmed. When its process is dead the slabs are room again."""
    with DaemonProcess(hbm=None, disk=None, dram={"size": "8MiB"}) as server:
        with KilledClient(server, "late-put", prompt(103, 6)) as victim:
            victim.wait_for("writing")
            server.kill()
            server.start()
            set_aside = server.tier("dram")["quarantined_bytes"]
            assert set_aside >= 6 * SPEC.block_bytes
            client = server.client()
            for seed in range(12):  # more than there is room for
                store(client, prompt(seed, 6))
            victim.go_on()
            victim.wait_for("stored-0")
            assert sum(read(client, prompt(seed, 6)) for seed in range(12)) >= 2 * 6
            assert server.tier("dram")["quarantined_bytes"] == set_aside
        wait_for(lambda: not server.tier("dram")["quarantined_bytes"], "the slabs back")
        assert store(client, prompt(200, 6)) == 6


def test_stopped_while_requests_wait() -> None:
    """Clients in the middle of their calls when the daemon is told to stop: each call ends by its
    deadline, as a miss at worst."""
    with DaemonProcess(hbm=None, deadlines={"shutdown": "2s"}) as server:
        client = server.client(timeout_s=5.0)
        tokens = prompt(1, 6)
        store(client, tokens)
        psutil.Process(server.pid).terminate()
        end_s = time.monotonic() + 5.0
        while client.match(tokens).is_answered and time.monotonic() < end_s:
            pass
        assert not client.match(tokens).is_answered
        server.wait()
        assert json.loads(hicache("ping", "--json", "--endpoint", server.endpoint).stdout)["error"]

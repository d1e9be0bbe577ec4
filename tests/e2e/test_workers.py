"""Worker processes that are killed or frozen in the middle of their work."""

from __future__ import annotations

import os
import random
import signal
import time

import numpy as np
import psutil
import pytest

from tests.e2e.daemon_process import SPEC, DaemonProcess, blocks_of, prompt, read, store, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


@pytest.mark.parametrize("kind", ["gpu", "disk"])
def test_killed_at_random_moments(kind: str) -> None:
    """Prompts are stored and read without a pause while the worker is killed, again and again: its
    moves fail as misses, it comes back, the daemon and the client live, no byte is wrong."""
    seed = int(os.environ.get("HICACHE_TEST_SEED", "0")) or random.randrange(2**31)
    print(f"HICACHE_TEST_SEED={seed}")
    chance = random.Random(seed)
    with DaemonProcess(hbm={"size": "8MiB"}, dram={"size": "16MiB"}) as server:
        client, epoch = server.client(), server.stats()["epoch"]
        number = 0
        killed: set[int] = set()
        for _ in range(4):
            for _ in range(chance.randrange(6, 14)):
                tokens = prompt(number, 8)
                result = client.put(tokens, blocks_of(tokens))
                assert result.stored + result.refused == 8
                read(client, prompt(chance.randrange(number + 1), 8))
                number += 1
            pid = server.stats()["workers"].get(_device(server, kind), 0)
            if pid and pid not in killed:
                killed.add(pid)
                psutil.Process(pid).kill()
        assert killed
        # One that was killed just now is not missed yet, and the daemon still calls itself healthy.
        wait_for(lambda: server.worker(kind) not in killed, "another worker")
        wait_for(lambda: server.ask("health")["healthy"], "both tiers back")
        server.settle()
        for known in range(number):
            read(client, prompt(known, 8))
        fresh = prompt(5000, 8)
        assert wait_for(lambda: store(client, fresh) == 8, "room")
        assert read(client, fresh) == 8
        stats = server.stats()
        assert stats["epoch"] == epoch
        assert "internal" not in stats["errors"]


def _device(server: DaemonProcess, kind: str) -> str:
    names = server.stats()["workers"]
    return next((name for name in names if name.startswith(kind)), "")


def test_the_disk_comes_back_with_what_it_held() -> None:
    """Its worker is killed while idle: for a moment its blocks are misses, then hits again."""
    with DaemonProcess(hbm=None) as server:
        client = server.client()
        tokens = prompt(1, 8)
        assert client.put(tokens, blocks_of(tokens), durable=True).durable
        server.stop()
        server.start()
        wait_for(lambda: client.match(tokens).is_answered, "the client's return")
        pid = server.worker("disk")
        psutil.Process(pid).kill()
        wait_for(lambda: server.worker("disk") != pid, "another worker")
        wait_for(lambda: server.ask("health")["healthy"], "the tier")
        assert read(client, tokens) == 8


def test_a_durable_put_whose_disk_dies() -> None:
    """The worker is killed with the blocks in its hands: the put is answered by its deadline, not
    as durable if they are not on disk; the blocks stay in memory."""
    with DaemonProcess(hbm=None, deadlines={"put": "4s"}) as server:
        client = server.client(put_timeout_s=4.0)
        disk = psutil.Process(server.worker("disk"))
        disk.send_signal(signal.SIGSTOP)
        tokens = prompt(1, 8)
        started_s = time.monotonic()
        result = client.put(tokens, blocks_of(tokens), durable=True)
        assert time.monotonic() - started_s < 4.0 + 3.0
        assert (result.stored, result.durable) == (8, False)
        assert read(client, tokens) == 8
        disk.kill()
        wait_for(lambda: server.ask("health")["healthy"], "the tier")
        assert read(client, tokens) == 8
        server.settle()


def test_a_frozen_disk() -> None:
    """A disk that does not answer: a fetch ends by its deadline with what arrived, which is the
    part in memory; others, who need no disk, notice nothing. When it thaws it serves again."""
    with DaemonProcess(hbm=None, deadlines={"fetch": "1s"}) as server:
        client = server.client(fetch_timeout_s=2.0)
        tokens, cold = prompt(1, 16), prompt(2, 16)
        for one in (tokens, cold):
            assert client.put(one, blocks_of(one), durable=True).durable
        server.stop()
        server.start()
        wait_for(lambda: client.match(tokens).is_answered, "the client's return")
        server.forget_clients()
        client = server.client(fetch_timeout_s=2.0)
        assert read(client, tokens[: 8 * SPEC.block_tokens + 1]) == 8
        match = client.match(tokens)
        assert match.runs == (("dram", 8), ("disk", 8))

        disk = psutil.Process(server.worker("disk"))
        disk.send_signal(signal.SIGSTOP)
        out = np.zeros((16, SPEC.block_bytes), np.uint8)
        started_s = time.monotonic()
        fetched = client.fetch(match, out)
        assert time.monotonic() - started_s < 2.0
        assert fetched.blocks == 8
        assert fetched.by_tier == {"dram": 8}
        assert np.array_equal(out[:8], blocks_of(tokens)[:8])
        client.release(match)
        assert read(client, cold) == 0

        other = server.client()
        warm = prompt(3, 8)
        assert store(other, warm) == 8
        assert read(other, warm) == 8
        disk.send_signal(signal.SIGCONT)
        wait_for(lambda: read(client, tokens) == 16, "the disk's return")
        assert read(client, cold) == 16


def test_both_workers_die_at_once() -> None:
    """Everything but memory is gone for a moment; the same daemon serves on."""
    with DaemonProcess() as server:
        client = server.client()
        tokens = prompt(1, 8)
        assert store(client, tokens) == 8
        pids = set(server.stats()["workers"].values())
        assert len(pids) == 2
        for pid in pids:
            psutil.Process(pid).kill()

        def are_new() -> bool:
            now = set(server.stats()["workers"].values())
            return len(now) == 2 and not now & pids

        wait_for(are_new, "both workers")
        wait_for(lambda: server.ask("health")["healthy"], "both tiers")
        read(client, tokens)
        fresh = prompt(2, 8)
        assert store(client, fresh) == 8
        assert read(client, fresh) == 8


def test_the_disk_dies_while_a_namespace_is_cleared() -> None:
    """1. The disk's worker stands still. 2. All is cleared: what the worker has not deleted yet is
    not told to be gone. 3. It is killed. 4. The next one finds the records, and removes them."""
    with DaemonProcess(hbm=None, dram={"size": "16MiB"}) as server:
        client, peer = server.client(), server.peer()
        session = peer.hello()["session"]
        prompts = [prompt(seed, 8) for seed in range(20)]
        for tokens in prompts:
            store(client, tokens)
        server.settle()
        assert server.tier("disk")["used_bytes"]
        worker = server.worker("disk")
        os.kill(worker, signal.SIGSTOP)
        told = peer.ask("clear", s=session, deadline_s=2.0)
        assert told["cleared"]
        assert not told["complete"]
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: server.worker("disk") != worker, "another worker")
        wait_for(lambda: server.ask("ping")["tiers"]["disk"] == "up", "the disk")
        wait_for(lambda: not server.tier("disk")["used_bytes"], "an empty disk")
        assert [read(client, tokens) for tokens in prompts] == [0] * len(prompts)
        assert peer.ask("clear", s=session)["complete"]

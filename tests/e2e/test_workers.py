"""Worker processes that are killed or frozen in the middle of their work."""

from __future__ import annotations

import os
import random
import signal
import time

import numpy as np
import psutil
import pytest

from tests.e2e.household import SPEC, Household, blocks_of, prompt, read, store, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


@pytest.mark.parametrize("kind", ["gpu", "disk"])
def test_killed_at_random_moments(kind: str) -> None:
    """Prompts are stored and read without a pause while the worker is killed, again and again: its
    moves fail as misses, it comes back, the daemon and the client live, no byte is wrong."""
    seed = int(os.environ.get("HICACHE_TEST_SEED", "0")) or random.randrange(2**31)
    print(f"HICACHE_TEST_SEED={seed}")
    chance = random.Random(seed)
    with Household(hbm={"size": "8MiB"}, dram={"size": "16MiB"}) as house:
        client, epoch = house.client(), house.stats()["epoch"]
        number = 0
        killed: set[int] = set()
        for _ in range(4):
            for _ in range(chance.randrange(6, 14)):
                tokens = prompt(number, 8)
                result = client.put(tokens, blocks_of(tokens))
                assert result.stored + result.refused == 8
                read(client, prompt(chance.randrange(number + 1), 8))
                number += 1
            pid = house.stats()["workers"].get(_device(house, kind), 0)
            if pid and pid not in killed:
                killed.add(pid)
                psutil.Process(pid).kill()
        assert killed
        # One that was killed just now is not missed yet, and the daemon still calls itself healthy.
        wait_for(lambda: house.worker(kind) not in killed, "another worker")
        wait_for(lambda: house.ask("health")["healthy"], "both tiers back")
        house.settle()
        for known in range(number):
            read(client, prompt(known, 8))
        fresh = prompt(5000, 8)
        assert wait_for(lambda: store(client, fresh) == 8, "room")
        assert read(client, fresh) == 8
        stats = house.stats()
        assert stats["epoch"] == epoch
        assert "internal" not in stats["errors"]


def _device(house: Household, kind: str) -> str:
    names = house.stats()["workers"]
    return next((name for name in names if name.startswith(kind)), "")


def test_the_disk_comes_back_with_what_it_held() -> None:
    """Its worker is killed while idle: for a moment its blocks are misses, then hits again."""
    with Household(hbm=None) as house:
        client = house.client()
        tokens = prompt(1, 8)
        assert client.put(tokens, blocks_of(tokens), durable=True).durable
        house.stop()
        house.start()
        wait_for(lambda: client.match(tokens).is_answered, "the client's return")
        pid = house.worker("disk")
        psutil.Process(pid).kill()
        wait_for(lambda: house.worker("disk") != pid, "another worker")
        wait_for(lambda: house.ask("health")["healthy"], "the tier")
        assert read(client, tokens) == 8


def test_a_durable_put_whose_disk_dies() -> None:
    """The worker is killed with the blocks in its hands: the put is answered by its deadline, not
    as durable if they are not on disk; the blocks stay in memory."""
    with Household(hbm=None, deadlines={"put": "4s"}) as house:
        client = house.client(put_timeout_s=4.0)
        disk = psutil.Process(house.worker("disk"))
        disk.send_signal(signal.SIGSTOP)
        tokens = prompt(1, 8)
        started_s = time.monotonic()
        result = client.put(tokens, blocks_of(tokens), durable=True)
        assert time.monotonic() - started_s < 4.0 + 3.0
        assert (result.stored, result.durable) == (8, False)
        assert read(client, tokens) == 8
        disk.kill()
        wait_for(lambda: house.ask("health")["healthy"], "the tier")
        assert read(client, tokens) == 8
        house.settle()


def test_a_frozen_disk() -> None:
    """A disk that does not answer: a fetch ends by its deadline with what arrived, which is the
    part in memory; others, who need no disk, notice nothing. When it thaws it serves again."""
    with Household(hbm=None, deadlines={"fetch": "1s"}) as house:
        client = house.client(fetch_timeout_s=2.0)
        tokens, cold = prompt(1, 16), prompt(2, 16)
        for one in (tokens, cold):
            assert client.put(one, blocks_of(one), durable=True).durable
        house.stop()
        house.start()
        wait_for(lambda: client.match(tokens).is_answered, "the client's return")
        house.forget_clients()
        client = house.client(fetch_timeout_s=2.0)
        assert read(client, tokens[: 8 * SPEC.block_tokens + 1]) == 8
        match = client.match(tokens)
        assert match.runs == (("dram", 8), ("disk", 8))

        disk = psutil.Process(house.worker("disk"))
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

        other = house.client()
        warm = prompt(3, 8)
        assert store(other, warm) == 8
        assert read(other, warm) == 8
        disk.send_signal(signal.SIGCONT)
        wait_for(lambda: read(client, tokens) == 16, "the disk's return")
        assert read(client, cold) == 16


def test_both_workers_die_at_once() -> None:
    """Everything but memory is gone for a moment; the same daemon serves on."""
    with Household() as house:
        client = house.client()
        tokens = prompt(1, 8)
        assert store(client, tokens) == 8
        pids = set(house.stats()["workers"].values())
        assert len(pids) == 2
        for pid in pids:
            psutil.Process(pid).kill()

        def are_new() -> bool:
            now = set(house.stats()["workers"].values())
            return len(now) == 2 and not now & pids

        wait_for(are_new, "both workers")
        wait_for(lambda: house.ask("health")["healthy"], "both tiers")
        read(client, tokens)
        fresh = prompt(2, 8)
        assert store(client, fresh) == 8
        assert read(client, fresh) == 8


def test_the_disk_dies_while_a_namespace_is_cleared() -> None:
    """1. The disk's worker stands still. 2. All is cleared: what the worker has not deleted yet is
    not told to be gone. 3. It is killed. 4. The next one finds the records, and removes them."""
    with Household(hbm=None, dram={"size": "16MiB"}) as house:
        client, peer = house.client(), house.peer()
        session = peer.hello()["session"]
        prompts = [prompt(seed, 8) for seed in range(20)]
        for tokens in prompts:
            store(client, tokens)
        house.settle()
        assert house.tier("disk")["used_bytes"]
        worker = house.worker("disk")
        os.kill(worker, signal.SIGSTOP)
        told = peer.ask("clear", s=session, deadline_s=2.0)
        assert told["cleared"]
        assert not told["complete"]
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: house.worker("disk") != worker, "another worker")
        wait_for(lambda: house.ask("ping")["tiers"]["disk"] == "up", "the disk")
        wait_for(lambda: not house.tier("disk")["used_bytes"], "an empty disk")
        assert [read(client, tokens) for tokens in prompts] == [0] * len(prompts)
        assert peer.ask("clear", s=session)["complete"]

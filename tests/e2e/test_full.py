"""Full everywhere, up and down the tiers, and never a wrong byte or a block in no tier."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from hicache.client import Client
from tests.e2e.daemon_process import (
    MIB,
    SPEC,
    DaemonProcess,
    Tokens,
    blocks_of,
    prompt,
    read,
    store,
    wait_for,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SMALL: dict[str, Any] = {
    "hbm": {"size": "8MiB"},
    "dram": {"size": "16MiB"},
    "disk": {"size": "64MiB", "batch": "4MiB"},
}


def capacity(server: DaemonProcess) -> int:
    return sum(int(tier["capacity_bytes"]) for tier in server.stats()["tiers"])


@pytest.mark.parametrize("write_policy", ["write_back", "write_through"])
def test_four_times_what_fits(write_policy: str) -> None:
    """New prompts for four times the size of all tiers: never an error, the coldest go, and the
    last ones stored are hits. A prompt of the first ones is a miss, not a fault."""
    with DaemonProcess(**SMALL, write_policy=write_policy) as server:
        client = server.client()
        block_bytes = SPEC.block_bytes
        num_prompts = 4 * capacity(server) // (8 * block_bytes)
        stored = 0
        for seed in range(num_prompts):
            result = client.put(prompt(1000 + seed, 8), blocks_of(prompt(1000 + seed, 8)))
            stored += result.stored
            assert result.busy == 0
            assert client.last_error == ""
            if seed % 8 == 0:
                server.stats()  # which checks that no tier holds more than it can
                assert read(client, prompt(1000 + seed // 2, 8)) in range(9)
                assert read(client, prompt(1000 + seed, 8)) == result.stored
        server.settle()
        # The last ones: all that hbm and dram hold are there for sure.
        last = range(num_prompts - 24 * MIB // 2 // (8 * block_bytes), num_prompts)
        found = [read(client, prompt(1000 + seed, 8)) for seed in last]
        assert all(found), found
        assert stored >= 0.9 * 8 * num_prompts
        stats = server.stats()
        assert sum(tier["evictions"] for tier in stats["tiers"]) > 0
        assert stats["errors"] == {}
        assert server.tier("disk")["blocks"] > 0


def test_one_put_larger_than_all_mapped_tiers() -> None:
    """Its front is stored, the rest is refused without an error, and the client goes on."""
    with DaemonProcess(**SMALL, deadlines={"shutdown": "3s"}) as server:
        client = server.client(put_timeout_s=3.0)
        tokens = prompt(1, 480)  # 120 MiB
        blocks = blocks_of(tokens)
        result = client.put(tokens, blocks)
        assert result.stored > 0
        assert result.stored + result.refused == 480
        assert read(client, tokens[: 4 * 8 + 1]) in range(9)
        stats = server.stats()
        assert (stats["leases"], stats["waiting"], stats["errors"]) == (0, 0, {})


def is_stored(client: Client, tokens: Tokens) -> bool:
    return store(client, tokens) == len(tokens) // SPEC.block_tokens


@pytest.mark.parametrize("write_policy", ["write_back", "write_through"])
def test_a_small_put_after_one_larger_than_all_mapped_tiers(write_policy: str) -> None:
    """Nobody holds the giant any more: a small prompt takes some of its room, and again later."""
    with DaemonProcess(**SMALL, write_policy=write_policy, deadlines={"shutdown": "3s"}) as server:
        client = server.client(put_timeout_s=2.0)
        giant = prompt(1, 480)
        client.put(giant, blocks_of(giant))
        for seed in (2, 3):
            small = prompt(seed, 4)
            wait_for(partial(is_stored, client, small), "room", 4.0)
            assert read(client, small) == 4


def test_fetch_of_a_prompt_larger_than_memory() -> None:
    """Its front lies on disk, its end fills the memory. Some of the front must come: a hit that
    never delivers anything would cost its whole deadline each time."""
    with DaemonProcess(**SMALL, deadlines={"fetch": "2s"}) as server:
        client = server.client(put_timeout_s=3.0)
        tokens = prompt(1, 300)
        blocks = blocks_of(tokens)
        for end in range(20, 301, 20):  # as turns of a conversation
            turn = tokens[: end * SPEC.block_tokens + 1]
            client.put(turn, blocks[:end])
            server.settle()
        assert client.match(tokens).runs[0][0] == "disk"
        server.forget_clients()
        assert read(server.client(), tokens) > 0


def test_refused_where_nothing_can_go() -> None:
    """One tier, and all of it leased: a put is refused, at once and cleanly; after the release it
    is stored at the expense of what was released."""
    with DaemonProcess(hbm=None, disk=None, dram={"size": "4MiB"}) as server:
        client = server.client()
        old, new = prompt(3, 14), prompt(4, 8)
        assert store(client, old) == 14
        match = client.match(old)
        assert match.decision.reload_blocks == 14
        result = client.put(new, blocks_of(new))
        assert result.stored + result.refused == 8
        assert result.refused >= 6
        assert client.match(old).hit_blocks == 14
        for lease in [match, client.match(old)]:
            client.release(lease)


@pytest.mark.parametrize(
    ("small", "tier"),
    [
        ({"hbm": {"size": "1MiB"}, "dram": {"size": "32MiB"}}, "dram"),
        ({"dram": {"size": "1MiB"}}, "hbm"),
    ],
)
def test_a_tier_smaller_than_a_block(small: dict[str, Any], tier: str) -> None:
    """It made every hello fail, with a sentence about the other tiers. It does without those
    blocks, the log says so once, and smaller blocks use it."""
    with DaemonProcess(**small, disk=None) as server:
        client, spec = server.model("a large one", block_bytes=2 << 20)
        assert store(client, prompt(5, 4), spec) == 4
        match = client.match(prompt(5, 4))
        assert match.runs == ((tier, 4),)
        client.release(match)
        assert read(client, prompt(5, 4), spec) == 4
        (other,) = {"hbm", "dram"} - {tier}
        sentence = f"{other} (1MiB) is too small for a block of {2 << 20} bytes"
        assert server.said().count(sentence) == 1
        client, spec = server.model("a small one", block_bytes=4096)
        assert store(client, prompt(6, 4), spec) == 4
        assert read(client, prompt(6, 4), spec) == 4


def test_a_block_too_large_for_every_tier() -> None:
    """Only then hello is refused, and the sentence names the tiers."""
    with DaemonProcess(hbm={"size": "1MiB"}, dram={"size": "2MiB"}, disk=None) as server:
        reply = server.peer().hello(replace(SPEC, block_bytes=4 << 20))
        assert reply["error"] == "spec"
        assert "does not fit in hbm (1MiB) and dram (2MiB)" in reply["message"]


def hits(client: Client, seeds: range, num_blocks: int) -> list[int]:
    found = []
    for seed in seeds:
        match = client.match(prompt(seed, num_blocks))
        client.release(match)
        found.append(match.hit_blocks)
    return found


def test_down_to_disk_and_back() -> None:
    """Prompts are stored one after the other until the first ones lie on disk; at each step every
    one of them is found whole, in some tier, while blocks move. Then they come back, compared."""
    with DaemonProcess(hbm={"size": "8MiB"}, dram={"size": "16MiB"}) as server:
        client = server.client()
        seeds = range(10, 50)  # 40 × 2 MiB
        tiers = set()
        for seed in seeds:
            assert store(client, prompt(seed, 8)) == 8
            for known in range(seeds.start, seed + 1):
                match = client.match(prompt(known, 8))
                assert match.hit_blocks == 8, (seed, known, match)
                client.release(match)
                tiers |= {tier for tier, _ in match.runs}
        assert tiers == {"hbm", "dram", "disk"}
        assert server.tier("disk")["demotions"] + server.tier("dram")["demotions"] > 0
        first = client.match(prompt(seeds.start, 8))
        assert {tier for tier, _ in first.runs} == {"disk"}
        out = np.zeros((8, SPEC.block_bytes), np.uint8)
        fetched = client.fetch(first, out)
        assert fetched.blocks == 8
        assert fetched.by_tier.keys() <= {"hbm", "dram", "disk"}
        client.release(first)
        assert np.array_equal(out, blocks_of(prompt(seeds.start, 8)))
        again = client.match(prompt(seeds.start, 8))
        assert "disk" not in {tier for tier, _ in again.runs}, "it came up and stays up"
        client.release(again)
        for seed in seeds:
            assert read(client, prompt(seed, 8)) == 8
            assert hits(client, seeds, 8) == [8] * len(seeds)

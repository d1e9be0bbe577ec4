"""Conversations that grow beyond the memory tiers, while the disk has room for all of them."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.client import Client
from tests.e2e.daemon_process import SPEC, DaemonProcess, Tokens, blocks_of, prompt, store

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


def held(client: Client, tokens: Tokens) -> int:
    match = client.match(tokens)
    client.release(match)
    return match.hit_blocks


@pytest.mark.parametrize("seed", [0, 1])
def test_nothing_is_lost_while_the_disk_has_room(seed: int) -> None:
    """Two agents share a prompt and take turns, other prompts squeeze them down the tiers, the
    daemon is stopped and started: every block of both is held all the time."""
    chance = np.random.default_rng(seed)
    shared = chance.integers(0, 50_000, 20 * SPEC.block_tokens).astype(np.uint32)
    end = np.ones(1, np.uint32)
    with DaemonProcess(
        hbm={"size": "8MiB"}, dram={"size": "16MiB"}, disk={"size": "160MiB"}
    ) as server:
        client = server.client()
        agents = [shared, shared]
        others = iter(range(100, 200))
        for turn in range(6):
            for number in (0, 1):
                size = SPEC.block_tokens * int(chance.integers(1, 6))
                new = chance.integers(0, 50_000, size).astype(np.uint32)
                agents[number] = np.concatenate([agents[number], new])
                tokens = np.concatenate([agents[number], end])
                match = client.match(tokens)
                out = np.zeros((match.decision.reload_blocks, SPEC.block_bytes), np.uint8)
                blocks = client.fetch(match, out).blocks
                client.release(match)
                client.put(tokens, blocks_of(tokens)[blocks:], first=blocks)
            for _ in range(8 if turn in (2, 3) else 0):
                store(client, prompt(next(others), 8))
        for _ in range(14):
            store(client, prompt(next(others), 8))
        server.settle()
        whole = [len(tokens) // SPEC.block_tokens for tokens in agents]
        assert [held(client, np.concatenate([tokens, end])) for tokens in agents] == whole
        assert server.stats()["dropped_blocks"] == 0
        server.stop()
        server.start()
        client = server.client()
        assert [held(client, np.concatenate([tokens, end])) for tokens in agents] == whole

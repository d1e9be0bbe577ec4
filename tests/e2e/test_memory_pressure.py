"""Memory is short: the daemon gives DRAM back while clients map it, and takes it again later."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.e2e.household import MIB, SPEC, Household, blocks_of, prompt, read, store, wait_for

pytestmark = pytest.mark.e2e
SHORT: dict[str, Any] = {"limits": {"min_available": "100%"}}
"""More than any machine has left: whatever can be given is given."""


def memory_of(house: Household) -> int:
    """What the dram arena's file holds of the machine's memory, as the kernel counts it."""
    (arena,) = house.arena_folder.glob("hicache-dram-*")
    return arena.stat().st_blocks * 512


def change(house: Household, **changes: Any) -> None:
    house.configure(hbm=None, **changes)
    house.ask("reload")


@pytest.mark.timeout(180)
def test_dram_is_given_back_and_taken_again() -> None:
    """Nothing is lost to a tier below that has room, the pages are the machine's again although a
    client maps them, what is leased stays and is right, and later the whole size is room again."""
    with Household(hbm=None, what_if=False) as house:
        client = house.client()
        before = memory_of(house)
        for seed in range(30):
            assert store(client, prompt(seed, 6)) == 6
        held = client.match(prompt(29, 6))
        assert held.lease
        change(house, **SHORT)
        wait_for(lambda: house.tier("dram")["given_back_bytes"] >= 40 * MIB, "most of the memory")
        assert memory_of(house) < before - 39 * MIB
        out = np.zeros((6, SPEC.block_bytes), np.uint8)
        assert client.fetch(held, out).blocks == 6, "a leased block was given up"
        assert np.array_equal(out, blocks_of(prompt(29, 6)))
        client.release(held)
        wait_for(lambda: house.tier("dram")["capacity_bytes"] < MIB, "all of it")
        assert house.ask("health")["live"]
        assert store(client, prompt(99, 2)) == 0, "refused, and nothing else"
        change(house)
        wait_for(lambda: not house.tier("dram")["given_back_bytes"], "its whole size")
        assert memory_of(house) >= before - MIB
        came = [read(client, prompt(seed, 6)) for seed in range(30)]
        assert sum(came) >= 29 * 6
        assert store(client, prompt(99, 6)) == 6
        assert read(client, prompt(99, 6)) == 6
        assert "memory is short" in house.said()
        assert "plentiful again" in house.said()


@pytest.mark.timeout(180)
def test_a_reader_whose_lease_ended_sees_that_the_pages_are_gone() -> None:
    """It maps them still, and reads zeros: its generations tell it not to use them."""
    with Household(hbm=None, disk=None) as house:
        client, tokens = house.client(), prompt(1, 6)
        assert store(client, tokens) == 6
        match = client.match(tokens)
        (run,) = list(client.fetch_runs(match))
        before = [view.copy() for view in run.views]
        assert run.verify()
        client.release(match)
        change(house, disk=None, **SHORT)
        wait_for(lambda: house.tier("dram")["capacity_bytes"] < MIB, "all of it")
        assert not run.verify()
        assert any((now != then).any() for now, then in zip(run.views, before, strict=True))

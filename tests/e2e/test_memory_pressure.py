"""Memory is short: the daemon gives DRAM back while clients map it, and takes it again later."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.e2e.daemon_process import (
    MIB,
    SPEC,
    DaemonProcess,
    blocks_of,
    prompt,
    read,
    store,
    wait_for,
)

pytestmark = pytest.mark.e2e
SMALL: dict[str, Any] = {"hbm": None, "dram": {"size": "16MiB"}}
SHORT: dict[str, Any] = {"limits": {"min_available": "100%"}}
"""More than any machine has left: whatever can be given is given."""


def memory_of(server: DaemonProcess) -> int:
    """What the dram arena's file holds of the machine's memory, as the kernel counts it."""
    (arena,) = server.arena_folder.glob("hicache-dram-*")
    return arena.stat().st_blocks * 512


def change(server: DaemonProcess, **changes: Any) -> None:
    server.configure(**SMALL | changes)
    server.ask("reload")


@pytest.mark.timeout(180)
def test_dram_is_given_back_and_taken_again() -> None:
    """Nothing is lost to a tier below that has room, the pages are the machine's again although a
    client maps them, what is leased stays and is right, and later the whole size is room again."""
    with DaemonProcess(**SMALL) as server:
        client = server.client()
        before = memory_of(server)
        for seed in range(8):
            assert store(client, prompt(seed, 6)) == 6
        held = client.match(prompt(7, 6))
        assert held.lease
        change(server, **SHORT)
        wait_for(lambda: server.tier("dram")["given_back_bytes"] >= 8 * MIB, "most of the memory")
        assert memory_of(server) < before - 7 * MIB
        out = np.zeros((6, SPEC.block_bytes), np.uint8)
        assert client.fetch(held, out).blocks == 6, "a leased block was given up"
        assert np.array_equal(out, blocks_of(prompt(7, 6)))
        client.release(held)
        wait_for(lambda: server.tier("dram")["capacity_bytes"] < MIB, "all of it")
        assert server.ask("health")["live"]
        assert store(client, prompt(99, 2)) == 0, "refused, and nothing else"
        change(server)
        wait_for(lambda: not server.tier("dram")["given_back_bytes"], "its whole size")
        assert memory_of(server) >= before - MIB
        came = [read(client, prompt(seed, 6)) for seed in range(8)]
        assert sum(came) >= 7 * 6
        assert store(client, prompt(99, 6)) == 6
        assert read(client, prompt(99, 6)) == 6
        assert "memory is short" in server.said()
        assert "enough memory again" in server.said()


@pytest.mark.timeout(180)
def test_a_reader_whose_lease_ended_sees_that_the_pages_are_gone() -> None:
    """It maps them still, and reads zeros: its generations tell it not to use them."""
    with DaemonProcess(**SMALL | {"disk": None}) as server:
        client, tokens = server.client(), prompt(1, 6)
        assert store(client, tokens) == 6
        match = client.match(tokens)
        (run,) = list(client.fetch_runs(match))
        before = [view.copy() for view in run.views]
        assert run.verify()
        client.release(match)
        change(server, disk=None, **SHORT)
        wait_for(lambda: server.tier("dram")["capacity_bytes"] < MIB, "all of it")
        assert not run.verify()
        assert any((now != then).any() for now, then in zip(run.views, before, strict=True))

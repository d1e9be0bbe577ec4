"""Clients that die, freeze or are dropped at the worst moment: what they held comes back, nothing
shows."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import psutil
import pytest

from hicache.client.session import Transport
from tests.e2e.daemon_process import (
    SPEC,
    DaemonProcess,
    KilledClient,
    blocks_of,
    prompt,
    read,
    store,
    wait_for,
)

pytestmark = pytest.mark.e2e
SMALL: dict[str, Any] = {
    "hbm": None,
    "disk": None,
    "dram": {"size": "8MiB"},
    "limits": {"lease_ttl": "500ms"},
}
"""Five prompts of six blocks fill it."""


@pytest.mark.parametrize("transport", ["arena", "frames"])
def test_killed_between_put_and_commit(server: DaemonProcess, transport: Transport) -> None:
    """Half of its slots are written, none committed: nobody ever sees them, and they are free
    again as soon as the process is known to be dead; somebody else stores the same prompt."""
    client = server.client()
    tokens = prompt(100 + len(transport), 3)  # one message's worth
    before = server.used()
    with KilledClient(server, "put", tokens, transport) as victim:
        victim.wait_for("writing")
        assert server.used() != before
        assert client.match(tokens).hit_blocks == 0
        assert client.put(tokens, lambda *_: pytest.fail("two writers")).busy == 3
        victim.kill()
        wait_for(lambda: server.used() == before, "the slots back")
    assert client.match(tokens).hit_blocks == 0
    assert store(client, tokens) == 3
    assert read(client, tokens) == 3


def test_killed_while_it_holds_a_lease(server: DaemonProcess) -> None:
    """Its lease ends with it; until then its blocks cannot be cleared."""
    client = server.client()
    server.settle()
    client.clear()
    tokens = prompt(101, 4)
    store(client, tokens)
    with KilledClient(server, "match", tokens) as victim:
        victim.wait_for("leased")
        assert server.stats()["leases"] == 1
        assert client.clear() == 0
        victim.kill()
        wait_for(lambda: server.stats()["leases"] == 0, "the lease's end")
    assert server.stats()["sessions"] == 1
    server.settle()
    assert client.clear() == 4


@pytest.mark.timeout(180)
def test_killed_in_the_middle_of_a_fetch() -> None:
    """Its blocks are on their way from a disk that does not answer: the lease and the waiting
    fetch end with the process, and later arrivals find nobody and harm nobody."""
    with DaemonProcess(hbm=None, write_policy="write_through") as server:
        client = server.client()
        tokens = prompt(102, 12)
        assert client.put(tokens, blocks_of(tokens), durable=True).durable
        server.stop()
        server.start()
        disk = psutil.Process(server.worker("disk"))
        disk.send_signal(signal.SIGSTOP)
        with KilledClient(server, "fetch", tokens) as victim:
            victim.wait_for("fetching")
            wait_for(lambda: server.stats()["waiting"] == 1, "its fetch")
            victim.kill()
            wait_for(lambda: server.stats()["leases"] == 0, "the lease's end")
            assert server.stats()["waiting"] == 0
        disk.send_signal(signal.SIGCONT)
        assert read(client, tokens) == 12


@pytest.mark.timeout(180)
def test_frozen_between_put_and_commit() -> None:
    """Shared memory cannot be revoked: when the ticket of a stopped process expires its slots are
    set aside, not free, for it may yet write; they are free when it is dead."""
    with DaemonProcess(hbm=None, disk=None, limits={"lease_ttl": "500ms"}) as server:
        client = server.client()
        tokens = prompt(103, 6)
        with KilledClient(server, "put", tokens) as victim:
            victim.wait_for("writing")
            victim.freeze()
            wait_for(lambda: server.tier("dram")["quarantined_bytes"], "the quarantine")
            assert server.tier("dram")["quarantined_bytes"] == 6 * (256 << 10)
            assert store(client, tokens) == 6  # in other slots
            assert read(client, tokens) == 6
            victim.kill()
            wait_for(lambda: not server.tier("dram")["quarantined_bytes"], "the slots back")
        assert read(client, tokens) == 6


@pytest.mark.timeout(180)
def test_resumed_long_after_its_slots_were_taken_from_it() -> None:
    """It was stopped in the middle of a put for longer than its ticket lasts, and others have
    filled all of memory since. It writes into its slots and commits: that is refused, and no block
    of anybody is harmed, then or when its slots are free again."""
    with DaemonProcess(**SMALL) as server:
        client = server.client()
        with KilledClient(server, "late-put", prompt(108, 6)) as victim:
            victim.wait_for("writing")
            victim.freeze()
            wait_for(lambda: server.tier("dram")["quarantined_bytes"], "the quarantine")
            for seed in range(12):  # more than there is room for
                store(client, prompt(seed, 6))
            victim.go_on()
            victim.wait_for("stored-0")
            assert sum(read(client, prompt(seed, 6)) for seed in range(12)) >= 3 * 6
        assert client.match(prompt(108, 6)).hit_blocks == 0
        wait_for(lambda: not server.tier("dram")["quarantined_bytes"], "the slots back")
        for seed in range(12, 24):
            store(client, prompt(seed, 6))
        assert sum(read(client, prompt(seed, 6)) for seed in range(24)) >= 3 * 6


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("others", "word"), [(12, "unusable"), (1, "right")])
def test_resumed_long_after_its_lease_ended(others: int, word: str) -> None:
    """It was stopped with blocks to read. Where others were stored in their place meanwhile it sees
    that, and uses nothing; where none were, what it reads is its own."""
    with DaemonProcess(**SMALL) as server:
        client, tokens = server.client(), prompt(109, 6)
        assert store(client, tokens) == 6
        with KilledClient(server, "late-read", tokens) as victim:
            victim.wait_for("running")
            victim.freeze()
            wait_for(lambda: server.stats()["leases"] == 0, "the lease's end")
            for seed in range(others):
                store(client, prompt(seed, 6))
            victim.go_on()
            victim.wait_for(word)


@pytest.mark.timeout(180)
def test_frozen_with_a_lease() -> None:
    """A lease that nobody uses ends after its time, though the client lives."""
    with DaemonProcess(hbm=None, disk=None, limits={"lease_ttl": "500ms"}) as server:
        client = server.client()
        tokens = prompt(104, 4)
        store(client, tokens)
        match = client.match(tokens)
        assert match.lease
        wait_for(lambda: server.stats()["leases"] == 0, "the lease's end")
        assert client.fetch(match, blocks_of(tokens)).blocks == 0
        assert read(client, tokens) == 4


@pytest.mark.timeout(180)
def test_dropped_without_a_goodbye() -> None:
    """A long-lived process makes client after client and says goodbye for none. Their sessions
    stayed until it ended, and then everybody was refused. Now the silent ones make room; those that
    speak, or hold something, stay; one that comes back says hello again by itself."""
    limits = {"max_sessions": 6, "session_ttl": "3s"}
    with DaemonProcess(hbm=None, disk=None, limits=limits) as server:
        busy, holder, silent = server.client(), server.client(), server.client()
        tokens = prompt(106, 4)
        assert store(busy, tokens) == 4
        assert read(silent, tokens) == 4
        held = holder.match(tokens)
        assert held.lease
        sessions = [c.greeting.session for c in (busy, holder, silent) if c.greeting]
        peer = server.peer()
        while (reply := peer.hello())["ok"]:
            assert read(busy, tokens) == 4
            assert server.stats()["sessions"] <= 6
        assert "limits.max_sessions" in reply["message"]

        def is_let_in() -> bool:
            assert read(busy, tokens) == 4
            return bool(peer.hello()["ok"])

        wait_for(is_let_in, "room for another session")
        out = np.zeros((4, SPEC.block_bytes), np.uint8)
        assert holder.fetch(held, out).blocks == 4
        silent.observe(sum_n=100, sum_nc=5000, seconds=0.1)
        # All places may be taken by sessions that spoke a moment ago: a miss, until one is silent.
        wait_for(lambda: read(silent, tokens) == 4, "the silent client to be let in again", 60.0)
        now = [c.greeting.session for c in (busy, holder, silent) if c.greeting]
        assert now[:2] == sessions[:2]
        assert now[2] != sessions[2]


@pytest.mark.timeout(180)
def test_ended_while_it_may_still_write() -> None:
    """A process that is stopped in the middle of a put loses its session to another one's need. Its
    slots stay set aside all the same, until it is dead."""
    limits = {"max_sessions": 1, "session_ttl": "500ms", "lease_ttl": "500ms"}
    with DaemonProcess(hbm=None, disk=None, limits=limits) as server:
        tokens = prompt(107, 6)
        with KilledClient(server, "put", tokens) as victim:
            victim.wait_for("writing")
            victim.freeze()
            peer = server.peer()
            wait_for(lambda: peer.hello()["ok"], "the end of the silent session")
            assert server.tier("dram")["quarantined_bytes"] == 6 * (256 << 10)
            victim.kill()
            wait_for(lambda: not server.tier("dram")["quarantined_bytes"], "the slots back")


@pytest.mark.timeout(180)
def test_killed_while_the_daemon_is_stopping() -> None:
    """The daemon is told to stop, and waits for a disk that does not answer; meanwhile a client
    with a lease dies. The daemon ends in order, when its time for that is over."""
    deadlines = {"shutdown": "3s"}
    with DaemonProcess(hbm=None, deadlines=deadlines) as server:
        client = server.client()
        tokens = prompt(105, 6)
        store(client, tokens)
        disk = psutil.Process(server.worker("disk"))
        with KilledClient(server, "match", tokens) as victim:
            victim.wait_for("leased")
            disk.send_signal(signal.SIGSTOP)
            psutil.Process(server.pid).terminate()
            wait_for(lambda: not client.match(tokens).is_answered, "the daemon's refusal")
            victim.kill()
            server.wait()

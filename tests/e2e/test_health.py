"""`health` follows what the parts do, not that they are there; to live is not to be ready."""

from __future__ import annotations

import json
import signal
from typing import Any

import numpy as np
import psutil
import pytest

from hicache.daemon.upkeep.health import PATIENCE_S
from hicache.transfer.liveness import EVERY_S
from tests.e2e.daemon_process import (
    SPEC,
    DaemonProcess,
    blocks_of,
    hicache,
    prompt,
    read,
    store,
    wait_for,
)

pytestmark = pytest.mark.e2e


def test_what_stands_still_shows_within_five_seconds() -> None:
    assert EVERY_S + PATIENCE_S < 5.0


def probed(server: DaemonProcess, probe: str, *more: str) -> tuple[int, dict[str, Any]]:
    done = hicache("health", probe, "--endpoint", server.endpoint, "--json", *more)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["disk", "gpu"])
@pytest.mark.timeout(180)
def test_an_idle_worker_that_stands_still_shows(server: DaemonProcess, kind: str) -> None:
    """Nobody asks anything of it but whether it goes on, once a second. It shows; when it goes on,
    all is well again."""
    wait_for(lambda: server.ask("health")["healthy"], "a healthy daemon")
    worker = psutil.Process(server.worker(kind))
    worker.send_signal(signal.SIGSTOP)
    try:
        name = next(device for device in server.stats()["workers"] if device.startswith(kind))
        wait_for(lambda: name in server.ask("health")["problems"], "it shows")
        health = server.ask("health")
        assert "stuck" in health["problems"][name]
        assert health["parts"][name]["owes_s"] > PATIENCE_S
        assert (health["live"], health["ready"], health["healthy"]) == (True, True, False)
        assert [probed(server, probe)[0] for probe in ("live", "ready", "healthy")] == [0, 0, 1]
    finally:
        worker.send_signal(signal.SIGCONT)
    wait_for(lambda: server.ask("health")["healthy"], "its return")
    assert not server.ask("health")["parts"][name]["faults"]


@pytest.mark.timeout(180)
def test_a_busy_worker_that_stands_still_shows() -> None:
    """A block on its way from a disk of which nothing comes."""
    with DaemonProcess(
        hbm=None, write_policy="write_through", planner={"min_deadline": "60s"}
    ) as server:
        client, tokens = server.client(fetch_timeout_s=1.0), prompt(1, 4)
        assert client.put(tokens, blocks_of(tokens), durable=True).durable
        server.stop()
        server.configure(hbm=None, debug={"check": True, "stall": {"disk_to_dram": True}})
        server.start()
        client.fetch(client.match(tokens), np.zeros((4, SPEC.block_bytes), np.uint8))
        health = wait_for(lambda: (h := server.ask("health"))["problems"] and h, "a problem")
        assert "stuck" in str(health["problems"])
        server.configure(hbm=None, debug={"check": True})
        server.ask("reload")
        wait_for(lambda: server.ask("health")["healthy"], "its return")


@pytest.mark.timeout(180)
def test_a_tier_that_goes_down_later_leaves_the_daemon_ready(server: DaemonProcess) -> None:
    """Its worker dies: not healthy for a moment, ready all the time, and counted."""
    client, tokens = server.client(), prompt(2, 4)
    assert store(client, tokens) == 4
    device = next(d for d in server.stats()["workers"] if d.startswith("gpu"))
    before = server.ask("health")["parts"][device]["faults"]
    psutil.Process(server.worker("gpu")).kill()

    def is_back() -> bool:
        health = server.ask("health")
        assert health["live"]
        assert health["ready"]
        return bool(health["healthy"]) and health["parts"][device]["faults"] == before + 1

    wait_for(is_back, "its return")
    assert store(client, tokens) == 4
    assert read(client, tokens) == 4


def test_a_daemon_that_stands_still_is_not_alive(server: DaemonProcess) -> None:
    """Nothing of it can say so: no answer in time is the answer."""
    daemon = psutil.Process(server.pid)
    daemon.send_signal(signal.SIGSTOP)
    try:
        code, told = probed(server, "live", "--timeout", "0.5")
        assert code == 1
        assert not told["live"]
    finally:
        daemon.send_signal(signal.SIGCONT)
    wait_for(lambda: server.ask("health")["healthy"], "its return")

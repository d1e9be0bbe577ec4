"""The n-th write, read, sync or open of the disk worker fails, for every n until a run passes
untouched, under a daemon that serves. The daemon runs with `debug`: it recomputes every counter of
the cache engine at each tick, and a difference ends it.

After each: what was acknowledged as durable is served bit by bit, the disk takes blocks again by
itself, and nothing was set aside.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import get_args

import pytest

from hicache.client import Client
from tests.e2e.daemon_process import DaemonProcess, blocks_of, prompt, read, store, wait_for
from tests.e2e.faulty_worker import CONTROL, mark_beside
from tests.tiers.faults import Kind

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NUM_BLOCKS = 4
BASE = range(12)  # more than memory holds
MOST = 60


class FaultyHousehold(DaemonProcess):
    """A daemon whose disk worker fails as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, control: Path) -> None:
        self.control = control
        monkeypatch.setenv(CONTROL, str(control))
        super().__init__(
            hbm=None, dram={"size": "8MiB"}, module="tests.e2e.faulty_daemon", autostart=False
        )

    def will_fail(
        self, kind: Kind, nth: int, error: int, at_start: bool, for_good: bool = False
    ) -> None:
        fault = {"kind": kind, "nth": nth, "errno": error, "at_start": at_start}
        fault["for_good"] = for_good
        self.control.write_text(json.dumps({"folder": str(self.disk), **fault}))
        mark_beside(self.control).unlink(missing_ok=True)

    def has_failed(self) -> bool:
        return mark_beside(self.control).exists()

    def is_healthy(self) -> bool:
        return bool(self.ask("health")["healthy"])


def is_durable(client: Client, seeds: itertools.count[int]) -> int:
    """The seed of a prompt that is on disk now, 0 if it is not."""
    seed = next(seeds)
    tokens = prompt(seed, NUM_BLOCKS)
    return seed if client.put(tokens, blocks_of(tokens), durable=True).durable else 0


def check(server: FaultyHousehold, client: Client, acked: list[int]) -> None:
    wait_for(server.is_healthy, "a healthy daemon", 90.0)
    for seed in acked:
        assert read(client, prompt(seed, NUM_BLOCKS)) == NUM_BLOCKS, seed
    assert not list(server.disk.glob("aside-*"))


@pytest.mark.parametrize("kind", [pytest.param("write", marks=pytest.mark.slow), "sync"])
def test_a_call_fails_while_it_serves(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_each_while_it_serves(kind, errno.EIO, tmp_path, monkeypatch)


def test_a_volume_that_takes_no_write_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a read-only remount: `health` says so, what is held is served, memory takes what
    comes; when the cause is gone the disk takes blocks again by itself."""
    with FaultyHousehold(monkeypatch, tmp_path / "fault") as server:
        server.will_fail("write", 1, errno.EROFS, at_start=False, for_good=True)
        server.start()
        client = server.client()
        for seed in BASE:
            assert store(client, prompt(seed, NUM_BLOCKS), durable=True) == NUM_BLOCKS
        worker = server.worker("disk")
        os.kill(worker, signal.SIGUSR1)
        seeds = itertools.count(100)
        assert not is_durable(client, seeds)
        health = server.ask("health")
        assert health["tiers"]["disk"] == "read-only"
        assert "Read-only file system" in health["problems"]["disk"]
        for seed in BASE:
            assert read(client, prompt(seed, NUM_BLOCKS)) == NUM_BLOCKS
        for seed in range(200, 212):
            assert store(client, prompt(seed, NUM_BLOCKS)) == NUM_BLOCKS
            assert read(client, prompt(seed, NUM_BLOCKS)) == NUM_BLOCKS
        assert server.worker("disk") == worker
        os.kill(worker, signal.SIGUSR2)
        wait_for(lambda: is_durable(client, seeds) and server.is_healthy(), "its return", 90.0)


def test_the_last_sync_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker cannot leave the disk in order. It is one sentence in the log, and the next daemon
    serves what had been acknowledged."""
    with FaultyHousehold(monkeypatch, tmp_path / "fault") as server:
        server.will_fail("sync", 1, errno.EIO, at_start=False, for_good=True)
        server.start()
        client = server.client()
        for seed in BASE:
            assert store(client, prompt(seed, NUM_BLOCKS), durable=True) == NUM_BLOCKS
        os.kill(server.worker("disk"), signal.SIGUSR1)
        server.stop()
        assert "sync: mdb_env_sync: Input/output error" in server.said()
        server.start()
        server.forget_clients()
        client = server.client()
        for seed in BASE:
            assert read(client, prompt(seed, NUM_BLOCKS)) == NUM_BLOCKS


@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("kind", get_args(Kind))
def test_any_call_fails_in_any_way_while_it_serves(
    kind: Kind, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_each_while_it_serves(kind, error, tmp_path, monkeypatch)


def fail_each_while_it_serves(
    kind: Kind, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultyHousehold(monkeypatch, tmp_path / "fault") as server:
        server.will_fail("write", 1 << 30, error, at_start=True)
        server.start()
        client = server.client()
        for seed in BASE:
            assert store(client, prompt(seed, NUM_BLOCKS), durable=True) == NUM_BLOCKS
        seeds, acked = itertools.count(100), list(BASE)
        for nth in range(1, MOST):
            server.will_fail(kind, nth, error, at_start=False)
            os.kill(server.worker("disk"), signal.SIGUSR1)
            wait = partial(is_durable, client, seeds)
            acked.append(wait_for(wait, "a durable put", 90.0))
            check(server, client, acked[-16:])
            if not server.has_failed():
                break
        else:
            raise AssertionError("no run passed untouched")
        check(server, client, acked)
        print(f"{nth - 1} calls failed")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_call_fails_while_it_opens_the_device(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultyHousehold(monkeypatch, tmp_path / "fault") as server:
        server.will_fail("write", 1 << 30, errno.EIO, at_start=True)
        server.start()
        client = server.client()
        for seed in BASE:
            assert store(client, prompt(seed, NUM_BLOCKS), durable=True) == NUM_BLOCKS
        for nth in range(1, 4 * MOST):
            server.kill()
            server.forget_clients()
            server.will_fail(kind, nth, errno.EIO, at_start=True)
            server.start()
            client = server.client()
            check(server, client, list(BASE))
            has_failed = server.has_failed()
            assert store(client, prompt(100 + nth, NUM_BLOCKS), durable=True) == NUM_BLOCKS
            if not has_failed:
                break
        else:
            raise AssertionError("no run passed untouched")

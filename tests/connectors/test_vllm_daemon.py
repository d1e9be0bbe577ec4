"""The connector's two sides on a real daemon, which is killed, stopped, restarted and filled."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.connectors.vllm_engine import Engine
from tests.connectors.vllm_scenes import (
    Make,
    check,
    connecting,
    repeated,
    request,
    store_and_load,
    tokens,
    until,
)
from tests.e2e.daemon_process import DaemonProcess

pytestmark = pytest.mark.e2e


@pytest.fixture
def server() -> Iterator[DaemonProcess]:
    with DaemonProcess(hbm=None, dram={"size": "16MiB"}) as server:
        yield server


@pytest.fixture
def engine(server: DaemonProcess) -> Iterator[Make]:
    made: list[Engine] = []

    def make(wait_s: float = 10.0, **more: Any) -> Engine:
        connect = connecting(server.endpoint, timeout_s=wait_s, load_s=wait_s, store_s=wait_s)
        made.append(Engine(connect, connect, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_load_with_the_schedulers_leases(
    server: DaemonProcess, engine: Make, num_ranks: int
) -> None:
    store_and_load(engine(num_ranks=num_ranks), engine(num_ranks=num_ranks))
    assert server.stats()["leases"] == 0


def test_a_daemon_killed_and_started_again(server: DaemonProcess, engine: Make) -> None:
    """Absent it costs nothing but time; back, it serves from disk, and is told of new blocks."""
    one, prompt = engine(), tokens(1, 61)
    one.run(request("a", prompt))
    server.settle()
    server.kill()
    one.forget_local()
    check(one.run(request("b", prompt), request("c", tokens(2, 61))))
    server.start()
    assert list(repeated(one, prompt))
    (other,) = one.run(request("e", tokens(2, 61)))
    check([other])


def test_a_daemon_killed_while_blocks_are_loading(server: DaemonProcess, engine: Make) -> None:
    one, prompt = engine(num_ranks=2), tokens(1, 121)
    one.run(request("a", prompt))
    one.forget_local()
    loading = request("b", prompt)
    one.add(loading)
    until(one, loading, "loading")
    server.kill()
    one.run()
    check([loading], num_ranks=2)


def test_a_daemon_that_is_stopped(server: DaemonProcess, engine: Make) -> None:
    one, prompt = engine(wait_s=0.2, lookup_s=0.3, load_s=0.3), tokens(1, 61)
    one.run(request("a", prompt))
    one.forget_local()
    os.kill(server.pid, signal.SIGSTOP)
    try:
        check(one.run(*(request(f"b{i}", prompt) for i in range(3))))
    finally:
        os.kill(server.pid, signal.SIGCONT)
    check(one.run(request("c", prompt)))

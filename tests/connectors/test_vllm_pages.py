"""The connector's two sides where the daemon's GPU worker copies vLLM's pages: a real daemon and
its worker, over a GPU that is the stand-in (tests/e2e/stand_in_gpu.py)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from hicache.bench.gpu_check.stand_in import StandIn
from hicache.client.gpu_pages import SharedPages
from hicache.connectors.common.paged_blocks import shared_pages
from hicache.connectors.vllm import worker_side as working
from hicache.connectors.vllm.vllm_pages import layout_of
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
from tests.e2e.daemon_process import DaemonProcess, wait_for
from tests.e2e.stand_in_gpu import held

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SHORT_S = 3.0
"""A deadline that is to pass, and not before the worker has begun."""


class Device:
    """Of the process that the engine is in."""

    def __init__(self, driver: Path) -> None:
        self._cupy, self._driver = StandIn(), driver
        self._memory: list[Any] = []

    def numbers(self, shape: tuple[int, ...]) -> torch.Tensor:
        self._memory.append(self._cupy.cuda.Memory(8 * prod(shape)))
        array = np.frombuffer(self._memory[-1].buffer, np.int64).reshape(shape)
        return torch.from_numpy(array)

    def share(self, layers: Sequence[torch.Tensor]) -> SharedPages:
        return shared_pages(self._cupy, layout_of(layers), str(self._driver))


@pytest.fixture
def server(gpu_daemon: DaemonProcess) -> DaemonProcess:
    return gpu_daemon


@pytest.fixture
def engine(
    server: DaemonProcess, stand_in_driver: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    """Makes engines on the daemon, with pages in GPU memory, and closes them. However busy this
    machine is, they wait for the worker."""
    monkeypatch.setattr(working, "share_patience_s", lambda load_s: load_s)
    made: list[Engine] = []

    def make(load_s: float = 30.0, store_s: float = 30.0, **more: Any) -> Engine:
        connect = connecting(server.endpoint, timeout_s=30.0, load_s=load_s, store_s=store_s)
        device = Device(stand_in_driver)
        made.append(Engine(connect, connect, load_s=load_s, device=device, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_worker_copies(server: DaemonProcess, engine: Make, num_ranks: int) -> None:
    one, two = engine(num_ranks=num_ranks), engine(num_ranks=num_ranks)
    store_and_load(one, two)
    assert server.stats()["leases"] == 0
    # Each engine's every rank has a client that stores and one that loads, but the first engine
    # loaded nothing.
    assert server.stats()["pages"]["registrations"] == 3 * num_ranks
    asked = server.stats()["requests"]
    assert asked["load"] >= 4 * num_ranks
    assert asked["save"] >= 4 * num_ranks
    one.close()
    two.close()
    assert server.stats()["pages"] == {"registrations": 0, "copies": 0}


@pytest.mark.parametrize(("num_local", "num_ranks"), [(0, 2), (5, 1)])
def test_pages_in_doubt_are_nobodys_until_they_are_at_rest(
    server: DaemonProcess, engine: Make, gate: Path, num_local: int, num_ranks: int
) -> None:
    """The worker stands still in the middle of a load. Its request begins anew by the deadline, on
    other pages, and the worker goes on writing into pages that nobody has."""
    prompt = tokens(1, 61)
    engine(num_ranks=num_ranks).run(request("a", prompt))
    one = engine(load_s=SHORT_S, num_ranks=num_ranks)
    if num_local:
        one.run(request("local", prompt[: 4 * num_local + 1], max_tokens=1))
    caught = request("b", prompt)
    with held(gate):
        one.add(caught)
        until(one, caught, "loading")
        pages = caught.pages[num_local:15]
        until(one, caught, "finished")
        check([caught], num_ranks)
        assert one.num_loads_failed == 1
        assert one.side.holds_blocks
        taken = [one.pool.blocks[page].ref_cnt for page in pages]
        assert taken == [num_ranks] * len(pages), "pages that are written were given to somebody"
        # Enough for everybody else to use all of the rest, by copies of this process' own.
        others = [request(f"c{seed}", tokens(seed, 61), max_tokens=1) for seed in range(10, 16)]
        one.add(*others)
        for other in others:
            until(one, other, "finished")
        check(others, num_ranks)
        assert [one.pool.blocks[page].ref_cnt for page in pages] == taken
    one.run()
    wait_for(lambda: server.stats()["pages"]["copies"] == 0, "the copies' end")
    one.forget_local()
    (again,) = one.run(request("d", prompt))
    check([again], num_ranks)
    assert again.num_cached == 60
    assert server.stats()["leases"] == 0


def test_a_reset_waits_for_pages_in_doubt(server: DaemonProcess, engine: Make, gate: Path) -> None:
    prompt = tokens(1, 61)
    engine().run(request("a", prompt))
    one = engine(load_s=SHORT_S)
    caught = request("b", prompt)
    with held(gate):
        one.add(caught)
        until(one, caught, "finished")
        assert not one.empty_local(patience_s=0.1)
    assert one.empty_local(patience_s=60.0)
    assert not one.side.holds_blocks
    check([caught])


def test_aborted_with_pages_in_doubt(server: DaemonProcess, engine: Make, gate: Path) -> None:
    prompt = tokens(1, 61)
    engine().run(request("a", prompt))
    one = engine(load_s=SHORT_S)
    gone = request("b", prompt)
    with held(gate):
        one.add(gone)
        until(one, gone, "loading")
        pages = list(gone.pages)
        one.abort(gone)
        while one.requests:
            one.step()
        assert all(one.pool.blocks[page].ref_cnt == 1 for page in pages[:15])
    one.run()


def test_a_save_that_is_not_answered_stores_nothing(
    server: DaemonProcess, engine: Make, gate: Path
) -> None:
    """Later ones are made by this process, until the pages are shared again."""
    one, prompt = engine(store_s=SHORT_S), tokens(1, 61)
    with held(gate):
        check(one.run(request("a", prompt)))
        assert server.stats()["pages"]["copies"] == 1
    wait_for(lambda: server.stats()["pages"]["registrations"] == 0, "the worker to let go")
    assert server.stats()["tickets"] == 0
    cached = [again.num_cached for again in repeated(one, prompt)]
    assert cached[0] == 0


def test_the_worker_killed_in_the_middle_of_a_load(
    server: DaemonProcess, engine: Make, gate: Path
) -> None:
    """Its copies have ended with it; another worker has the pages anew."""
    prompt = tokens(1, 61)
    one = engine()
    one.run(request("a", prompt))
    server.settle()
    one.forget_local()
    caught, pid = request("b", prompt), server.worker("gpu")
    with held(gate):
        one.add(caught)
        until(one, caught, "loading")
        wait_for(lambda: server.stats()["pages"]["copies"], "the load")
        psutil.Process(pid).kill()
        one.run()
        check([caught])
    wait_for(lambda: server.worker("gpu") != pid, "another worker")
    wait_for(lambda: server.ask("health")["healthy"], "the tier")
    loads = server.stats()["requests"]["load"]
    assert list(repeated(one, prompt))
    assert server.stats()["requests"]["load"] > loads


def test_a_daemon_killed_in_the_middle_of_a_load_and_started_again(
    server: DaemonProcess, engine: Make, gate: Path
) -> None:
    """Its worker ends with it, which settles the doubt; the pages are registered with the next."""
    one, prompt = engine(), tokens(1, 61)
    one.run(request("a", prompt))
    server.settle()
    one.forget_local()
    caught = request("b", prompt)
    with held(gate):
        one.add(caught)
        until(one, caught, "loading")
        wait_for(lambda: server.stats()["pages"]["copies"], "the load")
        server.kill()
        one.run()
        check([caught])
    server.start()
    wait_for(lambda: server.ask("health")["healthy"], "the GPU worker")
    assert list(repeated(one, prompt))
    assert server.stats()["requests"]["load"] >= 1
    assert server.stats()["pages"]["registrations"] >= 1


def test_a_daemon_stopped_in_the_middle_of_a_load(
    server: DaemonProcess, engine: Make, gate: Path
) -> None:
    """Nobody can say what its worker does: the pages stay held, and everybody else goes on."""
    prompt = tokens(1, 61)
    engine().run(request("a", prompt))
    one = engine(load_s=SHORT_S, lookup_s=1.0)
    caught = request("b", prompt)
    with held(gate):
        one.add(caught)
        until(one, caught, "loading")
        wait_for(lambda: server.stats()["pages"]["copies"], "the load")
        os.kill(server.pid, signal.SIGSTOP)
        try:
            until(one, caught, "finished")
            other = request("c", tokens(2, 61))
            one.add(other)
            until(one, other, "finished")
            assert one.side.holds_blocks
        finally:
            os.kill(server.pid, signal.SIGCONT)
        check([caught, other])
    one.run()

"""An inference engine's own pages, copied by the daemon's GPU worker: real processes over real
sockets. GPU memory is host memory, and IPC handles name memory files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from hicache.client import Client, PageShare
from hicache.connectors.common.paged_blocks import PagedCache
from hicache.transfer.gpu_pages.page_kernels import Launch
from tests.e2e.daemon_process import (
    SPEC,
    DaemonProcess,
    Tokens,
    blocks_of,
    prompt,
    read,
    store,
    wait_for,
)
from tests.e2e.page_engine import PLANES, PageEngine
from tests.e2e.stand_in_gpu import daemon_process, held

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture
def server(gpu_daemon: DaemonProcess) -> DaemonProcess:
    return gpu_daemon


@pytest.fixture
def kernel_daemon(
    stand_in_driver: Path, gate: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[DaemonProcess]:
    """Its worker runs kernels, and its copy engines take so long for each page that they lose."""
    monkeypatch.setenv("STAND_IN_COPY_S", "2e-4")
    monkeypatch.setenv("STAND_IN_NO_LAUNCH", str(tmp_path / "no launch"))
    with daemon_process(monkeypatch, stand_in_driver, gate, page_kernels="always") as server:
        yield server


LOADED = prompt(2, 8)


def about_to_load(server: DaemonProcess) -> tuple[Client, PageEngine, PageShare]:
    """Pages are shared, and LOADED is in the cache."""
    client, engine = server.client(), PageEngine()
    share = client.share_pages(engine.shared)
    assert share is not None, client.last_error
    assert store(client, LOADED) == 8
    return client, engine, share


def under_way(server: DaemonProcess) -> dict[str, int]:
    counts: dict[str, int] = server.stats()["pages"]
    return counts


def loaded(client: Client, engine: PageEngine, number: int, share: PageShare) -> int:
    """Match, load into fresh pages, compare, release: how many blocks came."""
    tokens = prompt(number, 8)
    match = client.match(tokens)
    pages = engine.pages(8, number + 1000)
    engine.tensors[:] = 0
    came = client.load_pages(match, share, pages)
    client.release(match)
    assert came.is_at_rest, client.last_error
    found = engine.read(pages[: came.blocks])
    assert np.array_equal(found, blocks_of(tokens)[: came.blocks]), "WRONG BYTES"
    assert not engine.tensors[
        :, engine.pages(8, number + 1000)[match.decision.reload_blocks :]
    ].any()
    return came.blocks


def test_saved_from_pages_and_loaded_into_others_from_every_tier(server: DaemonProcess) -> None:
    client, engine = server.client(), PageEngine()
    share = client.share_pages(engine.shared)
    assert share is not None, client.last_error
    for number in range(30):  # 60 MiB
        tokens, pages = prompt(number, 8), engine.pages(8, number)
        engine.write(pages, tokens)
        result = client.save_pages(tokens, share, pages)
        assert result.stored == 8, (result, client.last_error)
        loaded(client, engine, max(0, number - 2), share)
    server.settle()
    tiers = {tier: used for tier, (used, _) in server.used().items()}
    assert all(tiers.values()), tiers
    assert sum(loaded(client, engine, number, share) for number in range(30)) == 30 * 8
    assert server.tier("hbm")["hits"] > 0
    assert read(client, prompt(0, 8)) == 8  # what was saved from pages is what a put stores
    fresh = prompt(100, 8)
    assert store(client, fresh) == 8
    assert loaded(client, engine, 100, share) == 8
    assert client.unshare_pages(share)
    assert under_way(server) == {"registrations": 0, "copies": 0}
    assert not client.load_pages(client.match(fresh), share, engine.pages(8, 0)).blocks


def test_saved_and_loaded_by_kernels(kernel_daemon: DaemonProcess, tmp_path: Path) -> None:
    """From and to the GPU's slots and pinned ones, whole and layer by layer; `stats` says so. Once
    CUDA refuses a kernel the copy engines serve, and `stats` says that."""
    server = kernel_daemon
    for memory in ("GPU", "pinned"):
        assert f"of slots in {memory} memory by kernels" in server.tier("hbm")["note"]
    client, engine = server.client(), PageEngine()
    share = client.share_pages(engine.shared)
    assert share is not None, client.last_error
    for number in range(10, 16):
        tokens, pages = prompt(number, 8), engine.pages(8, number)
        engine.write(pages, tokens)
        assert client.save_pages(tokens, share, pages).stored == 8, client.last_error
        assert loaded(client, engine, number, share) == 8
    server.settle()
    assert sum(loaded(client, engine, number, share) for number in range(10, 16)) == 6 * 8
    assert server.tier("hbm")["hits"] > 0
    load_by_layer(client, engine, share)
    (tmp_path / "no launch").touch()
    assert loaded(client, engine, 15, share) == 8
    wait_for(lambda: "a page kernel was refused" in server.tier("hbm")["note"], "the news")
    assert server.ask("health")["healthy"]


def test_layer_by_layer(server: DaemonProcess) -> None:
    """A part that was told is in its pages; all parts come, in order."""
    client, engine = server.client(), PageEngine()
    share = client.share_pages(engine.shared)
    assert share is not None, client.last_error
    load_by_layer(client, engine, share)


def load_by_layer(client: Client, engine: PageEngine, share: PageShare) -> None:
    tokens, pages = prompt(1, 8), engine.pages(8, 5)
    assert store(client, tokens) == 8
    right = blocks_of(tokens).reshape(8, PLANES, -1)
    match = client.match(tokens)
    told = []
    for part in client.load_pages_by_part(match, share, pages, planes_per_part=3):
        assert (part.first, part.blocks) == (0, 8)
        found = engine.read(pages).reshape(8, PLANES, -1)
        assert np.array_equal(found[:, : part.planes], right[:, : part.planes])
        told.append(part.planes)
    assert told == [3, 6, PLANES]
    client.release(match)


def test_a_connector_has_the_worker_copy(
    server: DaemonProcess, stand_in_driver: Path, gate: Path
) -> None:
    """Where its pages were in doubt, or its worker is another by now, it shares them anew."""
    client, engine = server.client(), PageEngine()
    cache = PagedCache(client, engine.layout, engine.device, NoRunner(), str(stand_in_driver))
    assert cache.how == "copied by the daemon's GPU worker"
    tokens, pages = prompt(1, 8), engine.pages(8, 1)
    engine.write(pages, tokens)
    assert cache.save(tokens, pages, durable=True).durable
    match, others = client.match(tokens), engine.pages(8, 2)
    timeouts = client._connection.timeouts
    client._connection.timeouts = replace(timeouts, fetch_s=1.0)
    with held(gate):
        assert not cache.load(match, others).is_at_rest
        assert not cache.is_at_rest
    client._connection.timeouts = timeouts
    client.release(match)
    wait_for(lambda: cache.is_at_rest, "the worker to let go")
    wait_for(client.ping, "the client to ask again after its failure")
    load_into(client, cache, engine, tokens)
    engine.load_by_layer(client, cache, tokens, engine.pages(8, 3))
    pid = server.worker("gpu")
    psutil.Process(pid).kill()
    wait_for(lambda: server.worker("gpu") != pid, "another worker")
    wait_for(lambda: server.ask("health")["healthy"], "the tier")
    load_into(client, cache, engine, tokens)
    assert cache.close()
    assert under_way(server) == {"registrations": 0, "copies": 0}


def load_into(client: Client, cache: PagedCache, engine: PageEngine, tokens: Tokens) -> None:
    match, pages = client.match(tokens), engine.pages(8, 4)
    engine.tensors[:] = 0
    assert cache.load(match, pages).blocks == 8, client.last_error
    assert cache.how == "copied by the daemon's GPU worker"
    assert np.array_equal(engine.read(pages), blocks_of(tokens))
    client.release(match)


class NoRunner:
    def run(self, launch: Launch, grid: int, stream: object) -> None:
        raise AssertionError("the worker copies")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"bus_id": "0000:99:00.0"}, "but the cache uses the GPU at"),
        ({"handles": (b"/proc/1/fd/9999".ljust(64, b"\0"),)}, "does not map this memory"),
        ({"page_bytes": 4096}, "blocks of these pages have 65536 bytes"),
    ],
)
def test_what_cannot_be_shared_is_a_sentence_and_the_arena_serves(
    server: DaemonProcess, change: dict[str, object], why: str
) -> None:
    client, engine = server.client(), PageEngine()
    assert client.share_pages(replace(engine.shared, **change)) is None  # type: ignore[arg-type]
    assert why in client.last_error
    tokens = prompt(1, 8)
    assert store(client, tokens) == 8
    assert read(client, tokens) == 8
    assert under_way(server)["registrations"] == 0


def test_a_registration_that_lies_about_its_size_is_refused(server: DaemonProcess) -> None:
    """Before anything is copied: the worker asks the driver how large the allocation is."""
    client, engine = server.client(), PageEngine()
    for column, value in ((1, 1 << 30), (3, 1 << 20), (2, (1 << 63) - 1)):
        planes = engine.shared.planes.copy()
        planes[-1, column] = value
        assert client.share_pages(replace(engine.shared, planes=planes)) is None
        assert "beyond its allocation" in client.last_error
    assert client.share_pages(engine.shared) is not None


def test_an_engine_killed_in_the_middle_of_a_save(server: DaemonProcess, gate: Path) -> None:
    """Its slots are nobody's until the worker has written the last byte, and then they are free;
    its memory is let go of; other clients are served meanwhile and after."""
    with held(gate):
        command = [sys.executable, "-m", "tests.e2e.page_engine", server.endpoint, "7"]
        pipes = subprocess.PIPE
        engine = subprocess.Popen(command, stdin=pipes, stdout=pipes, text=True)
        assert engine.stdout is not None
        assert engine.stdout.readline() == "saving\n"
        wait_for(lambda: under_way(server)["copies"], "the save")
        engine.kill()
        engine.communicate()
        wait_for(lambda: not server.stats()["sessions"], "the end of its session")
        assert under_way(server) == {"registrations": 1, "copies": 1}
        assert server.stats()["tickets"] == 1
        used = server.used()["dram"][0]
        assert used >= 8 * SPEC.block_bytes
        client = server.client()
        assert store(client, prompt(1, 4)) == 4
    wait_for(lambda: not any(under_way(server).values()), "the worker to let go")
    assert server.stats()["tickets"] == 0
    assert read(client, prompt(1, 4)) == 4
    assert client.match(prompt(7, 8)).hit_blocks == 0


def test_a_session_that_ends_with_a_load_under_way(server: DaemonProcess, gate: Path) -> None:
    client, engine, share = about_to_load(server)
    match, pages = client.match(LOADED), engine.pages(8, 3)
    client._connection.timeouts = replace(client._connection.timeouts, fetch_s=1.0)
    with held(gate):
        came = client.load_pages(match, share, pages)
        assert (came.blocks, came.is_at_rest) == (0, False)
        assert share.is_in_doubt
        client.close()
        wait_for(lambda: not server.stats()["sessions"], "the end of its session")
        assert under_way(server) == {"registrations": 1, "copies": 1}
    wait_for(lambda: not any(under_way(server).values()), "the worker to let go")


def test_a_load_that_is_not_answered_leaves_its_pages_in_doubt_until_it_is(
    server: DaemonProcess, gate: Path
) -> None:
    client, engine, share = about_to_load(server)
    match, pages = client.match(LOADED), engine.pages(8, 3)
    timeouts = client._connection.timeouts
    client._connection.timeouts = replace(timeouts, fetch_s=1.0)
    with held(gate):
        assert not client.load_pages(match, share, pages).is_at_rest
        assert not client.unshare_pages(share)
        assert share.is_in_doubt
    client._connection.timeouts = timeouts
    wait_for(lambda: client.unshare_pages(share), "the worker to let go")
    assert not share.is_in_doubt
    assert not any(under_way(server).values())


def test_the_worker_killed_in_the_middle_of_a_load(server: DaemonProcess, gate: Path) -> None:
    """Its copies have ended with it. The next worker maps the pages anew."""
    client, engine, share = about_to_load(server)
    pages = engine.pages(8, 3)
    pid = server.worker("gpu")
    assert share.worker_pid == pid
    with held(gate):
        match = client.match(LOADED)
        client._connection.timeouts = replace(client._connection.timeouts, fetch_s=1.0)
        assert not client.load_pages(match, share, pages).is_at_rest
        psutil.Process(pid).kill()
        wait_for(lambda: not share.is_in_doubt, "the end of the worker")
    wait_for(lambda: server.worker("gpu") != pid, "another worker")
    wait_for(lambda: server.ask("health")["healthy"], "the tier")
    assert not any(under_way(server).values())
    again = client.share_pages(engine.shared)
    assert again is not None, client.last_error
    client.release(match)
    assert loaded(client, engine, 2, again) == 8

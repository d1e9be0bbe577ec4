"""A connector whose pages nobody else can copy: it says why, and copies itself, through the arena
or the socket. Its kernels run on the CPU, over "GPU memory" that is host memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hicache.bench.gpu_check.cpu_kernels import CpuRunner
from hicache.connectors.common import paged_blocks as paged
from hicache.connectors.common.paged_blocks import PagedCache
from tests.e2e.daemon_process import DaemonProcess, blocks_of, prompt, read
from tests.e2e.page_engine import PageEngine
from tests.shared_library import needs_page_kernels

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def server() -> Iterator[DaemonProcess]:
    with DaemonProcess() as server:
        yield server


@pytest.fixture
def runner() -> CpuRunner:
    needs_page_kernels()
    return CpuRunner()


@pytest.mark.parametrize("transport", ["arena", "frames"])
@pytest.mark.parametrize("staged_blocks", [3, 100])
def test_it_copies_itself(
    server: DaemonProcess,
    runner: CpuRunner,
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    staged_blocks: int,
) -> None:
    engine = PageEngine()
    monkeypatch.setattr(paged, "STAGING_BYTES", staged_blocks * engine.layout.block_bytes)
    spec_name = f"{transport} {staged_blocks}"
    client, spec = server.model(spec_name)
    client.close()
    client = server.client(spec, transport=transport)
    cache = PagedCache(client, engine.layout, engine.device, runner, "/no/libcuda.so")
    assert cache.how.startswith("copied by this process itself: /no/libcuda.so: cannot open")
    tokens, pages = prompt(1, 8), engine.pages(8, 1)
    engine.write(pages, tokens, spec)
    assert cache.save(tokens, pages[:5]).stored == 5
    assert cache.save(tokens, pages[2:], first=2).stored == 3
    assert read(client, tokens, spec) == 8
    match, others = client.match(tokens), engine.pages(8, 2)
    engine.tensors[:] = 0
    came = cache.load(match, others)
    assert (came.blocks, came.is_at_rest) == (8, True)
    client.release(match)
    assert np.array_equal(engine.read(others), blocks_of(tokens, spec))
    engine.load_by_layer(client, cache, tokens, engine.pages(8, 3), spec)
    assert runner.launches
    assert cache.is_at_rest
    assert cache.close()


def test_no_gpu_worker_is_a_sentence(server: DaemonProcess, runner: CpuRunner) -> None:
    client, engine = server.client(), PageEngine()
    assert client.share_pages(engine.shared) is None
    assert "has no GPU worker" in client.last_error

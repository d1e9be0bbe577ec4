"""An inference engine's pages through a real daemon: registered by CUDA IPC, saved and loaded by
its GPU worker, from every tier, layer by layer, by the copy engines and by kernels; what lies about
its size; the worker killed. And how long 1 GiB takes from the worker's GPU memory."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.bench.gpu_check.check import Check, CheckStep, Skipped
from hicache.bench.gpu_check.cpu_kernels import NoCompiler
from hicache.bench.gpu_check.stand_in_host import stand_in_host
from hicache.bench.gpu_check.through_daemon import BLOCK_TOKENS, GpuUse, daemon, wait_for
from hicache.client import Client, LayerGroup, Match, NamespaceSpec, PageShare, SharedPages
from hicache.connectors.common.paged_blocks import PagedCache, shared_pages
from hicache.demo.demo_daemon import PrivateDaemon
from hicache.transfer.gpu_pages.page_kernels import CupyRunner, PageLayout, whole_pages

PAGE_BYTES = 64 << 10  # 16 tokens of a layer of an 8B model, K and V
BLOCKS = 32
HANDOVER_BLOCKS = 512  # 8K tokens: 1 GiB
HANDOVER_MIB = {"hbm": 1536, "dram": 1536, "disk": 4096}
HANDOVER_TARGET_MS = 1.0
HANDOVER_ROUNDS = 9

Table = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


class Engine:
    """Tensors in one allocation, one page per block and layer, and their expected bytes. `driver`:
    its library, or the stand-in's."""

    def __init__(self, check: Check, server: PrivateDaemon, driver: str, blocks: int) -> None:
        self.layers = 4 if _is_small(check) else 32
        self.blocks, self.num_pages = blocks, blocks * 5 // 4 if blocks > BLOCKS else 8 * blocks
        self.block_bytes = self.layers * PAGE_BYTES
        self.cupy, self.driver = check.cupy, driver
        self.runtime: Any = check.cupy.cuda.runtime
        self.stream: Any = check.cupy.cuda.Stream(non_blocking=True)
        size = self.num_pages * PAGE_BYTES
        self.memory = check.cupy.cuda.Memory(self.layers * (size + 4096))
        self.bases = [int(self.memory.ptr) + n * (size + 4096) + 4096 for n in range(self.layers)]
        self.rng = np.random.default_rng(3)
        self.layout: PageLayout = whole_pages(self.bases, self.num_pages, PAGE_BYTES, 1)
        spec = NamespaceSpec(
            model_digest="gpu-check-engine",
            weights_digest="none",
            dtype="uint8",
            groups=(LayerGroup(self.layers, 1, PAGE_BYTES // BLOCK_TOKENS, "bench"),),
            block_tokens=BLOCK_TOKENS,
            block_bytes=self.block_bytes,
        )
        self.client = Client(
            spec, server.endpoint, timeout_s=5.0, fetch_timeout_s=12.0, put_timeout_s=12.0
        )
        self.right: dict[int, Bytes] = {}

    def shared(self) -> SharedPages:
        """Its pages, for the worker."""
        return shared_pages(self.cupy, self.layout, self.driver)

    def prompt(self, number: int) -> npt.NDArray[np.uint32]:
        rng = np.random.default_rng(number)
        return rng.integers(0, 50_000, self.blocks * BLOCK_TOKENS + 1).astype(np.uint32)

    def pages(self) -> Table:
        """Random pages for a prompt's blocks."""
        return self.rng.permutation(self.num_pages)[: self.blocks, None].astype(np.int32)

    def fill(self, number: int, pages: Table) -> None:
        """Write the bytes of this prompt into the pages."""
        shape = (self.blocks, self.layers, PAGE_BYTES)
        self.right[number] = self.rng.integers(0, 256, shape, np.uint8)
        self._each(pages, self.right[number], to_device=True)

    def holds(self, pages: Table) -> Bytes:
        """The bytes in these pages."""
        found = np.empty((len(pages), self.layers, PAGE_BYTES), np.uint8)
        self._each(pages, found, to_device=False)
        return found

    def _each(self, pages: Table, blocks: Bytes, *, to_device: bool) -> None:
        for row, page in zip(blocks, pages[:, 0].tolist(), strict=True):
            for base, part in zip(self.bases, row, strict=True):
                at, host = base + page * PAGE_BYTES, part.ctypes.data
                to, source = (at, host) if to_device else (host, at)
                kind = 1 if to_device else 2
                self.runtime.memcpyAsync(to, source, PAGE_BYTES, kind, self.stream.ptr)
        self.stream.synchronize()


def run(check: Check) -> None:
    if not check.is_dry:
        _run_all(check, "libcuda.so.1")
        return
    with check.step("on the stand-in for a GPU") as step:
        try:
            with stand_in_host(check.folder) as driver:
                _run_all(check, driver)
            step.value = "ran to its end"
        except NoCompiler as why:
            raise Skipped(str(why)) from why


def _run_all(check: Check, driver: str) -> None:
    for kernels in ("never", "always"):
        with check.step(f"an engine's pages through a daemon, page_kernels: {kernels}") as step:
            _run(check, driver, kernels)
            step.value = "ran to its end"
    with check.step("1 GiB handed over from GPU memory to another process' pages") as step:
        _handover(check, driver, step)


def _run(check: Check, driver: str, kernels: str) -> None:
    size = 32 if _is_small(check) else 512
    gpu = GpuUse(page_kernels=kernels)
    with daemon(check, gpu, hbm=size, dram=size // 2, disk=4 * size) as server:
        check.note(f"{kernels}: copied", _how(server))
        engine = Engine(check, server, driver, BLOCKS)
        with check.step(f"{kernels}: registered") as part:
            started_s = time.perf_counter()
            share = _shared(engine)
            part.value = f"in {(time.perf_counter() - started_s) * 1e3:.1f} ms"
        with check.step(f"{kernels}: a registration that lies about its size") as part:
            part.value = _lying(engine)
        with check.step(f"{kernels}: saved from pages and loaded into others") as part:
            part.value = _there_and_back(server, engine, share, size)
        with check.step(f"{kernels}: loaded layer by layer") as part:
            part.value = _by_layer(engine, share)
        with check.step(f"{kernels}: the same, copied by this process itself") as part:
            part.value = _by_layer_here(engine)
        with check.step(f"{kernels}: the worker killed in the middle of loads") as part:
            part.value = _killed(server, engine, share)
        engine.client.close()


def _handover(check: Check, driver: str, step: CheckStep) -> None:
    """A prompt of 8K tokens of an 8B model, all of it in the worker's GPU memory; the GPU does
    nothing else. What the worker measures is judged: from the request taken up to all bytes there.
    What the client waits is that, and the messages."""
    blocks = 64 if _is_small(check) else HANDOVER_BLOCKS
    mib = {"hbm": 48, "dram": 48, "disk": 64} if _is_small(check) else HANDOVER_MIB
    with daemon(check, GpuUse(page_kernels="always"), **mib) as server:
        engine = Engine(check, server, driver, blocks)
        share, pages = _shared(engine), engine.pages()
        engine.fill(1, pages)
        result = engine.client.save_pages(engine.prompt(1), share, pages)
        assert result.stored == blocks, f"{result}: {engine.client.last_error}"
        wait_for(lambda: _is_in_hbm(engine, share), "all of it to be promoted")
        worker_ms, client_ms = [], []
        for _ in range(HANDOVER_ROUNDS):
            match, pages = _matched(engine, 1), engine.pages()
            assert match.runs == (("hbm", blocks),), match.runs
            started_s = time.perf_counter()
            parts = list(engine.client.load_pages_by_part(match, share, pages, planes_per_part=0))
            client_ms.append((time.perf_counter() - started_s) * 1e3)
            engine.client.release(match)
            assert [part.blocks for part in parts] == [blocks], engine.client.last_error
            worker_ms.append(parts[0].copied_s * 1e3)
        assert np.array_equal(engine.holds(pages), engine.right[1]), "WRONG BYTES"
        worker, client = float(np.median(worker_ms)), float(np.median(client_ms))
        value = (
            f"{blocks * engine.block_bytes >> 20} MiB in {worker:.2f} ms by the worker's clock "
            f"(best {min(worker_ms):.2f}), target {HANDOVER_TARGET_MS} for 1 GiB; {client:.2f} ms "
            f"as the client sees it; the last one right; {_how(server)}"
        )
        step.judge(worker < HANDOVER_TARGET_MS, value, worker_ms=worker_ms, client_ms=client_ms)
        engine.client.close()


def _is_in_hbm(engine: Engine, share: PageShare) -> bool:
    """If not, loads it, which promotes it."""
    match = _matched(engine, 1)
    is_there = match.runs == (("hbm", engine.blocks),)
    if not is_there:
        engine.client.load_pages(match, share, engine.pages())
    engine.client.release(match)
    return is_there


def _is_small(check: Check) -> bool:
    return check.is_small or check.is_dry


def _how(server: PrivateDaemon) -> str:
    """The worker's note about pages."""
    (hbm,) = (tier for tier in server.stats()["tiers"] if tier["name"] == "hbm")
    return next(part for part in str(hbm["note"]).split("; ") if part.startswith("pages "))


def _shared(engine: Engine) -> PageShare:
    share = engine.client.share_pages(engine.shared())
    assert share is not None, engine.client.last_error
    return share


def _lying(engine: Engine) -> str:
    pages = engine.shared()
    planes = pages.planes.copy()
    planes[-1, 3] += 1 << 20
    assert engine.client.share_pages(replace(pages, planes=planes)) is None, "it was believed"
    return engine.client.last_error


def _there_and_back(server: PrivateDaemon, engine: Engine, share: PageShare, mib: int) -> str:
    """Save more than both memory tiers hold, then load all of it; every byte is compared."""
    prompt_bytes = BLOCKS * engine.block_bytes
    num_prompts = (mib + mib // 2) * (1 << 20) * 5 // 4 // prompt_bytes
    saved_s = []
    for number in range(num_prompts):
        pages = engine.pages()
        engine.fill(number, pages)
        started_s = time.perf_counter()
        result = engine.client.save_pages(engine.prompt(number), share, pages)
        saved_s.append(time.perf_counter() - started_s)
        held = result.stored + result.present
        assert held == BLOCKS, f"{result}: {engine.client.last_error}"
        if number >= 2:
            _load(engine, share, number - 2)
    loaded: dict[str, list[float]] = {}
    came = 0
    for number in [*range(num_prompts), *reversed(range(num_prompts))]:
        blocks, seconds, tiers = _load(engine, share, number)
        came += blocks
        if blocks == BLOCKS:
            loaded.setdefault("+".join(sorted(tiers)), []).append(seconds)
    rates = [
        f"{tiers} {prompt_bytes / min(seconds) / 1e9:.1f}"
        for tiers, seconds in sorted(loaded.items())
    ]
    reported = server.stats()["pages"]
    return (
        f"{came} of {2 * num_prompts * BLOCKS} blocks came, every byte right; GB/s with all "
        f"requests, best: saved {prompt_bytes / min(saved_s) / 1e9:.1f}, loaded from "
        f"{', '.join(rates)}; left over: {reported}"
    )


def _load(engine: Engine, share: PageShare, number: int) -> tuple[int, float, set[str]]:
    """(blocks, seconds with the requests, tiers). AssertionError on a wrong byte."""
    pages = engine.pages()
    match = _matched(engine, number)
    started_s = time.perf_counter()
    came = engine.client.load_pages(match, share, pages)
    seconds = time.perf_counter() - started_s
    engine.client.release(match)
    assert came.is_at_rest, engine.client.last_error
    found = engine.holds(pages[: came.blocks])
    assert np.array_equal(found, engine.right[number][: came.blocks]), f"WRONG BYTES of {number}"
    return came.blocks, seconds, {tier for tier, _ in match.runs}


def _by_layer(engine: Engine, share: PageShare) -> str:
    pages, number = engine.pages(), max(engine.right)
    _load(engine, share, number)
    match = _matched(engine, number)
    started_s = time.perf_counter()
    reported: list[float] = []
    parts = engine.client.load_pages_by_part(match, share, pages, planes_per_part=1)
    for part in parts:
        reported.append((time.perf_counter() - started_s) * 1e3)
        right = engine.right[number][part.first : part.first + part.blocks, : part.planes]
        found = engine.holds(pages[part.first : part.first + part.blocks])[:, : part.planes]
        assert np.array_equal(found, right), f"{part.planes} layers were reported and are not there"
    engine.client.release(match)
    first = f"the first after {reported[0]:.1f} ms"
    return f"{len(reported)} parts, {first}; each compared when it was reported"


def _by_layer_here(engine: Engine) -> str:
    """As a connector does if the worker cannot: here because it finds no CUDA library."""
    runner = CupyRunner(engine.cupy)
    cache = PagedCache(engine.client, engine.layout, engine.cupy, runner, "/dev/null")
    pages, number = engine.pages(), max(engine.right)
    match = _matched(engine, number)
    right = engine.right[number]
    started_s = time.perf_counter()
    reported: list[float] = []
    with cache.load_by_part(match, pages, planes_per_part=1) as load:
        for layers in range(1, engine.layers + 1):
            blocks = load.wait(layers)
            reported.append((time.perf_counter() - started_s) * 1e3)
            assert blocks == BLOCKS, f"{blocks} of {BLOCKS} blocks: {engine.client.last_error}"
            found = engine.holds(pages)[:, :layers]
            assert np.array_equal(found, right[:, :layers]), f"layer {layers} is not there"
    engine.client.release(match)
    cache.close()
    return (
        f"{cache.how[:40]}…; the first layer after {reported[0]:.1f} ms, each compared when it came"
    )


def _killed(server: PrivateDaemon, engine: Engine, share: PageShare) -> str:
    """Its copies end with it; the client shares its pages with the next worker."""
    number = max(engine.right)
    match = _matched(engine, number)
    pages = engine.pages()
    parts = engine.client.load_pages_by_part(match, share, pages, planes_per_part=1)
    first = next(parts, None)
    os.kill(share.worker_pid, signal.SIGKILL)
    rest = list(parts)
    engine.client.release(match)
    wait_for(lambda: not share.is_in_doubt, "the end of the worker")
    pages_again = engine.shared()
    again = wait_for(lambda: engine.client.share_pages(pages_again), "another worker to map them")
    assert again is not None
    blocks, _, _ = _load(engine, again, number)
    assert engine.client.unshare_pages(again), engine.client.last_error
    left = server.stats()["pages"]
    assert not any(left.values()), f"left over: {left}"
    seen = len(rest) + (first is not None)
    return f"after {seen} parts; {blocks} of {BLOCKS} blocks loaded by the next worker, bytes right"


def _matched(engine: Engine, number: int) -> Match:
    return engine.client.match(engine.prompt(number))

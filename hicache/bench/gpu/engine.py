"""An inference engine's pages through a real daemon: registered by CUDA IPC, saved and loaded by
its GPU worker, from every tier, layer by layer; what lies about its size; the worker killed."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.bench.gpu.check import Check, Skipped
from hicache.bench.gpu.cpu_kernels import CpuRunner
from hicache.bench.gpu.daemon import BLOCK_TOKENS, daemon, wait_for
from hicache.client import Client, LayerGroup, Match, NamespaceSpec, PageShare
from hicache.connectors.pages import PagedCache, shared_pages
from hicache.demo.daemon import PrivateDaemon
from hicache.transfer.pages import CupyRunner, PageLayout, Runner, whole_pages

PAGE_BYTES = 64 << 10  # 16 tokens of a layer of an 8B model, K and V
BLOCKS = 32

Table = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


class Engine:
    """Tensors in one allocation, a page a block and layer, and what they should hold."""

    def __init__(self, check: Check, house: PrivateDaemon) -> None:
        self.layers, self.num_pages = (4, 128) if check.is_small else (32, 256)
        self.block_bytes = self.layers * PAGE_BYTES
        self.cupy = check.cupy
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
            spec, house.endpoint, timeout_s=5.0, fetch_timeout_s=12.0, put_timeout_s=12.0
        )
        self.right: dict[int, Bytes] = {}

    def prompt(self, number: int) -> npt.NDArray[np.uint32]:
        rng = np.random.default_rng(number)
        return rng.integers(0, 50_000, BLOCKS * BLOCK_TOKENS + 1).astype(np.uint32)

    def pages(self) -> Table:
        """Of a prompt's blocks, anywhere."""
        return self.rng.permutation(self.num_pages)[:BLOCKS, None].astype(np.int32)

    def fill(self, number: int, pages: Table) -> None:
        """The pages get new bytes: those of this prompt."""
        shape = (BLOCKS, self.layers, PAGE_BYTES)
        self.right[number] = self.rng.integers(0, 256, shape, np.uint8)
        self._each(pages, self.right[number], to_device=True)

    def holds(self, pages: Table) -> Bytes:
        """What is in these pages."""
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
    if check.is_dry:
        with check.step("an inference engine's pages through a daemon"):
            raise Skipped("two processes' memory of one GPU")
        return
    size = 64 if check.is_small else 1024
    with (
        check.step("an inference engine's pages through a daemon") as step,
        daemon(check, hbm=size, dram=size // 2, disk=4 * size) as house,
    ):
        engine = Engine(check, house)
        with check.step("registered") as part:
            started_s = time.perf_counter()
            share = _shared(check, engine)
            part.value = f"in {(time.perf_counter() - started_s) * 1e3:.1f} ms"
        with check.step("a registration that lies about its size") as part:
            part.value = _lying(check, engine)
        with check.step("saved from pages and loaded into others") as part:
            part.value = _there_and_back(house, engine, share, size)
        with check.step("loaded layer by layer") as part:
            part.value = _by_layer(engine, share)
        with check.step("the same, copied by this process itself") as part:
            part.value = _by_layer_here(check, engine)
        with check.step("the worker killed in the middle of loads") as part:
            part.value = _killed(check, house, engine, share)
        engine.client.close()
        step.value = "ran to its end"


def _shared(check: Check, engine: Engine) -> PageShare:
    share = engine.client.share_pages(shared_pages(check.cupy, engine.layout))
    assert share is not None, engine.client.last_error
    return share


def _lying(check: Check, engine: Engine) -> str:
    pages = shared_pages(check.cupy, engine.layout)
    planes = pages.planes.copy()
    planes[-1, 3] += 1 << 20
    assert engine.client.share_pages(replace(pages, planes=planes)) is None, "it was believed"
    return engine.client.last_error


def _there_and_back(house: PrivateDaemon, engine: Engine, share: PageShare, mib: int) -> str:
    """More than both memory tiers hold, then all of it again; every byte compared."""
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
    told = house.stats()["pages"]
    return (
        f"{came} of {2 * num_prompts * BLOCKS} blocks came, every byte right; GB/s with all "
        f"requests, best: saved {prompt_bytes / min(saved_s) / 1e9:.1f}, loaded from "
        f"{', '.join(rates)}; left over: {told}"
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
    told: list[float] = []
    parts = engine.client.load_pages_by_part(match, share, pages, planes_per_part=1)
    for part in parts:
        told.append((time.perf_counter() - started_s) * 1e3)
        right = engine.right[number][part.first : part.first + part.blocks, : part.planes]
        found = engine.holds(pages[part.first : part.first + part.blocks])[:, : part.planes]
        assert np.array_equal(found, right), f"told of {part.planes} layers, and they are not there"
    engine.client.release(match)
    return f"{len(told)} parts, the first after {told[0]:.1f} ms; each compared when it was told"


def _by_layer_here(check: Check, engine: Engine) -> str:
    """As a connector does where the worker cannot: here because it finds no CUDA library."""
    runner: Runner = CupyRunner(check.cupy) if hasattr(check.cupy, "RawModule") else CpuRunner()
    cache = PagedCache(engine.client, engine.layout, engine.cupy, runner, "/dev/null")
    pages, number = engine.pages(), max(engine.right)
    match = _matched(engine, number)
    right = engine.right[number]
    started_s = time.perf_counter()
    told: list[float] = []
    with cache.load_by_part(match, pages, planes_per_part=1) as load:
        for layers in range(1, engine.layers + 1):
            blocks = load.wait(layers)
            told.append((time.perf_counter() - started_s) * 1e3)
            assert blocks == BLOCKS, f"{blocks} of {BLOCKS} blocks: {engine.client.last_error}"
            found = engine.holds(pages)[:, :layers]
            assert np.array_equal(found, right[:, :layers]), f"layer {layers} is not there"
    engine.client.release(match)
    cache.close()
    return f"{cache.how[:40]}…; the first layer after {told[0]:.1f} ms, each compared when it came"


def _killed(check: Check, house: PrivateDaemon, engine: Engine, share: PageShare) -> str:
    """Its copies end with it; the client sees that, and shares its pages with the next one."""
    number = max(engine.right)
    match = _matched(engine, number)
    pages = engine.pages()
    parts = engine.client.load_pages_by_part(match, share, pages, planes_per_part=1)
    first = next(parts, None)
    os.kill(share.worker_pid, signal.SIGKILL)
    rest = list(parts)
    engine.client.release(match)
    wait_for(lambda: not share.is_in_doubt, "the end of the worker")
    pages_again = shared_pages(check.cupy, engine.layout)
    again = wait_for(lambda: engine.client.share_pages(pages_again), "another worker to map them")
    assert again is not None
    blocks, _, _ = _load(engine, again, number)
    assert engine.client.unshare_pages(again), engine.client.last_error
    left = house.stats()["pages"]
    assert not any(left.values()), f"left over: {left}"
    seen = len(rest) + (first is not None)
    return f"after {seen} parts; {blocks} of {BLOCKS} blocks loaded by the next worker, bytes right"


def _matched(engine: Engine, number: int) -> Match:
    return engine.client.match(engine.prompt(number))

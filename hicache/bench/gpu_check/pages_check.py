"""The page kernels on the GPU: every layout and dtype bit by bit, and their speed from and to an
inference engine's 16-token pages, beside plain copies. In a dry run the kernels run on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.bench.gpu_check.check import Check, Skipped
from hicache.bench.gpu_check.cpu_kernels import CpuRunner, NoCompiler
from hicache.bench.gpu_check.gpu_machine import arena_of
from hicache.bench.gpu_check.layouts import (
    ITEM_BYTES,
    KINDS,
    Kind,
    Shape,
    Tensor,
    gathered,
    scattered,
)
from hicache.transfer.gpu_pages.page_kernels import CupyRunner, PageCopier, Runner, whole_pages
from hicache.transfer.media.pinned_memory import PinnedArena

HOST_TARGET, CARD_TARGET, HANDOVER_TARGET_MS = 0.85, 0.70, 1.0
FEW_SMS = 32
ROUNDS = 7
# A Llama of 8B parameters: 2 MiB for 16 tokens of all 32 layers, K and V apart.
MODEL = Shape(layers=32, page_tokens=16, heads=8, dim=128, item_bytes=2, pages_per_block=1)

Timed = Callable[[], float]


class Card:
    """Owns GPU memory, and makes plain copies of it."""

    def __init__(self, check: Check, runner: Runner) -> None:
        self.cupy, self.runner = check.cupy, runner
        self.runtime: Any = self.cupy.cuda.runtime
        self.stream: Any = self.cupy.cuda.Stream(non_blocking=True)
        self._memory: list[Any] = []

    def room(self, num_bytes: int) -> int:
        self._memory.append(self.cupy.cuda.Memory(num_bytes))
        return int(self._memory[-1].ptr)

    def upload(self, tensor: Tensor) -> int:
        at = self.room(tensor.nbytes)
        self.copy(at, tensor.ctypes.data, tensor.nbytes, 1)
        return at

    def download(self, at: int, like: Tensor) -> Tensor:
        found = np.empty_like(like)
        self.copy(found.ctypes.data, at, found.nbytes, 4)  # from host or device memory
        return found

    def copy(self, to: int, source: int, num_bytes: int, kind: int) -> None:
        self.runtime.memcpyAsync(to, source, num_bytes, kind, self.stream.ptr)
        self.stream.synchronize()


def run(check: Check) -> None:
    with check.step("the kernels are compiled") as step:
        started_s = time.perf_counter()
        try:
            runner: Runner = CpuRunner() if check.is_dry else CupyRunner(check.cupy)
        except NoCompiler as why:
            raise Skipped(str(why)) from why
        _touch(Card(check, runner))
        step.value = f"and run, after {time.perf_counter() - started_s:.1f} s"
    if step.status != "ok":
        return
    rounds = 1 if check.is_dry or check.is_small else 2
    for kind in KINDS:
        with check.step(f"{kind.name}: every dtype, random pages, both ways") as step:
            step.value = _exact(check, runner, kind, rounds)
    if not check.is_small:
        _speed(check, Card(check, runner))


def _touch(card: Card) -> None:
    """One small launch, which fails if the kernels cannot be compiled or run."""
    at = card.room(4096)
    copier = PageCopier(whole_pages([at], 2, 1024, 1), card.runner)
    blocks, pages = np.array([at + 2048], np.uint64), np.zeros((1, 1), np.int32)
    copier.start(blocks, pages, to_blocks=True, grid=1, stream=card.stream)
    card.stream.synchronize()


def _exact(check: Check, runner: Runner, kind: Kind, rounds: int) -> str:
    """To and from slots in pinned memory and in GPU memory; tensors and slots compared whole."""
    rng = np.random.default_rng(3)
    num_blocks = 0
    is_latent = kind.name.startswith("MLA")
    for dtype, item_bytes in ITEM_BYTES.items():
        for page_tokens in (16, 1) if kind.name == "SGLang" else (16,):
            heads, dim = (1, 576) if is_latent else (4, 128)
            shape = Shape(3, 48, page_tokens, heads, dim, item_bytes, 2)
            for _ in range(rounds):
                for in_host in (True, False):
                    try:
                        card = Card(check, runner)
                        num_blocks += _exact_once(check, card, kind, shape, in_host, rng)
                    except AssertionError as error:
                        where = "pinned" if in_host else "GPU"
                        raise AssertionError(f"{dtype}, {where} slots: {error}") from error
    return f"{num_blocks} blocks, {', '.join(ITEM_BYTES)}"


def _exact_once(
    check: Check, card: Card, kind: Kind, shape: Shape, in_host: bool, rng: np.random.Generator
) -> int:
    tensors = [rng.integers(0, 256, dims, np.uint8) for dims in kind.shapes(shape)]
    order = rng.permutation(shape.num_pages)[: shape.num_pages // 4 * 2].astype(np.int32)
    pages = order.reshape(-1, shape.pages_per_block)
    layout = kind.layout(shape, [card.upload(tensor) for tensor in tensors])
    room = layout.block_bytes + 4096
    slots = rng.integers(0, 256, len(pages) * room, np.uint8)
    right = slots.copy()
    places = rng.permutation(len(pages)) * room
    with _slots(check, card, slots, in_host) as base:
        blocks = (base + places).astype(np.uint64)
        copier = PageCopier(layout, card.runner)
        copier.start(blocks, pages, to_blocks=True, grid=7, stream=card.stream)
        card.stream.synchronize()
        for place, row in zip(places, pages, strict=True):
            block = gathered(kind, shape, tensors, row.tolist())
            right[place : place + layout.block_bytes] = block
        found = card.download(base, slots)
        assert np.array_equal(found, right), "gathered blocks are wrong"
        others = [rng.integers(0, 256, dims, np.uint8) for dims in kind.shapes(shape)]
        at = [card.upload(tensor) for tensor in others]
        copier = PageCopier(kind.layout(shape, at), card.runner)
        target = rng.permutation(order).reshape(pages.shape)
        copier.start(blocks, target, to_blocks=False, grid=5, stream=card.stream)
        card.stream.synchronize()
        for place, row in zip(places, target, strict=True):
            block = right[place : place + layout.block_bytes]
            scattered(kind, shape, others, row.tolist(), block)
        for address, tensor in zip(at, others, strict=True):
            assert np.array_equal(card.download(address, tensor), tensor), "scattered pages are"
        assert np.array_equal(card.download(base, slots), right), "reading changed a slot"
    return len(pages)


@contextmanager
def _slots(check: Check, card: Card, slots: Tensor, in_host: bool) -> Iterator[int]:
    """The address of a copy of these bytes, in pinned memory or in GPU memory."""
    if not in_host:
        yield card.upload(slots)
        return
    size = -(-slots.nbytes // 4096) * 4096
    with arena_of(size) as arena:
        pinned = PinnedArena(check.cupy.cuda.runtime, arena)
        assert pinned.is_whole, pinned.trouble
        arena.data[: slots.nbytes] = slots
        try:
            yield arena.address(0, slots.nbytes)
        finally:
            card.stream.synchronize()
            pinned.close()


def _speed(check: Check, card: Card) -> None:
    num_blocks = 8 if check.is_dry else 512  # 8192 tokens: 1 GiB
    shape = replace(MODEL, num_pages=num_blocks)
    kind = next(kind for kind in KINDS if kind.name == "vLLM, split")
    tensors = [card.room(int(np.prod(dims))) for dims in kind.shapes(shape)]
    copier = PageCopier(kind.layout(shape, tensors), card.runner)
    size = copier.layout.block_bytes
    rng = np.random.default_rng(5)
    pages = rng.permutation(num_blocks).astype(np.int32).reshape(-1, 1)
    slots = rng.permutation(num_blocks)
    half = num_blocks // 2
    sms = 2 if check.is_dry else _multiprocessors(card)
    host = card.runtime.hostAlloc(half * size, 0)
    try:
        for to_blocks in (True, False):
            way = "gathered from 16-token pages to" if to_blocks else "scattered to them from"
            with check.step(f"2 MiB blocks {way} pinned memory") as step:
                blocks = (host + slots[slots < half] * size).astype(np.uint64)
                found = _by_grid(card, copier, blocks, pages[:half], to_blocks, _few(sms))
                to, source = (host, tensors[0]) if to_blocks else (tensors[0], host)
                found["peak"] = _plain(card, to, source, shape, half * size, 2 if to_blocks else 1)
                _judge_host(step, found)
    finally:
        card.stream.synchronize()
        card.runtime.freeHost(host)
    pool = card.room(num_blocks * size)
    blocks = (pool + slots * size).astype(np.uint64)
    grids = [sms // 2, sms, 2 * sms, 4 * sms]
    whole = 2 * _whole(card, num_blocks * size)
    for to_blocks in (True, False):
        way = "gathered from 16-token pages" if to_blocks else "scattered to 16-token pages"
        with check.step(f"2 MiB blocks {way} within the GPU") as step:
            found = _by_grid(card, copier, blocks, pages, to_blocks, grids)
            best = max(found.values())
            text = ", ".join(f"{name} {2 * rate:.0f}" for name, rate in found.items())
            milliseconds = num_blocks * size / best / 1e6
            share = 2 * best / whole
            value = f"{text} GB/s read and written, one copy {whole:.0f}: {share:.2f}, "
            value += (
                f"target {CARD_TARGET}; {num_blocks * size >> 20} MiB in {milliseconds:.2f} ms, "
            )
            value += f"target {HANDOVER_TARGET_MS} for 1 GiB"
            is_met = share >= CARD_TARGET and milliseconds <= HANDOVER_TARGET_MS
            step.judge(is_met, value, gb_s=found, whole=whole, milliseconds=milliseconds)


def _judge_host(step: Any, found: dict[str, float]) -> None:
    text = ", ".join(f"{name} {rate:.1f}" for name, rate in found.items())
    rates = {name: rate for name, rate in found.items() if name != "peak"}
    best = max(rates, key=lambda name: rates[name])
    share = rates[best] / found["peak"]
    value = f"{text} GB/s; {share:.2f} of peak with {best}, target {HOST_TARGET}"
    step.judge(share >= HOST_TARGET, value, gb_s=found)


def _few(sms: int) -> list[int]:
    return [grid for grid in (4, 8, 16, FEW_SMS) if grid <= max(4, sms)]


def _multiprocessors(card: Card) -> int:
    return int(card.runtime.getDeviceProperties(0)["multiProcessorCount"])


def _by_grid(
    card: Card,
    copier: PageCopier,
    blocks: npt.NDArray[np.uint64],
    pages: npt.NDArray[np.int32],
    to_blocks: bool,
    grids: Sequence[int],
) -> dict[str, float]:
    """GB/s for each number of thread blocks, launch and wait included."""
    found = {}
    for grid in grids:

        def go(grid: int = grid) -> None:
            copier.start(blocks, pages, to_blocks=to_blocks, grid=grid, stream=card.stream)
            card.stream.synchronize()

        found[f"{grid} blocks"] = len(blocks) * copier.layout.block_bytes / _seconds(go) / 1e9
    return found


def _plain(card: Card, to: int, source: int, shape: Shape, num_bytes: int, kind: int) -> float:
    """One copy as large as a tensor, GB/s: the peak of the link."""
    size = min(num_bytes, 2 * shape.num_pages * shape.page_tokens * shape.row_bytes)
    repeats = num_bytes // size

    def go() -> None:
        for _ in range(repeats):
            card.runtime.memcpyAsync(to, source, size, kind, card.stream.ptr)
        card.stream.synchronize()

    return repeats * size / _seconds(go) / 1e9


def _whole(card: Card, num_bytes: int) -> float:
    """One copy within the GPU, GB/s one way."""
    to, source = card.room(num_bytes), card.room(num_bytes)
    return num_bytes / _seconds(lambda: card.copy(to, source, num_bytes, 3)) / 1e9


def _seconds(go: Callable[[], None]) -> float:
    """The median of a few rounds; the first one warms up."""
    spent = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        go()
        spent.append(time.perf_counter() - start)
    return float(np.median(spent[1:]))

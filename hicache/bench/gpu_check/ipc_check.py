"""Two processes on one GPU: blocks from and to another process' pages by CUDA IPC, and the state
after that process is killed in the middle of a copy."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hicache.bench.gpu_check.check import Check, Skipped
from hicache.bench.gpu_check.layouts import Tensor, gathered, scattered
from hicache.bench.gpu_check.pages_check import Card
from hicache.bench.gpu_check.tenant import KIND, SHAPE, tensors
from hicache.transfer.gpu_pages.cuda_ipc import Mappings, SharedRange
from hicache.transfer.gpu_pages.page_kernels import CupyRunner, PageCopier

SEED = 11
_COPIES = 400


class Tenant:
    """The other process, and the expected bytes of its tensors."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "hicache.bench.gpu_check.tenant", str(SEED)]
        pipes = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipes, stdout=pipes, text=True)
        self.tensors = tensors(SEED)
        rows = json.loads(self._answer())
        self.ranges = [
            SharedRange(bytes.fromhex(row["handle"]), row["offset"], tensor.nbytes)
            for row, tensor in zip(rows, self.tensors, strict=True)
        ]

    def holds(self, folder: Any) -> list[Tensor]:
        """The bytes it finds in its own memory."""
        target = folder / "tenant.npz"
        assert self.process.stdin is not None
        self.process.stdin.write(f"{target}\n")
        self.process.stdin.flush()
        self._answer()
        with np.load(target) as found:
            return [found[f"arr_{n}"] for n in range(len(self.tensors))]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the other process ended with status {self.process.wait()}"
        return line


@contextmanager
def _tenant() -> Iterator[Tenant]:
    tenant = Tenant()
    try:
        yield tenant
    finally:
        tenant.kill()


def run(check: Check) -> None:
    with check.step("blocks from and to another process' pages") as step:
        if check.is_dry:
            raise Skipped("two processes' memory of one GPU")
        with _tenant() as tenant:
            step.value = _copied(check, tenant)
    with check.step("the other process killed in the middle of copies") as step:
        if check.is_dry:
            raise Skipped("as above")
        with _tenant() as tenant:
            step.value = _killed(check, tenant)


def _copied(check: Check, tenant: Tenant) -> str:
    card = Card(check, CupyRunner(check.cupy))
    mappings = Mappings(check.cupy)
    started_s = time.perf_counter()
    at = [mappings.address(shared) for shared in tenant.ranges]
    mapped_ms = (time.perf_counter() - started_s) * 1e3
    for address, tensor in zip(at, tenant.tensors, strict=True):
        assert np.array_equal(card.download(address, tensor), tensor), "read by the copy engines"
    layout = KIND.layout(SHAPE, at)
    copier = PageCopier(layout, card.runner)
    rng = np.random.default_rng(2)
    pages = rng.permutation(SHAPE.num_pages).astype(np.int32).reshape(-1, SHAPE.pages_per_block)
    pool = card.room(len(pages) * layout.block_bytes)
    blocks = (pool + layout.block_bytes * np.arange(len(pages))).astype(np.uint64)
    copier.start(blocks, pages, to_blocks=True, grid=32, stream=card.stream)
    card.stream.synchronize()
    found = card.download(pool, np.empty(len(pages) * layout.block_bytes, np.uint8))
    rows = found.reshape(len(pages), -1)
    for row, numbers in zip(rows, pages, strict=True):
        assert np.array_equal(row, gathered(KIND, SHAPE, tenant.tensors, numbers.tolist()))
    target = rng.permutation(pages)
    copier.start(blocks, target, to_blocks=False, grid=32, stream=card.stream)
    card.stream.synchronize()
    for row, numbers in zip(rows, target, strict=True):
        scattered(KIND, SHAPE, tenant.tensors, numbers.tolist(), row)
    there = tenant.holds(check.folder)
    assert all(np.array_equal(a, b) for a, b in zip(there, tenant.tensors, strict=True)), "written"
    started_s = time.perf_counter()
    mappings.close()
    closed_ms = (time.perf_counter() - started_s) * 1e3
    num_bytes = sum(tensor.nbytes for tensor in tenant.tensors)
    return (
        f"{num_bytes >> 20} MiB right on both sides; mapped in {mapped_ms:.1f} ms, "
        f"unmapped in {closed_ms:.1f} ms"
    )


def _killed(check: Check, tenant: Tenant) -> str:
    """Reports what happens. It fails only if our own context neither works nor raises."""
    card = Card(check, CupyRunner(check.cupy))
    mappings = Mappings(check.cupy)
    at = mappings.address(tenant.ranges[0])
    size = tenant.tensors[0].nbytes
    host = card.runtime.hostAlloc(size, 0)
    for _ in range(_COPIES):
        card.runtime.memcpyAsync(host, at, size, 2, card.stream.ptr)
    is_mid_copy = not card.stream.done
    tenant.kill()
    error_type = card.runtime.CUDARuntimeError
    said = "before the copies had ended" if is_mid_copy else "after the copies"
    try:
        card.stream.synchronize()
        said += ": they went on to their end"
    except error_type as error:
        said += f": they ended with {error}"
    started_s = time.perf_counter()
    try:
        mappings.close()
        said += f"; unmapped in {(time.perf_counter() - started_s) * 1e3:.1f} ms"
    except error_type as error:
        said += f"; unmapping: {error}"
    own = np.arange(4096, dtype=np.uint8)
    try:
        assert np.array_equal(card.download(card.upload(own), own), own), "our own memory is wrong"
        card.runtime.freeHost(host)
        said += "; our own context works"
    except error_type as error:
        said += f"; our own context is gone: {error}"
    return said

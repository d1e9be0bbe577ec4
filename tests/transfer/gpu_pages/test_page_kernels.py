"""The page kernels' own source, compiled for this machine's CPU, against NumPy's indexing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.bench.gpu_check.cpu_kernels import CpuRunner
from hicache.bench.gpu_check.layouts import (
    ITEM_BYTES,
    KINDS,
    Kind,
    Shape,
    Tensor,
    gathered,
    scattered,
)
from hicache.bench.gpu_check.stand_in import StandIn
from hicache.transfer.gpu_pages.page_kernels import (
    SOURCE,
    CupyRunner,
    PageCopier,
    PageLayout,
    Plane,
    whole_pages,
)
from tests.shared_library import needs_page_kernels


@pytest.fixture(scope="module")
def runner() -> CpuRunner:
    needs_page_kernels()
    return CpuRunner()


_shapes = st.builds(
    Shape,
    layers=st.integers(1, 3),
    num_pages=st.integers(8, 20),
    page_tokens=st.sampled_from([1, 3, 16]),
    heads=st.integers(1, 3),
    dim=st.sampled_from([1, 5, 16, 64, 576]),
    item_bytes=st.sampled_from(sorted(set(ITEM_BYTES.values()))),
    pages_per_block=st.integers(1, 4),
)


@given(
    kind=st.sampled_from(KINDS),
    shape=_shapes,
    grid=st.integers(1, 3),
    skew=st.sampled_from([0, 0, 4, 1]),
    seed=st.integers(0, 1 << 16),
)
@settings(max_examples=100)
def test_blocks_hold_their_pages_and_nothing_else_is_written(
    runner: CpuRunner, kind: Kind, shape: Shape, grid: int, skew: int, seed: int
) -> None:
    """Out of random pages into blocks that lie anywhere, and from there into other tensors' pages.
    A skew takes the blocks off their 16-byte boundaries."""
    rng = np.random.default_rng(seed)
    tensors = [rng.integers(0, 256, dims, np.uint8) for dims in kind.shapes(shape)]
    layout = kind.layout(shape, [tensor.ctypes.data for tensor in tensors])
    order = rng.permutation(shape.num_pages).astype(np.int32)
    num_blocks = shape.num_pages // shape.pages_per_block
    pages = order[: num_blocks * shape.pages_per_block].reshape(num_blocks, -1)

    room = layout.block_bytes + 32 + skew
    memory = rng.integers(0, 256, num_blocks * room + 16, np.uint8)
    right = memory.copy()
    start = -memory.ctypes.data % 16 + skew
    places = start + rng.permutation(num_blocks) * (room // 16 * 16)
    blocks = (memory.ctypes.data + places).astype(np.uint64)
    PageCopier(layout, runner).start(blocks, pages, to_blocks=True, grid=grid)
    for place, row in zip(places, pages, strict=True):
        right[place : place + layout.block_bytes] = gathered(kind, shape, tensors, row.tolist())
    assert np.array_equal(memory, right)

    others = [rng.integers(0, 256, dims, np.uint8) for dims in kind.shapes(shape)]
    expected = [tensor.copy() for tensor in others]
    there = kind.layout(shape, [tensor.ctypes.data for tensor in others])
    shuffled = rng.permutation(pages.reshape(-1)).reshape(pages.shape).astype(np.int32)
    PageCopier(there, runner).start(blocks, shuffled, to_blocks=False, grid=grid)
    for place, row in zip(places, shuffled, strict=True):
        scattered(kind, shape, expected, row.tolist(), memory[place : place + layout.block_bytes])
    assert all(np.array_equal(a, b) for a, b in zip(others, expected, strict=True))
    assert np.array_equal(memory, right)


@pytest.mark.parametrize(("skew", "kernel"), [(0, "16"), (16, "16"), (4, "4"), (2, "1"), (1, "1")])
def test_the_widest_accesses_that_all_addresses_allow(
    runner: CpuRunner, skew: int, kernel: str
) -> None:
    pages, memory = np.zeros((4, 64), np.uint8), np.zeros(128, np.uint8)
    copier = PageCopier(PageLayout((Plane(_up(pages), 64, 2),), 64, 1), runner)
    block = np.array([_up(memory) + skew], np.uint64)
    copier.start(block, np.zeros((1, 1), np.int32), to_blocks=True, grid=1)
    assert runner.launches[-1] == f"copy_pages_{kernel}"


def _up(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> int:
    return int(array.ctypes.data) + -int(array.ctypes.data) % 16


def test_what_cannot_be_right_is_refused_before_anything_is_copied(runner: CpuRunner) -> None:
    memory = np.zeros(4096, np.uint8)
    copier = PageCopier(whole_pages([memory.ctypes.data], 4, 64, 2), runner)
    blocks = np.array([memory.ctypes.data + 1024, memory.ctypes.data + 2048], np.uint64)

    def start(pages: list[list[int]], to_blocks: bool) -> None:
        copier.start(blocks, np.array(pages, np.int32), to_blocks=to_blocks, grid=1)

    before = len(runner.launches)
    for pages, to_blocks, why in (
        ([[0, 1], [2, 4]], True, "out of range"),
        ([[0, 1], [2, -1]], True, "out of range"),
        ([[0, 1], [2, 1]], False, "written twice"),
        ([[0], [1]], True, "pages for 2 blocks"),
    ):
        with pytest.raises(ValueError, match=why):
            start(pages, to_blocks)
    with pytest.raises(ValueError, match="overlap"):
        PageLayout((Plane(0, 8, 4),), 16, 1)
    with pytest.raises(ValueError, match="at least one byte"):
        PageLayout((), 16, 1)
    assert len(runner.launches) == before
    start([[0, 1], [2, 1]], True)  # a page that two blocks share may be read
    copier.start(blocks[:0], np.zeros((0, 2), np.int32), to_blocks=True, grid=1)
    assert len(runner.launches) == before + 1


def test_a_launch_by_cupy_finds_its_tables(runner: CpuRunner) -> None:
    """On a device whose launches run when they are waited for. Their room is used again only when
    the launch that reads it is done."""
    rng = np.random.default_rng(0)
    device = StandIn()
    num_rooms, make = 0, device.cuda.Memory

    def memory(num_bytes: int) -> Any:
        nonlocal num_rooms
        num_rooms += 1
        return make(num_bytes)

    device.cuda.Memory = memory
    stream = device.cuda.Stream(non_blocking=True)
    tensors = [rng.integers(0, 256, (8, 48), np.uint8) for _ in range(2)]
    layout = whole_pages([tensor.ctypes.data for tensor in tensors], 8, 48, 2)
    copier = PageCopier(layout, CupyRunner(device))

    def launched() -> tuple[Tensor, Tensor]:
        """What is gathered into, and what it must hold when that is done."""
        blocks_of_it = np.zeros(4 * 192, np.uint8)
        pages = rng.permutation(8).astype(np.int32).reshape(4, 2)
        blocks = (blocks_of_it.ctypes.data + 192 * np.arange(4)).astype(np.uint64)
        copier.start(blocks, pages, to_blocks=True, grid=2, stream=stream)
        right = [tensor[page] for row in pages for tensor in tensors for page in row]
        return blocks_of_it, np.concatenate(right)

    for _ in range(2):
        under_way = [launched() for _ in range(3)]
        assert not any(found.any() for found, _ in under_way)
        stream.synchronize()
        assert all(np.array_equal(found, right) for found, right in under_way)
        assert num_rooms == 3


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_the_kernels_compile_for_gpus(tmp_path: Path, architecture: str) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip(
            "needs nvcc: install the CUDA toolkit, or run make gpu-check on a machine with a GPU"
        )
    command = [nvcc, f"-arch={architecture}", "-std=c++14", "-Werror=all-warnings", "-cubin"]
    subprocess.run([*command, str(SOURCE), "-o", str(tmp_path / "cubin")], check=True)

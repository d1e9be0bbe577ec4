"""Whether the GPU worker runs page kernels, and what it finds out about them at its start."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.bench.gpu_check import stand_in
from hicache.bench.gpu_check.cpu_kernels import NoCompiler
from hicache.bench.gpu_check.stand_in import ATTRIBUTES, StandIn
from hicache.tiers.arena import Arena
from hicache.tiers.hbm import CudaPool, PageKernels, gpu_spec
from hicache.transfer.gpu_pages import page_choice
from hicache.transfer.gpu_pages.page_choice import choose_page_path
from hicache.transfer.gpu_pages.page_paths import ByCopyEngines, Fastest, PagePath
from hicache.transfer.media.cuda import CudaMedium
from hicache.transfer.media.cuda_copy import EachCopy
from hicache.transfer.media.pinned_memory import PinnedArena
from hicache.transfer.worker_messages import WorkerConfig
from tests.shared_library import needs_page_kernels

MPS, SAME_POINTER = 133, 91
SLOW_COPY_S = 2e-4  # a copy engine's call, so that there is no doubt about the figures
UNDER_MPS = {**ATTRIBUTES, MPS: 1}
POOL_BYTES = 256 << 10


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena.create(tmp_path / "arena", 16 << 10)
    yield arena
    arena.close()


@pytest.fixture
def compiler() -> None:
    needs_page_kernels()


def chosen(
    arena: Arena, device: StandIn, wanted: str, pipes: Path = Path("/none")
) -> tuple[PagePath, str]:
    pool = CudaPool(0, POOL_BYTES, device)
    pinned = PinnedArena(device.cuda.runtime, arena)
    arena.data[:] = 7
    found = choose_page_path(pool, pinned, EachCopy(device.cuda.runtime), wanted, pipes)
    assert (arena.data == 7).all(), "the arena is not ours to try with"
    assert not device.waiting
    return found


@pytest.mark.parametrize(
    ("wanted", "attributes", "has_socket", "why_not"),
    [
        ("auto", ATTRIBUTES, True, "no MPS here"),
        ("auto", UNDER_MPS, False, ""),
        ("auto", {SAME_POINTER: 1}, False, "no MPS here"),
        ("auto", {SAME_POINTER: 1}, True, ""),
        ("never", UNDER_MPS, True, "as configured"),
        ("always", ATTRIBUTES, False, ""),
    ],
)
def test_kernels_run_under_mps_or_as_configured(
    arena: Arena,
    compiler: None,
    tmp_path: Path,
    wanted: str,
    attributes: dict[int, int],
    has_socket: bool,
    why_not: str,
) -> None:
    """The driver knows; one too old to know has MPS where its control daemon listens."""
    if has_socket:
        (tmp_path / "control").touch()
    device = StandIn(attributes=attributes)
    path, why = chosen(arena, device, wanted, tmp_path)
    assert isinstance(path, ByCopyEngines if why_not else Fastest)
    assert why.startswith(f"pages by the copy engines ({why_not}" if why_not else "pages of slots")
    assert bool(device.launches) != bool(why_not), "nothing is tried where kernels may not run"


def test_the_faster_path_by_memory_and_size_is_measured(
    arena: Arena, compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_choice, "_LIMIT_S", math.inf)
    device = StandIn(copy_s=SLOW_COPY_S)
    path, why = chosen(arena, device, "always")
    assert "of slots in GPU memory by kernels" in why
    assert "of slots in pinned memory by kernels" in why
    assert why.count("(copy engines/kernels in GB/s: 2 KiB ") == 2
    assert ", 64 KiB " in why
    assert ", 512 KiB " not in why, "the pool has no room for two of them"
    assert {grid for _, grid in device.launches} == {
        4,
        32,
    }  # two an SM; few where PCIe is the limit
    assert isinstance(path, Fastest)


def test_the_trial_ends_in_time(
    arena: Arena, compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that is busy with other things is not waited for at every size."""
    monkeypatch.setattr(page_choice, "_LIMIT_S", 0.0)
    _, why = chosen(arena, StandIn(), "always")
    assert "2 KiB" in why
    assert "16 KiB" not in why


@pytest.mark.parametrize("is_pinned", [False, True])
def test_host_memory_that_kernels_do_not_reach(
    arena: Arena, compiler: None, is_pinned: bool
) -> None:
    """None of it is pinned, or it has another address on the device."""
    attributes = ATTRIBUTES | ({SAME_POINTER: 0} if is_pinned else {})
    device = StandIn(copy_s=SLOW_COPY_S, attributes=attributes)
    if not is_pinned:
        device.cuda.runtime.hostRegister = refused
    path, why = chosen(arena, device, "always")
    assert "pinned" not in why
    assert "GPU memory by kernels" in why
    assert isinstance(path, Fastest)


def refused(address: int, num_bytes: int, flags: int) -> None:
    raise stand_in.StandInError(stand_in.INVALID_VALUE)


@pytest.mark.parametrize("trouble", ["compiler", "launch"])
def test_kernels_that_do_not_work_here_are_a_sentence(
    arena: Arena, compiler: None, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """No NVRTC, or one that does not know the GPU; a launch that CUDA refuses."""

    def nothing() -> None:
        raise NoCompiler("no NVRTC here\nand more of it")

    if trouble == "compiler":
        monkeypatch.setattr(stand_in, "library", nothing)
    path, why = chosen(arena, StandIn(refuse=range(10_000)), "always")
    assert isinstance(path, ByCopyEngines)
    said = {"compiler": "no NVRTC here", "launch": "cudaErrorInvalidValue: stand-in"}[trouble]
    assert why == f"pages by the copy engines (kernels could not be measured: {said})"


def test_a_pool_too_small_to_try_with(arena: Arena, compiler: None) -> None:
    device = StandIn()
    pool = CudaPool(0, 4096, device)
    pinned = PinnedArena(device.cuda.runtime, arena)
    path, why = choose_page_path(pool, pinned, EachCopy(device.cuda.runtime), "always")
    assert isinstance(path, ByCopyEngines)
    assert "too small to try" in why


@pytest.mark.parametrize("wanted", ["always", "never"])
def test_a_medium_says_what_serves_pages(arena: Arena, compiler: None, wanted: PageKernels) -> None:
    config = WorkerConfig(gpu_spec(0, POOL_BYTES, wanted), "dram", "/x", "hbm")
    medium = CudaMedium(config, arena, cupy=StandIn())
    right = {"always": "; pages of slots in GPU memory by ", "never": "(as configured)"}
    assert right[wanted] in medium.notes[0]
    medium.close()

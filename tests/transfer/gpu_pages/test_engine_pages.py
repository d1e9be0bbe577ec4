"""Inference engines' pages in the worker, on a device whose copies come late or in error; its "IPC
handles" name memory files. What a block must hold is NumPy's own indexing of the tensors."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.bench.gpu_check.layouts import (
    ITEM_BYTES,
    KINDS,
    Kind,
    Shape,
    Tensor,
    gathered,
    scattered,
)
from hicache.bench.gpu_check.stand_in import BUS_ID, StandIn
from hicache.tiers.arena import Arena
from hicache.tiers.block import PAGE_BYTES
from hicache.tiers.errors import TierDamaged
from hicache.tiers.hbm import CudaPool
from hicache.transfer.gpu_pages.cuda_ipc import NotShareable
from hicache.transfer.gpu_pages.engine_pages import EnginePages
from hicache.transfer.gpu_pages.page_kernels import CupyRunner
from hicache.transfer.gpu_pages.page_messages import Claim, PageCopy, pack_copy
from hicache.transfer.gpu_pages.page_paths import ByCopyEngines, ByKernel, Fastest, Memory, PagePath
from hicache.transfer.gpu_pages.page_worker import PageWork
from hicache.transfer.media.cuda_copy import EachCopy, Steps
from hicache.transfer.media.pinned_memory import PinnedArena
from hicache.transfer.worker_messages import Message, Stream
from tests.shared_library import needs_page_kernels

NUM_SLOTS = 8
SHAPE = Shape()
SLOT_PAGES = 6  # a block of these shapes has 3 · 2 · 4 KiB at most
TIER_BYTES = NUM_SLOTS * SLOT_PAGES * PAGE_BYTES
CHUNK_BYTES = 3 * PAGE_BYTES
GAP_BYTES = 512


ENGINES, KERNELS = "copy engines", "kernels"


@pytest.fixture(scope="module", params=[ENGINES, KERNELS])
def by(request: pytest.FixtureRequest) -> str:
    """Who copies."""
    how: str = request.param
    if how == KERNELS:
        needs_page_kernels()
    return how


_shapes = st.builds(
    Shape,
    page_tokens=st.sampled_from([1, 16]),
    dim=st.sampled_from([16, 5]),
    item_bytes=st.sampled_from(sorted(set(ITEM_BYTES.values()))),
)


class Engine:
    """A process' tensors in one allocation, as its allocator leaves them."""

    def __init__(self, device: StandIn, kind: Kind, shape: Shape, rng: np.random.Generator) -> None:
        self.kind, self.shape = kind, shape
        dims = kind.shapes(shape)
        sizes = [int(np.prod(d)) for d in dims]
        self.memory = device.cuda.Memory(sum(size + GAP_BYTES for size in sizes))
        whole = np.frombuffer(self.memory.buffer, np.uint8)
        self.tensors: list[Tensor] = []
        offsets, at = [], 0
        for d, size in zip(dims, sizes, strict=True):
            at += GAP_BYTES
            self.tensors.append(whole[at : at + size].reshape(d))
            self.tensors[-1][:] = rng.integers(0, 256, d, np.uint8)
            offsets.append(at)
            at += size
        self.layout = kind.layout(shape, offsets)
        handle = device.cuda.runtime.ipcGetMemHandle(self.memory.ptr)
        rows = [
            (0, plane.base, plane.stride_bytes, plane.num_pages) for plane in self.layout.planes
        ]
        planes = np.array(rows, np.uint64)
        per_block = shape.pages_per_block
        self.claim = Claim(1, BUS_ID, (handle,), planes, self.layout.page_bytes, per_block)

    def size_of(self, base: int) -> tuple[int, int]:
        return base, len(self.memory.buffer)


class World:
    """Both tiers, one engine, and the worker's side of it."""

    def __init__(
        self,
        arena: Arena,
        device: StandIn,
        kind: Kind,
        seed: int = 0,
        by: str = ENGINES,
        shape: Shape = SHAPE,
        kernels_from: Mapping[Memory, int] | None = None,
    ) -> None:
        """`kernels_from`: bytes of a page, by memory; all of them if not said."""
        self.rng = np.random.default_rng(seed)
        self.device = device
        self.engine = Engine(device, kind, shape, self.rng)
        self.pool = CudaPool(0, TIER_BYTES, device)
        pinned = PinnedArena(device.cuda.runtime, arena, chunk_bytes=CHUNK_BYTES)
        engines = ByCopyEngines(EachCopy(device.cuda.runtime), pinned)
        self.path = Fastest(engines, {})
        if by == KERNELS:
            runners = {to_blocks: CupyRunner(device) for to_blocks in (True, False)}
            kernel: PagePath = ByKernel(runners, {"gpu": 3, "pinned": 2})
            self.path = Fastest(
                engines,
                {
                    memory: Steps([(1, engines), (num_bytes, kernel)])
                    for memory, num_bytes in (kernels_from or {"gpu": 1, "pinned": 1}).items()
                },
            )
        more = (pinned, self.pool, self.path, self.engine.size_of)
        self.pages = EnginePages("dram", "hbm", *more)
        self.real = {
            "dram": arena.data,
            "hbm": np.frombuffer(self.pool.memory.buffer, np.uint8),
        }
        for real in self.real.values():
            real[:] = self.rng.integers(0, 256, TIER_BYTES, np.uint8)

    def block(self, tier: str, slot: int) -> Tensor:
        return self.real[tier][slot * SLOT_PAGES * PAGE_BYTES :][: self.engine.layout.block_bytes]

    def copy(self, *, to_blocks: bool, near: int, far: int, per_part: int = 0) -> PageCopy:
        """Blocks in random slots of each tier, with random pages."""
        slots = [self.rng.permutation(NUM_SLOTS)[:n].astype(np.int32) for n in (near, far)]
        shape = self.engine.shape
        numbers = self.rng.permutation(shape.num_pages)[: (near + far) * shape.pages_per_block]
        return PageCopy(
            1,
            1,
            to_blocks,
            self.engine.layout.block_bytes,
            (("dram", slots[0] * SLOT_PAGES), ("hbm", slots[1] * SLOT_PAGES)),
            numbers.astype(np.int32).reshape(near + far, shape.pages_per_block),
            per_part,
        )

    def places(self, copy: PageCopy) -> list[tuple[str, int]]:
        return [(tier, slot // SLOT_PAGES) for tier, slots in copy.runs for slot in slots.tolist()]


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena.create(Path(folder) / "arena", TIER_BYTES)
        yield arena
        arena.close()


@given(
    kind=st.sampled_from(KINDS),
    shape=_shapes,
    seed=st.integers(0, 1 << 32),
    near=st.integers(0, 5),
    far=st.integers(0, 5),
    per_part=st.integers(0, 7),
    to_blocks=st.booleans(),
)
@settings(max_examples=60)
def test_blocks_are_the_tensors_own_bytes(
    arena: Arena,
    by: str,
    kind: Kind,
    shape: Shape,
    seed: int,
    near: int,
    far: int,
    per_part: int,
    to_blocks: bool,
) -> None:
    """Every layout and dtype, both ways, both tiers in one copy, by either path, across chunks of
    pinned memory; and nothing but what was asked for is touched."""
    pace = Random(seed)
    world = World(arena, StandIn(lambda waiting: pace.randint(0, waiting)), kind, seed, by, shape)
    world.pages.map(world.engine.claim)
    copy = world.copy(to_blocks=to_blocks, near=near, far=far, per_part=per_part)
    tensors = [tensor.copy() for tensor in world.engine.tensors]
    tiers = {tier: real.copy() for tier, real in world.real.items()}
    came: list[int] = []
    world.pages.copy(copy, came.append)
    for (tier, slot), numbers in zip(world.places(copy), copy.pages.tolist(), strict=True):
        if to_blocks:
            right = gathered(kind, shape, tensors, numbers)
            at = slot * SLOT_PAGES * PAGE_BYTES
            tiers[tier][at : at + len(right)] = right
        else:
            scattered(kind, shape, tensors, numbers, world.block(tier, slot))
    for real, right in zip(world.engine.tensors, tensors, strict=True):
        assert np.array_equal(real, right)
    assert all(np.array_equal(world.real[tier], right) for tier, right in tiers.items())
    num_planes = len(world.engine.layout.planes)
    assert came == (list(range(per_part, num_planes, per_part)) if per_part else [])
    grids = [grid for grid, blocks in ((2, near), (3, far)) if blocks] * (len(came) + 1)
    assert [grid for _, grid in world.device.launches] == (grids if by == KERNELS else [])
    world.pages.close()


def test_a_layer_that_is_told_has_come_while_the_next_one_is_on_its_way(
    arena: Arena, by: str
) -> None:
    """Copies here are done when they are waited for, and not before: so nothing of a later part
    has come when a part is told."""
    world = World(arena, StandIn(), KINDS[0], by=by)
    world.pages.map(world.engine.claim)
    copy = world.copy(to_blocks=False, near=2, far=1, per_part=1)
    before = [tensor.copy() for tensor in world.engine.tensors]
    right = [tensor.copy() for tensor in before]
    for (tier, slot), numbers in zip(world.places(copy), copy.pages.tolist(), strict=True):
        scattered(KINDS[0], SHAPE, right, numbers, world.block(tier, slot))

    def check(planes: int) -> None:
        for number, tensor in enumerate(world.engine.tensors):
            assert np.array_equal(tensor, (right if number < planes else before)[number])

    world.pages.copy(copy, check)
    check(len(right))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"bus_id": "0000:99:00.0"}, "but the cache uses the GPU at 0000:00:00.0"),
        ({"handles": ()}, "has no allocation"),
        ({"handles": (b"/proc/self/fd/none".ljust(64, b"\0"),)}, "does not map this memory"),
        ({"page_bytes": 0}, "pages need at least one byte"),
        ({"pages_per_block": 0}, "pages need at least one byte"),
    ],
)
def test_a_claim_that_cannot_be_is_refused(arena: Arena, change: object, why: str) -> None:
    world = World(arena, StandIn(), KINDS[0])
    with pytest.raises(NotShareable, match=why):
        world.pages.map(replace(world.engine.claim, **change))  # type: ignore[arg-type]
    assert_nothing_is_mapped(world)


@pytest.mark.parametrize("column", [0, 1, 2, 3])
@pytest.mark.parametrize("value", [1 << 20, 1 << 40, (1 << 64) - 1])
def test_a_claim_that_lies_about_its_size_is_refused(arena: Arena, column: int, value: int) -> None:
    """Whatever the numbers, also where they would wrap: the driver knows how large it is."""
    world = World(arena, StandIn(), KINDS[0])
    planes = world.engine.claim.planes.copy()
    planes[1, column] = value
    with pytest.raises(NotShareable, match=r"plane 1 (ends|has no)"):
        world.pages.map(replace(world.engine.claim, planes=planes))
    assert_nothing_is_mapped(world)


def test_planes_end_exactly_where_their_allocation_does(arena: Arena) -> None:
    world = World(arena, StandIn(), KINDS[0])
    room = len(world.engine.memory.buffer)
    planes = world.engine.claim.planes.copy()
    planes[-1, 1] = room - world.engine.layout.planes[-1].num_pages * planes[-1, 2]
    world.pages.map(replace(world.engine.claim, planes=planes))
    world.pages.unmap(1)
    planes[-1, 1] += 1
    with pytest.raises(NotShareable, match="ends 1 bytes beyond"):
        world.pages.map(replace(world.engine.claim, planes=planes))


def assert_nothing_is_mapped(world: World) -> None:
    assert not world.pool.cupy._mapped
    with pytest.raises(ValueError, match="not registered"):
        world.pages.copy(world.copy(to_blocks=True, near=1, far=0), lambda planes: None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"registration": 2}, "not registered"),
        ({"block_bytes": 4096}, "blocks of 4096 bytes"),
        ({"pages": np.full((2, 2), SHAPE.num_pages, np.int32)}, "out of range"),
        ({"pages": np.array([[0, 1], [2, 1]], np.int32)}, "written twice"),
        ({"pages": np.zeros((2, 3), np.int32)}, "of this layout"),
        ({"runs": (("dram", np.array([0, 1 << 20], np.int32)),)}, "leaves the arena"),
        ({"runs": (("hbm", np.array([0, -1], np.int32)),)}, "leaves the pool"),
        ({"runs": (("disk", np.array([0, 1], np.int32)),)}, "this GPU has no tier"),
    ],
)
def test_a_copy_that_cannot_be_touches_nothing(
    arena: Arena, by: str, change: object, why: str
) -> None:
    device = StandIn()
    world = World(arena, device, KINDS[0], by=by)
    world.pages.map(world.engine.claim)
    copy = world.copy(to_blocks=False, near=2, far=0)
    with pytest.raises(ValueError, match=why):
        world.pages.copy(replace(copy, **change), lambda planes: None)  # type: ignore[arg-type]
    assert device.waiting == []
    assert device.num_done == 0


def test_a_copy_refused_half_way_is_at_rest_when_it_has_failed(arena: Arena) -> None:
    device = StandIn(refuse=[3])
    world = World(arena, device, KINDS[0])
    world.pages.map(world.engine.claim)
    copy = world.copy(to_blocks=True, near=4, far=0)
    with pytest.raises(world.pages.refusals, match="cudaErrorInvalidValue"):
        world.pages.copy(copy, lambda planes: None)
    assert device.waiting == []
    world.pages.copy(copy, lambda planes: None)


@pytest.mark.parametrize("refused", [0, 1])
def test_a_kernel_refused_is_the_last_one(arena: Arena, refused: int) -> None:
    """The copy engines copy what it did not, and all that comes after: whether CUDA refused its
    tables or the launch. The daemon is told of it once."""
    needs_page_kernels()
    device = StandIn(refuse=[refused])
    world = World(arena, device, KINDS[0], by=KERNELS)
    world.pages.map(world.engine.claim)
    told: list[Message] = []
    stream = Stream()
    work = PageWork(world.pages, lambda data: told.extend(stream.feed(data)))
    for _ in range(2):
        copy = world.copy(to_blocks=True, near=2, far=2)
        (message,) = Stream().feed(pack_copy(copy))
        work.job_of(message)[1]()
        assert_gathered(world, copy)
    assert [message["t"] for message in told] == ["copied", "noted", "copied"]
    assert "a page kernel was refused (cudaErrorInvalidValue" in told[1]["note"]
    assert device.launches == []


@pytest.mark.parametrize("memory", ["gpu", "pinned"])
@pytest.mark.parametrize("is_enough", [True, False])
def test_the_bytes_of_a_page_and_the_memory_decide(
    arena: Arena, memory: Memory, is_enough: bool
) -> None:
    """Not those of a block, which is many pages, and not what is faster for the other memory."""
    needs_page_kernels()
    device = StandIn()
    layout = Engine(device, KINDS[0], SHAPE, np.random.default_rng(0)).layout
    assert layout.block_bytes > layout.page_bytes
    size = layout.page_bytes + (0 if is_enough else 1)
    world = World(arena, device, KINDS[0], by=KERNELS, kernels_from={memory: size})
    world.pages.map(world.engine.claim)
    copy = world.copy(to_blocks=True, near=2, far=2)
    world.pages.copy(copy, lambda planes: None)
    assert_gathered(world, copy)
    grid = {"gpu": 3, "pinned": 2}[memory]
    assert [grid for _, grid in device.launches] == ([grid] if is_enough else [])


class Stingy(StandIn):
    """A device that pins only a limited number of chunks."""

    def __init__(self, chunks: int) -> None:
        super().__init__()
        self.num_left = chunks
        self.cuda.runtime.hostRegister = self._register

    def _register(self, address: int, num_bytes: int, flags: int) -> None:
        if not self.num_left:
            raise self.cuda.runtime.CUDARuntimeError(1)
        self.num_left -= 1


@pytest.mark.parametrize(("slots", "is_pinned"), [([0, 2], True), ([1, 3], False), ([7], False)])
def test_no_kernel_touches_memory_that_is_not_pinned(
    arena: Arena, slots: list[int], is_pinned: bool
) -> None:
    """Where a block of a copy lies in it, even in part, the copy engines copy them all."""
    needs_page_kernels()
    device = Stingy(6)  # 18 pages: the third slot is the last whole one
    world = World(arena, device, KINDS[0], by=KERNELS)
    world.pages.map(world.engine.claim)
    copy = world.copy(to_blocks=True, near=len(slots), far=1)
    runs = (("dram", np.array(slots, np.int32) * SLOT_PAGES), copy.runs[1])
    copy = replace(copy, runs=runs)
    world.pages.copy(copy, lambda planes: None)
    assert_gathered(world, copy)
    assert [grid for _, grid in device.launches] == ([2, 3] if is_pinned else [3])


def assert_gathered(world: World, copy: PageCopy) -> None:
    engine = world.engine
    for (tier, slot), numbers in zip(world.places(copy), copy.pages.tolist(), strict=True):
        right = gathered(engine.kind, engine.shape, engine.tensors, numbers)
        assert np.array_equal(world.block(tier, slot), right)


@pytest.mark.parametrize("break_at", [0, 1, 2])
def test_a_context_that_breaks_is_the_end_of_the_worker(
    arena: Arena, by: str, break_at: int
) -> None:
    world = World(arena, StandIn(break_at=break_at), KINDS[0], by=by)
    world.pages.map(world.engine.claim)
    with pytest.raises(TierDamaged):
        world.pages.copy(world.copy(to_blocks=True, near=4, far=1), lambda planes: None)


def test_unmapping_lets_go_of_the_owners_memory(arena: Arena) -> None:
    """What is mapped stays although its owner has ended; what is unmapped is gone."""
    world = World(arena, StandIn(), KINDS[0])
    world.pages.map(world.engine.claim)
    world.pages.map(replace(world.engine.claim, number=2))
    world.pages.unmap(1)
    world.pages.unmap(1)
    assert len(world.pool.cupy._mapped) == 1
    world.pages.unmap(2)
    assert_nothing_is_mapped(world)

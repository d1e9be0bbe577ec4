"""The GPU worker's links on a device whose copies come late, out of order, or in error."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hicache.bench.gpu_check.stand_in import StandIn
from hicache.engine.plan import Move, Outcome, Priority
from hicache.tiers.arena import Arena
from hicache.tiers.block import PAGE_BYTES
from hicache.tiers.errors import TierDamaged, TierUnavailable
from hicache.tiers.hbm import CudaPool, gpu_spec
from hicache.transfer.media.cuda import CudaLink, CudaMedium, Started, choose_path
from hicache.transfer.media.cuda_copy import EachCopy, Pieces
from hicache.transfer.media.pinned_memory import PinnedArena
from hicache.transfer.worker_messages import WorkerConfig

SLOT_PAGES = 2
SLOT_BYTES = SLOT_PAGES * PAGE_BYTES
NUM_SLOTS = 12
TIER_BYTES = NUM_SLOTS * SLOT_BYTES
CHUNK_BYTES = 3 * PAGE_BYTES  # every third block lies in two chunks

Bytes = npt.NDArray[np.uint8]


class AllAtOnce:
    """The stand-in's cuMemcpyBatchAsync."""

    name = "all at once"

    def __init__(self, device: StandIn) -> None:
        self._device = device

    def enqueue(self, pieces: Pieces, stream: int, *, to_device: bool | None) -> None:
        self._device.enqueue_all(pieces.tolist(), stream)


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena.create(Path(folder) / "arena", TIER_BYTES)
        yield arena
        arena.close()


class World:
    """Both tiers, the bytes that they should hold, and their free slots."""

    def __init__(self, arena: Arena, device: StandIn, at_once: bool) -> None:
        self.device = device
        self.rng = np.random.default_rng(0)
        self.pool = CudaPool(0, TIER_BYTES, device)
        pinned = PinnedArena(device.cuda.runtime, arena, chunk_bytes=CHUNK_BYTES)
        copies = AllAtOnce(device) if at_once else EachCopy(device.cuda.runtime)
        more = (pinned, self.pool, copies)
        self.links = {
            "dram": [CudaLink("dram", "hbm", *more, to_device=True) for _ in range(2)],
            "hbm": [CudaLink("hbm", "dram", *more, to_device=False) for _ in range(2)],
        }
        gpu = np.frombuffer(self.pool.memory.buffer, np.uint8)
        self.real = {"dram": arena.data, "hbm": gpu}
        self.right: dict[str, Bytes] = {}
        for tier, real in self.real.items():
            real[:] = self.rng.integers(0, 256, TIER_BYTES, np.uint8)
            self.right[tier] = real.copy()
        self.free = {tier: list(range(NUM_SLOTS)) for tier in self.real}
        self.started: list[tuple[Started, list[Move]]] = []
        self.num_moves = 0

    def start(self, src: str, wanted: Sequence[tuple[int, int, int]]) -> None:
        """A batch of (which free slot to read, which to write, bytes), on one of two streams; a
        slot of a move that is under way is never chosen: that is the daemon's rule."""
        dst = "hbm" if src == "dram" else "dram"
        batch = []
        for source, destination, num_bytes in wanted:
            if not self.free[src] or not self.free[dst]:
                break
            a = self.free[src].pop(source % len(self.free[src]))
            b = self.free[dst].pop(destination % len(self.free[dst]))
            self.num_moves += 1
            batch.append(move(self.num_moves, src, a, b, num_bytes))
        link = self.links[src][len(wanted) % 2]
        self.started.append((link.start(batch), batch))

    def wait(self, number: int) -> None:
        """Check the outcomes. Their slots are free at once, and get other bytes."""
        started, batch = self.started.pop(number)
        outcomes = started.wait()
        assert [outcome.move for outcome in outcomes] == [move.id for move in batch]
        for each, outcome in zip(batch, outcomes, strict=True):
            if outcome.ok:
                self._has_arrived(each)
            for tier, page in ((each.src, each.src_slot), (each.dst, each.dst_slot)):
                assert tier is not None
                where = slice(page * PAGE_BYTES, page * PAGE_BYTES + SLOT_BYTES)
                fresh = self.rng.integers(0, 256, SLOT_BYTES, np.uint8)
                self.real[tier][where] = self.right[tier][where] = fresh
                self.free[tier].append(page // SLOT_PAGES)

    def _has_arrived(self, each: Move) -> None:
        assert each.dst is not None
        source, target = each.src_slot * PAGE_BYTES, each.dst_slot * PAGE_BYTES
        arrived = self.real[each.dst][target : target + each.block_bytes]
        sent = self.right[each.src][source : source + each.block_bytes]
        assert np.array_equal(arrived, sent), "told as copied, and it is not"

    def finish(self) -> None:
        """Whatever the device still does, it touches no slot whose outcome was told."""
        while self.started:
            self.wait(0)
        self.device.synchronize()
        for tier, right in self.right.items():
            assert np.array_equal(self.real[tier], right), (
                f"{tier}: a slot was written after its end"
            )


def move(number: int, src: str, source: int, target: int, num_bytes: int) -> Move:
    dst = "hbm" if src == "dram" else "dram"
    return Move(
        number,
        number,
        src,
        source * SLOT_PAGES,
        dst,
        target * SLOT_PAGES,
        num_bytes,
        SLOT_BYTES,
        SLOT_BYTES,
        Priority.DEMAND,
    )


_slot = st.integers(0, NUM_SLOTS - 1)
_batch = st.lists(st.tuples(_slot, _slot, st.integers(1, SLOT_BYTES)), max_size=6)
_step = st.one_of(
    st.tuples(st.sampled_from(["dram", "hbm"]), _batch),
    st.tuples(st.just("wait"), st.integers(0, 5)),
)


@pytest.mark.thorough
@given(
    steps=st.lists(_step, max_size=25),
    at_once=st.booleans(),
    pace=st.randoms(use_true_random=False),
    refuse=st.sets(st.integers(0, 30), max_size=3),
    break_at=st.none() | st.integers(0, 40),
)
@example(
    steps=[("dram", [(0, 0, SLOT_BYTES)] * 3), ("hbm", [(0, 0, 1)]), ("wait", 1), ("wait", 0)],
    at_once=False,
    pace=None,
    refuse={1},
    break_at=None,
)
@settings(max_examples=300)
def test_a_slot_is_at_rest_when_its_outcome_is_told(
    arena: Arena,
    steps: list[tuple[str, object]],
    at_once: bool,
    pace: object,
    refuse: set[int],
    break_at: int | None,
) -> None:
    """Both directions, two streams each, several batches in flight, waited for in any order;
    refusals in the middle of a batch, and a context that breaks: then TierDamaged, and nothing is
    claimed."""

    def choose(waiting: int) -> int:
        return 0 if pace is None else pace.randint(0, waiting)  # type: ignore[attr-defined]

    world = World(arena, StandIn(choose, sorted(refuse), break_at), at_once)
    try:
        for what, more in steps:
            if what != "wait":
                world.start(what, more)  # type: ignore[arg-type]
            elif world.started:
                assert isinstance(more, int)
                world.wait(more % len(world.started))
        world.finish()
    except TierDamaged:
        if break_at is None:
            raise


def test_a_slot_that_is_not_there_fails_alone_and_in_its_place(arena: Arena) -> None:
    """The mover takes outcomes in another order for nonsense, and kills the worker for it."""
    world = World(arena, StandIn(), False)
    batch = [move(n, "dram", n, n, 100) for n in range(4)]
    batch[1].dst_slot = NUM_SLOTS * SLOT_PAGES
    batch[2].src_slot = -1
    outcomes = world.links["dram"][0].copy(batch)
    assert [(o.move, o.ok) for o in outcomes] == [(0, True), (1, False), (2, False), (3, True)]
    assert "leaves the pool" in outcomes[1].error
    assert "leaves the arena" in outcomes[2].error
    assert world.links["dram"][0].copy(batch[1:3])[0] == Outcome(
        1, ok=False, error=outcomes[1].error
    )


def test_a_refusal_is_not_the_end_of_the_link(arena: Arena) -> None:
    world = World(arena, StandIn(refuse=[1]), False)
    outcomes = world.links["dram"][0].copy([move(n, "dram", n, n, 100) for n in range(3)])
    assert not any(outcome.ok for outcome in outcomes)
    assert "cudaErrorInvalidValue" in outcomes[0].error
    assert world.links["dram"][0].copy([move(3, "dram", 3, 3, 100)])[0].ok


class Stingy(StandIn):
    """A device that pins only a limited number of chunks."""

    def __init__(self, chunks: int) -> None:
        super().__init__()
        self.pinned: list[int] = []
        self.chunks = chunks
        self.cuda.runtime.hostRegister = self._register
        self.cuda.runtime.hostUnregister = self.pinned.remove

    def _register(self, address: int, num_bytes: int, flags: int) -> None:
        if len(self.pinned) == self.chunks:
            raise self.cuda.runtime.CUDARuntimeError(1)
        self.pinned.append(address)


def test_a_medium_whose_memory_cannot_all_be_pinned(arena: Arena) -> None:
    """It says so and copies all the same; at the end it gives back what it pinned."""
    device = Stingy(2)
    config = WorkerConfig(gpu_spec(0, TIER_BYTES), "dram", "/x", "hbm")
    told: list[tuple[str, int, int]] = []
    medium = CudaMedium(config, arena, lambda *news: told.append(news), device, CHUNK_BYTES)
    assert told[-1] == ("bytes", 2 * CHUNK_BYTES, TIER_BYTES)
    assert len(device.pinned) == 2
    assert "could be pinned (cudaErrorInvalidValue" in medium.notes[0]
    measured = medium.probe(TIER_BYTES, SLOT_BYTES)
    assert [(m.src, m.dst, m.num_bytes) for m in measured] == [
        ("dram", "hbm", TIER_BYTES),
        ("hbm", "dram", TIER_BYTES),
    ]
    arena.data[:] = 7
    assert medium.writers[0].copy([move(1, "dram", 11, 0, SLOT_BYTES)])[0].ok
    arena.data[:] = 0
    assert medium.readers[0].copy([move(2, "hbm", 0, 5, SLOT_BYTES)])[0].ok
    assert arena.view(5 * SLOT_PAGES, SLOT_BYTES).tolist() == [7] * SLOT_BYTES
    medium.close()
    assert device.pinned == []
    with pytest.raises(ValueError, match="leaves the pool"):
        medium._pool.address(0, 1)


def test_pinned_memory_is_cut_where_two_chunks_meet(arena: Arena) -> None:
    pinned = PinnedArena(StandIn().cuda.runtime, arena, chunk_bytes=CHUNK_BYTES)
    assert pinned.is_whole
    start = arena.address(2, 100)
    assert pinned.cut(start, PAGE_BYTES) == [(0, PAGE_BYTES)]
    assert pinned.cut(start, 5 * PAGE_BYTES) == [
        (0, PAGE_BYTES),
        (PAGE_BYTES, 3 * PAGE_BYTES),
        (4 * PAGE_BYTES, PAGE_BYTES),
    ]


def test_the_path_is_chosen_with_a_reason(arena: Arena) -> None:
    """Here there is no driver, so it is the one that needs none."""
    device = StandIn()
    pool = CudaPool(0, TIER_BYTES, device)
    copies, why = choose_path(pool, PinnedArena(device.cuda.runtime, arena))
    assert copies.name == "cudaMemcpyAsync"
    assert why.startswith("copied by cudaMemcpyAsync")


def test_no_gpu_is_a_sentence() -> None:
    with pytest.raises(TierUnavailable, match="GPU 0: "):
        CudaPool(0, TIER_BYTES)

"""Blocks into pages layer by layer, copied by the inference engine's own process: on a device whose
copies come late, in rounds of its own choosing, through pinned memory that is used again."""

from __future__ import annotations

from collections.abc import Generator
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.bench.gpu_check.stand_in import StandIn
from hicache.client.gpu_pages import LoadedPart, PageTable
from hicache.client.results import Decision, FetchedRun, FramedRun, Match
from hicache.connectors.common.page_load import PageLoad
from hicache.connectors.common.paged_blocks import PagedCache
from hicache.connectors.common.staging import Staging
from hicache.transfer.gpu_pages.page_kernels import Launch, PageLayout, whole_pages

Bytes = npt.NDArray[np.uint8]

PAGE_BYTES, PAGES_PER_BLOCK, NUM_PAGES = 48, 2, 64


class LateRunner:
    """The kernel's copies, page by page on the stream it was given: done when the device pleases,
    and the device reports only by events."""

    def __init__(self, device: StandIn) -> None:
        self._memcpy = device.cuda.runtime.memcpyAsync

    def run(self, launch: Launch, grid: int, stream: Any) -> None:
        num_planes, per_block, num_blocks, page_bytes, to_blocks = launch.numbers
        for plane in range(num_planes):
            base, stride = int(launch.plane_bases[plane]), int(launch.plane_strides[plane])
            for block in range(num_blocks):
                for nth, page in enumerate(launch.pages[block].tolist()):
                    within = (plane * per_block + nth) * page_bytes
                    there = int(launch.block_bases[block]) + within
                    here = base + page * stride
                    to, source = (there, here) if to_blocks else (here, there)
                    self._memcpy(to, source, page_bytes, 4, stream.ptr)


class Pages:
    """An inference engine's tensors on such a device, and blocks to be loaded."""

    def __init__(
        self, num_planes: int, seed: int, staged_blocks: float = 3.0, *, is_lazy: bool = False
    ) -> None:
        """A lazy device copies only when a caller waits."""
        rng = Random(seed)
        self.device = StandIn(choose=lambda waiting: 0 if is_lazy else rng.randint(0, waiting))
        self.tensors = np.zeros((num_planes, NUM_PAGES, PAGE_BYTES), np.uint8)
        bases = [int(tensor.ctypes.data) for tensor in self.tensors]
        self.layout: PageLayout = whole_pages(bases, NUM_PAGES, PAGE_BYTES, PAGES_PER_BLOCK)
        self.rng = np.random.default_rng(seed)
        num_bytes = int(staged_blocks * self.layout.block_bytes)
        self.staging = Staging(self.device, self.layout, LateRunner(self.device), num_bytes)

    def blocks(self, num: int) -> Bytes:
        return self.rng.integers(0, 256, (num, self.layout.block_bytes), np.uint8)

    def tables(self, *nums: int) -> list[PageTable]:
        """Pages for so many blocks each, none of them twice."""
        order = self.rng.permutation(NUM_PAGES).astype(np.int32)
        rows = np.split(order, np.cumsum([num * PAGES_PER_BLOCK for num in nums]))
        return [row.reshape(-1, PAGES_PER_BLOCK) for row in rows[:-1]]

    def holds(self, pages: PageTable, blocks: Bytes, planes: int) -> bool:
        """Whether the first so many planes of these blocks are in their pages by now."""
        found = self.tensors[:planes, pages].swapaxes(0, 1).reshape(len(pages), -1)
        return np.array_equal(found, blocks[:, : planes * PAGES_PER_BLOCK * PAGE_BYTES])


def run_of(blocks: Bytes, first: int = 0) -> FramedRun:
    return FramedRun(first, "dram", [block.tobytes() for block in blocks])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(0, 7),
    st.integers(0, 12),
    st.floats(0, 9),
    st.integers(0, 99),
    st.booleans(),
)
def test_what_is_told_has_come(
    num_planes: int, per_part: int, num_blocks: int, staged_blocks: float, seed: int, is_lazy: bool
) -> None:
    pages = Pages(num_planes, seed, staged_blocks, is_lazy=is_lazy)
    (rows,), blocks = pages.tables(num_blocks), pages.blocks(num_blocks)
    came = np.zeros(num_blocks, int)
    for part in pages.staging.load(run_of(blocks, first=5), rows, per_part):
        mine = slice(part.first - 5, part.first - 5 + part.blocks)
        assert pages.holds(rows[mine], blocks[mine], part.planes)
        came[mine] = part.planes
    assert (came == num_planes).all()
    assert not pages.device.waiting


@pytest.mark.parametrize("staged_blocks", [3.0, 8.0])
@pytest.mark.parametrize("is_lazy", [True, False])
def test_loads_and_saves_take_turns_with_the_pinned_memory(
    is_lazy: bool, staged_blocks: float
) -> None:
    pages = Pages(4, seed=1, staged_blocks=staged_blocks, is_lazy=is_lazy)
    mine, other, kept = pages.tables(16, 8, 6)
    blocks, others, saved = pages.blocks(16), pages.blocks(8), pages.blocks(6)
    pages.tensors[:, kept] = saved.reshape(6, 4, PAGES_PER_BLOCK, PAGE_BYTES).swapaxes(0, 1)
    loads = [
        pages.staging.load(run_of(blocks), mine, 1),
        pages.staging.load(run_of(others), other, 2),
    ]
    fill, stored = pages.staging.fill(kept), np.zeros_like(saved)
    for number in range(len(saved)):
        for load in loads:
            next(load, None)
        fill(number, stored[number])
    for load in loads:
        for _ in load:
            pass
    assert pages.holds(mine, blocks, 4)
    assert pages.holds(other, others, 4)
    assert np.array_equal(stored, saved)


class Reused(FramedRun):
    """Its slots are given away when it has been checked so often."""

    left = 3

    def verify(self) -> bool:
        self.left -= 1
        return self.left >= 0


def test_a_run_whose_slots_were_given_away_is_not_told_of() -> None:
    pages = Pages(4, seed=2, staged_blocks=100)
    (rows,), blocks = pages.tables(5), pages.blocks(5)
    run = Reused(0, "dram", [block.tobytes() for block in blocks])
    parts_seen = [part.planes for part in pages.staging.load(run, rows, 1)]
    assert parts_seen == [1, 2], "the third was under way, and is not reported"
    assert not pages.device.waiting
    assert pages.holds(rows, blocks, 3)
    assert not pages.tensors[3].any(), "what was read too late is in no pages"


def test_a_load_that_is_given_up_leaves_nothing_on_its_way() -> None:
    pages = Pages(4, seed=3, is_lazy=True)
    (rows,), blocks = pages.tables(5), pages.blocks(5)
    load = pages.staging.load(run_of(blocks), rows, 1)
    next(load)
    assert pages.device.waiting
    load.close()
    assert not pages.device.waiting
    pages.staging.close()


# --- waiting --------------------------------------------------------------------------------------

PARTS = [
    LoadedPart(0, 2, 2),
    LoadedPart(3, 1, 2),
    LoadedPart(0, 2, 4),
    LoadedPart(2, 1, 2),
    LoadedPart(2, 2, 4),
]


def load_of(
    parts: list[LoadedPart], *, is_at_rest: bool = True
) -> tuple[PageLoad, list[LoadedPart]]:
    """And what has been told so far."""
    parts_seen: list[LoadedPart] = []

    def yield_parts() -> Generator[LoadedPart, None, None]:
        for part in parts:
            parts_seen.append(part)
            yield part

    return PageLoad(yield_parts(), 4, 4, lambda: is_at_rest), parts_seen


def test_a_layer_is_waited_for_and_no_longer() -> None:
    load, parts_seen = load_of(PARTS)
    assert load.wait(1) == 4
    assert len(parts_seen) == 4, "the third block was the last to get its first planes"
    assert load.wait(2) == 4
    assert len(parts_seen) == 4
    assert load.wait(3) == 4
    assert len(parts_seen) == 5
    loaded = load.end()
    assert (loaded.blocks, loaded.is_at_rest) == (4, True)
    assert load.end() is loaded


@pytest.mark.parametrize("is_at_rest", [True, False])
def test_what_does_not_come_is_missing_from_there_on(is_at_rest: bool) -> None:
    load, _ = load_of(PARTS[:3], is_at_rest=is_at_rest)
    assert load.wait(1) == 2
    assert load.wait(4) == 2
    loaded = load.end()
    assert (loaded.blocks, loaded.is_at_rest) == (2, is_at_rest)


def test_all_of_it_has_come_whatever_another_load_left_in_doubt() -> None:
    load, _ = load_of(PARTS, is_at_rest=False)
    assert load.end().is_at_rest


def test_left_by_an_error_the_rest_is_not_waited_for() -> None:
    load, parts_seen = load_of(PARTS)

    def fail() -> None:
        with load:
            load.wait(1)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert len(parts_seen) == 4
    assert load.end().blocks == 2, "the others lack planes"
    with load_of(PARTS)[0] as whole:
        pass
    assert whole.end().blocks == 4


# --- both together --------------------------------------------------------------------------------


class Client:
    """Tells runs of one match, and that nobody else copies."""

    greeting, last_error = None, ""

    def __init__(self, runs: list[FetchedRun]) -> None:
        self.runs = runs

    def fetch_runs(self, match: Match) -> Generator[FetchedRun, None, None]:
        while self.runs:
            yield self.runs.pop(0)


def cache_of(pages: Pages, runs: list[FetchedRun]) -> tuple[PagedCache, Client]:
    client, runner = Client(runs), LateRunner(pages.device)
    cache = PagedCache(client, pages.layout, pages.device, runner, "/no/libcuda.so")  # type: ignore[arg-type]
    assert cache.how.startswith("copied by this process itself")
    return cache, client


def match_of(blocks: int) -> Match:
    return Match(1, blocks, (("dram", blocks),), Decision("reload", blocks, "faster"))


def test_runs_come_in_any_order_and_only_what_was_asked_for() -> None:
    pages = Pages(4, seed=4)
    (rows,), blocks = pages.tables(6), pages.blocks(6)
    cache, client = cache_of(pages, [run_of(blocks[4:], 4), run_of(blocks[:4])])
    with cache.load_by_part(match_of(6), rows[:5], planes_per_part=2) as load:
        assert len(client.runs) == 2, "it begins when a caller waits"
        assert load.wait(2) == 5
        assert pages.holds(rows[:5], blocks[:5], 2)
    assert load.end().blocks == 5
    assert pages.holds(rows[:5], blocks[:5], 4)
    assert not pages.tensors[:, rows[5]].any()


def test_pages_that_are_not_there_are_refused_before_anything_is_fetched() -> None:
    pages = Pages(4, seed=5)
    (rows,), blocks = pages.tables(3), pages.blocks(3)
    cache, client = cache_of(pages, [run_of(blocks)])
    for bad in (NUM_PAGES, -1, int(rows[0, 0])):
        wrong = rows.copy()
        wrong[2, 1] = bad
        with pytest.raises(ValueError, match="a page"):
            cache.load_by_part(match_of(3), wrong, planes_per_part=1)
    assert len(client.runs) == 1
    assert not pages.tensors.any()

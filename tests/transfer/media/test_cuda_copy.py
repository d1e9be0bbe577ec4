"""The call into the driver, against a driver of our own: both signatures of cuMemcpyBatchAsync."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hicache.bench.gpu_check.stand_in import StandIn
from hicache.tiers.arena import Arena
from hicache.tiers.hbm import CudaPool
from hicache.transfer.media import cuda
from hicache.transfer.media.cuda_copy import (
    BatchCopy,
    BySize,
    CopyPath,
    CopyRefused,
    EachCopy,
    Pieces,
    fastest_by_size,
    rows_of,
)
from hicache.transfer.media.pinned_memory import PinnedArena
from tests.shared_library import compiled

# The types and the order are those of cuda.h, CUDA 12.8 and 13.0.
DRIVER = r"""
#include <stddef.h>
#include <stdint.h>
#include <string.h>
typedef struct { int type; int id; } Location;
typedef struct { int order; Location src, dst; unsigned int flags; } Attributes;

static int copy(uintptr_t *dsts, uintptr_t *srcs, size_t *sizes, size_t count, Attributes *a,
                size_t *first, size_t num, void *stream) {
    if (num != 1 || *first != 0 || a->order != 1 || a->flags != 1 || a->src.type || a->dst.type)
        return 1;
#ifndef ANY_STREAM
    if (stream != (void *)0x1234567890) return 2;
#endif
    for (size_t i = 0; i < count; i++) {
        if (sizes[i] == 13) return 700;
        memcpy((void *)dsts[i], (void *)srcs[i], sizes[i]);
    }
    return 0;
}
#if VERSION >= 13000
#define batch copy
#else
static int batch(uintptr_t *d, uintptr_t *s, size_t *n, size_t count, Attributes *a, size_t *first,
                 size_t num, size_t *fail, void *stream) {
    *fail = 0;
    return copy(d, s, n, count, a, first, num, stream);
}
#endif
int cuGetProcAddress_v2(const char *symbol, void **found, int version, uint64_t flags,
                        int *status) {
    *found = NULL;
    *status = version > VERSION ? 2 : 0;
    if (strcmp(symbol, "cuMemcpyBatchAsync") || version > VERSION || VERSION < 12080) return 500;
    *found = (void *)batch;
    return 0;
}
int cuGetErrorName(int status, const char **name) {
    *name = status == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : NULL;
    return 0;
}
"""
STREAM = 0x1234567890


def driver(folder: Path, version: int, *more: str) -> str:
    return str(compiled(DRIVER, folder / "libcuda.so", f"-DVERSION={version}", *more))


@pytest.mark.parametrize("version", [12080, 13000])
def test_a_batch_is_one_call_of_either_signature(tmp_path: Path, version: int) -> None:
    copies = BatchCopy(driver(tmp_path, version))
    source = np.arange(1000, dtype=np.uint8)
    target = np.zeros(1000, np.uint8)
    places = [(0, 500, 100), (200, 0, 1), (300, 7, 400)]
    to, start = target.ctypes.data, source.ctypes.data
    copies.enqueue(rows_of([(to + t, start + s, n) for t, s, n in places]), STREAM, to_device=True)
    right = np.zeros(1000, np.uint8)
    for t, s, n in places:
        right[t : t + n] = source[s : s + n]
    assert np.array_equal(target, right)
    copies.enqueue(rows_of([]), STREAM, to_device=True)
    with pytest.raises(CopyRefused, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        copies.enqueue(rows_of([(to, start, 13)]), STREAM, to_device=True)
    with pytest.raises(CopyRefused, match="error 2"):
        copies.enqueue(rows_of([(to, start, 1)]), 0, to_device=True)


def test_a_driver_without_the_call(tmp_path: Path) -> None:
    with pytest.raises(CopyRefused, match="has no cuMemcpyBatchAsync"):
        BatchCopy(driver(tmp_path, 12000))


def test_no_driver_at_all(tmp_path: Path) -> None:
    with pytest.raises(CopyRefused, match="cannot open"):
        BatchCopy(str(tmp_path / "none.so"))


class Noted:
    """Says which batches it got."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.got: list[int] = []

    def enqueue(self, pieces: Pieces, stream: int, *, to_device: bool | None) -> None:
        self.got.append(int(pieces[0, 2]))


def test_the_faster_path_by_size() -> None:
    each, batch = Noted("each"), Noted("batch")
    always: dict[int, dict[CopyPath, float]] = {
        1024: {each: 1.0, batch: 2.0},
        4096: {each: 1.0, batch: 0.96},  # by chance
    }
    assert fastest_by_size(always).paths == [each]
    times: dict[int, dict[CopyPath, float]] = {
        65536: {each: 2.0, batch: 1.0},
        16384: {each: 2.0, batch: 1.0},
        262144: {each: 1.0, batch: 2.0},
        2097152: {each: 2.0, batch: 1.0},
    }
    path = BySize(fastest_by_size(times))
    assert path.name == "batch, each from 256 KiB, batch from 2048 KiB"
    for size in (1, 16384, 262143, 262144, 2097151, 2097152, 1 << 30):
        path.enqueue(rows_of([(0, 0, size)]), 0, to_device=None)
    path.enqueue(rows_of([]), 0, to_device=True)
    assert each.got == [262144, 2097151]
    assert batch.got == [1, 16384, 262143, 2097152, 1 << 30]
    path.enqueue(rows_of([(0, 0, 600000), (0, 0, 1)]), 0, to_device=True)  # by their mean
    assert each.got[-1] == 600000


def test_which_path_serves_which_size_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a driver whose call copies at once, and a device that does so when it is waited for."""
    library = driver(tmp_path, 13000, "-DANY_STREAM")
    monkeypatch.setattr(cuda, "BatchCopy", lambda: BatchCopy(library))
    device = StandIn()
    arena = Arena.create(tmp_path / "arena", 1 << 20)
    pool = CudaPool(0, 3 << 20, device)
    path, why = cuda.choose_path(pool, PinnedArena(device.cuda.runtime, arena))
    assert why.startswith(f"copied by {path.name} (cudaMemcpyAsync/cuMemcpyBatchAsync in GB/s: ")
    assert all(f"{size} KiB " in why for size in (16, 64, 256, 2048))
    small = CudaPool(0, 4096, device)  # nothing to measure with
    assert isinstance(cuda.choose_path(small, PinnedArena(device.cuda.runtime, arena))[0], EachCopy)
    arena.close()

"""Two ways to enqueue a batch on the copy engines: a call for each piece, or one for all.

    EachCopy    cudaMemcpyAsync, piece by piece: always available; also for memory not pinned
    BatchCopy   cuMemcpyBatchAsync (CUDA 12.8), one driver call for the whole batch

Both only enqueue; an event shows when the copies have finished (media/cuda.py). Neither runs a
kernel, so they do not slow an inference engine's kernels down. Which one is faster for pieces of
which size is measured when a worker starts.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Piece = tuple[int, int, int]
"""(destination address, source address, bytes)."""
Pieces = npt.NDArray[np.uint64]
"""Rows of pieces, [n, 3]. Not a list: for 1 GiB, 16,384 pages of an 8B model, converting to a list
and back to arrays took 12 ms of Python, for a copy of 2 ms."""

_KINDS: Final[dict[bool | None, int]] = {True: 1, False: 2, None: 3}
# cudaMemcpyKind. Given, not left to the driver, which would take an invalid device address for host
# memory and write there.
_STREAM_ORDER: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_OVERLAP: Final = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_SIGNATURES: Final = (13000, 12080)  # CUDA versions whose cuMemcpyBatchAsync differ; newest first


CLEARLY: Final = 0.95
"""Another path is used from a size on where it takes less than this share of the first's time."""


class CopyRefused(Exception):
    """The driver refused a batch; an unknown part of it was enqueued."""


class CopyPath(Protocol):
    """`enqueue` copies pieces of one direction and returns before the copies have finished. If it
    raises, some may be running. `to_device` is None where both ends are in GPU memory."""

    name: str

    def enqueue(self, pieces: Pieces, stream: int, *, to_device: bool | None) -> None: ...


def rows_of(pieces: Sequence[Piece]) -> Pieces:
    return np.array(pieces, np.uint64).reshape(-1, 3)


class EachCopy:
    """A call for each piece."""

    name = "cudaMemcpyAsync"

    def __init__(self, runtime: Any) -> None:
        self._copy = runtime.memcpyAsync

    def enqueue(self, pieces: Pieces, stream: int, *, to_device: bool | None) -> None:
        kind = _KINDS[to_device]
        for destination, source, num_bytes in pieces.tolist():
            self._copy(destination, source, num_bytes, kind, stream)


class Named(Protocol):
    """A path with a name, for reports."""

    @property
    def name(self) -> str: ...


P = TypeVar("P", bound=Named)


class Steps(Generic[P]):
    """The path for each size: (bytes, path), rising; a path is used below the next step's bytes.
    `name` describes all steps."""

    def __init__(self, steps: Sequence[tuple[int, P]]) -> None:
        self._starts = [num_bytes for num_bytes, _ in steps]
        self.paths = [path for _, path in steps]
        names = [f"{path.name} from {num_bytes >> 10} KiB" for num_bytes, path in steps[1:]]
        self.name = ", ".join([self.paths[0].name, *names])

    def at(self, num_bytes: int) -> P:
        return self.paths[max(0, bisect_right(self._starts, num_bytes) - 1)]


def fastest_by_size(times: Mapping[int, Mapping[P, float]]) -> Steps[P]:
    """Steps from measured times: size → path → seconds, with at least one size. The path changes
    where another one is clearly faster (CLEARLY). At the smallest size a tie goes to the first."""
    steps: list[tuple[int, P]] = []
    for num_bytes, took in sorted(times.items()):
        best = min(took, key=lambda path: took[path])
        if not steps or took[best] < CLEARLY * took[steps[-1][1]]:
            steps.append((num_bytes, best))
    return Steps(steps)


class BySize:
    """Copies each batch by the path for the mean size of its pieces."""

    def __init__(self, steps: Steps[CopyPath]) -> None:
        self._steps = steps
        self.name = steps.name

    def enqueue(self, pieces: Pieces, stream: int, *, to_device: bool | None) -> None:
        if len(pieces):
            mean_bytes = int(pieces[:, 2].sum()) // len(pieces)
            self._steps.at(mean_bytes).enqueue(pieces, stream, to_device=to_device)


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes. The two location hints concern managed memory only, and stay zero."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("destination_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class BatchCopy:
    """One call for the whole batch. Raises CopyRefused where the driver lacks that call."""

    name = "cuMemcpyBatchAsync"

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            self._driver = ctypes.CDLL(library)
        except OSError as error:
            raise CopyRefused(str(error)) from error
        self._has_fail_index, self._call = self._entry_point()
        self._attributes = _Attributes(source_order=_STREAM_ORDER, flags=_OVERLAP)
        self._first = ctypes.c_size_t(0)

    def enqueue(self, pieces: Pieces, stream: int, *, to_device: bool | None) -> None:
        if not len(pieces):
            return
        # The driver copies the arrays before it returns: they need not outlive the call.
        columns: npt.NDArray[np.uint64] = pieces.T.copy()
        destinations, sources, sizes = (column.ctypes.data for column in columns)
        attributes, first = ctypes.byref(self._attributes), ctypes.byref(self._first)
        arguments: list[Any] = [
            *map(ctypes.c_void_p, (destinations, sources, sizes)),
            ctypes.c_size_t(len(pieces)),
            attributes,
            first,
            ctypes.c_size_t(1),
        ]
        if self._has_fail_index:  # CUDA 12.8 and 12.9
            arguments.append(ctypes.byref(ctypes.c_size_t(0)))
        status = self._call(*arguments, ctypes.c_void_p(stream))
        if status:
            raise CopyRefused(f"{self.name}: {self._name_of(status)}")

    def _entry_point(self) -> tuple[bool, Any]:
        """(whether it has CUDA 12's `failIdx`, the function), from the driver's table: looked up as
        a plain symbol, it would have the oldest signature."""
        for version in _SIGNATURES:
            found, status = ctypes.c_void_p(), ctypes.c_int()
            refused = self._driver.cuGetProcAddress_v2(
                b"cuMemcpyBatchAsync",
                ctypes.byref(found),
                ctypes.c_int(version),
                ctypes.c_uint64(0),
                ctypes.byref(status),
            )
            if not refused and not status.value and found.value:
                return version < 13000, ctypes.CFUNCTYPE(ctypes.c_int)(found.value)
        raise CopyRefused("this driver has no cuMemcpyBatchAsync (CUDA 12.8)")

    def _name_of(self, status: int) -> str:
        name = ctypes.c_char_p()
        self._driver.cuGetErrorName(ctypes.c_int(status), ctypes.byref(name))
        return name.value.decode() if name.value else f"error {status}"

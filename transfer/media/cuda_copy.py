"""Two ways of handing a batch to the copy engines: a call for each piece, or one for all.

    EachCopy    cudaMemcpyAsync, piece by piece: everywhere, and for memory that is not pinned
    BatchCopy   cuMemcpyBatchAsync (CUDA 12.8), one call of the driver for the whole batch

Both only enqueue: when the bytes have arrived is for an event to say (media/cuda.py). Neither
runs a kernel, so they take nothing from an inference engine's kernels in another process. Which one
serves pieces of which size is measured when a worker starts.
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
"""Rows of pieces, [n, 3]. No list: 1 GiB is 16,384 pages of an 8B model, and making a list of that
many and arrays of it again took 12 ms of Python, for a copy of 2 ms."""

_KINDS: Final[dict[bool | None, int]] = {True: 1, False: 2, None: 3}
# cudaMemcpyKind. Said, not left to the driver: one that takes an address for host memory because it
# is no other would write there.
_STREAM_ORDER: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_OVERLAP: Final = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_SIGNATURES: Final = (13000, 12080)  # CUDA versions whose cuMemcpyBatchAsync differ; newest first


CLEARLY: Final = 0.95
"""A path has to take less than this share of the other's time to take over from it."""


class CopyRefused(Exception):
    """The driver did not take a batch; how much of it was enqueued is not known."""


class CopyPath(Protocol):
    """`enqueue` takes pieces of one direction and returns before the bytes have arrived. Whatever
    it raises, pieces may be on their way. `to_device` is None where both ends are the GPU's."""

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
    """Something that can be chosen by measuring it."""

    @property
    def name(self) -> str: ...


P = TypeVar("P", bound=Named)


class Steps(Generic[P]):
    """What serves which size: (bytes, path), rising; a path serves sizes of less than the next
    step's bytes. `name` says all of it."""

    def __init__(self, steps: Sequence[tuple[int, P]]) -> None:
        self._starts = [num_bytes for num_bytes, _ in steps]
        self.paths = [path for _, path in steps]
        names = [f"{path.name} from {num_bytes >> 10} KiB" for num_bytes, path in steps[1:]]
        self.name = ", ".join([self.paths[0].name, *names])

    def at(self, num_bytes: int) -> P:
        return self.paths[max(0, bisect_right(self._starts, num_bytes) - 1)]


def fastest_by_size(times: Mapping[int, Mapping[P, float]]) -> Steps[P]:
    """From the seconds that each path took for the same bytes, by their size, at least one: another
    path takes over where it is faster by more than chance. Of two that are equally fast at the
    smallest size, the first."""
    steps: list[tuple[int, P]] = []
    for num_bytes, took in sorted(times.items()):
        best = min(took, key=lambda path: took[path])
        if not steps or took[best] < CLEARLY * took[steps[-1][1]]:
            steps.append((num_bytes, best))
    return Steps(steps)


class BySize:
    """Each batch by the path that was faster for pieces of its mean size."""

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
    """One call for the whole batch. CopyRefused where the driver knows no such call."""

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
        # Copied by the driver before it returns: the arrays need not outlive the call.
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
        """(whether it has CUDA 12's `failIdx`, the function), by the driver's own table: a symbol's
        bare name would be the oldest signature."""
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

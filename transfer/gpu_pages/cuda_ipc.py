"""GPU memory of one process, mapped into another by CUDA IPC.

The owner (a connector, in the inference engine's process) calls `share` for each tensor; ranges are
sent as plain bytes; the other process on the same GPU maps them with `Mappings`. A handle stands
for a whole allocation, of which a tensor is often only a part: so a range is an allocation and an
offset, and several ranges may share one mapping.

The owner must not free a range before the other process has reported that it is unmapped. `close`
does not wait: call it after the last copy that uses the mappings has finished.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any


class NotShareable(Exception):
    """This memory cannot be mapped by another process. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class SharedRange:
    """A part of another process's allocation, which is named by its handle (64 bytes)."""

    handle: bytes
    offset: int
    num_bytes: int


def cupy_for(device: int) -> Any:
    """CuPy, with this GPU as the calling thread's current one. Raises NotShareable."""
    try:
        import cupy

        cupy.cuda.runtime.setDevice(device)
    except (ImportError, RuntimeError) as error:  # CuPy's own errors are RuntimeErrors
        raise NotShareable(f"CuPy is needed and does not work here: {error}") from error
    return cupy


def share(cupy: Any, address: int, num_bytes: int, library: str = "libcuda.so.1") -> SharedRange:
    """Describe a range of the current GPU's memory for another process. Raises NotShareable for
    memory not from cudaMalloc (expandable segments, managed memory), or a driver without IPC."""
    base, size = allocation(address, library)
    if address + num_bytes > base + size:
        raise NotShareable(f"{num_bytes} bytes reach beyond their allocation of {size}")
    runtime = cupy.cuda.runtime
    try:
        handle = bytes(runtime.ipcGetMemHandle(base))
    except runtime.CUDARuntimeError as error:
        raise NotShareable(f"CUDA does not share this memory: {error}") from error
    return SharedRange(handle, address - base, num_bytes)


class Mappings:
    """Another process's allocations, mapped into this one. Used from one thread."""

    def __init__(self, cupy: Any) -> None:
        self._runtime = cupy.cuda.runtime
        self._bases: dict[bytes, int] = {}

    def address(self, shared: SharedRange) -> int:
        """The range's address in this process. Raises NotShareable where the handle cannot be
        mapped: another user, another IPC namespace, an owner that has ended."""
        base = self._bases.get(shared.handle)
        if base is None:
            try:
                base = int(self._runtime.ipcOpenMemHandle(shared.handle))
            except self._runtime.CUDARuntimeError as error:
                raise NotShareable(f"CUDA does not map this memory: {error}") from error
            self._bases[shared.handle] = base
        return base + shared.offset

    def close(self) -> None:
        """Unmap everything. No copy that uses it may be running."""
        while self._bases:
            _, base = self._bases.popitem()
            self._runtime.ipcCloseMemHandle(base)


def allocation(address: int, library: str = "libcuda.so.1") -> tuple[int, int]:
    """(base, bytes) of the allocation that contains an address, from the driver. Raises
    NotShareable."""
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        raise NotShareable(str(error)) from error
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    place = (ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    status = driver.cuMemGetAddressRange_v2(*place)
    if status:
        raise NotShareable(f"CUDA has no allocation at this address (error {status})")
    return int(base.value), int(size.value)

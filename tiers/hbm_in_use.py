"""How much of a GPU's memory is in use, from the driver's management library (NVML).

CUDA reports it only through a context, which itself takes half a gigabyte; NVML needs no context.
So the size of a context is the difference between before and after its creation. The figure is only
shown to people; where NVML is missing it is left out.
"""

from __future__ import annotations

import ctypes
from typing import Final

LIBRARY: Final = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


def used_bytes(bus_id: str, library: str = LIBRARY) -> int | None:
    """Bytes that all processes use of the GPU with this PCI bus id. None where unknown."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    try:
        device, memory = ctypes.c_void_p(), _Memory()
        if nvml.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(device)):
            return None
        if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
            return None
        return int(memory.used)
    finally:
        nvml.nvmlShutdown()


def grown_by(before: int | None, after: int | None, known: int = 0) -> int:
    """The growth between two values of `used_bytes`, less `known` bytes; 0 where unknown."""
    return 0 if before is None or after is None else max(0, after - before - known)

"""How much of a GPU is in use, as the driver's management library (NVML) tells it.

CUDA can be asked only through a context, which itself takes half a gigabyte; NVML needs none. So
what a context takes is the difference between before and after. Where NVML is missing nothing is
said: the figure is for people, and nothing is decided by it.
"""

from __future__ import annotations

import ctypes
from typing import Final

LIBRARY: Final = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


def used_bytes(bus_id: str, library: str = LIBRARY) -> int | None:
    """By everybody, of the GPU with this PCI bus id. None where nobody tells."""
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
    """What was taken in between, beside `known` bytes; 0 where it cannot be told."""
    return 0 if before is None or after is None else max(0, after - before - known)

"""The `hbm` tier: a pool of slots in GPU memory, or its emulation in a second shared mapping.

`HostPool` is opened by the daemon like `dram`: same protocol, honest about being emulated.
`CudaPool` is opened by the GPU worker and nobody else: the daemon never touches CUDA, and decides
by looking at device files and installed packages only (`pick_device`).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from hicache.tiers.base import TierUnavailable
from hicache.tiers.block import PAGE_BYTES
from hicache.tiers.dram import DramTier


@dataclass(frozen=True, slots=True)
class Device:
    """Where the pool lives and why, as a sentence for `stats`. `index` is -1 on the host."""

    kind: Literal["host", "cuda"]
    index: int
    reason: str


def pick_device(wanted: str) -> Device:
    """`auto`, `host` or `cuda:N`, decided without initialising CUDA. ValueError on other words."""
    if wanted == "host":
        return Device("host", -1, "emulated in host memory, as configured")
    if wanted == "auto":
        missing = _missing(0)
        if missing:
            return Device("host", -1, f"emulated in host memory: {missing}")
        return Device("cuda", 0, "GPU 0, found by itself")
    name, _, number = wanted.partition(":")
    if name != "cuda" or not number.isdecimal():
        raise ValueError(f"device {wanted!r}: must be auto, host, or cuda:N")
    missing = _missing(int(number))
    if missing:
        raise ValueError(f"device {wanted}: {missing}")
    return Device("cuda", int(number), f"GPU {number}, as configured")


def _missing(index: int) -> str:
    if not Path(f"/dev/nvidia{index}").exists():
        return f"there is no /dev/nvidia{index} on this machine"
    if find_spec("cupy") is None:
        return "cupy is not installed (pip install 'hicache[cuda]')"
    return ""


class HostPool(DramTier):
    """The pool emulated: a second arena, mapped by clients like `dram`."""

    medium = "host memory, emulated"


class CudaPool:
    """The pool in GPU memory, allocated in one piece by the GPU worker. Lost with its process.

    `cupy` is the module, or what stands in for it where the stream protocol is tried without a GPU.
    Raises TierUnavailable with the driver's own words.
    """

    medium = "GPU memory"

    def __init__(self, index: int, capacity_bytes: int, cupy: Any = None) -> None:
        try:
            if cupy is None:
                import cupy as module

                cupy = module
            self.index = index
            self.cupy: Any = cupy
            self.use()
            self.memory: Any = cupy.cuda.Memory(capacity_bytes)
        except Exception as error:  # cupy's own classes, an ImportError, a missing driver
            raise TierUnavailable(f"GPU {index}: {error}") from error
        self.capacity_bytes = capacity_bytes
        self._start = int(self.memory.ptr)

    def use(self) -> None:
        """Make the GPU and its context this thread's. Said outright: CuPy's `with device` leaves it
        out where the number is the thread's already, and the driver's own calls need it."""
        self.cupy.cuda.runtime.setDevice(self.index)

    def address(self, slot: int, num_bytes: int) -> int:
        """The device address of a slot. ValueError when it would leave the pool."""
        start = slot * PAGE_BYTES
        if slot < 0 or num_bytes < 0 or start + num_bytes > self.capacity_bytes:
            raise ValueError(f"slot {slot} of {num_bytes} bytes leaves the pool")
        return self._start + start

    def close(self) -> None:
        """Give the memory back; the process's exit would do the same."""
        self.memory = None
        self.capacity_bytes = 0

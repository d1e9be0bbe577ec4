"""The `hbm` tier: a pool of slots in GPU memory, or its emulation in a second shared mapping.

`HostPool` is opened by the daemon like `dram`: same protocol, honest about being emulated.
`CudaPool` is opened by the GPU worker and nobody else: the daemon never touches CUDA, and decides
by what a process of its own has found (`pick_device`; tiers/hbm_probe.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from hicache.tiers.block import PAGE_BYTES
from hicache.tiers.dram import DramTier
from hicache.tiers.errors import TierUnavailable
from hicache.tiers.hbm_in_use import grown_by, used_bytes

CONTEXT_BYTES: Final = 600 << 20
"""What CUDA takes of a GPU for a process of its own (518 MiB on an H200), beside the pool."""


@dataclass(frozen=True, slots=True)
class Device:
    """Where the pool lives and why, as a sentence for `stats`. `index` is -1 on the host."""

    kind: Literal["host", "cuda"]
    index: int
    reason: str


def pick_device(wanted: str, indices: Sequence[int], trouble: str) -> Device:
    """`auto`, `host` or `cuda:N`, from the GPUs that were found; `trouble` is why there are no
    (more) of them. ValueError on other words, and on a GPU that is not there."""
    if wanted == "host":
        return Device("host", -1, "emulated in host memory, as configured")
    if wanted == "auto":
        if not indices:
            return Device("host", -1, f"emulated in host memory: {trouble}")
        return Device("cuda", min(indices), f"GPU {min(indices)}, found by itself")
    name, _, number = wanted.partition(":")
    if name != "cuda" or not number.isdecimal():
        raise ValueError(f"device {wanted!r}: must be auto, host, or cuda:N")
    if int(number) not in indices:
        there = ", ".join(f"cuda:{index}" for index in indices)
        raise ValueError(f"device {wanted}: {trouble or f'there is only {there}'}")
    return Device("cuda", int(number), f"GPU {number}, as configured")


class HostPool(DramTier):
    """The pool emulated: a second arena, mapped by clients like `dram`."""

    medium = "host memory, emulated"


class CudaPool:
    """The pool in GPU memory, allocated in one piece by the GPU worker. Lost with its process.

    `cupy` is the module, or what stands in for it where the stream protocol is tried without a GPU.
    `context_bytes` is what CUDA took for itself beside the pool, 0 where nobody tells. Raises
    TierUnavailable with the driver's own words.
    """

    medium = "GPU memory"

    def __init__(self, index: int, capacity_bytes: int, cupy: Any = None) -> None:
        try:
            if cupy is None:
                import cupy as module

                cupy = module
            self.index = index
            self.cupy: Any = cupy
            self.bus_id = str(cupy.cuda.runtime.deviceGetPCIBusId(index)).lower()
            before = used_bytes(self.bus_id)
            self.use()
            self.memory: Any = cupy.cuda.Memory(capacity_bytes)
            self.context_bytes = grown_by(before, used_bytes(self.bus_id), capacity_bytes)
        except (ImportError, RuntimeError, MemoryError, OSError, ValueError) as error:
            # CuPy's own errors are RuntimeErrors, and its lack of memory a MemoryError.
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

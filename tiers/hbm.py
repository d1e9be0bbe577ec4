"""The `hbm` tier: a pool of slots in GPU memory, or its emulation in a second shared mapping.

`HostPool` is opened by the daemon like `dram`: same protocol, honest about being emulated.
`CudaPool` is opened by the GPU worker and nobody else: the daemon never touches CUDA, and decides
by what a process of its own has found (`pick_device`; tiers/hbm_probe.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from hicache.tiers.arena import Arena
from hicache.tiers.block import PAGE_BYTES, TierTraits
from hicache.tiers.dram import DramTier
from hicache.tiers.errors import TierUnavailable
from hicache.tiers.hbm_in_use import grown_by, used_bytes
from hicache.tiers.pool import SlotPool
from hicache.tiers.tier import DeviceSpec, DeviceTraits, OpenedTier, TierSite

PageKernels = Literal["auto", "always", "never"]
CONTEXT_BYTES: Final = 600 << 20
"""What CUDA takes of a GPU for a process of its own (518 MiB on an H200), beside the pool."""


@dataclass(frozen=True, slots=True)
class Device:
    """Where the pool lives and why, as a sentence for `stats`. `index` is -1 on the host."""

    index: int
    reason: str

    @property
    def is_emulated(self) -> bool:
        return self.index < 0


def pick_device(wanted: str, indices: Sequence[int], trouble: str) -> Device:
    """`auto`, `host` or `cuda:N`, from the GPUs that were found; `trouble` is why there are no
    (more) of them. ValueError on other words, and on a GPU that is not there."""
    if wanted == "host":
        return Device(-1, "emulated in host memory, as configured")
    if wanted == "auto":
        if not indices:
            return Device(-1, f"emulated in host memory: {trouble}")
        return Device(min(indices), f"GPU {min(indices)}, found by itself")
    name, _, number = wanted.partition(":")
    if name != "cuda" or not number.isdecimal():
        raise ValueError(f"device {wanted!r}: must be auto, host, or cuda:N")
    if int(number) not in indices:
        there = ", ".join(f"cuda:{index}" for index in indices)
        raise ValueError(f"device {wanted}: {trouble or f'there is only {there}'}")
    return Device(int(number), f"GPU {number}, as configured")


@dataclass(frozen=True, slots=True)
class ArenaOptions:
    """What the worker of an emulated pool is told: where its arena lies."""

    path: str


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """What a GPU's worker is told. `page_kernels`: see page_choice.py."""

    gpu: int = 0
    page_kernels: PageKernels = "auto"


class HostPool(DramTier):
    """The pool emulated: a second arena, mapped by clients like `dram`."""


class CudaPool:
    """The pool in GPU memory, allocated in one piece by the GPU worker. Lost with its process.

    `cupy` is the module, or what stands in for it where the stream protocol is tried without a GPU.
    `context_bytes` is what CUDA took for itself beside the pool, 0 where nobody tells. Raises
    TierUnavailable with the driver's own words.
    """

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


def open_hbm(section: Any, site: TierSite) -> OpenedTier:
    """See Builder. `section`: an HbmConfig. ValueError when it asks for a GPU that is not there."""
    found = [gpu.index for gpu in site.gpus.found]
    device = pick_device(section.device, found, site.gpus.trouble)
    if device.is_emulated:
        tier = HostPool(section.path, site.prefix, section.size_bytes, progress=site.progress)
        words, spec = "host memory (emulated)", emulated_spec(tier.arena)
        return OpenedTier(tier.pool, TierTraits(mapped=True), words, device.reason, tier, spec)
    pool = SlotPool(section.size_bytes)
    spec = gpu_spec(device.index, pool.capacity_bytes, section.page_kernels)
    return OpenedTier(pool, TierTraits(), f"GPU {device.index}", device.reason, device=spec)


def emulated_spec(arena: Arena) -> DeviceSpec:
    """The worker that copies between the near arena and this one."""
    medium, options = "hicache.transfer.media.host:MemoryMedium", ArenaOptions(str(arena.path))
    return DeviceSpec("gpu:0", "hicache-gpu-0", medium, arena.data_bytes, asdict(options))


def gpu_spec(index: int, capacity_bytes: int, page_kernels: PageKernels = "auto") -> DeviceSpec:
    """The worker that holds the pool in this GPU's memory."""
    return DeviceSpec(
        f"gpu:{index}",
        f"hicache-gpu-{index}",
        "hicache.transfer.media.cuda:CudaMedium",
        capacity_bytes,
        asdict(GpuOptions(index, page_kernels)),
        DeviceTraits(by_priority=True, maps_pages=True, pins_arena=True),
    )

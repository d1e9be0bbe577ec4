"""The `hbm` tier: a pool of slots in GPU memory, or its emulation in a second shared mapping.

`HostPool` is opened by the daemon like `dram`, with the same protocol. `CudaPool` is opened only by
the GPU worker: the daemon never calls CUDA, and chooses the device from the result of a probe
process (`pick_device`; tiers/hbm_probe.py).
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
"""The GPU memory of a process's CUDA context (518 MiB on an H200), besides the pool."""


@dataclass(frozen=True, slots=True)
class Device:
    """The pool's device and the reason for it, for `stats`. `index` is -1 on the host."""

    index: int
    reason: str

    @property
    def is_emulated(self) -> bool:
        return self.index < 0


def pick_device(wanted: str, indices: Sequence[int], trouble: str) -> Device:
    """Choose the device for `auto`, `host` or `cuda:N` from the GPUs found; `trouble`: why there
    are no (more) GPUs. Raises ValueError on other words, and on a missing GPU."""
    if wanted == "host":
        return Device(-1, "emulated in host memory, as configured")
    if wanted == "auto":
        if not indices:
            return Device(-1, f"emulated in host memory: {trouble}")
        return Device(min(indices), f"GPU {min(indices)}, found automatically")
    name, _, number = wanted.partition(":")
    if name != "cuda" or not number.isdecimal():
        raise ValueError(f"device {wanted!r}: must be auto, host, or cuda:N")
    if int(number) not in indices:
        there = ", ".join(f"cuda:{index}" for index in indices)
        raise ValueError(f"device {wanted}: {trouble or f'there is only {there}'}")
    return Device(int(number), f"GPU {number}, as configured")


@dataclass(frozen=True, slots=True)
class ArenaOptions:
    """The options of an emulated pool's worker: the path of its arena."""

    path: str


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """The options of a GPU's worker. `page_kernels`: see page_choice.py."""

    gpu: int = 0
    page_kernels: PageKernels = "auto"


class HostPool(DramTier):
    """The emulated pool: a second arena, mapped by clients like `dram`."""


class CudaPool:
    """The pool in GPU memory, allocated in one piece by the GPU worker. Lost with its process.

    `cupy` is the module, or a stand-in for tests without a GPU. `context_bytes` is the size of the
    CUDA context, 0 where unknown. Raises TierUnavailable with the driver's message.
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
            # CuPy's errors are RuntimeErrors, and for lack of memory a MemoryError.
            raise TierUnavailable(f"GPU {index}: {error}") from error
        self.capacity_bytes = capacity_bytes
        self._start = int(self.memory.ptr)

    def use(self) -> None:
        """Make the GPU and its context this thread's current ones. CuPy's `with device` skips that
        where the index is current already, but direct driver calls need it."""
        self.cupy.cuda.runtime.setDevice(self.index)

    def address(self, slot: int, num_bytes: int) -> int:
        """The device address of a slot. Raises ValueError when it leaves the pool."""
        start = slot * PAGE_BYTES
        if slot < 0 or num_bytes < 0 or start + num_bytes > self.capacity_bytes:
            raise ValueError(f"slot {slot} of {num_bytes} bytes leaves the pool")
        return self._start + start

    def close(self) -> None:
        """Free the memory, as the process's exit would do."""
        self.memory = None
        self.capacity_bytes = 0


def open_hbm(section: Any, site: TierSite) -> OpenedTier:
    """See Builder. `section`: an HbmConfig. Raises ValueError when its GPU is missing."""
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
    """The device of an emulated pool, whose worker copies between the near arena and this one."""
    medium, options = "hicache.transfer.media.host:MemoryMedium", ArenaOptions(str(arena.path))
    return DeviceSpec("gpu:0", "hicache-gpu-0", medium, arena.data_bytes, asdict(options))


def gpu_spec(index: int, capacity_bytes: int, page_kernels: PageKernels = "auto") -> DeviceSpec:
    """The device of a pool in this GPU's memory, which its worker owns."""
    return DeviceSpec(
        f"gpu:{index}",
        f"hicache-gpu-{index}",
        "hicache.transfer.media.cuda:CudaMedium",
        capacity_bytes,
        asdict(GpuOptions(index, page_kernels)),
        DeviceTraits(by_priority=True, maps_pages=True, pins_arena=True),
    )

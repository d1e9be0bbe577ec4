"""Finds the machine's GPUs in a short-lived child process.

    python -m hicache.tiers.hbm_probe [--measure]     prints one map as JSON

The daemon never calls CUDA, but needs the number, indices and free memory of the GPUs that a worker
will see. The child uses the same library as the worker: so its indices are the worker's for any
CUDA_VISIBLE_DEVICES, and a driver too old for the library is reported here, not at the first move.
Takes 1–2 s; where CuPy is not installed, no child is started.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from hicache.tiers.hbm import CONTEXT_BYTES
from hicache.tiers.hbm_in_use import grown_by, used_bytes
from hicache.tiers.numa import node_of

TIMEOUT_S: Final = 60.0
_ROOT = Path(__file__).absolute().parents[2]  # not resolved: hicache/tiers may be a link
_COPY_BYTES: Final = 256 << 20
_ROUNDS: Final = 5
_NO_DEVICES: Final = "there is no GPU on this machine: no /dev/nvidia*"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `index` is CUDA's; `free_bytes` is free before a worker's CUDA context is created;
    `context_bytes` is the size of such a context, 0 where unknown; `numa_node` is -1 where unknown;
    bytes per second are 0 unless measured."""

    index: int
    total_bytes: int
    free_bytes: int
    name: str = ""
    bus_id: str = ""
    numa_node: int = -1
    context_bytes: int = 0
    to_device_bytes_per_s: float = 0.0
    from_device_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs found. `trouble` says why there are not more, for the end of a sentence; CUDA's
    versions are numbers like 13000, 0 where unknown."""

    found: tuple[Gpu, ...] = ()
    trouble: str = "the GPUs have not been probed"
    cupy: str = ""
    cuda_driver: int = 0
    cuda_runtime: int = 0
    driver: str = field(default="")

    def get(self, index: int) -> Gpu | None:
        return next((gpu for gpu in self.found if gpu.index == index), None)


def look(*, measure: bool = False) -> Gpus:
    """Probe the GPUs now. Never raises: failures are described in `trouble`."""
    driver = _driver_version()
    has_devices = any(Path("/dev").glob("nvidia[0-9]*"))
    if find_spec("cupy") is None:
        if not has_devices:
            return Gpus(trouble=_NO_DEVICES, driver=driver)
        trouble = "cupy is not installed (pip install 'hicache[cuda]')"
        return Gpus(trouble=trouble, driver=driver)
    command = [sys.executable, "-m", "hicache.tiers.hbm_probe", *(["--measure"] if measure else [])]
    try:
        ran = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        data = json.loads(ran.stdout)
    except subprocess.TimeoutExpired:
        trouble = f"CUDA did not answer within {TIMEOUT_S:.0f} s"
        return Gpus(trouble=trouble, driver=driver)
    except (OSError, ValueError):
        last = (ran.stderr.strip().splitlines() or [f"status {ran.returncode}"])[-1]
        return Gpus(trouble=f"the CUDA probe failed: {last}", driver=driver)
    found = tuple(Gpu(**row) for row in data.pop("found"))
    if not found and not driver and not has_devices:  # CuPy's message alone would mislead
        data["trouble"] = f"{_NO_DEVICES} ({data['trouble']})"
    return Gpus(found=found, driver=driver, **data)


def probe(cupy: Any, measure: bool) -> dict[str, Any]:
    """In the child: the fields of `Gpus`, from CuPy or a stand-in for it."""
    runtime = cupy.cuda.runtime
    data: dict[str, Any] = {"cupy": cupy.__version__, "found": [], "trouble": ""}
    try:
        data["cuda_runtime"] = int(runtime.runtimeGetVersion())
        data["cuda_driver"] = int(runtime.driverGetVersion())
        for index in range(runtime.getDeviceCount()):
            data["found"].append(_probe_one(runtime, index))
            if measure:
                data["found"][-1] |= _measure(cupy)
    except runtime.CUDARuntimeError as error:
        data["trouble"] = str(error)
    if not data["found"] and not data["trouble"]:
        data["trouble"] = "CUDA sees no GPU"
    return data


def _probe_one(runtime: Any, index: int) -> dict[str, Any]:
    bus = str(runtime.deviceGetPCIBusId(index)).lower()
    before = used_bytes(bus)
    runtime.setDevice(index)
    properties = runtime.getDeviceProperties(index)
    free, total = runtime.memGetInfo()  # the context exists by now
    return {
        "index": index,
        "name": properties["name"].decode(),
        "total_bytes": int(total),
        # This process's context is freed before a worker creates one of about the same size.
        "free_bytes": min(int(total), int(free) + CONTEXT_BYTES),
        "bus_id": bus,
        "numa_node": node_of(bus),
        "context_bytes": grown_by(before, used_bytes(bus)),
    }


def _measure(cupy: Any) -> dict[str, float]:
    """The rate of the fastest of five copies of a pinned buffer, each direction, current GPU."""
    runtime = cupy.cuda.runtime
    host, memory = runtime.hostAlloc(_COPY_BYTES, 0), cupy.cuda.Memory(_COPY_BYTES)
    stream = cupy.cuda.Stream(non_blocking=True)
    rates = {}
    copies = {
        "to_device_bytes_per_s": (int(memory.ptr), host, 1),
        "from_device_bytes_per_s": (host, int(memory.ptr), 2),
    }
    for name, (to, source, kind) in copies.items():
        seconds = []
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            runtime.memcpyAsync(to, source, _COPY_BYTES, kind, stream.ptr)
            stream.synchronize()
            seconds.append(time.perf_counter() - start)
        rates[name] = _COPY_BYTES / min(seconds)
    runtime.freeHost(host)
    return rates


def _driver_version() -> str:
    """The version of NVIDIA's kernel module; "" where it is not loaded."""
    file = Path("/proc/driver/nvidia/version")
    words = file.read_text().split("\n")[0].split() if file.exists() else []
    return next((word for word in words if word[:1].isdigit() and "." in word), "")


if __name__ == "__main__":
    import cupy

    print(json.dumps(probe(cupy, "--measure" in sys.argv)))

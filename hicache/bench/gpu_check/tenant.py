"""A process in the role of an inference engine: it shares its tensors by CUDA IPC until it ends.

    python -m hicache.bench.gpu_check.tenant SEED       one line out, then a file name a line in

Its tensors lie in one allocation, not at its start, as an engine's allocator leaves them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hicache.bench.gpu_check.layouts import KINDS, Shape, Tensor
from hicache.transfer.gpu_pages.cuda_ipc import share

SHAPE = Shape(layers=4, num_pages=256, page_tokens=16, heads=8, dim=128, pages_per_block=2)
KIND = KINDS[0]
GAP_BYTES = 4096 + 512


def tensors(seed: int) -> list[Tensor]:
    """The initial bytes of its memory."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, dims, np.uint8) for dims in KIND.shapes(SHAPE)]


def main(seed: int) -> None:
    import cupy

    contents = tensors(seed)
    memory = cupy.cuda.Memory(sum(tensor.nbytes + GAP_BYTES for tensor in contents))
    runtime, stream = cupy.cuda.runtime, cupy.cuda.Stream(non_blocking=True)

    def copy(to: int, source: int, num_bytes: int, kind: int) -> None:
        runtime.memcpyAsync(to, source, num_bytes, kind, stream.ptr)
        stream.synchronize()

    at, ranges = int(memory.ptr), []
    rows: list[dict[str, Any]] = []
    for tensor in contents:
        at += GAP_BYTES
        copy(at, tensor.ctypes.data, tensor.nbytes, 1)
        shared = share(cupy, at, tensor.nbytes)
        rows.append({"handle": shared.handle.hex(), "offset": shared.offset})
        ranges.append((at, tensor))
        at += tensor.nbytes
    print(json.dumps(rows), flush=True)
    for line in sys.stdin:  # writes its bytes into this file
        for address, tensor in ranges:
            copy(tensor.ctypes.data, address, tensor.nbytes, 2)
        np.savez(Path(line.strip()), *contents)
        print("written", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""A process in the role of an inference engine: it multiplies bf16 matrices and reports the times.

    python -m hicache.bench.gpu_check.matmul [--dry]     "S\\n" on stdin: measure for S seconds

answers with one line each: the median and the mean milliseconds of a product, and their number.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import pairwise

SIDE, DRY_SIDE = 8192, 128


def main(is_dry: bool) -> None:
    """Until stdin ends."""
    import torch

    side, device = (DRY_SIDE, "cpu") if is_dry else (SIDE, "cuda")
    torch.manual_seed(0)
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty(side, side, dtype=torch.bfloat16, device=device)

    def multiply() -> None:
        torch.mm(a, b, out=out)

    measure = _on_the_host if is_dry else _on_the_gpu
    measure(multiply, 0.2)
    print("ready", flush=True)
    for line in sys.stdin:
        times = sorted(measure(multiply, float(line)))
        mean = sum(times) / len(times)
        print(times[len(times) // 2], mean, len(times), flush=True)


def _on_the_gpu(multiply: Callable[[], None], seconds: float) -> list[float]:
    """Milliseconds by events, a few products ahead, so that the stream never runs dry."""
    import torch

    times: list[float] = []
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(33)]
        events[0].record()
        for event in events[1:]:
            multiply()
            event.record()
        events[-1].synchronize()
        times += [a.elapsed_time(b) for a, b in pairwise(events)]
    return times


def _on_the_host(multiply: Callable[[], None], seconds: float) -> list[float]:
    times: list[float] = []
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        start = time.perf_counter()
        multiply()
        times.append(1000 * (time.perf_counter() - start))
    return times


if __name__ == "__main__":
    main("--dry" in sys.argv)

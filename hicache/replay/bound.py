"""The offline bound: MIN with bypass, prefix-closed.

Belady's MIN (1966) keeps the blocks whose next use is nearest; with bypass a new block may be
rejected at once. A block's ancestors are used whenever it is, so their next use is never later than
its own. Keeping the nearest therefore keeps whole prefixes and evicts leaves first. (Of equal next
uses, the deepest block is evicted.)

With several tiers, the hits of k tiers together are bounded by MIN at their summed size; a tier's
row is what it adds to those above it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from hicache.replay.traces import Trace

NEVER = np.iinfo(np.int64).max


def hit_blocks(
    trace: Trace, capacity_blocks: int, step: Callable[[int], None] | None = None
) -> list[int]:
    """Per request, how many blocks of its prefix MIN has when it arrives."""
    hits = []
    kept: dict[int, int] = {}
    heap: list[tuple[int, int, int]] = []  # farthest next use first, then the deepest
    for number, (blocks, next_uses) in enumerate(_with_next_uses(trace)):
        count = 0
        while count < len(blocks) and blocks[count] in kept:
            count += 1
        hits.append(count)
        for depth, (block, next_use) in enumerate(zip(blocks, next_uses, strict=True)):
            if next_use == NEVER:
                kept.pop(block, None)
            else:
                kept[block] = next_use
                heapq.heappush(heap, (-next_use, -depth, block))
        while len(kept) > capacity_blocks:
            next_use, _, block = heapq.heappop(heap)
            if kept.get(block) == -next_use:
                del kept[block]
        if step is not None:
            step(number)
    return hits


def _with_next_uses(trace: Trace) -> Sequence[tuple[list[int], list[int]]]:
    """Per request its blocks and, for each, the number of the next request that uses it."""
    next_use: dict[int, int] = {}
    rows: list[tuple[list[int], list[int]]] = []
    for number in range(len(trace.requests) - 1, -1, -1):
        blocks = _ids(trace.requests[number].symbols).tolist()
        rows.append((blocks, [next_use.get(block, NEVER) for block in blocks]))
        next_use.update(dict.fromkeys(blocks, number))
    rows.reverse()
    return rows


def _ids(symbols: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(symbols, np.uint64)

"""LRU proper over several tiers: one list of blocks in the order of their last use, cut at the
tiers' sizes.

The first C blocks are those of a single LRU cache of C blocks (Mattson, Gecsei, Slutz, Traiger:
"Evaluation techniques for storage hierarchies", 1970), so the tiers of a stack hit what nested
single caches hit: a tier's row is what it adds to those above it. A used block moves to the fastest
tier at once, each block is in one tier, and blocks pushed out of a tier are written to the next
one. The product's `lru` differs: it promotes into free room only and may keep several copies, so it
moves fewer bytes and hits more in the fastest tier.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from hicache.replay.traces import Trace


def hits_and_pushed(
    trace: Trace, capacity_blocks: int, step: Callable[[int], None] | None = None
) -> tuple[list[int], list[int]]:
    """Per request: how many blocks of its prefix are among the `capacity_blocks` used last when it
    arrives, and how many blocks it pushes out of them."""
    hits: list[int] = []
    pushed: list[int] = []
    kept: OrderedDict[int, None] = OrderedDict()
    for number, request in enumerate(trace.requests):
        blocks = np.frombuffer(request.symbols, np.uint64).tolist()
        hits.append(next((n for n, block in enumerate(blocks) if block not in kept), len(blocks)))
        for block in reversed(blocks):  # the front becomes the youngest
            kept[block] = None
            kept.move_to_end(block)
        pushed.append(max(0, len(kept) - capacity_blocks))
        for _ in range(pushed[-1]):
            kept.popitem(last=False)
        if step is not None:
            step(number)
    return hits, pushed

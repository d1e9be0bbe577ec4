"""Least recently used, leaf first.

Rank of a node = the time it was last matched or stored; the smallest goes first. A parent is never
older than its child, so leaf-first and LRU agree (the order of Mattson et al., 1970, on a tree).

Touching a node costs nothing here: an entry whose node was touched since is put at its new place
when it comes out. Nearly everything is added when it is the youngest, or is what an eviction left
of the oldest, so a line does for it; a heap takes what comes in out of turn.
"""

from __future__ import annotations

import heapq
from collections import deque

from hicache.engine.node import Node
from hicache.engine.policies.base import ALWAYS, MIN_SWEEP


class Lru:
    """`tier` is the bit number under which nodes note that they are queued here."""

    wants_history = False

    def __init__(self, tier: int) -> None:
        self._bit = 1 << tier
        self._line: deque[tuple[float, Node]] = deque()
        self._heap: list[tuple[float, int, Node]] = []
        self._serial = 0
        self._sweep_at = MIN_SWEEP

    def add(self, node: Node) -> None:
        """See EvictionPolicy."""
        if node.queued & self._bit:
            return
        node.queued |= self._bit
        line, touched_s = self._line, node.touched_s
        if line and touched_s < line[0][0]:
            line.appendleft((touched_s, node))
            return
        if len(line) + len(self._heap) >= self._sweep_at:
            self._sweep()
        self._put(node)

    def pop(self, worth: float = ALWAYS) -> Node | None:
        """See EvictionPolicy."""
        line, heap = self._line, self._heap
        while line or heap:
            if heap and not (line and line[0][0] <= heap[0][0]):
                touched_s, _, node = heapq.heappop(heap)
            else:
                touched_s, node = line.popleft()
            if node.parent is None:  # merged away or removed
                continue
            if node.touched_s > touched_s:
                self._put(node)
                continue
            node.queued &= ~self._bit
            return node
        return None

    def worth(self, kind: int, touched_s: float) -> float:
        """See EvictionPolicy: whatever is new is let in."""
        return ALWAYS

    def _put(self, node: Node) -> None:
        line, touched_s = self._line, node.touched_s
        if not line or touched_s >= line[-1][0]:
            line.append((touched_s, node))
        else:
            self._serial += 1
            heapq.heappush(self._heap, (touched_s, self._serial, node))

    def _sweep(self) -> None:
        """Let go of nodes that are no more, whenever there may be as many of them as others."""
        self._line = deque(entry for entry in self._line if entry[1].parent is not None)
        self._heap[:] = [entry for entry in self._heap if entry[2].parent is not None]
        heapq.heapify(self._heap)
        self._sweep_at = max(MIN_SWEEP, 2 * (len(self._line) + len(self._heap)))

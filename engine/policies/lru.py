"""Least recently used, leaf first.

The node goes first whose last match or put is the longest ago. A parent is never older than its
child, so leaf-first and LRU agree (the order of Mattson et al., 1970, on a tree).

Nearly every node is the youngest when it joins, or is what an eviction left of the oldest: a deque
holds these. A heap holds those that join out of turn.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from hicache.engine.index.node import Node
from hicache.engine.policies.base import Entry, EvictionPolicy
from hicache.engine.policies.hazard.history import History


class Lru(EvictionPolicy):
    """The longest unused goes first."""

    wants_history = False

    def __init__(self, tier: int, history: History) -> None:
        super().__init__(tier, history)
        self._line: deque[tuple[float, Node]] = deque()
        self._heap: list[tuple[float, int, Node]] = []
        self._serial = 0
        self.lines = (self._line, self._heap)

    def join(self, node: Node) -> None:
        """See EvictionPolicy."""
        line = self._line
        if line and node.touched_s < line[0][0]:
            line.appendleft((node.touched_s, node))
        else:
            self._join_later(node)

    def take(self, worth: float) -> Entry | None:
        """See EvictionPolicy."""
        line, heap = self._line, self._heap
        if heap and not (line and line[0][0] <= heap[0][0]):
            return heappop(heap)
        return line.popleft() if line else None

    def spares(self, entry: Entry) -> bool:
        """See EvictionPolicy."""
        node: Node = entry[-1]
        if node.touched_s > entry[0]:
            self._join_later(node)
            return True
        return False

    def _join_later(self, node: Node) -> None:
        touched_s, line = node.touched_s, self._line
        if not line or touched_s >= line[-1][0]:
            line.append((touched_s, node))
        else:
            self._serial += 1
            heappush(self._heap, (touched_s, self._serial, node))

"""Least recently used, leaf first.

Rank of a node = the time it was last matched or stored; the smallest goes first. A parent is never
older than its child, so leaf-first and LRU agree (the order of Mattson et al., 1970, on a tree).

A heap with lazy updates: touching a node costs nothing here; a popped entry whose node was touched
since is pushed back at its new place.
"""

from __future__ import annotations

import heapq

from hicache.engine.index import Node
from hicache.engine.policies.base import ALWAYS


class Lru:
    """`tier` is the bit number under which nodes note that they are queued here."""

    wants_history = False

    def __init__(self, tier: int) -> None:
        self._bit = 1 << tier
        self._heap: list[tuple[float, int, Node]] = []
        self._serial = 0

    def add(self, node: Node) -> None:
        """See EvictionPolicy."""
        if not node.queued & self._bit:
            node.queued |= self._bit
            self._push(node)

    def pop(self, worth: float = ALWAYS) -> Node | None:
        """See EvictionPolicy."""
        while self._heap:
            touched_s, _, node = heapq.heappop(self._heap)
            if node.parent is None:  # merged away or removed
                continue
            if node.touched_s > touched_s:
                self._push(node)
                continue
            node.queued &= ~self._bit
            return node
        return None

    def worth(self, kind: int, touched_s: float) -> float:
        """See EvictionPolicy: whatever is new is let in."""
        return ALWAYS

    def _push(self, node: Node) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (node.touched_s, self._serial, node))

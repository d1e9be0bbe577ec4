"""What policies share that give a node a priority when it is used, aged by a rising floor.

A heap with lazy updates: an entry whose node was used since is pushed back with its new priority.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod

from hicache.engine.index.node import Node
from hicache.engine.policies.base import ALWAYS, MIN_SWEEP


class PriorityPolicy(ABC):
    """`tier` is the bit number under which nodes note that they are queued here. `inflation`: the
    priority of the last victim (L in the formulas)."""

    wants_history = True

    def __init__(self, tier: int) -> None:
        self.inflation = 0.0
        self._bit = 1 << tier
        self._heap: list[tuple[float, float, int, Node]] = []
        self._serial = 0
        self._sweep_at = MIN_SWEEP

    @abstractmethod
    def priority(self, node: Node) -> float:
        """The node's priority, were it used now."""

    def add(self, node: Node) -> None:
        """See EvictionPolicy."""
        if not node.queued & self._bit:
            node.queued |= self._bit
            if len(self._heap) >= self._sweep_at:
                self._sweep()
            self._push(node)

    def pop(self, worth: float = ALWAYS) -> Node | None:
        """See EvictionPolicy."""
        while self._heap:
            priority, touched_s, _, node = heapq.heappop(self._heap)
            if node.parent is None:  # merged away or removed
                continue
            if node.touched_s > touched_s:
                self._push(node)
                continue
            node.queued &= ~self._bit
            self.inflation = max(self.inflation, priority)
            return node
        return None

    def worth(self, kind: int, touched_s: float) -> float:
        """See EvictionPolicy: whatever is new is let in."""
        return ALWAYS

    def _push(self, node: Node) -> None:
        self._serial += 1
        entry = (self.priority(node), node.touched_s, self._serial, node)
        heapq.heappush(self._heap, entry)

    def _sweep(self) -> None:
        """Let go of nodes that are no more."""
        self._heap[:] = [entry for entry in self._heap if entry[3].parent is not None]
        heapq.heapify(self._heap)
        self._sweep_at = max(MIN_SWEEP, 2 * len(self._heap))

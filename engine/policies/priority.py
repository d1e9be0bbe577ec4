"""What policies share that give a node a priority when it is used, aged by a rising floor."""

from __future__ import annotations

from abc import abstractmethod
from heapq import heappop, heappush

from hicache.engine.index.node import Node
from hicache.engine.policies.base import Entry, EvictionPolicy
from hicache.engine.policies.hazard.history import History


class PriorityPolicy(EvictionPolicy):
    """The smallest priority goes first, of equal ones the longest unused. `inflation`: the priority
    of the last victim (L in the formulas)."""

    def __init__(self, tier: int, history: History) -> None:
        super().__init__(tier, history)
        self.inflation = 0.0
        self._heap: list[tuple[float, float, int, Node]] = []
        self._serial = 0
        self.lines = (self._heap,)

    @abstractmethod
    def priority(self, node: Node) -> float:
        """The node's priority, were it used now."""

    def join(self, node: Node) -> None:
        """See EvictionPolicy."""
        self._serial += 1
        entry = (self.priority(node), node.touched_s, self._serial, node)
        heappush(self._heap, entry)

    def take(self, worth: float) -> Entry | None:
        """See EvictionPolicy."""
        return heappop(self._heap) if self._heap else None

    def spares(self, entry: Entry) -> bool:
        """See EvictionPolicy."""
        priority, touched_s, _, node = entry
        if node.touched_s > touched_s:
            self.join(node)
            return True
        self.inflation = max(self.inflation, priority)
        return False

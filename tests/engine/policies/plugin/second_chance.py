"""Second chance, also called CLOCK: first in, first out, but a node that was used since it joined
goes to the end of the line once more.

(Corbató: "A paging experiment with the Multics system", 1968.)
"""

from __future__ import annotations

from collections import deque

from hicache.engine.index.node import Node
from hicache.engine.policies.base import Entry, EvictionPolicy
from hicache.engine.policies.hazard.history import History


class SecondChance(EvictionPolicy):
    """One line. The base puts a node that was used since it joined into it again."""

    wants_history = False

    def __init__(self, tier: int, history: History) -> None:
        super().__init__(tier, history)
        self._line: deque[tuple[float, Node]] = deque()
        self.lines = (self._line,)

    def join(self, node: Node) -> None:
        """To the end of the line."""
        self._line.append((node.touched_s, node))

    def take(self, worth: float) -> Entry | None:
        """From its front."""
        return self._line.popleft() if self._line else None

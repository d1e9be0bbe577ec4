"""S3-FIFO: a small queue that new blocks have to survive, and a main queue that forgives.

New nodes join the small queue, a tenth of the candidates. At its end a node that was used again
moves to the main queue, any other goes. A node that was known before it was stored (the history
remembers it: the original's ghost queue) joins the main queue at once. At the main queue's end a
node that was used since it joined is put back at its beginning, at most MAX_ROUNDS times for its
uses. (Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for cache eviction", SOSP'23.)
"""

from __future__ import annotations

from collections import deque
from typing import Final

from hicache.engine.index.node import Node
from hicache.engine.policies.base import Entry, EvictionPolicy
from hicache.engine.policies.hazard.history import History

SMALL_SHARE: Final = 0.1
MAX_ROUNDS: Final = 3
IN_SMALL: Final = -1
"""The rounds of an entry of the small queue."""

_Queued = tuple[int, int, float, Node]
"""Blocks, rounds left, the node's last use when it joined, the node."""


class S3Fifo(EvictionPolicy):
    """The first in goes first, out of the queue whose share is used up."""

    def __init__(self, tier: int, history: History) -> None:
        super().__init__(tier, history)
        self._small: deque[_Queued] = deque()
        self._main: deque[_Queued] = deque()
        self._small_blocks = self._main_blocks = 0
        self.lines = (self._small, self._main)

    def join(self, node: Node) -> None:
        """See EvictionPolicy."""
        if node.uses > 1:
            self._join_main(node, 0)
            return
        entry = (len(node), IN_SMALL, node.touched_s, node)
        if self._small and node.touched_s < self._small[0][2]:
            self._small.appendleft(entry)  # what a victim left of its node
        else:
            self._small.append(entry)
        self._small_blocks += len(node)

    def take(self, worth: float) -> Entry | None:
        """See EvictionPolicy."""
        share = SMALL_SHARE * (self._small_blocks + self._main_blocks)
        if self._small and (self._small_blocks >= share or not self._main):
            self._small_blocks -= self._small[0][0]
            return self._small.popleft()
        if self._main:
            self._main_blocks -= self._main[0][0]
            return self._main.popleft()
        return None

    def spares(self, entry: Entry) -> bool:
        """See EvictionPolicy."""
        _, rounds, touched_s, node = entry
        if node.touched_s > touched_s:
            rounds = 1 if rounds == IN_SMALL else min(node.uses, MAX_ROUNDS)
        if rounds > 0:
            self._join_main(node, rounds - 1)
        return bool(rounds > 0)

    def sweep(self) -> None:
        """See EvictionPolicy."""
        super().sweep()
        self._small_blocks = sum(entry[0] for entry in self._small)
        self._main_blocks = sum(entry[0] for entry in self._main)

    def _join_main(self, node: Node, rounds: int) -> None:
        self._main.append((len(node), rounds, node.touched_s, node))
        self._main_blocks += len(node)

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
from hicache.engine.policies.base import ALWAYS, MIN_SWEEP

SMALL_SHARE: Final = 0.1
MAX_ROUNDS: Final = 3


class S3Fifo:
    """`tier` is the bit number under which nodes note that they are queued here. The queues hold
    (blocks, node's last use and its rounds left when it joined, node)."""

    wants_history = True

    def __init__(self, tier: int) -> None:
        self._bit = 1 << tier
        self._small: deque[tuple[int, float, Node]] = deque()
        self._main: deque[tuple[int, float, int, Node]] = deque()
        self._small_blocks = self._main_blocks = 0
        self._sweep_at = MIN_SWEEP

    def add(self, node: Node) -> None:
        """See EvictionPolicy."""
        if node.queued & self._bit:
            return
        node.queued |= self._bit
        if len(self._small) + len(self._main) >= self._sweep_at:
            self._sweep()
        if node.uses > 1:
            self._join_main(node, 0)
        else:
            entry = (len(node), node.touched_s, node)
            if self._small and node.touched_s < self._small[0][1]:
                self._small.appendleft(entry)  # what a victim left of its node
            else:
                self._small.append(entry)
            self._small_blocks += len(node)

    def pop(self, worth: float = ALWAYS) -> Node | None:
        """See EvictionPolicy."""
        while self._small or self._main:
            share = SMALL_SHARE * (self._small_blocks + self._main_blocks)
            from_small = self._small and (self._small_blocks >= share or not self._main)
            node = self._pop_small() if from_small else self._pop_main()
            if node is not None:
                node.queued &= ~self._bit
                return node
        return None

    def worth(self, kind: int, touched_s: float) -> float:
        """See EvictionPolicy: whatever is new is let in."""
        return ALWAYS

    def _pop_small(self) -> Node | None:
        size, touched_s, node = self._small.popleft()
        self._small_blocks -= size
        if node.parent is None:  # merged away or removed
            return None
        if node.touched_s > touched_s:
            self._join_main(node, 0)
            return None
        return node

    def _pop_main(self) -> Node | None:
        size, touched_s, rounds, node = self._main.popleft()
        self._main_blocks -= size
        if node.parent is None:
            return None
        if node.touched_s > touched_s:
            rounds = min(node.uses, MAX_ROUNDS)
        if rounds > 0:
            self._join_main(node, rounds - 1)
            return None
        return node

    def _join_main(self, node: Node, rounds: int) -> None:
        self._main.append((len(node), node.touched_s, rounds, node))
        self._main_blocks += len(node)

    def _sweep(self) -> None:
        """Let go of nodes that are no more."""
        self._small = deque(entry for entry in self._small if entry[2].parent is not None)
        self._main = deque(entry for entry in self._main if entry[3].parent is not None)
        self._small_blocks = sum(entry[0] for entry in self._small)
        self._main_blocks = sum(entry[0] for entry in self._main)
        self._sweep_at = max(MIN_SWEEP, 2 * (len(self._small) + len(self._main)))

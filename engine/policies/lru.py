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

from hicache.engine.index.node import Node
from hicache.engine.policies.base import ALWAYS, MIN_SWEEP


class Lru:
    """`tier` is the bit number under which nodes note that they are queued here."""

    wants_history = False

    def __init__(self, tier: int) -> None:
        self._bit = 1 << tier
        self._line: deque[Node] = deque()
        self._since: deque[float] = deque()  # when those in the line were last used, as they joined
        self._heap: list[tuple[float, int, Node]] = []
        self._serial = 0
        self._sweep_at = MIN_SWEEP

    def add(self, node: Node) -> None:
        """See EvictionPolicy."""
        if node.queued & self._bit:
            return
        node.queued |= self._bit
        since = self._since
        if since and node.touched_s < since[0]:
            self._line.appendleft(node)
            since.appendleft(node.touched_s)
            return
        if len(since) + len(self._heap) >= self._sweep_at:
            self._sweep()
        self._put(node)

    def pop(self, worth: float = ALWAYS) -> Node | None:
        """See EvictionPolicy."""
        since, heap = self._since, self._heap
        while since or heap:
            if heap and not (since and since[0] <= heap[0][0]):
                touched_s, _, node = heapq.heappop(heap)
            else:
                node, touched_s = self._line.popleft(), since.popleft()
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
        touched_s = node.touched_s
        if not self._since or touched_s >= self._since[-1]:
            self._line.append(node)
            self._since.append(touched_s)
        else:
            self._serial += 1
            heapq.heappush(self._heap, (touched_s, self._serial, node))

    def _sweep(self) -> None:
        """Let go of nodes that are no more, whenever there may be as many of them as others."""
        entries = zip(self._since, self._line, strict=True)
        kept = [(touched_s, node) for touched_s, node in entries if node.parent is not None]
        self._since = deque(touched_s for touched_s, _ in kept)
        self._line = deque(node for _, node in kept)
        self._heap[:] = [entry for entry in self._heap if entry[2].parent is not None]
        heapq.heapify(self._heap)
        self._sweep_at = max(MIN_SWEEP, 2 * (len(kept) + len(self._heap)))

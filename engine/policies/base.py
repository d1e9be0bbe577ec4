"""What every eviction policy shares: a policy adds only its discipline, the order of its entries.

One policy object serves one tier. The cache engine adds nodes that are candidates (leaves of the
tier) and asks for the next victim. Whether a victim can go (leases, moves) the engine checks.

    add ──▶ join ──▶ [ entries, in the discipline's own lines ] ──▶ take ──▶ spares? ──▶ victim
                            ▲                                                  │
                            └───────────────────── yes ────────────────────────┘

A touch costs nothing here: the entry of a node that was used since is out of date, which shows when
it is taken. Nodes that were merged or removed leave an entry behind too. It is dropped when it is
taken, or by the sweep. A call costs O(log n) on average at most.

A policy may read of a node: `touched_s` (its last use), `depth` (blocks before it), `len(node)`,
and `uses` and `kind`, which the shared `History` keeps.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, ClassVar, Final

from hicache.engine.index.node import Node
from hicache.engine.policies.hazard.history import History

ALWAYS: Final = math.inf
"""Worth more than any block held: room is made for it."""

MIN_SWEEP: Final = 64
"""A sweep drops the entries of nodes that are gone, once there are this many entries and twice as
many as the last one left. An entry keeps its node alive, some 400 bytes."""

Entry = tuple[Any, ...]
"""The node is its last item. The default `spares` expects before it the node's `touched_s` as it
was when the entry was made. Entries of a heap need a serial number, since nodes have no order."""


class EvictionPolicy(ABC):
    """Candidates of one tier. `tier` is the tier's number; `history` is shared by all tiers.

    A subclass makes its lines (deques or heaps of entries) in its constructor, names them in
    `lines`, and says by `join` and `take` in which order entries leave.
    """

    wants_history: ClassVar[bool] = True
    """Whether it reads `uses`, `kind` or the history. If so, the engine keeps a History."""

    def __init__(self, tier: int, history: History) -> None:
        self.tier = tier
        self.history = history
        self.lines: tuple[deque[Any] | list[Any], ...] = ()
        self._bit = 1 << tier
        self._num_entries = 0
        self._sweep_at = MIN_SWEEP

    # --- the discipline -------------------------------------------------------------------------

    @abstractmethod
    def join(self, node: Node) -> None:
        """Put an entry for the node, as it is now, into a line."""

    def take(self, worth: float) -> Entry | None:
        """Take out the next entry; None when there is none that is worth less than `worth`. A
        policy that lets in every block may ignore `worth`; one with a `pop` of its own needs no
        `take`."""
        raise NotImplementedError

    def spares(self, entry: Entry) -> bool:
        """Whether the entry's node stays. If so, this has put a new entry for it into a line. By
        default a node stays that was used since it joined."""
        node: Node = entry[-1]
        if node.touched_s > entry[-2]:
            self.join(node)
            return True
        return False

    def worth(self, kind: int, touched_s: float) -> float:
        """What a block of this kind and last use is worth compared with those held. By default
        every new block is let in."""
        return ALWAYS

    # --- what the cache engine calls ------------------------------------------------------------

    def add(self, node: Node) -> None:
        """The node became a candidate. Adding it again changes nothing."""
        if node.queued & self._bit:
            return
        node.queued |= self._bit
        if self._num_entries >= self._sweep_at:
            self.sweep()
        self._num_entries += 1
        self.join(node)

    def pop(self, worth: float = ALWAYS) -> Node | None:
        """Take out the next victim; None when there is none that is worth less than `worth`. It may
        have stopped being a candidate since it was added: the caller checks."""
        while (entry := self.take(worth)) is not None:
            node: Node = entry[-1]
            if node.parent is not None:
                if self.spares(entry):
                    continue
                self._num_entries -= 1
                node.queued &= ~self._bit
                return node
            self._num_entries -= 1  # merged into another node, or removed
        return None

    def sweep(self) -> None:
        """Drop the entries of nodes that are gone."""
        for line in self.lines:
            kept = [entry for entry in line if entry[-1].parent is not None]
            line.clear()
            line.extend(kept)
            if isinstance(line, list):
                heapq.heapify(line)
        self.swept(sum(map(len, self.lines)))

    def swept(self, num_entries: int) -> None:
        """A sweep has left this many entries."""
        self._num_entries = num_entries
        self._sweep_at = max(MIN_SWEEP, 2 * num_entries)

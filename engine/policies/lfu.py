"""Least frequently used, aged: LFU with dynamic aging.

Priority of a node = L + uses, fixed when it was last used, where L is the priority of the last
victim: what was used often, but long ago, falls behind by itself. (Arlitt, Cherkasova, Dilley,
Friedrich, Jin: "Evaluating content management techniques for web proxy caches", 2000; LFU-DA.)

`uses` is counted by the history, also while the node was not held, and is never higher below than
above, so leaves go first by themselves.
"""

from __future__ import annotations

from hicache.engine.index.node import Node
from hicache.engine.policies.priority import PriorityPolicy


class Lfu(PriorityPolicy):
    """The smallest L + uses goes first."""

    def priority(self, node: Node) -> float:
        """L + uses."""
        return self.inflation + node.uses

"""Greedy-Dual-Size-Frequency: recompute cost × frequency / size, aged.

Priority of a node = L + uses · cost / size, where L is the priority of the last victim
(Cherkasova: "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy",
1998). Blocks of one namespace have one size, and the cost of computing a block again grows with the
context before it, as prefill does: 1 + depth / DEPTH_OF_DOUBLE_COST (the term n·c of the prefill's
cost, see cost.py). So of nodes used equally the one at the shorter prefix goes first.
"""

from __future__ import annotations

from typing import Final

from hicache.engine.index.node import Node
from hicache.engine.policies.priority import PriorityPolicy

DEPTH_OF_DOUBLE_COST: Final = 50.0
"""Blocks of context at which attention costs as much as the rest: 27k tokens for an 8B model, in
blocks of 512. The order hardly depends on it."""


class Gdsf(PriorityPolicy):
    """The smallest L + uses · cost goes first."""

    def priority(self, node: Node) -> float:
        """L + uses · cost."""
        return self.inflation + node.uses * (1.0 + node.depth / DEPTH_OF_DOUBLE_COST)

"""The candidates for eviction in each tier: the policies' order, parked and dismissed nodes.

    a leaf of its tier ──queue──▶ its policy ──coldest──▶ evicted
                                     ▲            │ leased or read
                                     └──unpark────┴──park

Owned by the daemon's one loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hicache.engine.index.node import Node
from hicache.engine.policies.base import ALWAYS, EvictionPolicy

DISMISSED_S: Final = -1.0
"""The time of last use of a block that is not expected to be used again: before all others."""
MAX_DISMISSED: Final = 4096


class Candidates:
    """`policies`: one for each tier. `dismissed`: nodes to evict before all others, by tier."""

    def __init__(self, policies: Sequence[EvictionPolicy]) -> None:
        self.policies = policies
        self.dismissed: list[dict[Node, None]] = [{} for _ in policies]
        self._parked: list[set[Node]] = [set() for _ in policies]

    def ranks(self, tier: int) -> bool:
        """Whether the tier's policy currently ranks blocks by worth, so that it refuses some."""
        return self.policies[tier].worth(-1, 0.0) != ALWAYS

    def queue(self, node: Node) -> None:
        """Add the node as a candidate in the tiers in which it is a leaf."""
        staying = node.staying
        holding = node.holding
        for tier in range(len(self.policies)):
            if staying >> tier & 1 and not holding[tier]:
                self.policies[tier].add(node)
                if node.touched_s == DISMISSED_S:
                    self.dismissed[tier][node] = None

    def dismiss(self, nodes: Sequence[Node]) -> None:
        """These are not expected to be used again: evict them before all others, whatever the
        policy, unless they are used. Ancestors first."""
        for node in nodes:
            node.touched_s = DISMISSED_S
        for tier, dismissed in enumerate(self.dismissed):
            if len(dismissed) > MAX_DISMISSED:
                dismissed.clear()  # a long list without evictions: leave them to the policy
            dismissed.update((node, None) for node in nodes if node.staying >> tier & 1)

    def coldest(self, tier: int, worth: float = ALWAYS) -> Node | None:
        """The next candidate for eviction, see `EvictionPolicy.pop`."""
        dismissed = self.dismissed[tier]
        while dismissed:
            node, _ = dismissed.popitem()
            if node.parent is not None and node.touched_s == DISMISSED_S:
                return node
        return self.policies[tier].pop(worth)

    def park(self, node: Node, tier: int) -> None:
        """Put a candidate that cannot be evicted now (leased, read) aside until `unpark`."""
        self._parked[tier].add(node)

    def unpark(self) -> None:
        """Leases or moves have ended: queue parked candidates again."""
        for tier, parked in enumerate(self._parked):
            for node in parked:
                if node.parent is not None:
                    self.policies[tier].add(node)
            parked.clear()

"""Which nodes may be given up next in each tier: the policies' order, and what it leaves out.

    a leaf of its tier ──queue──▶ its policy ──coldest──▶ given up
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
"""When a block that is not expected to be used again was last used: before all others."""
MAX_DISMISSED: Final = 4096


class Candidates:
    """`policies`: one for each tier. `dismissed`: nodes that go before all others, by tier."""

    def __init__(self, policies: Sequence[EvictionPolicy]) -> None:
        self.policies = policies
        self.dismissed: list[dict[Node, None]] = [{} for _ in policies]
        self._parked: list[set[Node]] = [set() for _ in policies]

    def ranks(self, tier: int) -> bool:
        """Whether the tier's policy tells now which blocks are worth more than others, so that not
        everything is let in."""
        return self.policies[tier].worth(-1, 0.0) != ALWAYS

    def queue(self, node: Node) -> None:
        """Tell the policies of the tiers in which the node is a leaf now."""
        staying = node.staying
        holding = node.holding
        for tier in range(len(self.policies)):
            if staying >> tier & 1 and not holding[tier]:
                self.policies[tier].add(node)
                if node.touched_s == DISMISSED_S:
                    self.dismissed[tier][node] = None

    def dismiss(self, nodes: Sequence[Node]) -> None:
        """Nobody is expected to ask for these again: they go before all others, whatever the
        policy, unless they are used after all. Ancestors first."""
        for node in nodes:
            node.touched_s = DISMISSED_S
        for tier, dismissed in enumerate(self.dismissed):
            if len(dismissed) > MAX_DISMISSED:
                dismissed.clear()  # nothing had to go for so long: the policy will do
            dismissed.update((node, None) for node in nodes if node.staying >> tier & 1)

    def coldest(self, tier: int, worth: float = ALWAYS) -> Node | None:
        """The candidate to go next, as `EvictionPolicy.pop` gives it."""
        dismissed = self.dismissed[tier]
        while dismissed:
            node, _ = dismissed.popitem()
            if node.parent is not None and node.touched_s == DISMISSED_S:
                return node
        return self.policies[tier].pop(worth)

    def park(self, node: Node, tier: int) -> None:
        """A candidate that cannot go now (leased, read): queued again by `unpark`."""
        self._parked[tier].add(node)

    def unpark(self) -> None:
        """Leases or moves ended: parked candidates may go now."""
        for tier, parked in enumerate(self._parked):
            for node in parked:
                if node.parent is not None:
                    self.policies[tier].add(node)
            parked.clear()

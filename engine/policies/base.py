"""The protocol behind which every eviction policy stands.

One policy object serves one tier. The cache engine tells it which nodes are candidates (leaves of
the tier) and asks for the next victim; whether a victim can go (leases, moves) is not its business.
Candidates are kept, never rebuilt: a call costs O(log n) at most, on average.
"""

from __future__ import annotations

from typing import Protocol

from hicache.engine.node import Node


class EvictionPolicy(Protocol):
    """Candidates of one tier, coldest first."""

    def add(self, node: Node) -> None:
        """The node became a candidate. Adding it again changes nothing."""

    def pop(self) -> Node | None:
        """The coldest candidate, taken out; None when there is none. A node that stopped being one
        since it was added may come out too: the caller checks."""

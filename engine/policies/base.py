"""The protocol behind which every eviction policy stands.

One policy object serves one tier. The cache engine tells it which nodes are candidates (leaves of
the tier) and asks for the next victim; whether a victim can go (leases, moves) is not its business.
Candidates are kept, never rebuilt: a call costs O(log n) at most, on average.

A policy that wants to know more of a node than when it was last used reads `node.uses` and
`node.kind`, which the shared `History` keeps; LRU needs none.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

from hicache.engine.index.node import Node

ALWAYS: Final = math.inf
"""Worth more than anything held: room is made for it."""

MIN_SWEEP: Final = 64
"""Candidates come and go unseen (merged, forgotten, used again): fewer entries than this are not
looked through for those that stand for nothing any more; more are, whenever they have doubled. Each
keeps a node alive, some 400 bytes: of 1,024 in each of three tiers a mebibyte, bit by bit."""


class EvictionPolicy(Protocol):
    """Candidates of one tier, coldest first."""

    wants_history: bool
    """Whether it reads `uses` or `kind`: then the engine keeps a History."""

    def add(self, node: Node) -> None:
        """The node became a candidate, or its kind has changed. Adding it again changes nothing
        else."""

    def pop(self, worth: float = ALWAYS) -> Node | None:
        """The coldest candidate, taken out; None when there is none that is worth less than
        `worth`. A node that stopped being one since it was added may come out too: the caller
        checks."""

    def worth(self, kind: int, touched_s: float) -> float:
        """What a block of this kind, last used then, is worth beside those held: more is warmer."""

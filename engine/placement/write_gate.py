"""Decides which evicted blocks are written to the persistent tier: those likely to be reused, as
far as the device's endurance allows.

A block passes if its probability of reuse is at least the one demanded now:

    demanded = max(min_return, 1 - balance / allowance)

The allowance is the budget for BURST_S seconds, the balance what is left of it: it grows at the
budget's rate and shrinks with every written byte. So with a full balance only `min_return` counts,
with a shrinking one only the likeliest blocks pass, with an empty one none, and a day's writes stay
within the budget. Without a model a block's probability is UNKNOWN_RETURN.

Blocks that a put waits for, and the writes of a clean stop, are counted but never refused. Owned by
the daemon's one loop.
"""

from __future__ import annotations

import math
from typing import Final

from hicache.engine.index.node import Node
from hicache.engine.policies.hazard.history import History

BURST_S: Final = 3600.0
UNKNOWN_RETURN: Final = 0.5


class WriteGate:
    """`min_return`: a probability; `bytes_per_s`: the budget, infinite where there is none.
    `refused_blocks`: the number of blocks dropped instead of written."""

    def __init__(
        self, history: History | None, min_return: float = 0.0, bytes_per_s: float = math.inf
    ) -> None:
        self.history = history
        self.min_return = min_return
        self.bytes_per_s = bytes_per_s
        self.balance_bytes = self._allowance
        self.refused_blocks = 0
        self._now_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether all blocks pass."""
        return not self.min_return and self.bytes_per_s == math.inf

    @property
    def demanded(self) -> float:
        """The probability of reuse that is demanded now."""
        if self.bytes_per_s == math.inf:
            return self.min_return
        return max(self.min_return, 1.0 - self.balance_bytes / self._allowance)

    def configure(self, min_return: float, bytes_per_s: float) -> None:
        """Change the settings. A new budget starts with its full allowance."""
        self.min_return = min_return
        if bytes_per_s != self.bytes_per_s:
            self.bytes_per_s = bytes_per_s
            self.balance_bytes = self._allowance

    def pass_time(self, now_s: float) -> None:
        """Let the balance grow until `now_s`."""
        if self._now_s is not None and self.bytes_per_s < math.inf:
            earned = (now_s - self._now_s) * self.bytes_per_s
            self.balance_bytes = min(self._allowance, self.balance_bytes + earned)
        self._now_s = now_s

    def written(self, num_bytes: int) -> None:
        """Take `num_bytes` submitted for writing off the balance."""
        self.balance_bytes -= num_bytes

    def admits(self, node: Node) -> bool:
        """Whether to write this node instead of dropping it. Nodes with children always pass."""
        return self.is_open or bool(node.children) or self.return_of(node) >= self.demanded

    def return_of(self, node: Node) -> float:
        """The probability that the node is used again."""
        model = self.history.model if self.history is not None else None
        if model is None or self.history is None:
            return UNKNOWN_RETURN
        return model.returns_at(node.kind, self.history.now_s - node.touched_s)

    @property
    def _allowance(self) -> float:
        return self.bytes_per_s * BURST_S

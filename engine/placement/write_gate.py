"""Which blocks are written to the durable tier when memory gives them up: those likely to return,
as far as the device's endurance allows.

A block passes if it will be asked for again with at least the probability that is demanded now:

    demanded = max(min_return, 1 - balance / allowance)

The allowance is what the budget gives in BURST_S seconds, the balance what is left of it: it fills
at the budget's rate and every written byte empties it. So a full balance takes whatever
`min_return` lets through, an emptying one the likeliest only, an empty one nothing, and the writes
of a day come to the budget and not more. Where no model tells, a block counts as UNKNOWN_RETURN.

What somebody waits for to be durable, and what a clean stop writes, is counted and not refused.
Owned by the daemon's one loop.
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
    `refused_blocks` were forgotten instead of being written."""

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
        """Whether everything passes."""
        return not self.min_return and self.bytes_per_s == math.inf

    @property
    def demanded(self) -> float:
        """The probability of return that is demanded now."""
        if self.bytes_per_s == math.inf:
            return self.min_return
        return max(self.min_return, 1.0 - self.balance_bytes / self._allowance)

    def configure(self, min_return: float, bytes_per_s: float) -> None:
        """A live change. A new budget starts with its whole allowance."""
        self.min_return = min_return
        if bytes_per_s != self.bytes_per_s:
            self.bytes_per_s = bytes_per_s
            self.balance_bytes = self._allowance

    def pass_time(self, now_s: float) -> None:
        """It is so late: the balance has grown."""
        if self._now_s is not None and self.bytes_per_s < math.inf:
            earned = (now_s - self._now_s) * self.bytes_per_s
            self.balance_bytes = min(self._allowance, self.balance_bytes + earned)
        self._now_s = now_s

    def written(self, num_bytes: int) -> None:
        """So much is on its way to the device."""
        self.balance_bytes -= num_bytes

    def admits(self, node: Node) -> bool:
        """Whether to write this node, rather than to forget it. What others hang from is kept."""
        return self.is_open or bool(node.children) or self.return_of(node) >= self.demanded

    def return_of(self, node: Node) -> float:
        """The probability that the node is asked for again."""
        model = self.history.model if self.history is not None else None
        if model is None or self.history is None:
            return UNKNOWN_RETURN
        return model.returns_at(node.kind, self.history.now_s - node.touched_s)

    @property
    def _allowance(self) -> float:
        return self.bytes_per_s * BURST_S

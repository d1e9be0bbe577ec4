"""Tiers that can be read but refuse new blocks: a full volume, an I/O error on writing.

    open ──rejected──▶ shut ──pause is over──▶ on trial ──took a block──▶ open
                        ▲                             │
                        └───────rejected, twice as long┘

While a tier is shut, blocks are evicted as if it did not exist, so that puts find room. On trial it
is offered one block at a time. Without the pause each failed copy would be retried at once, for
ever, and every put would wait for it.

Owned by the daemon's one loop; time comes with the events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0


@dataclass(slots=True)
class Shut:
    """Why a tier takes nothing, until when, and the length of the pause."""

    reason: str
    until_s: float
    pause_s: float


class Backoff:
    """The tiers that take no blocks for now."""

    def __init__(self) -> None:
        self.shut: dict[int, Shut] = {}
        self.trials: dict[int, Shut] = {}

    def takes(self, tier: int) -> bool:
        """Whether blocks may be sent to the tier now."""
        return tier not in self.shut

    def rejected(self, tier: int, reason: str, now_s: float) -> None:
        """The tier refused a block. Later refusals by a tier that is shut already are ignored."""
        if tier in self.shut:
            return
        last = self.trials.pop(tier, None)
        pause_s = min(LONGEST_PAUSE_S, 2 * last.pause_s) if last is not None else FIRST_PAUSE_S
        self.shut[tier] = Shut(reason, now_s + pause_s, pause_s)

    def took(self, tier: int) -> None:
        """The tier took a block: it is open, and the next pause is short again."""
        self.shut.pop(tier, None)
        self.trials.pop(tier, None)

    def tick(self, now_s: float) -> None:
        """Put tiers whose pause is over on trial."""
        for tier in [t for t, shut in self.shut.items() if now_s >= shut.until_s]:
            self.trials[tier] = self.shut.pop(tier)

    def reasons(self) -> dict[int, str]:
        """Tier → why it takes nothing, or refused the last block."""
        return {tier: shut.reason for tier, shut in (self.trials | self.shut).items()}

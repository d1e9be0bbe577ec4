"""The cache engine's counters, for `stats`. Owned by the daemon's one loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hicache.engine.residency.leases import Lease


@dataclass(slots=True)
class TierCounts:
    """One tier's counters. `hits` counts blocks."""

    hits: int = 0
    hit_tokens: int = 0
    bytes_served: int = 0
    seconds_saved: float = 0.0


@dataclass(slots=True)
class Ledger:
    """Counters since the start. A hit block counts once, in the tier that it was read from."""

    tiers: dict[str, TierCounts]
    matches: int = 0
    decisions: dict[str, int] = field(
        default_factory=lambda: {"reload": 0, "partial": 0, "recompute": 0}
    )
    reasons: dict[str, int] = field(default_factory=dict)

    def decided(self, name: str, reason: str) -> None:
        """Count a match and its decision."""
        self.matches += 1
        self.decisions[name] += 1
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def served(self, lease: Lease, num_blocks: int, block_tokens: int, block_bytes: int) -> None:
        """Count the first `num_blocks` of a lease, which were readable, at its end."""
        total = max(1, num_blocks)
        saved_s = lease.decision.recompute_s - lease.decision.reload_s - lease.decision.prefill_s
        for run in lease.runs:
            blocks = min(run.num_blocks, num_blocks)
            num_blocks -= blocks
            counts = self.tiers[run.tier]
            counts.hits += blocks
            counts.hit_tokens += blocks * block_tokens
            counts.bytes_served += blocks * block_bytes
            counts.seconds_saved += max(0.0, saved_s) * blocks / total

    def planner_summary(self) -> dict[str, Any]:
        """Decisions and reasons, for `stats`."""
        return {"decisions": dict(self.decisions), "reasons": dict(self.reasons)}

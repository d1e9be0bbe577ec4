"""Measured bandwidth of a link, from its probe and its real batches. Used by the daemon's loop."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY_BYTES = 256 << 20
"""After this many bytes more, an old measurement counts 1/e."""


@dataclass(slots=True)
class Meter:
    """Totals since the start, and a bandwidth that follows recent batches, weighted by bytes."""

    num_bytes: int = 0
    seconds: float = 0.0
    num_batches: int = 0
    bytes_per_s: float = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        """A batch took so long. One of no bytes or no time tells nothing."""
        if num_bytes <= 0 or seconds <= 0.0:
            return
        self.num_bytes += num_bytes
        self.seconds += seconds
        self.num_batches += 1
        # An average of seconds per byte, so that slow batches weigh by the time they cost.
        weight = max(num_bytes / (num_bytes + MEMORY_BYTES), 1.0 / self.num_batches)
        old = 1.0 / self.bytes_per_s if self.bytes_per_s else 0.0
        self.bytes_per_s = 1.0 / (old * (1.0 - weight) + weight * seconds / num_bytes)

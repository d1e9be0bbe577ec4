"""Whether one queue of a worker makes progress, judged by its replies and its finished batches.

    ping ──▶ the queue, between its batches ──▶ pong
    a batch ─────────────────────────────────▶ its outcomes

A queue is overdue from when it was sent a ping or a batch until anything comes back; a slow device
that makes progress is never overdue for long. Owned by the supervisor; pure.
"""

from __future__ import annotations

from typing import Final

EVERY_S: Final = 1.0


class Liveness:
    """Of the queue `name` (queues.py)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._pinged_s: float | None = None
        self._heard_s = 0.0

    def begin(self, now_s: float) -> None:
        """A new process has started: forget what the last one was sent."""
        self._pinged_s = None
        self._heard_s = now_s

    def is_due(self, now_s: float) -> bool:
        """Whether to send a ping now."""
        return self._pinged_s is None and now_s - self._heard_s >= EVERY_S

    def pinged(self, now_s: float) -> None:
        """A ping was sent."""
        self._pinged_s = now_s

    def answered(self, now_s: float) -> None:
        """The pong came."""
        self._pinged_s = None
        self._heard_s = now_s

    def moved(self, now_s: float) -> None:
        """A batch came back, or the daemon did not read for a while: count from now."""
        self._heard_s = now_s

    def overdue_s(self, now_s: float, oldest_batch_s: float | None) -> float:
        """For how long something has been due; 0 if nothing is."""
        since = [s for s in (self._pinged_s, oldest_batch_s) if s is not None]
        return max(0.0, now_s - max(min(since), self._heard_s)) if since else 0.0

"""Whether one way of a worker goes on, judged by what it does and not by its being there.

    asked ──▶ the way's own queue, between its batches ──▶ answered
    a batch sent ─────────────────────────────────────────────▶ its outcomes

It owes an answer from when it was asked, or sent a batch, until something comes of it; a device
that is slow but goes on never owes one for long. Owned by the mover; pure.
"""

from __future__ import annotations

from typing import Final

EVERY_S: Final = 1.0


class Pulse:
    """One way's. `name` is its name (queues.py)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._asked_s: float | None = None
        self._heard_s = 0.0

    def begin(self, now_s: float) -> None:
        """A new process: whatever the last one owed is forgotten."""
        self._asked_s = None
        self._heard_s = now_s

    def is_due(self, now_s: float) -> bool:
        """Whether to ask now."""
        return self._asked_s is None and now_s - self._heard_s >= EVERY_S

    def asked(self, now_s: float) -> None:
        """The question is on its way."""
        self._asked_s = now_s

    def answered(self, now_s: float) -> None:
        """It came to the question."""
        self._asked_s = None
        self._heard_s = now_s

    def moved(self, now_s: float) -> None:
        """A batch came back, or nobody listened for a while: it owes nothing older than this."""
        self._heard_s = now_s

    def owes_s(self, now_s: float, oldest_batch_s: float | None) -> float:
        """For how long it has owed an answer; 0 if it owes none."""
        since = [s for s in (self._asked_s, oldest_batch_s) if s is not None]
        return max(0.0, now_s - max(min(since), self._heard_s)) if since else 0.0

"""Failures between a client and the daemon, and the client's circuit breaker.

The text of each exception is a sentence for people: it becomes the client's `last_error`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hicache.protocol.messages import WireError


class DaemonAbsent(Exception):
    """No reply came, and none will."""


class BreakerOpen(DaemonAbsent):
    """The request was not sent, because the circuit breaker is open."""


class DaemonError(Exception):
    """The reply to one request was an error: its code and its sentence."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code
        self.message = message


TROUBLE: Final = (DaemonAbsent, DaemonError, WireError)
"""The failures that a call turns into a miss."""


@dataclass(slots=True)
class Breaker:
    """After a failure, calls are refused until a retry time; then one probe is let through.

    The first wait is `first_s`; each further failure doubles it, up to `last_s`.
    """

    first_s: float = 0.1
    last_s: float = 2.0
    failures: int = 0
    opened_s: float = 0.0
    retry_s: float = 0.0
    why: str = ""

    def admit(self, now_s: float) -> None:
        """Raises BreakerOpen while calls are refused. Otherwise this call is the probe, and others
        are refused until its outcome is known or its time is up."""
        if not self.failures:
            return
        if now_s < self.retry_s:
            raise BreakerOpen(self.why)
        self.retry_s = now_s + self._wait_s()

    def record_failure(self, now_s: float, started_s: float, why: str) -> None:
        """A call that began at `started_s` failed. A call that had begun before the breaker opened
        failed for the same reason and is not counted again."""
        if self.failures and started_s < self.opened_s:
            return
        self.failures += 1
        self.opened_s = now_s
        self.retry_s = now_s + self._wait_s()
        self.why = why

    def record_success(self) -> None:
        self.failures = 0

    def _wait_s(self) -> float:
        return min(self.last_s, self.first_s * 2.0 ** min(self.failures - 1, 16))

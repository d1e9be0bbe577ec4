"""Observers keep a record of what clients asked for. They run when no client waits for an answer.

Used from the daemon's loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, Protocol

from hicache.daemon.sessions import Session
from hicache.daemon.upkeep.supervised import Faults

MAX_PENDING: Final = 64


class Observer(Protocol):
    """Records requests after their answers have been sent."""

    def asked(self, session: Session, tokens: bytes, conversation: str, now_s: float) -> None:
        """A prompt was matched."""

    def hinted(
        self, session: Session, conversation: str, stop: str, answer_tokens: int, now_s: float
    ) -> None:
        """An answer of a conversation ended, for this reason, after this many tokens."""


class Observers:
    """Notes of requests, kept until `deliver` hands them to every observer.

    Each observer has its own `Faults`: one that fails and rests does not stop the others."""

    def __init__(self, observers: Mapping[str, Observer] | None = None) -> None:
        self._present = [(Faults(name), each) for name, each in (observers or {}).items()]
        self._pending: list[Callable[[Observer], None]] = []

    @property
    def faults(self) -> list[Faults]:
        return [faults for faults, _ in self._present]

    def note(self, notify: Callable[[Observer], None]) -> None:
        """Have each observer notified soon."""
        if self._present:
            self._pending.append(notify)
            if len(self._pending) >= MAX_PENDING:
                self.deliver()

    def deliver(self) -> None:
        """Notify every observer of each pending request once, in order."""
        pending, self._pending = self._pending, []
        for notify in pending:
            for faults, observer in self._present:
                faults.guard(partial(notify, observer))

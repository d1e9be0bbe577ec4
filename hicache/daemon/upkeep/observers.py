"""Those who keep a record of what was asked for: they get to know it when no client waits.

Used from the daemon's loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

from hicache.daemon.sessions import Session
from hicache.daemon.upkeep.supervised import Faults

MAX_UNTOLD: Final = 64


class Witness(Protocol):
    """Somebody who notes what was asked for, when the answer has left."""

    def asked(self, session: Session, tokens: bytes, conversation: str, now_s: float) -> None:
        """A prompt came."""

    def hinted(
        self, session: Session, conversation: str, stop: str, answer_tokens: int, now_s: float
    ) -> None:
        """An answer of a conversation ended, for this reason, after so many tokens."""


class Witnesses:
    """`present`: who is told. What goes wrong with them is counted in `faults`."""

    def __init__(self) -> None:
        self.present: Sequence[Witness] = ()
        self.faults = Faults("who notes what is asked for")
        self._untold: list[Callable[[Witness], None]] = []

    def note(self, told: Callable[[Witness], None]) -> None:
        """To be told soon."""
        if self.present:
            self._untold.append(told)
            if len(self._untold) >= MAX_UNTOLD:
                self.tell()

    def tell(self) -> None:
        """In order, each thing once."""
        untold, self._untold = self._untold, []
        for told in untold:
            for witness in self.present:
                self.faults.guard(partial(told, witness))

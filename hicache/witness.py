"""Who notes what is asked for, beside those who answer it."""

from __future__ import annotations

from typing import Protocol

from hicache.session import Session


class Witness(Protocol):
    """Somebody who notes what was asked for, when the answer has left."""

    def asked(self, session: Session, tokens: bytes, conversation: str, now_s: float) -> None:
        """A prompt came."""

    def hinted(
        self, session: Session, conversation: str, stop: str, answer_tokens: int, now_s: float
    ) -> None:
        """An answer of a conversation ended, for this reason, after so many tokens."""

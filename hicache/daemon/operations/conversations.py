"""Which prompt a conversation has come to, by the name that the inference engine gives it.

So a hint needs no tokens. A prompt that does not extend the one before says nothing: agents go back
and forth between contexts under one name. Bounded by the bytes of the prompts, the longest unheard
of go first; a forgotten conversation costs hits only. Used from the daemon's loop only.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

MAX_BYTES: Final = 32 << 20
"""Prompts are the messages' own bytes: 32 KiB for 8,192 tokens."""


class Conversations:
    """The newest prompt of each, by (namespace, name)."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._prompts: OrderedDict[tuple[int, str], bytes] = OrderedDict()
        self._num_bytes = 0
        self._max_bytes = max_bytes

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def num_bytes(self) -> int:
        """What the prompts take."""
        return self._num_bytes

    def newest(self, namespace: int, name: str) -> bytes:
        """The prompt it has come to; b"" where it is not known."""
        return self._prompts.get((namespace, name), b"")

    def went_on(self, namespace: int, name: str, tokens: bytes) -> None:
        """It asks for this prompt now."""
        self.ended(namespace, name)
        self._prompts[namespace, name] = tokens
        self._num_bytes += len(tokens)
        while self._num_bytes > self._max_bytes:
            self.ended(*next(iter(self._prompts)))

    def ended(self, namespace: int, name: str) -> None:
        """It is over."""
        self._num_bytes -= len(self._prompts.pop((namespace, name), b""))

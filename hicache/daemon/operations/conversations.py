"""The newest prompt of each conversation, by the name that the inference engine gives it.

So a hint needs no tokens. A prompt need not extend the one before: agents go back and forth between
contexts under one name. Bounded by the bytes of the prompts; the conversations whose last request
is longest ago are forgotten first, which costs hits only. Used from the daemon's loop only.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

MAX_BYTES: Final = 32 << 20
"""Prompts are the messages' own bytes: 32 KiB for 8,192 tokens."""


class Conversations:
    """By (namespace, name)."""

    def __init__(self, _: object = None, max_bytes: int = MAX_BYTES) -> None:
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
        """b"" where the conversation is not known."""
        return self._prompts.get((namespace, name), b"")

    def went_on(self, namespace: int, name: str, tokens: bytes) -> None:
        """A match or a hint of the conversation names this prompt."""
        self.ended(namespace, name)
        self._prompts[namespace, name] = tokens
        self._num_bytes += len(tokens)
        while self._num_bytes > self._max_bytes:
            self.ended(*next(iter(self._prompts)))

    def ended(self, namespace: int, name: str) -> None:
        """Forget it."""
        self._num_bytes -= len(self._prompts.pop((namespace, name), b""))

"""The newest prompt of each conversation, by the inference engine's name for it.

So a hint needs no tokens. A prompt need not extend the one before: agents switch between contexts
under one name. The bytes of all prompts are limited; the conversations with the oldest last request
are dropped first, which costs hits only. Used from the daemon's loop only.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

MAX_BYTES: Final = 32 << 20
"""A prompt of 8,192 tokens takes 32 KiB."""


class Conversations:
    """Newest prompts by (namespace, name)."""

    def __init__(self, _: object = None, max_bytes: int = MAX_BYTES) -> None:
        self._prompts: OrderedDict[tuple[int, str], bytes] = OrderedDict()
        self._num_bytes = 0
        self._max_bytes = max_bytes

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def num_bytes(self) -> int:
        """Bytes of all prompts."""
        return self._num_bytes

    def newest(self, namespace: int, name: str) -> bytes:
        """The conversation's newest prompt; b"" where it is unknown."""
        return self._prompts.get((namespace, name), b"")

    def went_on(self, namespace: int, name: str, tokens: bytes) -> None:
        """Set the conversation's newest prompt."""
        self.ended(namespace, name)
        self._prompts[namespace, name] = tokens
        self._num_bytes += len(tokens)
        while self._num_bytes > self._max_bytes:
            self.ended(*next(iter(self._prompts)))

    def ended(self, namespace: int, name: str) -> None:
        """Drop the conversation."""
        self._num_bytes -= len(self._prompts.pop((namespace, name), b""))

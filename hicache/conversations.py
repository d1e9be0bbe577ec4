"""Which prompt a conversation has come to, by the name that the inference engine gives it.

So a hint needs no tokens, and a conversation that goes on elsewhere (its context was cut or
rewritten) is noticed: nobody will ask for its old end again. Bounded by the bytes of the prompts,
the longest unheard of go first; a forgotten conversation costs hits only. Used from the daemon's
loop only.
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

    def newest(self, namespace: int, name: str) -> bytes:
        """The prompt it has come to; b"" where it is not known."""
        return self._prompts.get((namespace, name), b"")

    def went_on(self, namespace: int, name: str, tokens: bytes, step: int) -> bytes:
        """It asks for this prompt now, in blocks of `step` bytes. Returns the prompt it has left
        behind, b"" where the new one extends it."""
        before = self._forget(namespace, name)
        self._prompts[namespace, name] = tokens
        self._num_bytes += len(tokens)
        while self._num_bytes > self._max_bytes:
            self._forget(*next(iter(self._prompts)))
        whole = len(before) // step * step
        return b"" if tokens.startswith(before[:whole]) else before

    def ended(self, namespace: int, name: str) -> None:
        """It is over."""
        self._forget(namespace, name)

    def _forget(self, namespace: int, name: str) -> bytes:
        prompt = self._prompts.pop((namespace, name), b"")
        self._num_bytes -= len(prompt)
        return prompt

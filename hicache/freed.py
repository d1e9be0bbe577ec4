"""Memory that was freed goes back to the machine now and then.

The C library keeps what ZeroMQ's buffers and large messages leave behind in pieces; without this
the daemon's own memory creeps up for hours although nothing in it grows (a soak of 30 minutes:
9.6 % in its last 15, none of it Python's). One call takes a few milliseconds. Used from the
daemon's loop only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

EVERY_S: Final = 60.0


class FreedMemory:
    """`tick` gives it back when it is time; where the C library cannot do that, nothing happens."""

    def __init__(self, now_s: float) -> None:
        self._due_s = now_s + EVERY_S
        self._trim: Callable[[int], object] | None = None
        try:
            self._trim = ctypes.CDLL(None).malloc_trim
        except (AttributeError, OSError):
            return  # not glibc

    def tick(self, now_s: float) -> None:
        """Once a minute."""
        if self._trim is not None and now_s >= self._due_s:
            self._due_s = now_s + EVERY_S
            self._trim(0)

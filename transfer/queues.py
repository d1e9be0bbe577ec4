"""The ways of a device: each a queue in the mover, and threads (on a GPU a stream) in the worker.

A disk and host memory have two, from the device and to it: a batch takes the medium itself, so
another beside it would only be slower. A GPU has two for every priority, or a request's blocks
would wait behind as many batches of demotions as it takes to keep the link busy:

    disk    read                                          write
    GPU     read-demand  read-prefetch  read-demotion     write-demand  write-prefetch …

Ways keep no order among themselves, and need none: a slot belongs to one move at a time, until its
outcome was told.
"""

from __future__ import annotations

from typing import Final, Literal

from hicache.engine.plan import Priority

Heading = Literal["read", "write"]
"""From the device, or to it."""
PAGE_WAYS: Final = ("pages", "load", "save")
"""A GPU's other ways, for inference engines' own pages (page_worker.py)."""
HEADINGS: Final[tuple[Heading, ...]] = ("read", "write")


def way_of(heading: Heading, priority: Priority, by_priority: bool) -> str:
    """The way that carries a move of this priority."""
    return f"{heading}-{priority.name.lower()}" if by_priority else heading


def ways_of(by_priority: bool) -> dict[str, Heading]:
    """All ways of a device, the most urgent ones first, reading before writing."""
    urgent_first = [(heading, p) for p in Priority for heading in HEADINGS]
    return {way_of(heading, p, by_priority): heading for heading, p in urgent_first}

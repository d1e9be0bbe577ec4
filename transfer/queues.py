"""The names of a device's queues: each is a queue in the mover, and threads in the worker.

A disk and host memory have two, from the device and to it: one batch uses the whole medium, so
batches in parallel would only be slower. A GPU has two for every priority, each with its stream:
otherwise a request's blocks would wait behind the batches of demotions that keep the link busy:

    disk    read                                          write
    GPU     read-demand  read-prefetch  read-demotion     write-demand  write-prefetch …

No order is kept between queues, and none is needed: a slot belongs to one move at a time, until the
move's outcome was reported.
"""

from __future__ import annotations

from typing import Final, Literal

from hicache.engine.plan import Priority

Direction = Literal["read", "write"]
"""From the device, or to it."""
PAGE_QUEUES: Final = ("pages", "load", "save")
"""A GPU's further queues, for inference engines' own pages (page_worker.py)."""
DIRECTIONS: Final[tuple[Direction, ...]] = ("read", "write")


def queue_name(direction: Direction, priority: Priority, by_priority: bool) -> str:
    """The queue for a move of this direction and priority."""
    return f"{direction}-{priority.name.lower()}" if by_priority else direction


def queue_names(by_priority: bool) -> dict[str, Direction]:
    """All queues of a device by name, the most urgent first, reading before writing."""
    urgent_first = [(direction, p) for p in Priority for direction in DIRECTIONS]
    return {queue_name(direction, p, by_priority): direction for direction, p in urgent_first}

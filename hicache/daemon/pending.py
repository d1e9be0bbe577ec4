"""Requests that cannot be answered yet: fetches, puts without room, commits that want the disk,
warmings whose end is waited for.

Each has a deadline; when it passes the request gets what there is by then. Exactly one final reply
leaves for every request. Used from the daemon's loop only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Any

import msgspec

from hicache.engine.plan import ReadyRun

Part = bytes | memoryview
"""Of a message, behind its map: one block's bytes."""


class Peer(msgspec.Struct):
    """Where a reply goes, and for which request."""

    routing_id: bytes
    request_id: int


@dataclass(slots=True)
class WaitingFetch:
    """`arrived` marks the lease's blocks that the client has been told of; `unsent` could be told
    of, were it not for what the client has still to read; `is_complete`: no more will come;
    `by_worker`: it is told which blocks the GPU worker can read, and gets none of them."""

    peer: Peer
    session: bytes
    lease: int
    deadline_s: float
    arrived: bytearray
    unsent: deque[ReadyRun] = field(default_factory=deque)
    is_complete: bool = False
    by_worker: bool = False

    def mark(self, run: ReadyRun) -> None:
        """The client is told of these."""
        count = len(run.slots)
        self.arrived[run.first : run.first + count] = b"\1" * count

    def prefix_blocks(self) -> int:
        """How many blocks from the front have arrived without a gap."""
        gap = self.arrived.find(0)
        return len(self.arrived) if gap < 0 else gap


@dataclass(slots=True)
class WaitingPut:
    """A put for which room may come. `event` is asked again whenever something was freed."""

    peer: Peer
    session: bytes
    event: Any
    deadline_s: float


@dataclass(slots=True)
class WaitingCommit:
    """A durable commit: `committed` blocks are visible and on their way to the durable tier."""

    peer: Peer
    ticket: int
    committed: int
    deadline_s: float


@dataclass(slots=True)
class Waiting:
    """Everything that waits, by what it waits for."""

    fetches: dict[int, WaitingFetch] = field(default_factory=dict)
    puts: list[WaitingPut] = field(default_factory=list)
    commits: dict[int, WaitingCommit] = field(default_factory=dict)
    warms: dict[int, Peer] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.fetches) + len(self.puts) + len(self.commits) + len(self.warms)

    def put_bytes(self) -> int:
        """What the prompts of waiting puts take."""
        return sum(len(put.event.tokens) for put in self.puts)

    @property
    def is_sending(self) -> bool:
        """Whether a fetch waits for its client to read."""
        return any(fetch.unsent for fetch in self.fetches.values())

    def next_fetch_deadline_s(self) -> float:
        """The earliest one, infinity when there is none. The others may be answered a little late:
        nobody computes meanwhile."""
        return min([fetch.deadline_s for fetch in self.fetches.values()], default=inf)

    def overdue_fetches(self, now_s: float) -> list[WaitingFetch]:
        """Taken out."""
        late = [fetch for fetch in self.fetches.values() if fetch.deadline_s <= now_s]
        for fetch in late:
            del self.fetches[fetch.lease]
        return late

    def overdue_commits(self, now_s: float) -> list[WaitingCommit]:
        """Taken out."""
        late = [commit for commit in self.commits.values() if commit.deadline_s <= now_s]
        for commit in late:
            del self.commits[commit.ticket]
        return late

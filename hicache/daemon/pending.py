"""Requests that cannot be answered yet: fetches, puts without room, durable commits, warmings.

Each has a deadline, at which it gets what has come by then. Every request gets exactly one final
reply. Used from the daemon's loop only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Any

import msgspec

from hicache.engine.plan import ReadyRun

Part = bytes | memoryview
"""One block's bytes, a part of a message after its map."""


class Peer(msgspec.Struct):
    """The client to reply to, and the request's number."""

    routing_id: bytes
    request_id: int


@dataclass(slots=True)
class WaitingFetch:
    """`arrived` marks the lease's blocks that were reported to the client; `unsent`: runs that wait
    until the client has read earlier ones; `is_complete`: no more will come; `by_worker`: it gets
    the runs that the GPU worker can read, without their bytes."""

    peer: Peer
    session: bytes
    lease: int
    deadline_s: float
    arrived: bytearray
    unsent: deque[ReadyRun] = field(default_factory=deque)
    is_complete: bool = False
    by_worker: bool = False

    def mark(self, run: ReadyRun) -> None:
        """Mark a run as reported to the client."""
        count = len(run.slots)
        self.arrived[run.first : run.first + count] = b"\1" * count

    def prefix_blocks(self) -> int:
        """The number of blocks from the front that have arrived without a gap."""
        gap = self.arrived.find(0)
        return len(self.arrived) if gap < 0 else gap


@dataclass(slots=True)
class WaitingPut:
    """A put for which room may come. `event` is repeated whenever blocks were freed."""

    peer: Peer
    session: bytes
    event: Any
    deadline_s: float


@dataclass(slots=True)
class WaitingCommit:
    """A durable commit: `committed` blocks are visible and are being written."""

    peer: Peer
    ticket: int
    committed: int
    deadline_s: float


@dataclass(slots=True)
class Waiting:
    """All waiting requests, by kind."""

    fetches: dict[int, WaitingFetch] = field(default_factory=dict)
    puts: list[WaitingPut] = field(default_factory=list)
    commits: dict[int, WaitingCommit] = field(default_factory=dict)
    warms: dict[int, Peer] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.fetches) + len(self.puts) + len(self.commits) + len(self.warms)

    def put_bytes(self) -> int:
        """Bytes of the prompts of waiting puts."""
        return sum(len(put.event.tokens) for put in self.puts)

    @property
    def is_sending(self) -> bool:
        """Whether a fetch waits until its client has read."""
        return any(fetch.unsent for fetch in self.fetches.values())

    def next_fetch_deadline_s(self) -> float:
        """The earliest deadline of a fetch, infinity when there is none. Other requests may be
        answered a little late, since no inference engine waits for them to compute."""
        return min([fetch.deadline_s for fetch in self.fetches.values()], default=inf)

    def overdue_fetches(self, now_s: float) -> list[WaitingFetch]:
        """Remove and return them."""
        late = [fetch for fetch in self.fetches.values() if fetch.deadline_s <= now_s]
        for fetch in late:
            del self.fetches[fetch.lease]
        return late

    def overdue_commits(self, now_s: float) -> list[WaitingCommit]:
        """Remove and return them."""
        late = [commit for commit in self.commits.values() if commit.deadline_s <= now_s]
        for commit in late:
            del self.commits[commit.ticket]
        return late

"""One queue of a device (queues.py) in its worker: threads that copy batches and report outcomes.

    daemon ──▶ queue ──▶ [beginning thread] ──▶ begun, in order ──▶ [ending thread] ──▶ daemon

Where a link's copies go on by themselves (a GPU's), the beginning thread hands over the next batch
while the ending thread still waits for the one before: 2 MiB blocks ran at 0.61 of a PCIe link's
peak one batch at a time, and at 0.95 with two (H200). Where a link copies within the call (a disk,
host memory) the beginning thread does both, and there is no other.

Races, and who wins:
1. A batch is begun while another is on its way. The link keeps their order; outcomes are told in
   that order, each only once its own bytes are at rest. How many travel is the daemon's to bound.
2. A batch fails when it is begun, behind one that is still on its way. Its failure waits its turn.
3. The device breaks while one batch is begun and another waited for. Whichever thread learns of it
   ends the process; neither batch is told as copied afterwards, and the daemon fails both once the
   process is dead. An outcome told before that was true.
4. The daemon is gone, or says stop. What has begun is waited for: nothing is unmapped under a copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from hicache.engine.plan import Outcome
from hicache.tiers.errors import TierError
from hicache.transfer.media.medium import (
    Finished,
    Link,
    Pending,
    StartingLink,
    failed,
    start_or_fail,
)
from hicache.transfer.throttle import Pace
from hicache.transfer.worker_messages import Batch, Done, pack_done

Job = Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Begun:
    batch: Batch
    pending: Pending
    start_s: float


class Direction:
    """`send` takes a message for the daemon, from either thread; `on_fault` what a job or a batch
    raised, and does not return where the worker cannot go on."""

    def __init__(
        self,
        name: str,
        links: Sequence[Link],
        send: Callable[[bytes], None],
        on_fault: Callable[[Exception], None],
        cut_off: threading.Event,
        pace: Pace | None = None,
    ) -> None:
        self._links = {(link.src, link.dst): link for link in links}
        self._send, self._on_fault, self._cut_off = send, on_fault, cut_off
        self._pace = pace or Pace()
        self._jobs: SimpleQueue[Batch | Job | None] = SimpleQueue()
        self._begun: SimpleQueue[_Begun | None] = SimpleQueue()
        self._ended_s = 0.0  # of the thread that ends batches
        self._threads = [threading.Thread(target=self._begin_all, name=f"hicache-{name}")]
        self._is_paired = any(isinstance(link, StartingLink) for link in links)
        if self._is_paired:
            ending = threading.Thread(target=self._end_all, name=f"hicache-{name}-end")
            self._threads.append(ending)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def put(self, job: Batch | Job) -> None:
        """A batch, or something to be done between batches."""
        self._jobs.put(job)

    def finish(self) -> None:
        """What is here is the last. Returns when nothing is on its way."""
        self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _begin_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._cut_off.is_set():
                continue
            self._guarded(partial(self._begin, job) if isinstance(job, Batch) else job)
        self._begun.put(None)

    def _end_all(self) -> None:
        while (begun := self._begun.get()) is not None:
            self._guarded(partial(self._end, begun))

    def _guarded(self, job: Job) -> None:
        try:
            job()
        except Exception as error:  # a thread that ended alone would leave an idle worker
            self._on_fault(error)

    def _begin(self, batch: Batch) -> None:
        start_s = time.perf_counter()
        names = {(move.src, move.dst) for move in batch.moves}
        link = self._links.get(names.pop()) if len(names) == 1 else None
        if link is None:
            error = TierError("no link of this device")
            pending: Pending = Finished([failed(move, error) for move in batch.moves])
        else:
            pending = start_or_fail(link, batch.moves)
        begun = _Begun(batch, pending, start_s)
        if self._is_paired:
            self._begun.put(begun)
        else:
            self._end(begun)

    def _end(self, begun: _Begun) -> None:
        outcomes: list[Outcome] = begun.pending.wait()
        # A batch is charged from when the one before it had arrived: a link that is never idle has
        # its real bandwidth in the measurements, not that divided by the batches in flight.
        start_s = max(begun.start_s, self._ended_s)
        batch = begun.batch
        copied = zip(batch.moves, outcomes, strict=True)
        num_bytes = sum(m.block_bytes for m, o in copied if o.ok and m.dst is not None)
        self._pace.hold(num_bytes, start_s)
        self._ended_s = time.perf_counter()
        seconds = self._ended_s - start_s
        self._send(pack_done(Done(batch.number, outcomes, seconds, num_bytes)))

"""One queue of a device (queues.py) in its worker: threads that copy batches and report outcomes.

    daemon ──▶ queue ──▶ [beginning thread] ──▶ begun, in order ──▶ [ending thread] ──▶ daemon

Where a link copies asynchronously (a GPU's), the beginning thread enqueues the next batch while the
ending thread waits for the one before: 2 MiB blocks ran at 0.61 of a PCIe link's peak one batch at
a time, and at 0.95 with two (H200). Where a link copies within the call (a disk, host memory) the
beginning thread does both, and there is no ending thread.

Races, and who wins:
1. A batch is begun while another is being copied. The link keeps their order; outcomes are reported
   in that order, each once its own copies have finished. The daemon limits the batches in flight.
2. A batch fails when it is begun, behind one that is still being copied. Its failure is reported
   after that one's outcomes.
3. The device breaks while one batch is begun and another waited for. The first thread that notices
   ends the process; neither batch is reported as copied, and the daemon fails both once the process
   is dead. Outcomes reported before that are true.
4. The daemon has died, or sends `stop`. Batches that have begun are waited for: no memory is
   unmapped during a copy.
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
from hicache.transfer.throttle import Throttle
from hicache.transfer.worker_messages import Batch, Done, pack_done

Job = Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Begun:
    batch: Batch
    pending: Pending
    start_s: float


class CopyThread:
    """`send` sends a message to the daemon and is called by both threads. `on_fault` is called with
    the exception of a job or batch, and does not return if the worker cannot continue."""

    def __init__(
        self,
        name: str,
        links: Sequence[Link],
        send: Callable[[bytes], None],
        on_fault: Callable[[Exception], None],
        cut_off: threading.Event,
        throttle: Throttle | None = None,
    ) -> None:
        self._links = {(link.src, link.dst): link for link in links}
        self._send, self._on_fault, self._cut_off = send, on_fault, cut_off
        self._throttle = throttle or Throttle()
        self._jobs: SimpleQueue[Batch | Job | None] = SimpleQueue()
        self._begun: SimpleQueue[_Begun | None] = SimpleQueue()
        self._ended_s = 0.0  # only used by the ending thread
        self._threads = [threading.Thread(target=self._begin_all, name=f"hicache-{name}")]
        self._is_paired = any(isinstance(link, StartingLink) for link in links)
        if self._is_paired:
            ending = threading.Thread(target=self._end_all, name=f"hicache-{name}-end")
            self._threads.append(ending)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def put(self, job: Batch | Job) -> None:
        """Queue a batch, or a job to run between batches."""
        self._jobs.put(job)

    def finish(self) -> None:
        """Process what is queued, and end the threads. Returns when all copies have finished."""
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
        except Exception as error:  # if this thread ended silently, the worker would stand idle
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
        # A batch's time counts from the end of the one before: else the measured bandwidth would be
        # the link's divided by the number of batches in flight.
        start_s = max(begun.start_s, self._ended_s)
        batch = begun.batch
        copied = zip(batch.moves, outcomes, strict=True)
        num_bytes = sum(m.block_bytes for m, o in copied if o.ok and m.dst is not None)
        self._throttle.hold(num_bytes, start_s)
        self._ended_s = time.perf_counter()
        seconds = self._ended_s - start_s
        self._send(pack_done(Done(batch.number, outcomes, seconds, num_bytes)))

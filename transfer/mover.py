"""The daemon's side of every transfer: queues moves, sends batches to workers, reads the outcomes.

Used from one thread, the daemon's loop, which it never blocks. `fileno()` is one descriptor, the
same for the mover's life, that becomes readable when any worker has sent a message or ended:

    poller.register(mover.fileno(), zmq.POLLIN)
    …                                                   # when it is readable
    for event in mover.on_readable(now_s): …            # outcomes and worker events
    for event in mover.tick(now_s): …                   # several times a second

Every submitted move gets exactly one Outcome, unless `submit` returned it as refused. A supervisor
per device keeps its worker alive (supervisor.py).

Races, and who wins:
1. A worker dies in the middle of a copy. Its moves fail only after the kernel reports that the
   process is dead: no slot is granted again while it may still be written.
2. A worker reports outcomes and dies at once. Its messages are read before its moves fail.
3. A move is cancelled while its batch is in flight: the copy continues, and its real outcome comes.
4. A worker does not answer any more (a hung device, a stopped process). It is killed, then as in 1;
   a process that cannot be killed keeps its slots.
5. The daemon itself was stopped. Its workers' messages are read before they are judged stuck.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hicache.engine.plan import Move, Outcome, Priority, Use
from hicache.tiers.arena import Arena
from hicache.transfer.gpu_pages.page_messages import REPORTS, unpack_report
from hicache.transfer.liveness import Liveness
from hicache.transfer.move_queue import GPU_LIMITS, LIMITS, Limits, MoveQueue
from hicache.transfer.queues import PAGE_QUEUES, Direction, queue_name, queue_names
from hicache.transfer.supervisor import DeviceState, Down, Supervisor
from hicache.transfer.worker_events import (
    MoverEvent,
    PageEvent,
    WorkerDown,
    WorkerMeasured,
    WorkerNoted,
    WorkerOpening,
    WorkerRestored,
    WorkerRows,
    WorkerScrubbed,
    WorkerUp,
)
from hicache.transfer.worker_messages import (
    Batch,
    MalformedMessage,
    Message,
    WorkerConfig,
    pack,
    pack_batch,
    pack_uses,
    unpack_done,
    unpack_rows,
    unpack_scrubbed,
)
from hicache.transfer.worker_process import WorkerProcess

KILL_S = 5.0
AWAY_S = 2.0
"""If `tick` was not called for this long, workers' messages may wait unread."""
MAX_QUEUED = 8192

LinkName = tuple[str, str | None]


class _Device:
    """One device: its queues, and its worker's supervisor."""

    def __init__(
        self,
        config: WorkerConfig,
        poller: select.epoll,
        max_queued: int,
        stuck_s: float,
        start_s: float,
    ) -> None:
        self.name, self.tier, self.traits = config.device, config.far, config.spec.traits
        limits = GPU_LIMITS if self.traits.by_priority else LIMITS
        self.directions = queue_names(self.traits.by_priority)
        self.queues = {queue: MoveQueue(max_queued, limits) for queue in self.directions}
        if "write" in self.queues:
            limits = Limits(self.traits.batch_moves, self.traits.batch_bytes, LIMITS.in_flight)
            self.queues["write"] = MoveQueue(max_queued, limits)
        self.watched = [(Liveness(name), queue) for name, queue in self.queues.items()]
        if self.traits.maps_pages:  # the mover puts no moves into these queues
            self.watched += [(Liveness(name), MoveQueue(0)) for name in PAGE_QUEUES]
        self.worker = Supervisor(config, poller, self.watched, stuck_s, start_s)

    def queue(self, direction: Direction, priority: Priority) -> MoveQueue:
        return self.queues[queue_name(direction, priority, self.traits.by_priority)]

    def send(self, message: bytes) -> None:
        """Send a message; nothing where the worker is not running."""
        if self.worker.process is not None:
            self.worker.process.send(message)


class Mover:
    """Queues and workers of all devices. `arenas`: by tier, of the mapped tiers; slots' generations
    are raised before they are written. `identify(moves)` sets `move.identity` just before moves of
    a persistent device are sent. `stuck_s`, `start_s`: see Supervisor."""

    def __init__(
        self,
        configs: Sequence[WorkerConfig],
        arenas: Mapping[str, Arena],
        identify: Callable[[Sequence[Move]], None],
        *,
        stuck_s: float = 30.0,
        start_s: float = 120.0,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        self._arenas = arenas
        self._identify = identify
        self._poller = poller = select.epoll()
        self._devices = {
            config.device: _Device(config, poller, max_queued, stuck_s, start_s)
            for config in configs
        }
        self._device_of: dict[LinkName, tuple[_Device, Direction]] = {}
        self._device_of_fd: dict[int, _Device] = {}
        self._events: list[MoverEvent] = []
        self._num_batches = 0
        self._ticked_s: float | None = None
        self.num_refused = 0
        for config in configs:
            device, near, far = self._devices[config.device], config.near, config.far
            self._device_of[far, near] = device, "read"
            self._device_of[near, far] = device, "write"
            self._device_of[far, None] = device, "write"

    # --- the loop's calls ----------------------------------------------------------------------

    def fileno(self) -> int:
        """Readable when `on_readable` should be called. One descriptor for the mover's life."""
        return self._poller.fileno()

    def start(self, now_s: float) -> None:
        """Start every worker. A WorkerUp event follows when it is ready."""
        for device in self._devices.values():
            self._start(device, now_s)

    def submit(self, moves: Sequence[Move], now_s: float) -> list[Move]:
        """Queue moves and send what can be sent. Returns the moves refused because their worker is
        not up or their queue is full; these get no Outcome."""
        refused = []
        touched = {}
        for move in moves:
            known = self._device_of.get((move.src, move.dst))
            if known is not None and self._queue(*known, move):
                touched[id(known[0])] = known[0]
            else:
                refused.append(move)
        for device in touched.values():
            self._dispatch(device, now_s)
        self.num_refused += len(refused)
        return refused

    def _queue(self, device: _Device, direction: Direction, move: Move) -> bool:
        return device.worker.state == "up" and device.queue(direction, move.priority).push(move)

    def cancel(self, ids: Sequence[int]) -> list[Outcome]:
        """Cancel the moves that are still queued. Returns their failed outcomes; the outcomes of
        the others will come."""
        queues = [queue for d in self._devices.values() for queue in d.queues.values()]
        return [outcome for queue in queues for outcome in queue.cancel(ids)]

    def on_readable(self, now_s: float) -> list[MoverEvent]:
        """Read workers' messages. Returns events in order."""
        for fd, events in self._poller.poll(0):
            device = self._device_of_fd.get(fd)
            if device is None or device.worker.process is None:
                continue
            if events & select.EPOLLOUT:
                device.worker.process.flush()
            self._receive(device, now_s)
            if fd == device.worker.process.pidfd:
                self._reap(device, now_s)
        return self._take_events()

    def tick(self, now_s: float) -> list[MoverEvent]:
        """Start workers again, kill stuck ones, expire queued moves. Returns events in order."""
        was_away = self._ticked_s is not None and now_s - self._ticked_s > AWAY_S
        self._ticked_s = now_s
        for device in self._devices.values():
            if device.worker.process is None:
                if device.worker.is_start_due(now_s):
                    self._start(device, now_s)
                continue
            for queue in device.queues.values():
                self._events += queue.expire(now_s)
            device.worker.check(now_s, was_away=was_away)
        return self._take_events()

    def backlog(self) -> dict[LinkName, dict[int, int]]:
        """Bytes queued and in flight over each link, by priority."""
        return {
            name: {int(p): device.queue(direction, p).backlog[p] for p in Priority}
            for name, (device, direction) in self._device_of.items()
            if name[1] is not None
        }

    def states(self) -> dict[str, DeviceState]:
        """Each device's state."""
        return {name: device.worker.state for name, device in self._devices.items()}

    def overdue_s(self, now_s: float) -> dict[str, float]:
        """For how long each device's worker has been overdue with a reply; 0 if it is not."""
        return {name: device.worker.overdue_s(now_s) for name, device in self._devices.items()}

    def num_starts(self) -> dict[str, int]:
        """How often each device's worker was started."""
        return {name: device.worker.num_starts for name, device in self._devices.items()}

    def num_queued(self) -> dict[str, int]:
        """Waiting moves of each device, in its fullest queue."""
        return {
            name: max(queue.num_queued for queue in device.queues.values())
            for name, device in self._devices.items()
        }

    def unsent_bytes(self) -> int:
        """Bytes of messages that wait here because workers have not read earlier ones."""
        return sum(process.num_unsent for process in self._running())

    def last_words(self) -> dict[str, str]:
        """The error that ended each device's worker, or made the supervisor kill it; without
        devices whose worker ended normally."""
        workers = {name: device.worker for name, device in self._devices.items()}
        return {name: worker.error for name, worker in workers.items() if worker.error}

    def pids(self) -> dict[str, int]:
        """The pid of each device's running worker."""
        workers = {name: device.worker.process for name, device in self._devices.items()}
        return {name: process.pid for name, process in workers.items() if process is not None}

    def forget(self, device: str, keys: Sequence[tuple[int, bytes]]) -> None:
        """Delete records, given as (slot bytes, key), that the cache engine has no room for, before
        all moves submitted later. No outcome; nothing where the worker is not running."""
        for start in range(0, len(keys), 1000):
            part = [list(row) for row in keys[start : start + 1000]]
            self._devices[device].send(pack("forget", keys=part))

    def taken(self, device: str) -> None:
        """Acknowledge a WorkerRows: the worker may send more."""
        self._devices[device].send(pack("taken"))

    def note(self, device: str, uses: Sequence[Use], zero_s: float) -> None:
        """Store blocks' uses beside them, in the order of writes. No outcome; nothing where the
        worker is not running. `zero_s`: see `pack_uses`."""
        for start in range(0, len(uses), 2000):
            self._devices[device].send(pack_uses(uses[start : start + 2000], zero_s))

    def scrub(self, device: str, bytes_per_s: float) -> None:
        """Read and check every stored block in the background (WorkerScrubbed)."""
        self._devices[device].send(pack("scrub", bytes_per_s=bytes_per_s))

    def describe(self, device: str, namespace: bytes, about: Mapping[str, Any]) -> None:
        """Store a readable description of a namespace beside its blocks."""
        self._devices[device].send(pack("describe", namespace=namespace, about=dict(about)))

    def send_pages(self, device: str, message: bytes) -> bool:
        """Send a message about inference engines' pages (page_messages.py); PageEvent follows.
        Returns False, and sends nothing, where the worker is not up."""
        if self._devices[device].worker.state != "up":
            return False
        self._devices[device].send(message)
        return True

    def throttle(self, tier: str, read_bytes_per_s: float, write_bytes_per_s: float) -> None:
        """Limit the speed of copies from and to this tier's devices: infinity for no limit, 0 to
        copy nothing (throttle.py)."""
        for device in self._devices.values():
            if device.tier == tier:
                device.worker.config = replace(
                    device.worker.config,
                    read_bytes_per_s=read_bytes_per_s,
                    write_bytes_per_s=write_bytes_per_s,
                )
                device.send(pack("throttle", read=read_bytes_per_s, write=write_bytes_per_s))

    def close(self, timeout_s: float) -> list[Outcome]:
        """Stop every worker, kill those that take longer than `timeout_s`, and return the outcomes
        of all remaining moves. Blocks; the mover cannot be used afterwards."""
        events: list[MoverEvent] = []
        for device in self._devices.values():
            events += [
                outcome for queue in device.queues.values() for outcome in queue.cancel_all()
            ]
            device.send(pack("stop"))
        give_up_s, is_patient = time.monotonic() + timeout_s, True
        while running := self._running():
            left_s = give_up_s - time.monotonic()
            if left_s > 0:
                self._poller.poll(left_s)
                events += self.on_readable(time.monotonic())
            elif is_patient:
                give_up_s, is_patient = time.monotonic() + KILL_S, False
                for process in running:
                    process.kill()
            else:
                break  # a process inside the kernel that cannot be killed
        self._poller.close()
        return [event for event in [*events, *self._take_events()] if isinstance(event, Outcome)]

    def _running(self) -> list[WorkerProcess]:
        workers = [device.worker.process for device in self._devices.values()]
        return [process for process in workers if process is not None]

    # --- workers -------------------------------------------------------------------------------

    def _start(self, device: _Device, now_s: float) -> None:
        down = device.worker.start(now_s)
        if down is not None:
            self._report_down(device, down)
        elif device.worker.process is not None:
            for fd in device.worker.process.fds:
                self._device_of_fd[fd] = device

    def _reap(self, device: _Device, now_s: float) -> None:
        """Only now that the process is dead may its moves fail."""
        assert device.worker.process is not None
        fds = device.worker.process.fds
        down = device.worker.reap(now_s)
        if down is not None:
            for fd in fds:
                del self._device_of_fd[fd]
            self._report_down(device, down)

    def _report_down(self, device: _Device, down: Down) -> None:
        """Fail all moves. If the process crashed, a block being read may be what crashes it, and
        must not be tried for ever: it counts as corrupt."""
        self._events.append(WorkerDown(device.name, device.tier, down.error, down.retry_s))
        for name, queue in device.queues.items():
            is_suspect = down.is_crash and device.traits.persistent and name == "read"
            self._events += queue.fail_all(down.error, is_suspect)

    def _receive(self, device: _Device, now_s: float) -> None:
        """Handle all messages that the worker has sent."""
        worker = device.worker
        assert worker.process is not None
        try:
            for message in worker.process.receive():
                worker.heard_s = now_s
                self._take(device, message)
        except MalformedMessage as error:
            worker.error = f"sent a malformed message: {error}"
            worker.process.hang_up()
        if worker.state == "up":
            self._dispatch(device, now_s)

    def _take(self, device: _Device, message: Message) -> None:
        kind = message["t"]
        name, tier, worker = device.name, device.tier, device.worker
        try:
            if kind == "done":
                self._finish(device, message)
            elif kind == "pong":
                worker.ponged(str(message["queue"]))
            elif kind == "rows":
                worker.restoring(is_done=False)
                self._events.append(WorkerRows(name, tier, unpack_rows(message)))
            elif kind == "restored":
                worker.restoring(is_done=True)
                self._events.append(WorkerRestored(name, tier, _notes(message)))
            elif kind == "noted":
                self._events.append(WorkerNoted(name, tier, str(message["note"])))
            elif kind == "scrubbed":
                s = unpack_scrubbed(message)
                numbers = s.blocks, s.num_bytes, s.total_blocks
                self._events.append(WorkerScrubbed(name, tier, *numbers, s.bad, s.is_done))
            elif kind == "measured":
                link = (str(message["src"]), str(message["dst"]))
                self._measure(device, link, int(message["bytes"]), float(message["seconds"]))
            elif kind == "ready":
                assert worker.process is not None
                is_restoring = message["restoring"] is True
                worker.ready(is_restoring)
                up = worker.process.pid, str(message["detail"]), _notes(message), is_restoring
                self._events.append(WorkerUp(name, tier, *up))
            elif kind == "opening":
                done, total = int(message["done"]), int(message["total"])
                self._events.append(WorkerOpening(name, tier, str(message["unit"]), done, total))
            elif kind in REPORTS:
                self._events.append(PageEvent(name, unpack_report(message)))
            elif kind == "broken":
                worker.error = str(message["error"])
                worker.is_damaged = message["damaged"] is True
            else:
                raise MalformedMessage(f"unknown message {kind!r}")
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedMessage(f"{kind}: {error!r}") from error

    # --- batches -------------------------------------------------------------------------------

    def _dispatch(self, device: _Device, now_s: float) -> None:
        """Send batches until each queue has enough in flight."""
        for name, queue in device.queues.items():
            while True:
                moves, late = queue.take(now_s)
                self._events += late
                if moves and device.traits.persistent:
                    moves = self._identified(queue, moves)
                    if not moves:
                        continue
                if not moves:
                    break
                self._send(device, name, moves, now_s)

    def _identified(self, queue: MoveQueue, moves: list[Move]) -> list[Move]:
        self._identify(moves)
        removed = [move for move in moves if move.identity is None]
        self._events += [queue.drop(move, "the block was removed meanwhile") for move in removed]
        return [move for move in moves if move.identity is not None]

    def _send(self, device: _Device, queue: str, moves: list[Move], now_s: float) -> None:
        arena = self._arenas.get(moves[0].dst or "")
        if arena is not None:
            arena.raise_generations(np.array([move.dst_slot for move in moves], np.int32))
        self._num_batches += 1
        batch = Batch(self._num_batches, moves, queue)
        device.queues[queue].sent(batch, now_s)
        device.send(pack_batch(batch))

    def _finish(self, device: _Device, message: Message) -> None:
        """A batch came back. Raises MalformedMessage if it is not the batch that was sent."""
        done = unpack_done(message)
        batch = None
        for liveness, queue in device.watched:
            if batch is None and (batch := queue.done(done.batch)) is not None:
                liveness.moved(device.worker.heard_s)
        if batch is None:
            raise MalformedMessage(f"batch {done.batch} is not in flight")
        if [outcome.move for outcome in done.outcomes] != [move.id for move in batch.moves]:
            error = "its outcomes are not those of the batch"
            self._events += [Outcome(move.id, ok=False, error=error) for move in batch.moves]
            raise MalformedMessage(error)
        self._events += done.outcomes
        src, dst = batch.moves[0].src, batch.moves[0].dst
        if dst is not None and done.num_bytes:
            self._measure(device, (src, dst), done.num_bytes, done.seconds)

    def _measure(
        self, device: _Device, link: tuple[str, str], num_bytes: int, seconds: float
    ) -> None:
        if link[0] == device.tier:  # a write batch is a commit, as large as possible
            for name, direction in device.directions.items():
                if direction == "read":
                    device.queues[name].timed(num_bytes, seconds)
        self._events.append(WorkerMeasured(device.name, link[0], link[1], num_bytes, seconds))

    def _take_events(self) -> list[MoverEvent]:
        events, self._events = self._events, []
        return events


def _notes(message: Message) -> list[str]:
    return [str(note) for note in message["notes"]]

"""The daemon's side of every transfer: queues moves, feeds workers, and keeps those alive.

Used from one thread, the daemon's loop, which it never blocks. `fileno()` is one descriptor, for
its whole life, that turns readable when any worker has something to say:

    poller.register(mover.fileno(), zmq.POLLIN)
    …                                                   # when it is readable
    for news in mover.on_readable(now_s): …             # outcomes, and how the workers are
    for news in mover.tick(now_s): …                    # several times a second

Every submitted move gets exactly one Outcome, unless `submit` handed it back.

Races, and who wins:
1. A worker dies in the middle of a copy. Its moves fail only after the kernel says that the process
   is dead: no slot can be given to somebody else while it may still be written.
2. A worker reports outcomes and dies at once. What it said is read before its moves are failed.
3. A move is cancelled while its batch travels: nothing is called back, its real outcome comes.
4. A worker does not answer any more (a hung device, a process that stands still). It is killed,
   then as in 1; a process that cannot even be killed keeps its slots.
5. The daemon itself stood still. What its workers said meanwhile is read before they are judged.
"""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from hicache.engine.plan import Move, Outcome, Priority, Use
from hicache.tiers.arena import Arena
from hicache.transfer.gpu_pages.page_messages import TOLD, unpack_told
from hicache.transfer.liveness import Pulse
from hicache.transfer.move_queue import GPU_LIMITS, LIMITS, Lane, Limits
from hicache.transfer.queues import PAGE_WAYS, Heading, way_of, ways_of
from hicache.transfer.worker_events import (
    News,
    PageNews,
    WorkerDown,
    WorkerMeasured,
    WorkerNews,
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

__all__ = [
    "Mover",
    "News",
    "PageNews",
    "WorkerDown",
    "WorkerMeasured",
    "WorkerNews",
    "WorkerNoted",
    "WorkerOpening",
    "WorkerRestored",
    "WorkerRows",
    "WorkerScrubbed",
    "WorkerUp",
]

FIRST_DELAY_S, LAST_DELAY_S = 0.2, 10.0
HEALTHY_S = 60.0
KILL_S = 5.0
AWAY_S = 2.0
"""A loop that did not turn for so long has not heard what was said meanwhile."""
MAX_QUEUED = 8192
_CRASHES = {signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}

DeviceState = Literal["starting", "up", "down"]
LinkName = tuple[str, str | None]


class _Device:
    """One device under supervision."""

    def __init__(self, config: WorkerConfig, max_queued: int) -> None:
        self.config = config
        self.state: DeviceState = "down"
        self.is_restoring = False
        self.process: WorkerProcess | None = None
        traits = config.spec.traits
        limits = GPU_LIMITS if traits.by_priority else LIMITS
        self.by_priority = traits.by_priority
        self.headings = ways_of(self.by_priority)
        self.lanes = {way: Lane(max_queued, limits) for way in self.headings}
        if "write" in self.lanes:
            limits = Limits(traits.batch_moves, traits.batch_bytes, LIMITS.in_flight)
            self.lanes["write"] = Lane(max_queued, limits)
        self.pulses = [(Pulse(way), lane) for way, lane in self.lanes.items()]
        if traits.maps_pages:  # the mover puts nothing into these lanes
            self.pulses += [(Pulse(way), Lane(0)) for way in PAGE_WAYS]
        self.start_at_s = 0.0
        self.started_s = 0.0
        self.heard_s = 0.0
        self.rows_s = 0.0
        self.num_starts = 0
        self.num_failures = 0
        self.num_damages = 0
        self.error = ""
        self.is_damaged = False

    def lane(self, heading: Heading, priority: Priority) -> Lane:
        return self.lanes[way_of(heading, priority, self.by_priority)]

    def owes_s(self, now_s: float) -> float:
        """For how long it has owed an answer; 0 if it owes none."""
        if self.state != "up":
            return 0.0
        return max(pulse.owes_s(now_s, lane.oldest_s()) for pulse, lane in self.pulses)


class Mover:
    """Queues and workers. `arenas`, by tier, are the mapped ones, whose generations are raised
    before a slot is written; `identify(moves)` fills in `move.identity` just before moves of a
    persistent device are sent; a worker that owes an answer for `stuck_s` is killed."""

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
        self._stuck_s, self._start_s = stuck_s, start_s
        self._poller = select.epoll()
        self._devices = {config.device: _Device(config, max_queued) for config in configs}
        self._device_of: dict[LinkName, tuple[_Device, Heading]] = {}
        self._device_of_fd: dict[int, _Device] = {}
        self._news: list[News] = []
        self._num_batches = 0
        self._ticked_s: float | None = None
        self.num_refused = 0
        for device in self._devices.values():
            near, far = device.config.near, device.config.far
            self._device_of[far, near] = device, "read"
            self._device_of[near, far] = device, "write"
            self._device_of[far, None] = device, "write"

    # --- the loop's calls ----------------------------------------------------------------------

    def fileno(self) -> int:
        """Readable when `on_readable` should be called. One descriptor for the mover's life."""
        return self._poller.fileno()

    def start(self, now_s: float) -> None:
        """Start every worker; each says WorkerUp when it is ready."""
        for device in self._devices.values():
            self._start(device, now_s)

    def submit(self, moves: Sequence[Move], now_s: float) -> list[Move]:
        """Queue moves and send what can be sent. Those returned were refused: their worker is not
        up, or its queue is full; nothing more is heard of them."""
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

    def _queue(self, device: _Device, heading: Heading, move: Move) -> bool:
        return device.state == "up" and device.lane(heading, move.priority).push(move)

    def cancel(self, ids: Sequence[int]) -> list[Outcome]:
        """Failed outcomes ('cancelled') of those still queued; the others' outcomes will come."""
        lanes = [lane for d in self._devices.values() for lane in d.lanes.values()]
        return [outcome for lane in lanes for outcome in lane.cancel(ids)]

    def on_readable(self, now_s: float) -> list[News]:
        """What happened, in order."""
        for fd, events in self._poller.poll(0):
            device = self._device_of_fd.get(fd)
            if device is None or device.process is None:
                continue
            if events & select.EPOLLOUT:
                device.process.flush()
            self._listen(device, now_s)
            if fd == device.process.pidfd:
                self._bury(device, now_s)
        return self._take_news()

    def tick(self, now_s: float) -> list[News]:
        """Start workers again, kill stuck ones, expire queued moves."""
        was_away = self._ticked_s is not None and now_s - self._ticked_s > AWAY_S
        self._ticked_s = now_s
        for device in self._devices.values():
            if device.process is None:
                if device.start_at_s <= now_s:
                    self._start(device, now_s)
                continue
            for pulse, lane in device.pulses:
                self._news += lane.expire(now_s)
                if was_away:
                    pulse.moved(now_s)
                if device.state == "up" and pulse.is_due(now_s):
                    device.process.send(pack("pulse", of=pulse.name))
                    pulse.asked(now_s)
            self._kill_if_stuck(device, now_s)
        return self._take_news()

    def backlog(self) -> dict[LinkName, dict[int, int]]:
        """Bytes queued and in flight over each link, by priority."""
        return {
            name: {int(p): device.lane(heading, p).backlog[p] for p in Priority}
            for name, (device, heading) in self._device_of.items()
            if name[1] is not None
        }

    def states(self) -> dict[str, DeviceState]:
        """Each device's state."""
        return {name: device.state for name, device in self._devices.items()}

    def owed_s(self, now_s: float) -> dict[str, float]:
        """For how long each device's worker has owed an answer; 0 where it owes none."""
        return {name: device.owes_s(now_s) for name, device in self._devices.items()}

    def num_starts(self) -> dict[str, int]:
        """How often each device's worker was started."""
        return {name: device.num_starts for name, device in self._devices.items()}

    def num_queued(self) -> dict[str, int]:
        """Moves that wait for each device, in the fullest of its ways."""
        return {
            name: max(lane.num_queued for lane in device.lanes.values())
            for name, device in self._devices.items()
        }

    def unsent_bytes(self) -> int:
        """What the workers have still to read, as far as it is kept here."""
        running = [d.process for d in self._devices.values() if d.process is not None]
        return sum(process.num_unsent for process in running)

    def last_words(self) -> dict[str, str]:
        """What each device's worker said, or was found to do, that ended it; not of those that
        end in order."""
        return {name: device.error for name, device in self._devices.items() if device.error}

    def pids(self) -> dict[str, int]:
        """The process of each device that has one."""
        return {n: d.process.pid for n, d in self._devices.items() if d.process is not None}

    def forget(self, device: str, keys: Sequence[tuple[int, bytes]]) -> None:
        """Delete records, given as (slot bytes, key), that the cache engine has no place for. No
        outcome; ahead of every write submitted later. Nothing when the worker is not there."""
        found = self._devices[device]
        if found.process is not None:
            for start in range(0, len(keys), 1000):
                part = [list(row) for row in keys[start : start + 1000]]
                found.process.send(pack("forget", keys=part))

    def taken(self, device: str) -> None:
        """The rows told last were taken in: the worker may tell more."""
        found = self._devices[device]
        if found.process is not None:
            found.process.send(pack("taken"))

    def note(self, device: str, uses: Sequence[Use], zero_s: float) -> None:
        """Have uses written beside their blocks, in the order of writes. No outcome; nothing when
        the worker is not there. `zero_s`: see `pack_uses`."""
        found = self._devices[device]
        if found.process is not None:
            for start in range(0, len(uses), 2000):
                found.process.send(pack_uses(uses[start : start + 2000], zero_s))

    def scrub(self, device: str, bytes_per_s: float) -> None:
        """Have every stored block read and checked while others work (WorkerScrubbed)."""
        found = self._devices[device]
        if found.process is not None:
            found.process.send(pack("scrub", bytes_per_s=bytes_per_s))

    def describe(self, device: str, namespace: bytes, about: Mapping[str, Any]) -> None:
        """Have a readable account of a namespace kept beside its blocks."""
        found = self._devices[device]
        if found.process is not None:
            found.process.send(pack("describe", namespace=namespace, about=dict(about)))

    def send_pages(self, device: str, message: bytes) -> bool:
        """Something about inference engines' pages (page_messages.py), answered by PageNews. False,
        and nothing sent, when the worker is not up."""
        found = self._devices[device]
        if found.process is None or found.state != "up":
            return False
        found.process.send(message)
        return True

    def pace(self, tier: str, read_bytes_per_s: float, write_bytes_per_s: float) -> None:
        """Copy no faster from and to this tier's devices, from now on: infinity for as fast as they
        can, 0 for not at all (throttle.py)."""
        for device in self._devices.values():
            if device.config.far == tier:
                device.config = replace(
                    device.config,
                    read_bytes_per_s=read_bytes_per_s,
                    write_bytes_per_s=write_bytes_per_s,
                )
                if device.process is not None:
                    told = pack("pace", read=read_bytes_per_s, write=write_bytes_per_s)
                    device.process.send(told)

    def close(self, timeout_s: float) -> list[Outcome]:
        """Stop every worker in order, kill those that take longer, and fail what is left. The one
        call that waits; the mover is of no use afterwards."""
        news: list[News] = []
        for device in self._devices.values():
            news += [outcome for lane in device.lanes.values() for outcome in lane.cancel_all()]
            if device.process is not None:
                device.process.send(pack("stop"))
        give_up_s, is_patient = time.monotonic() + timeout_s, True
        while self.pids():
            left_s = give_up_s - time.monotonic()
            if left_s > 0:
                self._poller.poll(left_s)
                news += self.on_readable(time.monotonic())
            elif is_patient:
                give_up_s, is_patient = time.monotonic() + KILL_S, False
                for device in self._devices.values():
                    if device.process is not None:
                        device.process.kill()
            else:
                break  # unkillable, inside the kernel; there is nothing more to do
        self._poller.close()
        return [item for item in [*news, *self._take_news()] if isinstance(item, Outcome)]

    # --- supervision ---------------------------------------------------------------------------

    def _start(self, device: _Device, now_s: float) -> None:
        config = replace(device.config, set_aside=device.num_damages >= 2)
        try:
            device.process = WorkerProcess(config, self._poller)
        except OSError as error:  # no memory, no descriptors: later, perhaps
            self._fall(device, now_s, f"cannot be started: {error}")
            return
        if config.set_aside:
            device.num_damages = 0
        device.state = "starting"
        device.num_starts += 1
        device.started_s = device.heard_s = now_s
        device.error, device.is_damaged = "", False
        for fd in device.process.fds:
            self._device_of_fd[fd] = device

    def _listen(self, device: _Device, now_s: float) -> None:
        """Take in everything the worker has said."""
        assert device.process is not None
        try:
            for message in device.process.receive():
                device.heard_s = now_s
                self._take(device, message)
        except MalformedMessage as error:
            device.error = f"said something malformed: {error}"
            device.process.hang_up()
        if device.state == "up":
            self._dispatch(device, now_s)

    def _take(self, device: _Device, message: Message) -> None:
        kind = message["t"]
        name, tier = device.config.device, device.config.far
        try:
            if kind == "done":
                self._finish(device, message)
            elif kind == "beat":
                for pulse, _ in device.pulses:
                    if pulse.name == message["of"]:
                        pulse.answered(device.heard_s)
            elif kind == "rows":
                device.rows_s = device.heard_s
                self._news.append(WorkerRows(name, tier, unpack_rows(message)))
            elif kind == "restored":
                device.is_restoring = False
                notes = [str(note) for note in message["notes"]]
                self._news.append(WorkerRestored(name, tier, notes))
            elif kind == "noted":
                self._news.append(WorkerNoted(name, tier, str(message["note"])))
            elif kind == "scrubbed":
                s = unpack_scrubbed(message)
                numbers = s.blocks, s.num_bytes, s.total_blocks
                self._news.append(WorkerScrubbed(name, tier, *numbers, s.bad, s.is_done))
            elif kind == "measured":
                link = (str(message["src"]), str(message["dst"]))
                self._measure(device, link, int(message["bytes"]), float(message["seconds"]))
            elif kind == "ready":
                assert device.process is not None
                device.state = "up"
                device.rows_s = device.heard_s
                for pulse, _ in device.pulses:
                    pulse.begin(device.heard_s)
                device.is_restoring = restoring = message["restoring"] is True
                notes = [str(note) for note in message["notes"]]
                detail = str(message["detail"])
                pid = device.process.pid
                self._news.append(WorkerUp(name, tier, pid, detail, notes, restoring))
            elif kind == "opening":
                done, total = int(message["done"]), int(message["total"])
                opening = WorkerOpening(name, tier, str(message["unit"]), done, total)
                self._news.append(opening)
            elif kind in TOLD:
                self._news.append(PageNews(name, unpack_told(message)))
            elif kind == "broken":
                device.error = str(message["error"])
                device.is_damaged = message["damaged"] is True
            else:
                raise MalformedMessage(f"unknown message {kind!r}")
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedMessage(f"{kind}: {error!r}") from error

    def _bury(self, device: _Device, now_s: float) -> None:
        """The process is dead: only now may its moves fail."""
        process = device.process
        assert process is not None
        status = process.exit_status()
        if status is None:
            return
        for fd in process.fds:
            del self._device_of_fd[fd]
        process.close()
        device.process = None
        if now_s - device.started_s >= HEALTHY_S:
            device.num_failures = device.num_damages = 0
        is_crash = -status in _CRASHES
        if is_crash or device.is_damaged:
            device.num_damages += 1
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        said = f": {device.error}" if device.error else ""
        self._fall(device, now_s, f"{device.config.spec.title} ended with {how}{said}", is_crash)

    def _fall(self, device: _Device, now_s: float, error: str, is_crash: bool = False) -> None:
        """Down, until the next try. What was being read when the medium's mapping killed the
        reader must not be tried for ever: it counts as corrupt."""
        retry_s = min(LAST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(device.num_failures, 10))
        device.state = "down"
        device.is_restoring = False
        device.num_failures += 1
        device.start_at_s = now_s + retry_s
        config = device.config
        self._news.append(WorkerDown(config.device, config.far, error, retry_s))
        for way, lane in device.lanes.items():
            is_suspect = is_crash and config.spec.traits.persistent and way == "read"
            self._news += lane.fail_all(error, is_suspect)

    def _kill_if_stuck(self, device: _Device, now_s: float) -> None:
        assert device.process is not None
        if device.state == "starting":
            is_stuck = now_s - device.heard_s > self._start_s
        else:
            is_stuck = device.owes_s(now_s) > self._stuck_s
            is_stuck |= device.is_restoring and now_s - device.rows_s > self._start_s
        if is_stuck and not device.error:
            device.error = "did not answer any more"
            device.process.kill()

    # --- batches -------------------------------------------------------------------------------

    def _dispatch(self, device: _Device, now_s: float) -> None:
        """Send batches until each lane has enough in flight."""
        for way, lane in device.lanes.items():
            while True:
                moves, late = lane.take(now_s)
                self._news += late
                if moves and device.config.spec.traits.persistent:
                    moves = self._identified(lane, moves)
                    if not moves:
                        continue
                if not moves:
                    break
                self._send(device, way, moves, now_s)

    def _identified(self, lane: Lane, moves: list[Move]) -> list[Move]:
        self._identify(moves)
        nameless = [move for move in moves if move.identity is None]
        self._news += [lane.drop(move, "nobody knows this block any more") for move in nameless]
        return [move for move in moves if move.identity is not None]

    def _send(self, device: _Device, way: str, moves: list[Move], now_s: float) -> None:
        assert device.process is not None
        arena = self._arenas.get(moves[0].dst or "")
        if arena is not None:
            arena.raise_generations(np.array([move.dst_slot for move in moves], np.int32))
        self._num_batches += 1
        batch = Batch(self._num_batches, moves, way)
        device.lanes[way].sent(batch, now_s)
        device.process.send(pack_batch(batch))

    def _finish(self, device: _Device, message: Message) -> None:
        """A batch came back. An answer that does not match what was sent is malformed."""
        done = unpack_done(message)
        batch = None
        for pulse, lane in device.pulses:
            if batch is None and (batch := lane.done(done.batch)) is not None:
                pulse.moved(device.heard_s)
        if batch is None:
            raise MalformedMessage(f"batch {done.batch} is not in flight")
        if [outcome.move for outcome in done.outcomes] != [move.id for move in batch.moves]:
            error = "its outcomes are not those of the batch"
            self._news += [Outcome(move.id, ok=False, error=error) for move in batch.moves]
            raise MalformedMessage(error)
        self._news += done.outcomes
        src, dst = batch.moves[0].src, batch.moves[0].dst
        if dst is not None and done.num_bytes:
            self._measure(device, (src, dst), done.num_bytes, done.seconds)

    def _measure(
        self, device: _Device, link: tuple[str, str], num_bytes: int, seconds: float
    ) -> None:
        if link[0] == device.config.far:  # a commit is as large as it can be, whatever it takes
            for way, heading in device.headings.items():
                if heading == "read":
                    device.lanes[way].timed(num_bytes, seconds)
        name = device.config.device
        self._news.append(WorkerMeasured(name, link[0], link[1], num_bytes, seconds))

    def _take_news(self) -> list[News]:
        news, self._news = self._news, []
        return news

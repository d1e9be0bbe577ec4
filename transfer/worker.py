"""A worker process: opens one device, receives batches of moves, copies, reports outcomes.

    python -m hicache.transfer.worker <fd>        started by transfer/mover.py, never by hand

The main thread reads the daemon's messages. Each way (queues.py) has threads of its own
(copy_thread.py): from the device and to it, on a GPU for each priority, each in the order of its
batches, so a demand read waits behind no write, nor, on a GPU, behind demotions. One more tells
what a durable device held, at start, while the others work. All of them send; a lock keeps their
messages whole, and nothing but a send happens under it.

How it ends, and what the daemon sees:
1. `stop`: batches already here are finished, the device is left in order, exit 0.
2. The daemon is gone (end of stream): batches not begun are dropped, the rest as in 1. The kernel
   kills us anyway if the daemon's death comes first (PDEATHSIG).
3. The device is broken (TierBroken) or cannot be opened: `broken`, exit 3, nothing marked clean.
4. Any other fault in a batch: its moves fail with the error's text, and work goes on.
5. Killed, or a SIGBUS from the device's mapping: the daemon sees the process end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pkgutil import resolve_name

from hicache.tiers.arena import Arena, ArenaError
from hicache.tiers.errors import TierBroken, TierDamaged, TierError, TierUnavailable
from hicache.transfer.copy_thread import Direction
from hicache.transfer.gpu_pages.page_worker import PAGE_JOBS, PageWork
from hicache.transfer.media.medium import Medium, Progress, Spoilt
from hicache.transfer.queues import HEADINGS, PAGE_WAYS, ways_of
from hicache.transfer.throttle import Pace
from hicache.transfer.worker_messages import (
    MalformedMessage,
    Message,
    Stream,
    WorkerConfig,
    pack,
    pack_rows,
    pack_scrubbed,
    unpack_batch,
    unpack_keys,
    unpack_uses,
)

EXIT_BROKEN = 3
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_RECEIVE_BYTES = 1 << 20
SCRUB_TOLD_S = 0.25
PROBE_BLOCK_BYTES = 1 << 20
MAX_UNTAKEN = 2
"""Messages of rows that the daemon has not taken in: one is on its way while it takes another."""


class Worker:
    """The conversation with the daemon, and the ways that do the work."""

    def __init__(
        self,
        sock: socket.socket,
        medium: Medium,
        read_bytes_per_s: float = inf,
        write_bytes_per_s: float = inf,
    ) -> None:
        self._sock = sock
        self._medium = medium
        self._sending = threading.Lock()  # guards the socket's write side
        self._cut_off = threading.Event()
        self._is_ending = threading.Event()
        self._scrub: threading.Thread | None = None
        self._untaken = threading.Semaphore(MAX_UNTAKEN)
        more = (self.send, self._fail, self._cut_off)
        self._read_pace, self._write_pace = Pace(read_bytes_per_s), Pace(write_bytes_per_s)
        self._ways: dict[str, Direction] = {}
        links_of = {"read": medium.readers, "write": medium.writers}
        paces = {"read": self._read_pace, "write": self._write_pace}
        for place, (way, heading) in enumerate(ways_of(medium.by_priority).items()):
            links = links_of[heading]
            if medium.by_priority:
                links = [links[place // len(HEADINGS)]]
            self._ways[way] = Direction(way, links, *more, paces[heading])
        self._pages = PageWork(medium.pages, self.send) if medium.pages is not None else None
        if self._pages is not None:
            self._ways |= {way: Direction(way, [], *more) for way in PAGE_WAYS}
        self._record = next(self._ways[way] for way in self._ways if way.startswith("write"))
        self._reads = {(link.src, link.dst) for link in medium.readers}

    def send(self, message: bytes) -> None:
        """A daemon that is gone is noticed by whoever reads."""
        try:
            with self._sending:
                self._sock.sendall(message)
        except OSError:
            self._cut_off.set()

    def introduce(self, probe_bytes: int) -> None:
        """Say what was opened and how fast it is, then that work may come."""
        if probe_bytes:
            try:
                for m in self._medium.probe(probe_bytes, PROBE_BLOCK_BYTES):
                    pace = self._read_pace if (m.src, m.dst) in self._reads else self._write_pace
                    seconds = max(m.seconds, pace.least_s(m.num_bytes))
                    fields = {"bytes": m.num_bytes, "seconds": seconds}
                    self.send(pack("measured", src=m.src, dst=m.dst, **fields))
            except TierBroken:
                raise
            except (TierError, OSError) as error:
                self._medium.notes.append(f"the probe failed: {error}")
        medium = self._medium
        notes, remembers = list(medium.notes), medium.remembers
        self.send(pack("ready", detail=medium.detail, notes=notes, restoring=remembers))

    def serve(self, stream: Stream, early: Sequence[Message]) -> None:
        """Until `stop` or the end of the stream; then nothing is on its way."""
        for direction in self._ways.values():
            direction.start()
        telling = threading.Thread(
            target=self._or_break, args=(self._tell_stored,), name="hicache-scan"
        )
        if self._medium.remembers:
            telling.start()
        is_stopped = any(self._handle(message) for message in early)
        while not is_stopped:
            data = self._sock.recv(_RECEIVE_BYTES)
            if not data:
                self._cut_off.set()
                break
            is_stopped = any(self._handle(message) for message in stream.feed(data))
        self._set_paces(inf, inf)  # nothing is held for ever
        for direction in self._ways.values():
            direction.finish()
        self._is_ending.set()
        self._untaken.release()
        if self._medium.remembers:
            telling.join()
        if self._scrub is not None:
            self._scrub.join()

    def _or_break(self, work: Callable[[], None]) -> None:
        """A thread of the worker's own: one that ended quietly would leave the tier half restored,
        or a scrub that nobody ends."""
        try:
            work()
        except Exception as error:
            self._break(error)

    def _begin_scrub(self, bytes_per_s: float) -> None:
        """One at a time."""
        if self._scrub is None or not self._scrub.is_alive():
            work = partial(self._scrub_all, bytes_per_s)
            self._scrub = threading.Thread(
                target=self._or_break, args=(work,), name="hicache-scrub"
            )
            self._scrub.start()

    def _scrub_all(self, bytes_per_s: float) -> None:
        """Check every block, no faster than asked for, and tell the daemon now and then."""
        start_s = told_s = time.monotonic()
        bad: list[Spoilt] = []
        for so_far in self._medium.scrub():
            bad += so_far.bad
            now_s = time.monotonic()
            if so_far.is_done or now_s - told_s >= SCRUB_TOLD_S:
                self.send(pack_scrubbed(replace(so_far, bad=bad)))
                bad, told_s = [], now_s
            ahead_s = so_far.num_bytes / bytes_per_s - (now_s - start_s)
            if self._is_ending.wait(max(0.0, ahead_s)) or self._cut_off.is_set():
                return

    def _tell_stored(self) -> None:
        """What the medium held, as fast as the daemon takes it in, while requests are served."""
        for rows in self._medium.stored():
            self._untaken.acquire()
            if self._is_ending.is_set() or self._cut_off.is_set():
                return
            self.send(pack_rows(rows))
        self.send(pack("restored", notes=list(self._medium.notes)))

    def _handle(self, message: Message) -> bool:
        """True when this was `stop`."""
        kind = message["t"]
        if kind == "batch":
            batch = unpack_batch(message)
            self._way(batch.way).put(batch)
        elif kind in PAGE_JOBS and self._pages is not None:
            way, job = self._pages.job_of(message)
            self._way(way).put(job)
        elif kind == "forget":
            self._record.put(partial(self._medium.forget, unpack_keys(message)))
        elif kind == "note":
            self._record.put(partial(self._medium.note, unpack_uses(message)))
        elif kind == "pulse":
            beat = pack("beat", of=message.get("of"))
            self._way(str(message.get("of"))).put(partial(self.send, beat))
        elif kind == "scrub":
            self._begin_scrub(float(message["bytes_per_s"]))
        elif kind == "taken":
            self._untaken.release()
        elif kind == "describe":
            namespace, about = message.get("namespace"), message.get("about")
            if type(namespace) is not bytes or not isinstance(about, dict):
                raise MalformedMessage("describe: a namespace and a map")
            self._record.put(partial(self._medium.describe, namespace, about))
        elif kind == "pace":
            read, write = message.get("read"), message.get("write")
            if type(read) is not float or type(write) is not float:
                raise MalformedMessage("pace: bytes per second, read and write")
            self._set_paces(read, write)
        elif kind != "stop":
            raise MalformedMessage(f"unknown message {kind!r}")
        return bool(kind == "stop")

    def _way(self, name: str) -> Direction:
        if name not in self._ways:
            raise MalformedMessage(f"{name[:40]!r} is no way of this device")
        return self._ways[name]

    def _set_paces(self, read_bytes_per_s: float, write_bytes_per_s: float) -> None:
        self._read_pace.set(read_bytes_per_s)
        self._write_pace.set(write_bytes_per_s)

    def _fail(self, error: Exception) -> None:
        """What a direction's thread met: the end of this process, but for a record that could not
        be removed or a use that could not be noted (they alone raise such errors here)."""
        if isinstance(error, TierError) and not isinstance(error, TierBroken):
            print(f"hicache worker: {error}", file=sys.stderr, flush=True)
            return
        self._break(error)

    def _break(self, error: Exception) -> None:
        is_damaged = isinstance(error, TierDamaged)
        self.send(pack("broken", error=str(error) or repr(error), damaged=is_damaged))
        os._exit(EXIT_BROKEN)


def _open(config: WorkerConfig, near: Arena, progress: Progress) -> Medium:
    """Only this device's medium is loaded: a GPU worker loads no lmdb."""
    try:
        medium_class = resolve_name(config.spec.medium)
    except (ImportError, AttributeError, ValueError) as error:
        raise TierUnavailable(f"{config.device}: no medium {config.spec.medium}: {error}") from None
    medium: Medium = medium_class(config, near, progress)
    return medium


def _receive_config(sock: socket.socket, stream: Stream) -> list[Message]:
    """The first message, `config`, and whatever came with it; empty when the daemon is gone."""
    while data := sock.recv(_RECEIVE_BYTES):
        messages = list(stream.feed(data))
        if messages:
            if messages[0]["t"] != "config":
                raise MalformedMessage(f"config expected, not {messages[0]['t']!r}")
            return messages
    return []


def _tell_progress(sock: socket.socket, unit: str, done: int, total: int) -> None:
    """Opening takes long and goes on: the supervisor need not be anxious."""
    sock.sendall(pack("opening", unit=unit, done=done, total=total))


def _become(title: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NAME, title.encode(), 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main(fd: int) -> int:
    """The process's exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whether to end is the daemon's to decide
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stream = Stream()
    with socket.socket(fileno=fd) as sock:
        messages = _receive_config(sock, stream)
        if not messages:
            return 0
        parent, fields = messages[0].get("parent"), messages[0].get("config")
        if not isinstance(fields, dict):
            raise MalformedMessage("config: the fields are missing")
        config = WorkerConfig.from_fields(fields)
        _become(config.spec.title)
        if os.getppid() != parent:
            return 0  # it died before PDEATHSIG was set
        worker = None
        try:
            near = Arena.attach(config.near_path)
            near.hold()
            medium = _open(config, near, partial(_tell_progress, sock))
            worker = Worker(sock, medium, config.read_bytes_per_s, config.write_bytes_per_s)
            threading.Thread(target=near.populate, name="hicache-touch", daemon=True).start()
            worker.introduce(config.probe_bytes)
            worker.serve(stream, messages[1:])
            medium.close()
            near.close()
        except (TierError, ArenaError) as error:
            message = pack("broken", error=str(error), damaged=isinstance(error, TierDamaged))
            try:
                sock.sendall(message)
            except OSError:  # the daemon has died: there is nobody else to tell it to
                print(f"{config.spec.title}: {error}", file=sys.stderr)
            return EXIT_BROKEN
        except OSError:
            return 0 if worker is not None else EXIT_BROKEN  # the daemon is gone
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

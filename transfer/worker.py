"""A worker process: opens one device, receives batches of moves, copies, reports outcomes.

    python -m hicache.transfer.worker <fd>        started by transfer/mover.py, never by hand

The main thread reads the daemon's messages. Each queue (queues.py) has separate threads
(copy_thread.py), which keep the order of its batches: so a demand read never waits behind a write,
nor, on a GPU, behind a demotion. Another thread lists the stored blocks of a persistent device at
start, while the others work. All threads send; a lock keeps messages whole, and only sending
happens under it.

How it ends, and what the daemon sees:
1. `stop`: batches already received are finished, the device is closed cleanly, exit 0.
2. The daemon has died (end of stream): batches not begun are dropped, the rest as in 1. Usually the
   kernel kills this process first (PDEATHSIG).
3. The device is broken (TierBroken) or cannot be opened: `broken`, exit 3, nothing marked clean.
4. Any other error in a batch: its moves fail with the error's text, and work continues.
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
from hicache.transfer.copy_thread import CopyThread
from hicache.transfer.gpu_pages.page_worker import PAGE_JOBS, PageWork
from hicache.transfer.media.medium import Medium, Progress, Spoilt
from hicache.transfer.queues import DIRECTIONS, PAGE_QUEUES, Direction, queue_names
from hicache.transfer.throttle import Throttle
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
SCRUB_REPORT_S = 0.25
PROBE_BLOCK_BYTES = 1 << 20
MAX_UNTAKEN = 2
"""`rows` messages sent and not acknowledged: one is in transit while the daemon handles another."""


class Worker:
    """Handles the daemon's messages, and owns the queues' threads."""

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
        self._throttles: dict[Direction, Throttle] = {
            "read": Throttle(read_bytes_per_s),
            "write": Throttle(write_bytes_per_s),
        }
        self._queues: dict[str, CopyThread] = {}
        links_of = {"read": medium.readers, "write": medium.writers}
        for place, (queue, direction) in enumerate(queue_names(medium.by_priority).items()):
            links = links_of[direction]
            if medium.by_priority:
                links = [links[place // len(DIRECTIONS)]]
            self._queues[queue] = CopyThread(queue, links, *more, self._throttles[direction])
        self._pages = PageWork(medium.pages, self.send) if medium.pages is not None else None
        if self._pages is not None:
            self._queues |= {queue: CopyThread(queue, [], *more) for queue in PAGE_QUEUES}
        self._writes = next(self._queues[name] for name in self._queues if name.startswith("write"))
        self._reads = {(link.src, link.dst) for link in medium.readers}

    def send(self, message: bytes) -> None:
        """Send a message. If the daemon has died, the main thread notices when it reads."""
        try:
            with self._sending:
                self._sock.sendall(message)
        except OSError:
            self._cut_off.set()

    def report_ready(self, probe_bytes: int) -> None:
        """Measure the device's speed, and report it and `ready`."""
        if probe_bytes:
            try:
                for m in self._medium.probe(probe_bytes, PROBE_BLOCK_BYTES):
                    throttle = self._throttles["read" if (m.src, m.dst) in self._reads else "write"]
                    seconds = max(m.seconds, throttle.least_s(m.num_bytes))
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
        """Handle messages until `stop` or the end of the stream. When it returns, all copies have
        finished."""
        for queue in self._queues.values():
            queue.start()
        scan = threading.Thread(
            target=self._or_break, args=(self._list_stored,), name="hicache-scan"
        )
        if self._medium.remembers:
            scan.start()
        is_stopped = any(self._handle(message) for message in early)
        while not is_stopped:
            data = self._sock.recv(_RECEIVE_BYTES)
            if not data:
                self._cut_off.set()
                break
            is_stopped = any(self._handle(message) for message in stream.feed(data))
        self._set_rates(inf, inf)  # report the batches that are being held back
        for queue in self._queues.values():
            queue.finish()
        self._is_ending.set()
        self._untaken.release()
        if self._medium.remembers:
            scan.join()
        if self._scrub is not None:
            self._scrub.join()

    def _or_break(self, work: Callable[[], None]) -> None:
        """Run in a thread. On an error end the process: otherwise the tier would stay half
        restored, or the scrub unfinished."""
        try:
            work()
        except Exception as error:
            self._break(error)

    def _begin_scrub(self, bytes_per_s: float) -> None:
        """Start a scrub unless one is running."""
        if self._scrub is None or not self._scrub.is_alive():
            work = partial(self._scrub_all, bytes_per_s)
            self._scrub = threading.Thread(
                target=self._or_break, args=(work,), name="hicache-scrub"
            )
            self._scrub.start()

    def _scrub_all(self, bytes_per_s: float) -> None:
        """Check every block at no more than this rate, and report progress now and then."""
        start_s = reported_s = time.monotonic()
        bad: list[Spoilt] = []
        for so_far in self._medium.scrub():
            bad += so_far.bad
            now_s = time.monotonic()
            if so_far.is_done or now_s - reported_s >= SCRUB_REPORT_S:
                self.send(pack_scrubbed(replace(so_far, bad=bad)))
                bad, reported_s = [], now_s
            ahead_s = so_far.num_bytes / bytes_per_s - (now_s - start_s)
            if self._is_ending.wait(max(0.0, ahead_s)) or self._cut_off.is_set():
                return

    def _list_stored(self) -> None:
        """Send the stored blocks, as fast as the daemon acknowledges them."""
        for rows in self._medium.stored():
            self._untaken.acquire()
            if self._is_ending.is_set() or self._cut_off.is_set():
                return
            self.send(pack_rows(rows))
        self.send(pack("restored", notes=list(self._medium.notes)))

    def _handle(self, message: Message) -> bool:
        """Handle one message. Returns True for `stop`."""
        kind = message["t"]
        if kind == "batch":
            batch = unpack_batch(message)
            self._queue(batch.queue).put(batch)
        elif kind in PAGE_JOBS and self._pages is not None:
            queue, job = self._pages.job_of(message)
            self._queue(queue).put(job)
        elif kind == "forget":
            self._writes.put(partial(self._medium.forget, unpack_keys(message)))
        elif kind == "note":
            self._writes.put(partial(self._medium.note, unpack_uses(message)))
        elif kind == "ping":
            pong = pack("pong", queue=message.get("queue"))
            self._queue(str(message.get("queue"))).put(partial(self.send, pong))
        elif kind == "scrub":
            self._begin_scrub(float(message["bytes_per_s"]))
        elif kind == "taken":
            self._untaken.release()
        elif kind == "describe":
            namespace, about = message.get("namespace"), message.get("about")
            if type(namespace) is not bytes or not isinstance(about, dict):
                raise MalformedMessage("describe: a namespace and a map")
            self._writes.put(partial(self._medium.describe, namespace, about))
        elif kind == "throttle":
            read, write = message.get("read"), message.get("write")
            if type(read) is not float or type(write) is not float:
                raise MalformedMessage("throttle: bytes per second, read and write")
            self._set_rates(read, write)
        elif kind != "stop":
            raise MalformedMessage(f"unknown message {kind!r}")
        return bool(kind == "stop")

    def _queue(self, name: str) -> CopyThread:
        if name not in self._queues:
            raise MalformedMessage(f"this device has no queue {name[:40]!r}")
        return self._queues[name]

    def _set_rates(self, read_bytes_per_s: float, write_bytes_per_s: float) -> None:
        self._throttles["read"].set(read_bytes_per_s)
        self._throttles["write"].set(write_bytes_per_s)

    def _fail(self, error: Exception) -> None:
        """An error in a queue's thread ends the process, unless it is a plain TierError: only
        `forget` and `note` raise one here, and the worker can continue without them."""
        if isinstance(error, TierError) and not isinstance(error, TierBroken):
            print(f"hicache worker: {error}", file=sys.stderr, flush=True)
            return
        self._break(error)

    def _break(self, error: Exception) -> None:
        is_damaged = isinstance(error, TierDamaged)
        self.send(pack("broken", error=str(error) or repr(error), damaged=is_damaged))
        os._exit(EXIT_BROKEN)


def _open(config: WorkerConfig, near: Arena, progress: Progress) -> Medium:
    """Import only this device's medium: a GPU worker loads no lmdb."""
    try:
        medium_class = resolve_name(config.spec.medium)
    except (ImportError, AttributeError, ValueError) as error:
        raise TierUnavailable(f"{config.device}: no medium {config.spec.medium}: {error}") from None
    medium: Medium = medium_class(config, near, progress)
    return medium


def _receive_config(sock: socket.socket, stream: Stream) -> list[Message]:
    """The first message, `config`, and those received with it; empty if the daemon has died."""
    while data := sock.recv(_RECEIVE_BYTES):
        messages = list(stream.feed(data))
        if messages:
            if messages[0]["t"] != "config":
                raise MalformedMessage(f"config expected, not {messages[0]['t']!r}")
            return messages
    return []


def _report_progress(sock: socket.socket, unit: str, done: int, total: int) -> None:
    """Opening makes progress: the supervisor must not kill this process as stuck."""
    sock.sendall(pack("opening", unit=unit, done=done, total=total))


def _become(title: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NAME, title.encode(), 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main(fd: int) -> int:
    """Run the worker. Returns the process's exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the daemon decides when to end
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
            return 0  # the daemon died before PDEATHSIG was set
        worker = None
        try:
            near = Arena.attach(config.near_path)
            near.hold()
            medium = _open(config, near, partial(_report_progress, sock))
            worker = Worker(sock, medium, config.read_bytes_per_s, config.write_bytes_per_s)
            threading.Thread(target=near.populate, name="hicache-touch", daemon=True).start()
            worker.report_ready(config.probe_bytes)
            worker.serve(stream, messages[1:])
            medium.close()
            near.close()
        except (TierError, ArenaError) as error:
            message = pack("broken", error=str(error), damaged=isinstance(error, TierDamaged))
            try:
                sock.sendall(message)
            except OSError:  # the daemon has died: log it
                print(f"{config.spec.title}: {error}", file=sys.stderr)
            return EXIT_BROKEN
        except OSError:
            return 0 if worker is not None else EXIT_BROKEN  # the daemon has died
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

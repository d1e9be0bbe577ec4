"""The connection to the daemon: one DEALER socket, and the driver of a blocking client.

What both drivers share (`open_socket`, `Lineage`, `map_arenas`), and `BlockingDriver`. Independent
of the protocol's operations; replies are decoded by the core (`exchange`).

    Send ──▶ DEALER ──▶ daemon          a monitor socket reports at once when the connection is
    feed ◀── DEALER ◀── daemon          made, refused or broken, so that an absent daemon costs
                                        a millisecond, not the timeout

Sockets do not reconnect: a broken one is closed, and the next Send opens another. Not thread-safe;
after a fork the child opens other sockets.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Generator, Sequence
from typing import Any, Final, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from hicache.client.exchange import Exchange
from hicache.client.steps import (
    Give,
    MapArenas,
    Part,
    Pause,
    Send,
    Step,
    Steps,
    Stream,
    Wait,
    Work,
)
from hicache.client.trouble import DaemonAbsent
from hicache.protocol.curve import CurveKeys
from hicache.protocol.messages import MAX_HEAD_BYTES
from hicache.tiers.arena import Arena

T = TypeVar("T")
Sock = TypeVar("Sock", bound=zmq.Socket[Any])

_SLICE_S: Final = 0.02
"""The interval of checks for a broken connection while waiting for a reply."""
_NOBLOCK: Final = int(zmq.NOBLOCK)
_HIGH_WATER: Final = 1024

_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
)
_NOT_LET_IN: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)
_monitor_numbers = itertools.count()


class Lineage:
    """The number of forks between the first import and this process. Cheaper than getting the pid
    at every call."""

    generation = 0

    @classmethod
    def forked(cls) -> None:
        cls.generation += 1


os.register_at_fork(after_in_child=Lineage.forked)


def open_socket(
    context: zmq.Context[Any], endpoint: str, max_part_bytes: int, curve: CurveKeys | None
) -> tuple[Sock, Sock]:
    """A DEALER connecting to `endpoint`, and its monitor. Raises DaemonAbsent on a bad endpoint."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, max(MAX_HEAD_BYTES, max_part_bytes))
    if curve is not None:
        curve.apply(socket)
    address = f"inproc://hicache-monitor-{os.getpid()}-{next(_monitor_numbers)}"
    socket.monitor(address, _EVENTS)
    monitor = context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(address)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        close_socket(socket, monitor)
        raise DaemonAbsent(f"cannot connect to {endpoint}: {error}") from None
    return socket, monitor


def close_socket(socket: zmq.Socket[Any], monitor: zmq.Socket[Any]) -> None:
    socket.disable_monitor()
    monitor.close(0)
    socket.close(0)


def is_up(monitor_message: list[bytes]) -> bool:
    """Whether the connection is usable after this event; otherwise it has ended."""
    return bool(parse_monitor_message(monitor_message)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)


def absent(endpoint: str, monitor_message: Sequence[bytes] = ()) -> DaemonAbsent:
    """The exception for a failed connection. `monitor_message`: the event that ended the
    attempt."""
    event = parse_monitor_message(list(monitor_message))["event"] if monitor_message else 0
    if event in _NOT_LET_IN and endpoint.startswith("tcp://"):
        return DaemonAbsent(
            f"the listener at {endpoint} refused this client: are the CURVE keys right, and is "
            "this client's public key listed there?"
        )
    return DaemonAbsent(f"no daemon answers at {endpoint}")


def map_arenas(paths: Sequence[str]) -> list[Arena]:
    """Map all arenas, or raise and map none."""
    arenas: list[Arena] = []
    with contextlib.ExitStack() as undo:  # if the second of two cannot be mapped: unmap the first
        for path in paths:
            arenas.append(Arena.attach(path))
            undo.callback(arenas[-1].close)
        undo.pop_all()
    return arenas


class BlockingDriver:
    """Executes the steps of a core's calls, one after another, by blocking.

    Not an event loop: a round trip is one send and one blocking receive."""

    def __init__(
        self, core: Exchange, max_part_bytes: int = 0, curve: CurveKeys | None = None
    ) -> None:
        self._core = core
        self._max_part_bytes = max_part_bytes
        self._curve = curve
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._is_over = False
        self._lineage = Lineage.generation

    def run(self, call: Steps[T]) -> T:
        """The result of a call."""
        if self._lineage != Lineage.generation:
            self._forked()
        try:
            step = next(call)
            while True:
                try:
                    result = self._carried_out(step)
                except BaseException as error:
                    step = call.throw(error)
                else:
                    step = call.send(result)
        except StopIteration as stop:
            value: T = stop.value
            return value

    def each(self, call: Stream[T]) -> Generator[T, None, None]:
        """The items of a stream. Other calls may be run between two of them."""
        if self._lineage != Lineage.generation:
            self._forked()
        with contextlib.closing(call):
            step = next(call, None)
            while step is not None:
                if isinstance(step, Give):
                    yield step.item
                    step = next(call, None)
                    continue
                try:
                    try:
                        result = self._carried_out(step)
                    except BaseException as error:
                        step = call.throw(error)
                    else:
                        step = call.send(result)
                except StopIteration:
                    return

    @property
    def connected(self) -> bool:
        if self._socket is not None and self._is_broken():
            self._hang_up(self._gone())
        return self._socket is not None

    def close(self) -> None:
        self._hang_up("the client was closed")
        if self._context is not None:
            self._context.destroy(linger=0)
        self._context = None

    def _forked(self) -> None:
        """In a child process: leave the parent's sockets open, and use others."""
        self._lineage = Lineage.generation
        self._context = self._socket = self._monitor = None
        self._core.forked()

    def _carried_out(self, step: Step) -> Any:
        if isinstance(step, Send):
            return self._send(step)
        if isinstance(step, Wait):
            return self._wait(step)
        if isinstance(step, Work):
            return step.task()
        if isinstance(step, Pause):
            return time.sleep(step.seconds)
        if isinstance(step, MapArenas):
            return map_arenas(step.paths)
        return self.close() if step.is_final else self._hang_up(step.why)

    def _send(self, step: Send) -> list[Part] | None:
        if self._socket is None or not self._was_passed_on(self._socket, step.frames):
            if not step.may_connect:
                raise DaemonAbsent(self._gone())
            self._connect(step.deadline_s)
            assert self._socket is not None
            if not self._was_passed_on(self._socket, step.frames):
                raise absent(self._core.endpoint)
        if not step.is_awaited or step.deadline_s - self._core.clock() < _SLICE_S:
            return None
        try:
            return self._received(self._socket, 0)
        except zmq.Again:  # no reply within the slice: the core continues to wait
            return None

    def _was_passed_on(self, socket: zmq.Socket[bytes], frames: Sequence[Part]) -> bool:
        """Send. Returns False, and closes the connection, where it is broken."""
        try:
            if len(frames) == 1:  # saves 11 µs of a call's 70 µs CPU time, as in `_received`
                socket.send(frames[0], _NOBLOCK)
            else:
                socket.send_multipart(frames, _NOBLOCK)
        except zmq.Again:
            if not self._is_broken():
                raise DaemonAbsent("the daemon takes no more requests") from None
            self._hang_up(self._gone())
            return False
        return True

    def _received(self, socket: zmq.Socket[bytes], flags: int) -> list[Part]:
        if self._core.has_parts:
            return list(socket.recv_multipart(flags))
        return [socket.recv(flags)]

    def _wait(self, step: Wait) -> None:
        """Fast path: one blocking receive; polls only after the first slice."""
        inbox, clock = step.inbox, self._core.clock
        while not inbox.items:
            if self._socket is None:
                raise DaemonAbsent(self._gone())
            left_s = step.deadline_s - clock()
            try:
                if left_s > _SLICE_S:
                    self._feed(self._received(self._socket, 0))
                    continue
                if self._socket.poll(max(0, int(left_s * 1000))):
                    self._feed(self._received(self._socket, _NOBLOCK))
                    continue
            except zmq.Again:
                pass
            if self._is_broken() and not self._socket.poll(0):  # after reading what had arrived
                self._hang_up(self._gone())
            elif clock() >= step.deadline_s:
                return

    def _feed(self, frames: list[Part]) -> None:
        if why := self._core.feed(frames):
            self._hang_up(why)

    def _connect(self, deadline_s: float) -> None:
        if self._context is None:
            self._context = zmq.Context()
        self._is_over = False
        self._socket, self._monitor = open_socket(
            self._context, self._core.endpoint, self._max_part_bytes, self._curve
        )
        self._socket.setsockopt(zmq.RCVTIMEO, int(_SLICE_S * 1000))
        wait_ms = max(1, int((deadline_s - self._core.clock()) * 1000))
        event: list[bytes] = []
        if self._monitor.poll(wait_ms):
            event = self._monitor.recv_multipart()
        if not event or not is_up(event):
            self._hang_up(self._gone())
            raise absent(self._core.endpoint, event)

    def _is_broken(self) -> bool:
        assert self._monitor is not None
        while not self._is_over and self._monitor.poll(0):
            self._is_over = not is_up(self._monitor.recv_multipart())
        return self._is_over

    def _hang_up(self, why: str) -> None:
        """Close the socket; the next Send opens another. Every waiting call gets DaemonAbsent."""
        if self._socket is not None and self._monitor is not None:
            close_socket(self._socket, self._monitor)
        self._socket = self._monitor = None
        self._core.lost(why)

    def _gone(self) -> str:
        return f"the daemon at {self._core.endpoint} has gone"

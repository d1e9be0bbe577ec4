"""The connection to the daemon: one DEALER socket. What both drivers (`blocking`, `aio`) share.

Independent of the protocol's operations; replies are decoded by the core (`exchange`).

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
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from hicache.client.session import DaemonAbsent
from hicache.protocol.curve import CurveKeys
from hicache.protocol.messages import MAX_HEAD_BYTES
from hicache.tiers.arena import Arena

T = TypeVar("T")
Sock = TypeVar("Sock", bound=zmq.Socket[Any])

SLICE_S: Final = 0.02
"""The interval of checks for a broken connection while waiting for a reply."""
NOBLOCK: Final = int(zmq.NOBLOCK)
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

"""The interface of the client's core and its drivers: the core decides, a driver does the I/O.

A call is a generator of the core. It yields steps; the driver executes each one and sends its
result back. Messages and lost connections are passed to `Exchange.feed` and `Exchange.lost`.

    call.send(result) ──▶ Send, Wait, Pause, Work, MapArenas, HangUp     driver: socket, clock,
         ▲                      │                                        threads
         └───────result─────────┘        Give: one item of a stream, for the caller

An operation is one method decorated with `operation` (or `stream`), which returns such a generator.
On a `Blocking` client it is a method that returns the result, on an `Asynchronous` one a coroutine.
Nothing here does I/O, waits, or reads a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import msgspec

P = ParamSpec("P")
T = TypeVar("T")
Part = bytes | memoryview
ReplyMap = dict[str, Any]


class Inbox:
    """What was received for one waiting call: replies with their parts, or a sentence why no reply
    will come. A waiting driver sets `wake`."""

    __slots__ = ("items", "request_id", "session", "wake")

    def __init__(self, request_id: int = 0, session: bytes = b"") -> None:
        self.request_id, self.session = request_id, session
        self.items: deque[tuple[ReplyMap, list[Part]] | str] = deque()
        self.wake: Callable[[], object] | None = None

    def put(self, item: tuple[ReplyMap, list[Part]] | str) -> None:
        self.items.append(item)
        if self.wake is not None:
            self.wake()


class Send(msgspec.Struct):
    """Send one message, connecting first where needed (and where the message `may_connect`).

    Result: the next message, where `is_awaited` and the driver has received it already; or None.
    The driver raises DaemonAbsent where it cannot send."""

    frames: Sequence[Part]
    deadline_s: float
    is_awaited: bool = True
    may_connect: bool = True


class Wait(msgspec.Struct):
    """Receive messages until the inbox has an item or the deadline has passed."""

    inbox: Inbox
    deadline_s: float


class Pause(msgspec.Struct):
    seconds: float


class Work(msgspec.Struct):
    """Run a function that copies many bytes. Result: what it returns. It has ended when the driver
    goes on, even where the call is cancelled."""

    task: Callable[[], Any]


class MapArenas(msgspec.Struct):
    """Result: an Arena for each path, in order. Raises ArenaError, OSError, ValueError, and then
    none of them is mapped."""

    paths: Sequence[str]


class HangUp(msgspec.Struct):
    """Close the connection; the next Send opens another. Every waiting call fails with `why`.
    `is_final`: no Send is expected, so everything that a connection needs is freed, too."""

    why: str
    is_final: bool = False


class Give(msgspec.Struct, Generic[T]):
    """One item of a stream."""

    item: T


Step = Send | Wait | Pause | Work | MapArenas | HangUp
Steps = Generator[Step, Any, T]
"""One call that returns a T."""
Stream = Generator[Step | Give[T], Any, None]
"""One call that gives items. Its cleanup must not yield: the caller may stop at any item."""


class Blocking:
    """Marks a client whose operations block and return the result."""


class Asynchronous:
    """Marks a client whose operations are coroutines."""


class _Declared(Generic[P, T]):
    """A method of the core that becomes a method of each client when it is first looked up: the
    client class's `call_of` or `stream_of` makes it, so name, parameters and docstring are written
    once."""

    _maker = ""

    def __init__(self, steps: Callable[Concatenate[Any, P], Generator[Any, Any, Any]]) -> None:
        self.steps = steps
        self.__doc__ = steps.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def _found(self, instance: Any, owner: Any) -> Any:
        make = getattr(owner, self._maker, None)
        if make is None:  # a class of the core, not a client
            return self
        made = make(self.steps)
        setattr(owner, self._name, made)  # from here on the class finds the method itself
        return made if instance is None else made.__get__(instance, owner)


class operation(_Declared[P, T]):  # noqa: N801
    """Declares a call: a method that returns Steps[T]."""

    _maker = "call_of"

    def __init__(self, steps: Callable[Concatenate[Any, P], Steps[T]]) -> None:
        super().__init__(steps)

    @overload
    def __get__(self, instance: None, owner: Any) -> operation[P, T]: ...
    @overload
    def __get__(self, instance: Blocking, owner: Any) -> Callable[P, T]: ...
    @overload
    def __get__(
        self, instance: Asynchronous, owner: Any
    ) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, instance: Any, owner: Any) -> Any:
        return self._found(instance, owner)


class stream(_Declared[P, T]):  # noqa: N801
    """Declares a call that gives items of type T: a method that returns Stream[T]."""

    _maker = "stream_of"

    def __init__(self, steps: Callable[Concatenate[Any, P], Stream[T]]) -> None:
        super().__init__(steps)

    @overload
    def __get__(self, instance: None, owner: Any) -> stream[P, T]: ...
    @overload
    def __get__(self, instance: Blocking, owner: Any) -> Callable[P, Generator[T, None, None]]: ...
    @overload
    def __get__(
        self, instance: Asynchronous, owner: Any
    ) -> Callable[P, AsyncGenerator[T, None]]: ...
    def __get__(self, instance: Any, owner: Any) -> Any:
        return self._found(instance, owner)

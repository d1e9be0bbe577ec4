"""What of CuPy the GPU worker uses, in host memory: for `gpu-check` without a GPU, and for tests.

Copies are done as late as the real device may do them: when somebody waits, and not before; or,
if `choose` is given, whenever it says so. Each stream keeps its order, streams keep none among
themselves. Errors come as CUDA's do: a call refused changes nothing else, a copy that fails takes
the context with it, and every later call fails.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from hicache.transfer.cuda_copy import Piece

INVALID_VALUE, ILLEGAL_ADDRESS = 1, 700


class StandInError(RuntimeError):
    """In the place of cupy.cuda.runtime.CUDARuntimeError."""

    def __init__(self, status: int) -> None:
        name = {INVALID_VALUE: "cudaErrorInvalidValue"}.get(status, "cudaErrorIllegalAddress")
        super().__init__(f"{name}: stand-in")
        self.status = status


class StandIn:
    """In the place of the module `cupy`.

    `choose(n)`: a number from 0 to n, how many of the n copies that wait are done now. `refuse`:
    the calls to enqueue, counted from 0, that are refused. `break_at`: the copy, counted from 0 as
    they are done, that takes the context with it.
    """

    def __init__(
        self,
        choose: Callable[[int], int] = lambda waiting: 0,
        refuse: Sequence[int] = (),
        break_at: int | None = None,
    ) -> None:
        self.num_done = 0
        self._choose, self._refuse, self._break_at = choose, frozenset(refuse), break_at
        self._num_enqueued = 0
        self._is_broken = False
        self._lock = threading.RLock()  # guards all of the above; links have threads of their own
        self._streams: list[_Stream] = []
        self._buffers: dict[int, Any] = {}
        self.cuda = SimpleNamespace(
            Memory=self._memory,
            Stream=self._stream,
            Event=lambda block=False, disable_timing=False: _Event(self),
            runtime=SimpleNamespace(
                CUDARuntimeError=StandInError,
                setDevice=lambda index: self._turn(),
                memcpyAsync=self._memcpy_async,
                hostRegister=lambda address, num_bytes, flags: self._turn(),
                hostUnregister=lambda address: self._turn(),
                hostAlloc=self._host_alloc,
                freeHost=lambda address: self._buffers.pop(address),
                deviceSynchronize=self.synchronize,
                runtimeGetVersion=lambda: 13000,
                driverGetVersion=lambda: 13000,
                getDeviceCount=lambda: 1,
                getDeviceProperties=lambda index: {"name": b"stand-in"},
                memGetInfo=lambda: (80 << 30, 80 << 30),
                deviceGetPCIBusId=lambda index: "0000:00:00.0",
            ),
        )

    @property
    def waiting(self) -> list[Piece]:
        """Copies that were enqueued and not done."""
        return [piece for stream in self._streams for piece in stream.waiting]

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    def enqueue_all(self, pieces: Sequence[Piece], stream: int) -> None:
        """As cuMemcpyBatchAsync: the copies of a batch in no order."""
        with self._lock:
            self._turn()
            half = len(pieces) // 2
            if self._is_refused():
                self._streams[stream].waiting += pieces[:half]
                raise StandInError(INVALID_VALUE)
            self._streams[stream].waiting += [*pieces[half:], *pieces[:half]]

    def do(self, stream: _Stream, count: int) -> None:
        """The next `count` copies of a stream. Raises StandInError."""
        with self._lock:
            for _ in range(count):
                if self.num_done == self._break_at:
                    self._is_broken = True
                self.check()
                destination, source, num_bytes = stream.waiting.pop(0)
                stream.num_done += 1
                ctypes.memmove(destination, source, num_bytes)
                self.num_done += 1
            self.check()

    def check(self) -> None:
        if self._is_broken:
            raise StandInError(ILLEGAL_ADDRESS)

    def lock(self) -> threading.RLock:
        return self._lock

    def _turn(self) -> None:
        """The device goes on by itself, as far as `choose` says, at every call."""
        with self._lock:
            self.check()
            for stream in reversed(self._streams):
                try:
                    self.do(stream, self._choose(len(stream.waiting)))
                except StandInError:
                    return  # told by the next call

    def _is_refused(self) -> bool:
        self._num_enqueued += 1
        return self._num_enqueued - 1 in self._refuse

    def _memcpy_async(self, to: int, source: int, num_bytes: int, kind: int, stream: int) -> None:
        with self._lock:
            self._turn()
            self.check()
            if self._is_refused():
                raise StandInError(INVALID_VALUE)
            self._streams[stream].waiting.append((to, source, num_bytes))

    def _stream(self, non_blocking: bool = False) -> _Stream:
        with self._lock:
            self._streams.append(_Stream(self, len(self._streams)))
            return self._streams[-1]

    def _memory(self, num_bytes: int) -> SimpleNamespace:
        buffer = (ctypes.c_ubyte * num_bytes)()
        return SimpleNamespace(ptr=ctypes.addressof(buffer), buffer=buffer)

    def _host_alloc(self, num_bytes: int, flags: int) -> int:
        buffer = (ctypes.c_ubyte * num_bytes)()
        self._buffers[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)


class _Stream:
    def __init__(self, device: StandIn, number: int) -> None:
        self.ptr = number
        self.waiting: list[Piece] = []
        self.num_done = 0
        self._device = device

    def synchronize(self) -> None:
        with self._device.lock():
            self._device.do(self, len(self.waiting))


class _Event:
    """Complete when all that its stream held when it was recorded is done."""

    def __init__(self, device: StandIn) -> None:
        self._device = device

    def record(self, stream: _Stream) -> None:
        with self._device.lock():
            self._device.check()
            self._stream, self._behind = stream, stream.num_done + len(stream.waiting)

    def synchronize(self) -> None:
        with self._device.lock():
            self._device.do(self._stream, max(0, self._behind - self._stream.num_done))

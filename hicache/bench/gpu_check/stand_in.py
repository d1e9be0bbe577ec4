"""What of CuPy the GPU worker uses, in host memory: for `gpu-check` without a GPU, and for tests.

Copies are done as late as the real device may do them: when a caller waits, and not before; or,
if `choose` is given, whenever it says so. Each stream keeps its order, streams keep none among
themselves. Errors come as CUDA's do: a call refused changes nothing else, a copy that fails takes
the context with it, and every later call fails.

Kernels are transfer/gpu_pages/kernels.cu compiled for the CPU (cpu_kernels.py), enqueued and done
as a copy is; where there is no C++ compiler they do not compile.

Memory can be mapped by another process, as by CUDA IPC: a handle names a memory file by the way to
it through its owner, so it can be opened while the owner lives, and what was mapped stays.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from hicache.bench.gpu_check.cpu_kernels import NoCompiler, library
from hicache.transfer.media.cuda_copy import Piece

INVALID_VALUE, ILLEGAL_ADDRESS = 1, 700
BUS_ID = "0000:00:00.0"
HANDLE_BYTES = 64
ATTRIBUTES = {133: 0, 91: 1}
"""No MPS; pinned memory has one address for both sides."""

Work = Piece | Callable[[], None]


class StandInError(RuntimeError):
    """Replaces cupy.cuda.runtime.CUDARuntimeError."""

    def __init__(self, status: int) -> None:
        name = {INVALID_VALUE: "cudaErrorInvalidValue"}.get(status, "cudaErrorIllegalAddress")
        super().__init__(f"{name}: stand-in")
        self.status = status


class StandInCompileError(Exception):
    """Replaces cupy.cuda.compiler.CompileException, which is not a RuntimeError."""


class StandIn:
    """Replaces the module `cupy`.

    `choose(n)`: a number from 0 to n, how many of the n copies that wait are done now. `refuse`:
    the calls to enqueue, counted from 0, that are refused. `break_at`: the copy, counted from 0 as
    they are done, that takes the context with it. `copy_s`: what each copy takes beside its bytes.
    `attributes` of the device, by CUDA's number; others it does not know.
    """

    def __init__(
        self,
        choose: Callable[[int], int] = lambda waiting: 0,
        refuse: Sequence[int] = (),
        break_at: int | None = None,
        copy_s: float = 0.0,
        attributes: Mapping[int, int] = ATTRIBUTES,
    ) -> None:
        self.num_done = 0
        self.launches: list[tuple[str, int]] = []  # (kernel, thread blocks)
        self._copy_s, self._attributes = copy_s, attributes
        self._choose, self._refuse, self._break_at = choose, frozenset(refuse), break_at
        self._num_enqueued = 0
        self._is_broken = False
        self._lock = threading.RLock()  # guards all of the above; links have their own threads
        self._current = threading.local()
        self._streams: list[_Stream] = []
        self._buffers: dict[int, Any] = {}
        self._files: dict[int, int] = {}
        self._mapped: dict[bytes, tuple[int, Any, list[None]]] = {}
        self.RawModule = self._raw_module
        self.cuda = SimpleNamespace(
            Memory=self._memory,
            Stream=self._stream,
            alloc_pinned_memory=_Pinned,
            compiler=SimpleNamespace(CompileException=StandInCompileError),
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
                getDevice=lambda: 0,
                getDeviceProperties=lambda index: {"name": b"stand-in", "multiProcessorCount": 2},
                deviceGetAttribute=self._attribute,
                memGetInfo=lambda: (80 << 30, 80 << 30),
                deviceGetPCIBusId=lambda index: BUS_ID,
                ipcGetMemHandle=self._handle_of,
                ipcOpenMemHandle=self._open_handle,
                ipcCloseMemHandle=self._close_handle,
            ),
        )

    @property
    def waiting(self) -> list[Work]:
        """Copies that were enqueued and are not done."""
        return [piece for stream in self._streams for piece in stream.waiting]

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    def enqueue_all(self, pieces: Sequence[Piece], stream: int) -> None:
        """Like cuMemcpyBatchAsync: the copies of a batch have no order."""
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
                work = stream.waiting.pop(0)
                stream.num_done += 1
                if callable(work):
                    work()
                else:
                    if self._copy_s:
                        time.sleep(self._copy_s)
                    ctypes.memmove(*work)
                self.num_done += 1
            self.check()

    def check(self) -> None:
        if self._is_broken:
            raise StandInError(ILLEGAL_ADDRESS)

    def lock(self) -> threading.RLock:
        return self._lock

    def make_current(self, stream: _Stream | None) -> None:
        """Of the calling thread."""
        self._current.stream = stream

    def _raw_module(self, code: str, options: tuple[str, ...]) -> SimpleNamespace:
        try:
            library()
        except NoCompiler as why:
            raise StandInCompileError(str(why)) from why
        return SimpleNamespace(get_function=lambda name: partial(self._launch, name))

    def _launch(
        self, name: str, grid: tuple[int], threads: tuple[int], arguments: Sequence[Any]
    ) -> None:
        """Checks the types of the arguments: CuPy passes them on unchecked."""
        assert [type(each) for each in arguments] == 4 * [np.uint64] + 4 * [np.uint32] + [np.int32]
        values = [
            make(int(each))
            for make, each in zip(
                4 * [ctypes.c_void_p] + 4 * [ctypes.c_uint] + [ctypes.c_int], arguments, strict=True
            )
        ]
        start = (name.encode(), ctypes.c_uint(*grid), ctypes.c_uint(*threads))
        with self._lock:
            self._turn()
            self.check()
            if self._is_refused():
                raise StandInError(INVALID_VALUE)
            self.launches.append((name, *grid))
            self._current.stream.waiting.append(partial(library(), *start, *values))

    def _attribute(self, number: int, index: int) -> int:
        if number not in self._attributes:
            raise StandInError(INVALID_VALUE)
        return self._attributes[number]

    def _turn(self) -> None:
        """Called by every function: the device does as many copies as `choose` says."""
        with self._lock:
            self.check()
            for stream in reversed(self._streams):
                try:
                    self.do(stream, self._choose(len(stream.waiting)))
                except StandInError:
                    return  # the next call raises it

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
        file = os.memfd_create("stand-in", os.MFD_CLOEXEC)
        os.ftruncate(file, num_bytes)
        buffer = (ctypes.c_ubyte * num_bytes).from_buffer(mmap.mmap(file, num_bytes))
        self._files[ctypes.addressof(buffer)] = file
        weakref.finalize(buffer, os.close, file)
        return SimpleNamespace(ptr=ctypes.addressof(buffer), buffer=buffer, size=num_bytes)

    def _handle_of(self, base: int) -> bytes:
        with self._lock:
            self.check()
            if base not in self._files:
                raise StandInError(INVALID_VALUE)
            return f"/proc/{os.getpid()}/fd/{self._files[base]}".encode().ljust(HANDLE_BYTES, b"\0")

    def _open_handle(self, handle: bytes) -> int:
        """A handle can be opened several times, and maps at the same address."""
        with self._lock:
            self.check()
            if handle not in self._mapped:
                try:
                    file = os.open(handle.rstrip(b"\0"), os.O_RDWR)
                except OSError as error:
                    raise StandInError(INVALID_VALUE) from error
                size = os.fstat(file).st_size
                buffer = (ctypes.c_ubyte * size).from_buffer(mmap.mmap(file, size))
                os.close(file)
                self._mapped[handle] = ctypes.addressof(buffer), buffer, []
            base, _, users = self._mapped[handle]
            users.append(None)
            return base

    def _close_handle(self, base: int) -> None:
        with self._lock:
            self.check()
            for handle, (at, _, users) in list(self._mapped.items()):
                if at == base:
                    users.pop()
                    if not users:
                        del self._mapped[handle]
                    return
            raise StandInError(INVALID_VALUE)

    def _host_alloc(self, num_bytes: int, flags: int) -> int:
        buffer = (ctypes.c_ubyte * num_bytes)()
        self._buffers[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)


class _Pinned(bytearray):
    """cupy.cuda.PinnedMemoryPointer: a buffer with an address."""

    @property
    def ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))


class _Stream:
    def __init__(self, device: StandIn, number: int) -> None:
        self.ptr = number
        self.waiting: list[Work] = []
        self.num_done = 0
        self._device = device

    def __enter__(self) -> None:
        self._device.make_current(self)

    def __exit__(self, *_: object) -> None:
        self._device.make_current(None)

    def synchronize(self) -> None:
        with self._device.lock():
            self._device.do(self, len(self.waiting))


class _Event:
    """Complete when all copies enqueued in its stream before it was recorded are done."""

    def __init__(self, device: StandIn) -> None:
        self._device = device

    @property
    def done(self) -> bool:
        return self._stream.num_done >= self._behind

    def record(self, stream: _Stream) -> None:
        with self._device.lock():
            self._device.check()
            self._stream, self._behind = stream, stream.num_done + len(stream.waiting)

    def synchronize(self) -> None:
        with self._device.lock():
            self._device.do(self._stream, max(0, self._behind - self._stream.num_done))

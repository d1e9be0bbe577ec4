"""A shared-memory arena: a file that the daemon owns and that workers and clients map.

    | header page | generations: u32 per data page | writers: u64 per data page | data: slots … |

The daemon creates it (`Arena.create`), holds a lock on it while it runs, and is the only process
that raises generations. Workers and clients attach and copy; the daemon's messages name the slots
that they may use. Few imports: clients import this module.

The arena of a killed daemon is taken over by the next daemon (`Arena.adopt`): clients still map it,
and a second one would take as much memory again. Its contents are discarded; the writers' table
says which slots its clients may still write. Where it cannot be taken over, and at a clean stop,
its memory is freed although clients map it (`empty`).

Races, and who wins:
1. A reader's lease expires while it copies, and the slot gets another block. The owner raises the
   slot's generation before the first byte is written; the reader compares generations after its
   copy: a difference is a miss.
2. A reader's lease expires while it copies, and smaller slots are laid over its old slot. Raising
   the new slots' generations need not raise that of the old slot's first page. So the pool lists
   the pages it cuts anew (`SlotPool.reshaped`), the plan carries them, and the daemon's loop calls
   `raise_range` for them before it starts a move or sends a reply of that plan.
3. The owner frees pages (`discard`) while clients map them. It raises their generations first, so a
   reader whose lease had expired, and who may have read zeros, sees a difference. Such a slot is
   granted again only after its memory has been allocated (`refill`): writing a page for which there
   is no memory is a SIGBUS.
4. An arena is taken over while a worker of the dead daemon still copies, because the kernel has not
   ended it yet. Workers hold another lock (`hold`); the new daemon waits for it.
5. A client has slots to write when its daemon dies. They are marked with its pid from before the
   client receives them until it reports that it has finished; the next daemon uses none of them
   while that process lives.
6. A scan for stale arenas finds one that is just being created, and takes the lock first. The scan
   unlinks it; the creator sees that its file has no name, and starts over.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hicache.tiers.block import MAX_TIER_BYTES, PAGE_BYTES, Ids

MAGIC = b"hicarena"
UNKNOWN_WRITER = 0xFFFFFFFF
WORKERS_S = 3.0
VERSION = 1
_HEADER = struct.Struct("<8sIIQQQ32s")  # magic, version, page, data bytes, data offset, pid, epoch
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock: type, whence, start, length, pid
_HUGE_PAGE_BYTES = 2 << 20
_STEP_BYTES = 256 << 20
_MADV_POPULATE_WRITE = 23

Bytes = npt.NDArray[np.uint8]
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while an arena is allocated and touched."""


class ArenaError(Exception):
    """An arena cannot be created or mapped; the message is a sentence for the operator."""


class Arena:
    """A mapped arena. Every process closes its own mapping; only the owner unlinks the file."""

    def __init__(self, path: Path, fd: int, data_bytes: int, data_offset: int, epoch: str) -> None:
        self.path = path
        self.data_bytes = data_bytes
        self.epoch = epoch
        self._data_offset = data_offset
        self.huge_pages = False
        self._fd = fd
        self._map = mmap.mmap(fd, data_offset + data_bytes)
        everything: Bytes = np.frombuffer(self._map, np.uint8)
        self.data: Bytes = everything[data_offset:]
        num_pages = data_bytes // PAGE_BYTES
        table = everything[PAGE_BYTES : PAGE_BYTES + 4 * num_pages]
        self._generations: npt.NDArray[np.uint32] = table.view(np.uint32)
        table = everything[_writers_offset(data_bytes) : data_offset][: 8 * num_pages]
        self._writers: npt.NDArray[np.uint64] = table.view(np.uint64)
        self.inherited: list[tuple[int, int, int]] = []
        self._data_address = int(self.data.ctypes.data)

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        data_bytes: int,
        *,
        huge_pages: bool = False,
        pretouch: Progress | None = None,
    ) -> Arena:
        """Create an arena, allocate all its memory and lock it; with `pretouch` also map every
        page now. Raises ArenaError and leaves no file behind; an existing file is never changed."""
        path = Path(path)
        data_bytes = _whole_pages(data_bytes)
        if not PAGE_BYTES <= data_bytes <= MAX_TIER_BYTES:
            raise ArenaError(f"an arena of {data_bytes} bytes: 4 KiB … 8 TiB are possible")
        data_offset = _data_offset(data_bytes, huge_pages)
        fd = _create_locked(path)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            undo.callback(path.unlink, missing_ok=True)  # the file would keep its memory allocated
            _allocate(fd, path, data_offset + data_bytes, pretouch)
            arena = cls(path, fd, data_bytes, data_offset, secrets.token_hex(16))
            undo.pop_all()
        arena._own(huge_pages, pretouch)
        return arena

    @classmethod
    def adopt(
        cls,
        path: str | os.PathLike[str],
        data_bytes: int,
        *,
        huge_pages: bool = False,
        pretouch: Progress | None = None,
    ) -> Arena:
        """Take over a dead owner's arena for its memory; its contents are discarded and all its
        generations raised. `inherited` lists the (first page, pages, pid) that clients of the dead
        owner may still write. Raises ArenaError and leaves the file unchanged where it is not such
        an arena."""
        path = Path(path)
        data_bytes = _whole_pages(data_bytes)
        data_offset = _data_offset(data_bytes, huge_pages)
        if not is_adoptable(path, data_bytes, huge_pages=huge_pages):
            raise ArenaError(f"{path} is of another size")
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ArenaError(f"cannot open the arena {path}: {error.strerror}") from error
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _wait_for_workers(fd)
                os.posix_fallocate(fd, 0, data_offset + data_bytes)  # holes that were cut
            except OSError as error:
                raise ArenaError(f"{path} cannot be taken over: {error.strerror}") from error
            if not os.fstat(fd).st_nlink:
                raise ArenaError(f"{path} is gone")
            arena = cls(path, fd, data_bytes, data_offset, secrets.token_hex(16))
            undo.pop_all()
            undo.callback(arena.close)
            arena.inherited = arena._marked()
            if any(pid == UNKNOWN_WRITER for _, _, pid in arena.inherited):
                raise ArenaError(f"an unknown process may still be writing to {path}")
            undo.pop_all()
        arena.raise_range(0, data_bytes // PAGE_BYTES)
        arena._own(huge_pages, pretouch)
        return arena

    @classmethod
    def attach(cls, path: str | os.PathLike[str]) -> Arena:
        """Map an arena that another process owns. Raises ArenaError when the file is not a
        complete arena."""
        path = Path(path)
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ArenaError(f"cannot open the arena {path}: {error.strerror}") from error
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            found = os.pread(fd, _HEADER.size, 0)
            if len(found) < _HEADER.size or not found.startswith(MAGIC):
                raise ArenaError(f"{path} is not an arena of hicache, or not ready yet")
            _, version, page, data_bytes, data_offset, _, epoch = _HEADER.unpack(found)
            if (version, page) != (VERSION, PAGE_BYTES):
                raise ArenaError(f"{path}: arena version {version}; this hicache needs {VERSION}")
            if os.fstat(fd).st_size < data_offset + data_bytes:
                raise ArenaError(f"{path} is shorter than its header says")
            arena = cls(path, fd, data_bytes, data_offset, epoch.decode())
            undo.pop_all()
        return arena

    # --- bytes ---------------------------------------------------------------------------------

    def view(self, slot: int, num_bytes: int) -> Bytes:
        """The writable bytes of a slot. Raises ValueError when they leave the data area."""
        start = slot * PAGE_BYTES
        if slot < 0 or num_bytes < 0 or start + num_bytes > self.data_bytes:
            raise ValueError(f"slot {slot} of {num_bytes} bytes leaves the arena")
        return self.data[start : start + num_bytes]

    def address(self, slot: int, num_bytes: int) -> int:
        """The address of `view`'s first byte, valid while this arena is open. Raises ValueError as
        `view` does."""
        start = slot * PAGE_BYTES
        if slot < 0 or num_bytes < 0 or start + num_bytes > self.data_bytes or self._fd < 0:
            raise ValueError(f"slot {slot} of {num_bytes} bytes leaves the arena")
        return self._data_address + start

    def copy_in(self, slots: Ids, blocks: Bytes, slot_bytes: int) -> None:
        """Write row i of `blocks` ([n, block bytes]) to `slots[i]`, adjacent slots in one copy."""
        for first, end, room in self._runs(slots, slot_bytes, blocks):
            np.copyto(room[:, : blocks.shape[1]], blocks[first:end])

    def copy_out(self, slots: Ids, blocks: Bytes, slot_bytes: int) -> None:
        """Read `slots[i]` to row i of `blocks` ([n, block bytes]), adjacent slots in one copy."""
        for first, end, room in self._runs(slots, slot_bytes, blocks):
            np.copyto(blocks[first:end], room[:, : blocks.shape[1]])

    def _runs(
        self, slots: Ids, slot_bytes: int, blocks: Bytes
    ) -> Iterator[tuple[int, int, npt.NDArray[np.uint8]]]:
        """(first, end, [end - first, slot_bytes] of the arena) for each run of adjacent slots."""
        if blocks.ndim != 2 or len(blocks) != len(slots) or blocks.shape[1] > slot_bytes:
            raise ValueError(f"{len(slots)} slots of {slot_bytes} bytes for {blocks.shape} bytes")
        if not len(slots):
            return
        ends = np.flatnonzero(np.diff(slots) != slot_bytes // PAGE_BYTES) + 1
        first = 0
        for end in [*ends.tolist(), len(slots)]:
            run = self.view(int(slots[first]), (end - first) * slot_bytes)
            yield first, end, run.reshape(end - first, slot_bytes)
            first = end

    # --- generations ---------------------------------------------------------------------------

    def generations(self, slots: Ids) -> npt.NDArray[np.uint32]:
        """A copy of the slots' current generations."""
        return self._generations[slots]

    def raise_generations(self, slots: Ids) -> None:
        """Owner only: call before these slots (all different) get other bytes. Unmarks them."""
        self._generations[slots] += np.uint32(1)
        self._writers[slots] = 0

    # --- the writers' table, for the next owner ------------------------------------------------

    def mark(self, slots: Ids, slot_bytes: int, pid: int) -> None:
        """Owner only: call before granting these slots to a client for writing."""
        pages = np.uint64(slot_bytes // PAGE_BYTES)
        self._writers[slots] = pages << np.uint64(32) | np.uint64(pid or UNKNOWN_WRITER)

    def unmark(self, slots: Ids) -> None:
        """Owner only: the client has reported that it no longer writes these slots."""
        self._writers[slots] = 0

    def _marked(self) -> list[tuple[int, int, int]]:
        pages = np.flatnonzero(self._writers)
        entries = self._writers[pages]
        sizes, pids = entries >> np.uint64(32), entries & np.uint64(0xFFFFFFFF)
        return list(zip(pages.tolist(), sizes.tolist(), pids.tolist(), strict=True))

    def raise_range(self, first_page: int, num_pages: int) -> None:
        """Owner only: call before these pages are divided into other slots (race 2)."""
        self._generations[first_page : first_page + num_pages] += np.uint32(1)

    # --- freeing memory ------------------------------------------------------------------------

    def discard(self, first_page: int, num_bytes: int) -> None:
        """Owner only: free the memory of pages without a slot, although clients map them.
        Idempotent. Raises OSError where the file system cannot do that."""
        self.raise_range(first_page, num_bytes // PAGE_BYTES)
        start = self._data_offset + first_page * PAGE_BYTES
        self._map.madvise(mmap.MADV_REMOVE, start, num_bytes)

    def refill(self, first_page: int, num_bytes: int) -> None:
        """Owner only: allocate memory for these pages again. Raises OSError (ENOSPC)."""
        start = self._data_offset + first_page * PAGE_BYTES
        os.posix_fallocate(self._fd, start, num_bytes)

    def empty(self) -> None:
        """Owner only, or for a dead owner's arena: raise all generations and free all memory,
        although clients map it."""
        self._generations += np.uint32(1)
        with contextlib.suppress(OSError):  # a file system without holes: the memory stays
            self._map.madvise(mmap.MADV_REMOVE, self._data_offset, self.data_bytes)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory allocated to the file."""
        return os.fstat(self._fd).st_blocks * 512

    def populate(self) -> None:
        """Map every page into this process, from a separate thread, in steps of 2 MiB: a first
        touch costs several times the copy that causes it. Ends early when the arena is closed."""
        with contextlib.suppress(ValueError, OSError):  # closed; a kernel before 5.14
            total = len(self._map)
            for start in range(0, total, _HUGE_PAGE_BYTES):
                step = min(_HUGE_PAGE_BYTES, total - start)
                self._map.madvise(_MADV_POPULATE_WRITE, start, step)

    # --- lifetime ------------------------------------------------------------------------------

    def hold(self) -> None:
        """For a worker: keep other daemons from taking the arena over while this process lives."""
        _lock_as_worker(self._fd, fcntl.F_RDLCK)

    def close(self) -> None:
        """Unmap. Existing views keep the mapping alive until they are deleted. Idempotent."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        self.data = np.empty(0, np.uint8)
        self._generations = np.empty(0, np.uint32)
        self._writers = np.empty(0, np.uint64)
        try:
            self._map.close()
        except BufferError:
            pass  # unmapped with the last view
        finally:
            os.close(fd)

    def unlink(self) -> None:
        """Remove the file's name; existing mappings stay. Idempotent."""
        self.path.unlink(missing_ok=True)

    def _own(self, huge_pages: bool, pretouch: Progress | None) -> None:
        """Become the owner; writes the header last, when the arena is ready."""
        self.huge_pages = huge_pages and self._ask_for_huge_pages()
        if pretouch is not None:
            self._touch(pretouch)
        epoch, pid = self.epoch.encode(), os.getpid()
        fields = (MAGIC, VERSION, PAGE_BYTES, self.data_bytes, self._data_offset, pid, epoch)
        self._map[: _HEADER.size] = _HEADER.pack(*fields)

    def _ask_for_huge_pages(self) -> bool:
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return False  # a kernel without them: slower, not wrong
        return True

    def _touch(self, progress: Progress) -> None:
        """Map every page now: a first touch later costs more than the copy that causes it."""
        total = len(self._map)
        for start in range(0, total, _STEP_BYTES):
            step = min(_STEP_BYTES, total - start)
            try:
                self._map.madvise(_MADV_POPULATE_WRITE, start, step)
            except OSError:  # a kernel before 5.14
                np.frombuffer(self._map, np.uint8)[start : start + step : PAGE_BYTES] = 0
            progress(total // 2 + (start + step) // 2, total)


def is_adoptable(
    path: str | os.PathLike[str], data_bytes: int, *, huge_pages: bool = False
) -> bool:
    """Whether the file is an arena of this size and layout; the owner is not checked."""
    data_bytes = _whole_pages(data_bytes)
    data_offset = _data_offset(data_bytes, huge_pages)
    try:
        with open(path, "rb", opener=_without_following) as file:
            found = file.read(_HEADER.size)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if len(found) < _HEADER.size:
        return False
    wanted = (MAGIC, VERSION, PAGE_BYTES, data_bytes, data_offset)
    return _HEADER.unpack(found)[:5] == wanted and size == data_offset + data_bytes


def stale_arenas(directory: str | os.PathLike[str], prefix: str) -> list[Path]:
    """This user's arenas in `directory`, named `prefix…`, whose owner is dead."""
    with _Stale(directory, prefix) as stale:
        return list(stale.paths)


def remove_stale(
    directory: str | os.PathLike[str],
    prefix: str,
    is_kept: Callable[[Path], bool] = lambda path: False,
) -> list[Path]:
    """Delete the arenas of dead owners and free their memory, although clients may map them.
    Returns the deleted paths. A live owner's arena is never changed."""
    with _Stale(directory, prefix) as stale:
        removed = [path for path in stale.paths if not is_kept(path)]
        for path in removed:
            with contextlib.suppress(ArenaError):  # its creator died before it was complete
                arena = Arena.attach(path)
                arena.empty()
                arena.close()
            path.unlink(missing_ok=True)
        return removed


class _Stale:
    """The stale arenas, each locked while this is open, so that no daemon takes one over."""

    def __init__(self, directory: str | os.PathLike[str], prefix: str) -> None:
        self.paths: list[Path] = []
        self._fds: list[int] = []
        for path in sorted(Path(directory).glob(prefix + "*")):
            self._try(path)

    def _try(self, path: Path) -> None:
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return  # another user's, a link, or gone
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            begin = os.pread(fd, len(MAGIC), 0)
            # If its creator died before it wrote the header, it begins with zeros or is empty.
            if begin != MAGIC and begin.strip(b"\0"):
                raise BlockingIOError
            self.paths.append(path)
            self._fds.append(fd)
        except OSError:
            os.close(fd)

    def __enter__(self) -> _Stale:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds:
            os.close(fd)


def _without_following(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _writers_offset(data_bytes: int) -> int:
    return PAGE_BYTES + _whole_pages(4 * (data_bytes // PAGE_BYTES))


def _data_offset(data_bytes: int, huge_pages: bool) -> int:
    unit = _HUGE_PAGE_BYTES if huge_pages else PAGE_BYTES
    return -(-(_writers_offset(data_bytes) + 8 * (data_bytes // PAGE_BYTES)) // unit) * unit


def _wait_for_workers(fd: int) -> None:
    """Wait for the dead owner's workers to end. Raises BlockingIOError after WORKERS_S."""
    give_up_s = time.monotonic() + WORKERS_S
    while True:
        try:
            _lock_as_worker(fd, fcntl.F_WRLCK)
        except OSError:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.02)
        else:
            _lock_as_worker(fd, fcntl.F_UNLCK)
            return


def _lock_as_worker(fd: int, kind: int) -> None:
    """Lock the file's first byte by an open file description (OFD) lock: a process's lock would be
    lost when any of its descriptors of this file is closed. Raises BlockingIOError."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, 0, 1, 0))


def _create_locked(path: Path) -> int:
    """Create an empty file under an exclusive lock (race 6)."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        try:
            fd = os.open(path, flags, 0o600)
        except FileExistsError:
            raise ArenaError(f"{path} exists already; another daemon may be using it") from None
        except OSError as error:
            raise ArenaError(f"cannot create the arena {path}: {error.strerror}") from error
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def _allocate(fd: int, path: Path, total: int, progress: Progress | None) -> None:
    """Allocate all of the file's memory now: a full /dev/shm is an error here, not a SIGBUS."""
    room = os.statvfs(path.parent)
    free = room.f_bavail * room.f_frsize
    advice = f"make the tier smaller, or give {path.parent} more room"
    if total > free:
        raise ArenaError(f"{path} needs {total} bytes and {path.parent} has {free} free: {advice}")
    for start in range(0, total, _STEP_BYTES):
        step = min(_STEP_BYTES, total - start)
        try:
            os.posix_fallocate(fd, start, step)
        except OSError as error:
            reason = f"{error.strerror} after {start} bytes; {free} bytes were free"
            raise ArenaError(f"{path} needs {total} bytes: {reason}: {advice}") from error
        if progress is not None:
            progress((start + step) // 2, total)

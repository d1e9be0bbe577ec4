"""One slot-size class of the disk tier as LMDB holds it: opening, committing, errors, room.

Used by `disk_tier.py` and the tools beside it (shrink, verify, repair), never by two processes at
once: the device's lock sees to that.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from hicache.tiers.block import PAGE_BYTES
from hicache.tiers.errors import TierBroken, TierDamaged, TierError, TierFull

DATA_FILE = "data.mdb"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's mallopt
_KEPT_BYTES = 64 << 20
_FULL_BYTES = 16 << 20
_MAX_READERS = 64
_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.MapResizedError,  # its first pages were overwritten: nobody else may change the map
    lmdb.InvalidParameterError,  # its lock file was
    lmdb.BadTxnError,  # a page of its trees was no page
    lmdb.CursorFullError,  # its trees are deeper than any tree
    lmdb.PageFullError,  # one of its pages holds more than a page
)


class Environment(NamedTuple):
    """One class's LMDB environment and its sub-databases. `usage` is None in one that is only read
    and has none.

    `data` is the file that LMDB has mapped, for reading what lies in it without touching the map.
    `mapping` is held while blocks are read, `writing` while something is committed; both to change
    the map's size, for LMDB unmaps the file then.
    """

    env: lmdb.Environment
    meta: Any
    blocks: Any
    usage: Any
    inode: int
    data: FileIO
    mapping: threading.Lock
    writing: threading.Lock

    def file_bytes(self) -> int:
        """How long the file is; it never shrinks."""
        return (self.env.info()["last_pgno"] + 1) * PAGE_BYTES

    def map_bytes(self) -> int:
        """How long it may become."""
        return int(self.env.info()["map_size"])

    def live_bytes(self) -> int:
        """What its databases take of it; the rest is free, or will be a commit later."""
        with self.env.begin() as txn:
            return PAGE_BYTES * sum(
                stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
                for stat in (txn.stat(self.meta), txn.stat(self.blocks), txn.stat(self.usage))
            )

    def num_blocks(self) -> int:
        with self.env.begin() as txn:
            return int(txn.stat(self.meta)["entries"])

    def close(self) -> None:
        """Idempotent. Nobody may be reading or writing."""
        self.env.close()
        self.data.close()

    def resize(self, map_bytes: int) -> None:
        """Let the file grow to here and no further. Waits for the batch that is being read."""
        with typed("write", self.env.path()), self.mapping, self.writing:
            self.env.set_mapsize(map_bytes)

    def commit(self, change: Callable[[lmdb.Transaction], object]) -> None:
        """One write transaction; on any failure it is aborted and nothing of it is seen."""
        with typed("write", self.env.path()):
            # What is written to a file without a name is acknowledged and lost.
            if os.stat(os.path.join(self.env.path(), DATA_FILE)).st_ino != self.inode:
                raise TierBroken("its file was replaced while it was open")
            with self.writing, self.env.begin(write=True) as txn:
                change(txn)


def open_environment(
    directory: Path,
    map_bytes: int,
    *,
    is_synced: bool = True,
    read_ahead: bool = True,
    is_read_only: bool = False,
) -> Environment:
    """Open a class, or make it. TierDamaged when its file cannot be what LMDB left there.
    `is_read_only` changes nothing, and is for whoever holds the device's lock."""
    file = directory / DATA_FILE
    had_bytes = file.stat().st_size if file.exists() else 0
    with typed("open", str(directory)):
        if not is_read_only:
            directory.mkdir(mode=0o700, exist_ok=True)
        env = lmdb.open(
            str(directory),
            map_size=map_bytes,
            mode=0o600,
            max_dbs=3,
            max_readers=_MAX_READERS,
            sync=is_synced,
            metasync=is_synced,
            readahead=read_ahead,
            meminit=False,
            readonly=is_read_only,
            lock=not is_read_only,
        )
        with contextlib.ExitStack() as undo:
            undo.callback(env.close)
            needs = (env.info()["last_pgno"] + 1) * PAGE_BYTES
            if had_bytes and had_bytes < needs:  # touching the missing pages would be a SIGBUS
                raise TierDamaged(f"it has {had_bytes} bytes where its own record says {needs}")
            meta, blocks = (
                env.open_db(name, create=not is_read_only) for name in (b"meta", b"blocks")
            )
            usage = None
            with contextlib.suppress(lmdb.NotFoundError):  # made before uses were noted
                usage = env.open_db(b"usage", create=not is_read_only)
            data = FileIO(file)
            undo.callback(data.close)
            inode = os.fstat(data.fileno()).st_ino
            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # read what is asked for
            undo.pop_all()
        locks = threading.Lock(), threading.Lock()
        return Environment(env, meta, blocks, usage, inode, data, *locks)


def keep_freed_memory() -> None:
    """For this process: what a commit has freed serves the next one.

    LMDB allocates a value's pages when it is put and frees them at the commit. By default glibc
    gives so much at once back to the kernel, which then clears every page anew: that was half of
    the processor time of a write (32 MiB: 50 ms against 20). Elsewhere than on glibc nothing is
    changed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def give_memory_back() -> None:
    """After something large that will not come again."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def remove_record(txn: lmdb.Transaction, opened: Environment, key: bytes) -> None:
    """All rows of one block; it does not matter when there are none."""
    for rows in (opened.meta, opened.blocks, opened.usage):
        txn.delete(key, db=rows)


@contextlib.contextmanager
def typed(doing: str, path: str) -> Iterator[None]:
    """LMDB's and the kernel's errors as tier errors.

    A medium that refuses a write (full, failing, read-only) keeps what it holds and may take
    another write later, so that is no damage. LMDB gives up an environment whose root page could
    not be written (PanicError): its process must end, and what was committed before is whole.
    """
    try:
        yield
    except (lmdb.MapFullError, lmdb.TxnFullError) as error:
        raise TierFull(f"{doing}: the map is full") from error
    except _DAMAGE as error:
        raise TierDamaged(f"{doing}: {error}") from error
    except lmdb.PanicError as error:
        raise TierBroken(f"{doing}: {error}") from error
    except (lmdb.Error, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise TierBroken(f"{doing}: somebody deleted {error.filename}") from error
        code = error.errno if isinstance(error, OSError) else getattr(error, "code", 0)
        # A write cut short by a full volume is EIO to LMDB.
        if code in (errno.ENOSPC, errno.EDQUOT) or (code == errno.EIO and is_full(path)):
            raise TierFull(f"{doing}: the volume of {path} is full") from error
        raise TierError(f"{doing}: {error}") from error


def is_full(path: str) -> bool:
    """Whether the volume has nothing left to speak of."""
    return volume_free_bytes(path) < _FULL_BYTES


def volume_free_bytes(path: str) -> int:
    """What may still be written to the volume of this path."""
    volume = os.statvfs(path)
    return volume.f_bavail * volume.f_frsize

"""One slot-size class of the disk tier in LMDB: opening, committing, errors, room.

Used by `disk_tier.py`, `compact.py`, `scrub.py` and `repair.py`. The device's lock keeps two
processes from opening one environment at the same time.
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
    lmdb.MapResizedError,  # its first pages were overwritten: only we change the map's size
    lmdb.InvalidParameterError,  # its lock file was overwritten
    lmdb.BadTxnError,  # a page of its trees has an impossible type
    lmdb.CursorFullError,  # its trees are deeper than LMDB allows
    lmdb.PageFullError,  # a page's contents exceed its size
)


class Environment(NamedTuple):
    """One class's LMDB environment and its sub-databases. `usage` is None only in a read-only
    environment written before uses were stored.

    `data` is the mapped file, opened again for `pread`. The lock `mapping` is held while blocks are
    read, `writing` during a commit; a change of the map's size needs both, since LMDB then unmaps
    the file.
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
        """The file's length; it never shrinks."""
        return (self.env.info()["last_pgno"] + 1) * PAGE_BYTES

    def map_bytes(self) -> int:
        """The greatest length that the file may reach."""
        return int(self.env.info()["map_size"])

    def live_bytes(self) -> int:
        """Bytes of pages in use; the rest is free now, or after the next commit."""
        with self.env.begin() as txn:
            return PAGE_BYTES * sum(
                stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
                for stat in (txn.stat(self.meta), txn.stat(self.blocks), txn.stat(self.usage))
            )

    def num_blocks(self) -> int:
        with self.env.begin() as txn:
            return int(txn.stat(self.meta)["entries"])

    def close(self) -> None:
        """Close. No thread may be reading or writing. Idempotent."""
        self.env.close()
        self.data.close()

    def resize(self, map_bytes: int) -> None:
        """Limit the file's length to `map_bytes`. Waits for the batch being read to finish."""
        with typed("write", self.env.path()), self.mapping, self.writing:
            self.env.set_mapsize(map_bytes)

    def commit(self, change: Callable[[lmdb.Transaction], object]) -> None:
        """Run `change` in one write transaction; on any failure it is aborted as a whole."""
        with typed("write", self.env.path()):
            # Writes to a deleted file would succeed and be lost.
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
    """Open a class's environment, or create it. Raises TierDamaged when the file is shorter than
    LMDB left it, or not LMDB's. `is_read_only` takes no LMDB lock: hold the device's lock."""
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
            with contextlib.suppress(lmdb.NotFoundError):  # written before uses were stored
                usage = env.open_db(b"usage", create=not is_read_only)
            data = FileIO(file)
            undo.callback(data.close)
            inode = os.fstat(data.fileno()).st_ino
            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no kernel read-ahead
            undo.pop_all()
        locks = threading.Lock(), threading.Lock()
        return Environment(env, meta, blocks, usage, inode, data, *locks)


def keep_freed_memory() -> None:
    """Make glibc keep the memory that a commit frees, for the next commit of this process.

    LMDB allocates a value's pages on put and frees them at the commit. By default glibc returns
    them to the kernel, which must then clear every page again: half of the CPU time of a write
    (32 MiB: 50 ms against 20). Does nothing without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def give_memory_back() -> None:
    """Return freed memory to the kernel, after one large allocation. Does nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def remove_record(txn: lmdb.Transaction, opened: Environment, key: bytes) -> None:
    """Delete all rows of one block; absent rows are ignored."""
    for rows in (opened.meta, opened.blocks, opened.usage):
        txn.delete(key, db=rows)


@contextlib.contextmanager
def typed(doing: str, path: str) -> Iterator[None]:
    """Raises LMDB's and the kernel's errors as tier errors.

    A failed write (full, failing or read-only medium) leaves the stored data intact, and a later
    write may succeed: TierFull or TierError, not TierDamaged. After LMDB fails to write an
    environment's root page (PanicError), this process can no longer use it, but everything
    committed before is intact: TierBroken.
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
            raise TierBroken(f"{doing}: {error.filename} was deleted") from error
        code = error.errno if isinstance(error, OSError) else getattr(error, "code", 0)
        # LMDB reports a write cut short by a full volume as EIO.
        if code in (errno.ENOSPC, errno.EDQUOT) or (code == errno.EIO and is_full(path)):
            raise TierFull(f"{doing}: the volume of {path} is full") from error
        raise TierError(f"{doing}: {error}") from error


def is_full(path: str) -> bool:
    """Whether the volume has less than 16 MiB left."""
    return volume_free_bytes(path) < _FULL_BYTES


def volume_free_bytes(path: str) -> int:
    """Bytes that may still be written to the volume of this path."""
    volume = os.statvfs(path)
    return volume.f_bavail * volume.f_frsize

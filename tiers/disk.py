"""The `disk` tier: one LMDB environment per slot-size class under one device path.

Opened only in the disk worker's process: LMDB on a damaged file can end its process by SIGBUS or
abort. One reader thread calls `read`; one writer thread calls `put`, `delete`, `sync`; `scan` runs
before both; `close` after both. `docs/disk-format.md` draws the files.

A record is a row of `meta` and one of `blocks`, committed together: after kill -9 a block is whole
or absent. Whatever `read` reports as good was checked on the destination's own bytes.

Races, and who wins:
1. The reader finds a record bad; before it removes it, the writer stores the block anew. The
   removal compares the header it found bad with the one there now, and leaves another alone.
2. A read transaction is open while the writer frees pages: LMDB keeps them until it ends, so it
   lasts one batch. The pages set free serve the commit after the next; a put that meets a full map
   commits an empty transaction and tries once more.
3. Two daemons on one path: the second waits for the lock, then fails naming the first's pid.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lmdb
import numpy as np
import numpy.typing as npt
import xxhash

from hicache.tiers.base import (
    Identity,
    NoRoomForSize,
    TierCorrupt,
    TierDamaged,
    TierError,
    TierFull,
    TierMissing,
)
from hicache.tiers.block import PAGE_BYTES, slot_bytes_for
from hicache.tiers.disk_device import DiskDevice
from hicache.tiers.disk_format import Header, derive_key, pack_header, unpack_header

Bytes = npt.NDArray[np.uint8]
Durability = Literal["fast", "batched", "sync"]
_FULL_BYTES = 16 << 20
_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.MapResizedError,  # its first pages were overwritten: nobody else may change the map
    lmdb.InvalidParameterError,  # its lock file was
    lmdb.BadTxnError,  # a page of its trees was no page
)


class _Environment(NamedTuple):
    """One class's LMDB environment and its two sub-databases."""

    env: lmdb.Environment
    meta: Any
    blocks: Any
    inode: int

    def file_bytes(self) -> int:
        return (self.env.info()["last_pgno"] + 1) * PAGE_BYTES


class DiskTier:
    """The device at `path`. The map size of every environment is the device's whole capacity.

    `fast` leaves syncing to the kernel (safe against kill -9, not against power loss), `batched`
    syncs every commit, `sync` commits every block by itself (the caller splits; see
    `blocks_per_commit`). `notes` says in sentences what opening it had to do.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        durability: Durability = "batched",
        read_ahead: bool = True,
        lock_wait_s: float = 0.0,
        set_aside: bool = False,
    ) -> None:
        self.path = Path(path)
        self.capacity_bytes = capacity_bytes // PAGE_BYTES * PAGE_BYTES
        self.durability: Durability = durability
        self.blocks_per_commit = 1 if durability == "sync" else 1 << 30
        self._read_ahead = read_ahead
        self._environments: dict[int, _Environment] = {}
        self._is_open = True
        self._device = DiskDevice(path, durability, lock_wait_s=lock_wait_s, set_aside=set_aside)
        self.notes = self._device.notes
        try:
            for slot_bytes in self._device.classes():
                self._reopen(slot_bytes)
        except BaseException:  # one that is damaged must not leave the others open, and locked
            self._release()
            raise

    # --- the writer's side ---------------------------------------------------------------------

    def put(self, slot_bytes: int, blocks: Sequence[tuple[Identity, Bytes]]) -> None:
        """Store blocks of one class in one transaction: all of them or, on TierError, none."""
        num_bytes = sum(view.nbytes + 2 * PAGE_BYTES for _, view in blocks)
        opened = self._environments.get(slot_bytes) or self._open(slot_bytes)
        if self._is_over_budget(opened, num_bytes):
            raise NoRoomForSize(
                f"{self.path}: other slot sizes hold the room of {slot_bytes}-byte slots"
            )
        rows = [
            (
                identity.key,
                pack_header(
                    identity, view.nbytes, xxhash.xxh3_64_intdigest(view.data), time.time()
                ),
                view.data,
            )
            for identity, view in blocks
        ]

        def store(txn: lmdb.Transaction) -> None:
            for key, header, content in rows:
                txn.put(key, header, db=opened.meta)
                txn.put(key, content, db=opened.blocks)

        try:
            self._commit(opened, store)
        except TierFull as error:
            if not isinstance(error.__cause__, lmdb.MapFullError):
                raise
            self._commit(opened, lambda txn: txn.put(b"commits", os.urandom(8)))  # race 2
            self._commit(opened, store)

    def delete(self, slot_bytes: int, keys: Sequence[bytes]) -> None:
        """Remove records in one transaction; those that are not there do not matter."""
        opened = self._environments.get(slot_bytes)
        if opened is None:
            return

        def remove(txn: lmdb.Transaction) -> None:
            for key in keys:
                txn.delete(key, db=opened.meta)
                txn.delete(key, db=opened.blocks)

        self._commit(opened, remove)

    def describe_namespace(self, digest: bytes, description: Mapping[str, Any]) -> None:
        """Leave a readable account of a namespace beside its blocks, for people."""
        file = self.path / "namespaces" / f"{digest.hex()}.json"
        if not file.exists():
            file.parent.mkdir(mode=0o700, exist_ok=True)
            new = file.with_suffix(".new")
            new.write_text(json.dumps(description, indent=1, sort_keys=True))
            new.rename(file)

    def sync(self) -> None:
        """Everything that was committed is on the medium when this returns."""
        for opened in list(self._environments.values()):
            with _typed("sync", self.path):
                opened.env.sync(True)

    # --- the reader's side ---------------------------------------------------------------------

    def read(
        self, slot_bytes: int, wanted: Sequence[tuple[Identity, Bytes]]
    ) -> list[TierError | None]:
        """Copy blocks of one class into their views, in one read transaction.

        None means that the view holds exactly the bytes that were stored under that identity.
        TierMissing and TierCorrupt say that it does not; a corrupt record is removed.
        """
        opened = self._environments.get(slot_bytes)
        if opened is None:
            return [TierMissing("no block of this size is stored") for _ in wanted]
        results: list[TierError | None] = []
        bad: list[tuple[bytes, bytes | None]] = []
        with _typed("read", self.path), opened.env.begin(buffers=True) as txn:
            for identity, view in wanted:
                found = txn.get(identity.key, db=opened.meta)
                header = None if found is None else bytes(found)
                problem = _copy(txn, opened, identity, header, view)
                if isinstance(problem, TierCorrupt):
                    bad.append((identity.key, header))
                results.append(problem)
                del found
        if bad:
            self._remove_bad(opened, bad)
        return results

    def scan(self, batch_rows: int = 1000) -> Iterator[list[Header]]:
        """What is stored, from `meta` alone: batches of one namespace each, parents before their
        children. Rows that are not what they claim to be are removed. Before any other thread."""
        order: list[tuple[bytes, int, bytes, int]] = []
        for slot_bytes, opened in self._environments.items():
            bad: list[tuple[bytes, bytes | None]] = []
            with (
                _typed("scan", self.path),
                opened.env.begin() as txn,
                txn.cursor(db=opened.meta) as cursor,
            ):
                for key, packed in cursor:
                    header = unpack_header(packed)
                    if header is None or not _is_sound(header, key, slot_bytes):
                        bad.append((key, packed))
                    else:
                        order.append((header.namespace, header.depth, key, slot_bytes))
            if bad:
                self.notes.append(f"{len(bad)} records of {slot_bytes}-byte slots were not whole")
                self._remove_bad(opened, bad)
        order.sort()
        start = 0
        while start < len(order):
            end = start + 1
            while end < min(start + batch_rows, len(order)) and order[end][0] == order[start][0]:
                end += 1
            yield self._headers(order[start:end])
            start = end

    def num_blocks(self) -> int:
        """How many blocks are stored."""
        total = 0
        for opened in self._environments.values():
            with opened.env.begin() as txn:
                total += txn.stat(opened.meta)["entries"]
        return total

    def close(self) -> None:
        """Sync, mark the device as left in order, and let go of it. Idempotent."""
        if not self._is_open:
            return
        try:
            self.sync()
            self._device.mark(is_clean=True)
        finally:
            self._release()

    def __enter__(self) -> DiskTier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- opening -------------------------------------------------------------------------------

    def _reopen(self, slot_bytes: int) -> None:
        """Open a class found on the device; remove it when empty, set it aside when damaged."""
        try:
            opened = self._open(slot_bytes)
            with opened.env.begin() as txn:
                is_empty = not txn.stat(opened.meta)["entries"]
        except TierDamaged as error:
            self._device.set_aside(slot_bytes, str(error))
            return
        if is_empty:  # its file never shrinks: this is how the room comes back
            opened.env.close()
            del self._environments[slot_bytes]
            shutil.rmtree(self._device.directory(slot_bytes))

    def _open(self, slot_bytes: int) -> _Environment:
        directory = self._device.directory(slot_bytes)
        file = directory / "data.mdb"
        had_bytes = file.stat().st_size if file.exists() else 0
        with _typed("open", self.path):
            directory.mkdir(mode=0o700, exist_ok=True)
            env = lmdb.open(
                str(directory),
                map_size=self.capacity_bytes,
                mode=0o600,
                max_dbs=2,
                max_readers=8,
                sync=self.durability != "fast",
                metasync=self.durability != "fast",
                readahead=self._read_ahead,
                meminit=False,
            )
            try:
                needs = (env.info()["last_pgno"] + 1) * PAGE_BYTES
                if had_bytes and had_bytes < needs:  # touching the missing pages would be a SIGBUS
                    raise TierDamaged(f"it has {had_bytes} bytes where its own record says {needs}")
                inode = file.stat().st_ino
                opened = _Environment(env, env.open_db(b"meta"), env.open_db(b"blocks"), inode)
            except BaseException:  # opened again in this process, it would be the same damaged map
                env.close()
                raise
        self._environments[slot_bytes] = opened
        return opened

    def _release(self) -> None:
        for opened in self._environments.values():
            opened.env.close()
        self._environments.clear()
        self._device.close()
        self._is_open = False

    # --- records -------------------------------------------------------------------------------

    def _commit(self, opened: _Environment, change: Callable[[lmdb.Transaction], object]) -> None:
        """One write transaction; on any failure it is aborted and nothing of it is seen."""
        with _typed("write", self.path):
            # What is written to a file without a name is acknowledged and lost.
            if os.stat(opened.env.path() + "/data.mdb").st_ino != opened.inode:
                raise TierDamaged("its file was replaced while it was open")
            with opened.env.begin(write=True) as txn:
                change(txn)

    def _is_over_budget(self, opened: _Environment, num_bytes: int) -> bool:
        """Would this put grow the files of all classes together beyond the capacity? The file of
        one class alone is bounded by its map."""
        if len(self._environments) == 1:
            return False
        files = sum(other.file_bytes() for other in self._environments.values())
        if files + num_bytes <= self.capacity_bytes:
            return False
        with opened.env.begin() as txn:
            pages = sum(
                stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
                for stat in (txn.stat(opened.meta), txn.stat(opened.blocks))
            )
        return opened.file_bytes() - pages * PAGE_BYTES < 2 * num_bytes

    def _remove_bad(self, opened: _Environment, bad: Sequence[tuple[bytes, bytes | None]]) -> None:
        def remove(txn: lmdb.Transaction) -> None:
            for key, found in bad:
                if txn.get(key, db=opened.meta) == found:  # race 1
                    txn.delete(key, db=opened.meta)
                    txn.delete(key, db=opened.blocks)

        self._commit(opened, remove)

    def _headers(self, rows: Sequence[tuple[bytes, int, bytes, int]]) -> list[Header]:
        headers: list[Header] = []
        with contextlib.ExitStack() as stack:
            txns = {
                slot_bytes: stack.enter_context(self._environments[slot_bytes].env.begin())
                for slot_bytes in {row[3] for row in rows}
            }
            for _, _, key, slot_bytes in rows:
                packed = txns[slot_bytes].get(key, db=self._environments[slot_bytes].meta)
                header = None if packed is None else unpack_header(packed)
                if header is not None:
                    headers.append(header)
        return headers


def _copy(
    txn: lmdb.Transaction,
    opened: _Environment,
    identity: Identity,
    packed: bytes | None,
    view: Bytes,
) -> TierError | None:
    """One record into its view, checked; the error says why the view must not be believed."""
    content = txn.get(identity.key, db=opened.blocks)
    if packed is None or content is None:
        return (
            TierMissing("the block is not stored")
            if packed is content
            else TierCorrupt("half of the record is missing")
        )
    header = unpack_header(packed)
    if header is None:
        return TierCorrupt("the header is damaged")
    if not header.names(identity):
        return TierCorrupt("the record is another block's")
    if not len(content) == header.block_bytes == view.nbytes:
        return TierCorrupt(f"{len(content)} bytes are stored where {view.nbytes} belong")
    np.copyto(view, np.frombuffer(content, np.uint8))
    if xxhash.xxh3_64_intdigest(view.data) != header.checksum:
        return TierCorrupt("the bytes do not match their checksum")
    return None


def _is_sound(header: Header, key: bytes, slot_bytes: int) -> bool:
    return (
        header.key == key == derive_key(header.namespace, header.parent, header.tokens)
        and header.block_bytes > 0
        and slot_bytes_for(header.block_bytes) == slot_bytes
    )


@contextlib.contextmanager
def _typed(doing: str, path: Path) -> Iterator[None]:
    """LMDB's and the kernel's errors as tier errors."""
    try:
        yield
    except (lmdb.MapFullError, lmdb.TxnFullError) as error:
        raise TierFull(f"{doing}: the map is full") from error
    except _DAMAGE as error:
        raise TierDamaged(f"{doing}: {error}") from error
    except (lmdb.Error, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise TierDamaged(f"{doing}: somebody deleted {error.filename}") from error
        code = error.errno if isinstance(error, OSError) else getattr(error, "code", 0)
        # A write cut short by a full volume is EIO to LMDB.
        if code in (errno.ENOSPC, errno.EDQUOT) or (code == errno.EIO and _is_full(path)):
            raise TierFull(f"{doing}: the volume of {path} is full") from error
        if code in (errno.EIO, errno.EROFS):
            raise TierDamaged(f"{doing}: {error}") from error
        raise TierError(f"{doing}: {error}") from error


def _is_full(path: Path) -> bool:
    volume = os.statvfs(path)
    return volume.f_bavail * volume.f_frsize < _FULL_BYTES

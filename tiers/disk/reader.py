"""Copies stored blocks from the file to the destination's memory, in parallel, and checks them.

Called by `DiskTier.read` and by scrubs, within a read transaction that outlives the copies. Values
of 32 KiB and more are located by `lmdb_pages.py` and copied by `pread` in file order by several
threads, with read-ahead of the next 2 MiB. A truncated file or a failing device is then an error of
one block; through the mapping it would be a SIGBUS, which ends the worker.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import lmdb
import numpy as np
import numpy.typing as npt
import xxhash

from hicache.tiers.disk.environment import Environment
from hicache.tiers.disk.format import unpack_header
from hicache.tiers.disk.lmdb_pages import Extent, Tree, is_known, locate
from hicache.tiers.errors import Identity, TierCorrupt, TierError, TierMissing

Bytes = npt.NDArray[np.uint8]
Value = Bytes | Extent | None
"""A view of LMDB's mapping, or the value's position in the file; None where it is missing."""

_SMALL_BYTES = 32 << 10  # below, reading through LMDB's mapping is cheaper than locating
_PARALLEL_BYTES = 64 << 10  # below, another thread costs more than it saves
_AHEAD_BYTES = 2 << 20  # read-ahead; a longer queue was slower on a busy disk
_TRIES = 2
_CALL_BYTES = 1 << 20  # the kernel limits how much one call reads ahead


class Found:
    """A record as the transaction shows it. `packed` (its header) or `value` is None if missing."""

    __slots__ = ("identity", "packed", "value", "view")

    def __init__(self, identity: Identity, view: Bytes, packed: bytes | None, value: Value) -> None:
        self.identity, self.view = identity, view
        self.packed, self.value = packed, value

    def copy(self, fd: int) -> TierError | None:
        """Copy into the view. Returns None, or the error that makes the view's bytes invalid."""
        try:
            self._copy(fd)
        except TierError as error:  # returned: on a raise, other threads would still be copying
            return error
        return None

    def _copy(self, fd: int) -> None:
        value, view = self.value, self.view
        if self.packed is None and value is None:
            raise TierMissing("the block is not stored")
        if self.packed is None or value is None:
            raise TierCorrupt("half of the record is missing")
        header = unpack_header(self.packed)
        if header is None:
            raise TierCorrupt("the header is damaged")
        if not header.matches(self.identity):
            raise TierCorrupt("the record belongs to another block")
        if not num_bytes(value) == header.block_bytes == view.nbytes:
            raise TierCorrupt(f"{num_bytes(value)} bytes are stored instead of {view.nbytes}")
        fill(view, value, fd)
        if xxhash.xxh3_64_intdigest(view.data) != header.checksum:
            raise TierCorrupt("the bytes do not match their checksum")

    def fetch(self, fd: int) -> None:
        """Ask the kernel to read the value ahead, without waiting."""
        value = self.value
        if isinstance(value, Extent) and value.num_bytes == self.view.nbytes:
            end = value.offset + value.num_bytes
            with contextlib.suppress(OSError):
                for at in range(value.offset, end, _CALL_BYTES):
                    os.posix_fadvise(fd, at, min(_CALL_BYTES, end - at), os.POSIX_FADV_WILLNEED)


def find_all(
    txn: lmdb.Transaction,
    opened: Environment,
    slot_bytes: int,
    wanted: Iterable[tuple[Identity, Bytes]],
) -> list[Found]:
    """The records of one class, in the order of `wanted`; large values have not been read yet."""
    wanted = list(wanted)
    keys = [identity.key for identity, _ in wanted]
    rows = _located(txn, opened, b"meta", slot_bytes, keys)
    values = find_values(txn, opened, slot_bytes, keys)
    found = []
    for (identity, view), value in zip(wanted, values, strict=True):
        row = rows.get(identity.key)
        if not isinstance(row, bytes):
            shown = txn.get(identity.key, db=opened.meta)
            row = None if shown is None else bytes(shown)
        found.append(Found(identity, view, row, value))
    return found


def find_values(
    txn: lmdb.Transaction, opened: Environment, slot_bytes: int, keys: Sequence[bytes]
) -> list[Value]:
    """The values of one class, in the order of `keys`. `txn` was begun with buffers=True."""
    places = _located(txn, opened, b"blocks", slot_bytes, keys)
    values: list[Value] = []
    for key in keys:
        place = places.get(key)
        if isinstance(place, Extent):
            values.append(place)
        else:
            shown = txn.get(key, db=opened.blocks)
            values.append(None if shown is None else np.frombuffer(shown, np.uint8))
    return values


def copy_all(
    fd: int, found: Sequence[Found], pool: ThreadPoolExecutor | None
) -> list[TierError | None]:
    """Copy every record into its view, with all threads of the pool. One result each, in order."""
    if not found:
        return []
    by_offset = sorted(range(len(found)), key=lambda at: _offset(found[at].value))
    records = [found[at] for at in by_offset]
    ahead = max(1, _AHEAD_BYTES // found[0].view.nbytes)
    for record in records[:ahead]:
        record.fetch(fd)

    def copy(at: int) -> TierError | None:
        if at + ahead < len(records):
            records[at + ahead].fetch(fd)
        return records[at].copy(fd)

    is_shared = pool is not None and len(found) > 1 and found[0].view.nbytes >= _PARALLEL_BYTES
    numbers = range(len(records))
    problems = pool.map(copy, numbers) if pool is not None and is_shared else map(copy, numbers)
    results = dict(zip(by_offset, problems, strict=True))
    return [results[at] for at in range(len(found))]


def fill(view: Bytes, value: Bytes | Extent, fd: int) -> None:
    """Copy a value that is as long as the view. Raises TierCorrupt when the file is too short or
    the device fails to read it."""
    if not isinstance(value, Extent):
        np.copyto(view, value)
        return
    done = num_failed = 0
    while done < view.nbytes:
        try:
            num_read = os.preadv(fd, [view.data[done:]], value.offset + done)
        except OSError as error:
            num_failed += 1
            if num_failed < _TRIES:  # a bad sector fails again; a lost path to the disk may be back
                continue
            if error.errno == errno.EIO:
                raise TierCorrupt("the bytes cannot be read from the device") from error
            raise TierError(f"read: {error.strerror}") from error
        if not num_read:
            raise TierCorrupt("the file is shorter than the record")
        done += num_read


def num_bytes(value: Bytes | Extent) -> int:
    """A value's length."""
    return value.num_bytes if isinstance(value, Extent) else len(value)


def _located(
    txn: lmdb.Transaction, opened: Environment, name: bytes, slot_bytes: int, keys: Sequence[bytes]
) -> dict[bytes, bytes | Extent]:
    """What `locate` finds: all of these values, or none where the class or file rules it out."""
    fd = opened.data.fileno()
    if slot_bytes < _SMALL_BYTES or not is_known(fd):
        return {}
    tree = Tree.of(txn, name)
    return {} if tree is None else locate(fd, tree, keys)


def _offset(value: Value) -> int:
    return value.offset if isinstance(value, Extent) else 0

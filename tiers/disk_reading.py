"""Copies of stored blocks: mapped file → the destination's memory, checked there, several at once.

Called by `DiskTier.read` within a read transaction that outlives the copies. Before a value is
touched, the kernel is told to fetch all of it (a fault at a time reads cold values several times
slower), and asked to map it: where the file has ended or the device fails, that is an error here,
while touching it would be a SIGBUS, the end of the worker.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import xxhash

from hicache.tiers.base import Identity, TierCorrupt, TierError, TierMissing
from hicache.tiers.block import PAGE_BYTES
from hicache.tiers.disk_format import unpack_header

Bytes = npt.NDArray[np.uint8]

_MADV_WILLNEED, _MADV_POPULATE_READ = 3, 22  # the second is Linux 5.14
_AHEAD_BYTES = 256 << 10  # one call fetches no more than the device's own read-ahead
_SMALL_BYTES = 64 << 10  # not worth two system calls, nor another thread
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class Found:
    """A record as the transaction shows it. `packed` and `content` are None where missing."""

    __slots__ = ("content", "identity", "packed", "view")

    def __init__(
        self, identity: Identity, view: Bytes, packed: bytes | None, content: Bytes | None
    ) -> None:
        self.identity, self.view = identity, view
        self.packed, self.content = packed, content

    def copy(self) -> TierError | None:
        """Into its view; the error says why the view must not be believed."""
        content, view = self.content, self.view
        if self.packed is None or content is None:
            is_absent = self.packed is None and content is None
            return (
                TierMissing("the block is not stored")
                if is_absent
                else TierCorrupt("half of the record is missing")
            )
        header = unpack_header(self.packed)
        if header is None:
            return TierCorrupt("the header is damaged")
        if not header.names(self.identity):
            return TierCorrupt("the record is another block's")
        if not len(content) == header.block_bytes == view.nbytes:
            return TierCorrupt(f"{len(content)} bytes are stored where {view.nbytes} belong")
        if not is_readable(content):
            return TierCorrupt("the bytes cannot be read from the device")
        np.copyto(view, content)
        if xxhash.xxh3_64_intdigest(view.data) != header.checksum:
            return TierCorrupt("the bytes do not match their checksum")
        return None


def copy_all(found: Sequence[Found], pool: ThreadPoolExecutor | None) -> list[TierError | None]:
    """Every record into its view, by as many threads as the pool has. In order."""
    for record in found:
        if record.content is not None and not is_resident(record.content):
            read_ahead(record.content)
    if pool is None or len(found) < 2 or found[0].view.nbytes < _SMALL_BYTES:
        return [record.copy() for record in found]
    return list(pool.map(Found.copy, found))


def is_resident(content: Bytes) -> bool:
    """Whether all of it is in the page cache; small values are read as they come."""
    if len(content) < _SMALL_BYTES:
        return True
    start, length = _pages(content)
    resident = np.zeros(-(-length // PAGE_BYTES), np.uint8)
    if _libc.mincore(start, length, resident.ctypes.data):
        return True  # not a mapping that tells: nothing to fetch ahead
    return bool((resident & 1).all())


def read_ahead(content: Bytes) -> None:
    """Have all of it fetched from the device, without waiting."""
    start, length = _pages(content)
    for at in range(0, length, _AHEAD_BYTES):
        _libc.madvise(start + at, min(_AHEAD_BYTES, length - at), _MADV_WILLNEED)


def is_readable(content: Bytes) -> bool:
    """False where the device cannot give these bytes; maps them, where it can."""
    if len(content) < _SMALL_BYTES:
        return True
    start, length = _pages(content)
    failed = _libc.madvise(start, length, _MADV_POPULATE_READ)
    return not failed or ctypes.get_errno() == errno.EINVAL  # an older kernel


def _pages(content: Bytes) -> tuple[int, int]:
    """(address, bytes) of the whole pages that hold it."""
    address = content.ctypes.data
    start = address // PAGE_BYTES * PAGE_BYTES
    return start, address + len(content) - start

"""Finds where values lie in LMDB's file, by reading its B-tree pages with `pread`.

LMDB's Python binding touches every page of a value before returning it, one value after the other:
no read-ahead, no parallel reads, and a page that the device cannot read ends the process by SIGBUS.
So this module walks the trees with `pread`, for all keys of a batch at once, level by level:

    root ──▶ branch pages ──▶ leaf pages ──▶ the value, or the position of its overflow pages

The caller holds a read transaction from before `Tree.of` until the bytes have been read: LMDB
writes to no page that such a transaction can reach, and it writes by `pwrite`, so `pread` and the
mapping show the same bytes. The layout is that of LMDB 0.9, data version 1, with 4 KiB pages. In a
file of another layout, or on an unexpected page, nothing is found, and the caller asks LMDB.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import lmdb

from hicache.tiers.block import PAGE_BYTES

PAGE = struct.Struct("<QHHI")
"""Page number, padding, flags, and the length of an overflow run (in other pages: 2 bytes with the
start of the free space)."""
OVERFLOW = 0x04
_BRANCH, _LEAF, _KIND = 0x01, 0x02, 0x0F
_NODE = struct.Struct("<HHHH")  # low and high half of a number, flags, bytes of the key
_BIG = 0x01
_NUMBER = struct.Struct("<Q")
_DATABASE = struct.Struct("<IHHQQQQQ")  # padding, flags, depth, pages of 3 kinds, entries, root
_META = struct.Struct("<IIQQI")  # magic, data version, address, map's size, page's size
_MAGIC, _DATA_VERSION = 0xBEEFC0DE, 1
_MOST_LEVELS = 32
_MOST_PAGES = 1 << 50  # no file is as long: leave such a number to LMDB's own error


class Extent(NamedTuple):
    """A value's position in the file."""

    offset: int
    num_bytes: int


class Tree(NamedTuple):
    """The B-tree of a named sub-database, as one transaction sees it."""

    root: int
    depth: int

    @classmethod
    def of(cls, txn: lmdb.Transaction, name: bytes) -> Tree | None:
        """None where it is empty, or has flags that hicache never sets."""
        record = txn.get(name)
        if record is None or len(record) != _DATABASE.size:
            return None
        _, flags, depth, *_, root = _DATABASE.unpack(record)
        return cls(root, depth) if not flags and 0 < depth < _MOST_LEVELS else None


def leaf_values(page: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The keys and values that lie in a leaf page itself; nothing where it is no sound leaf."""
    if len(page) < PAGE_BYTES or PAGE.unpack_from(page)[2] & _KIND != _LEAF:
        return
    ends = PAGE.unpack_from(page)[3] & 0xFFFF
    if not PAGE.size < ends <= PAGE_BYTES or ends % 2:
        return
    for node in memoryview(page)[PAGE.size : ends].cast("H"):
        if node + _NODE.size > PAGE_BYTES:
            continue
        low, high, flags, key_bytes = _NODE.unpack_from(page, node)
        start = node + _NODE.size + key_bytes
        end = start + (low | high << 16)
        if not flags and end <= PAGE_BYTES:
            yield page[start - key_bytes : start], page[start:end]


def is_known(fd: int) -> bool:
    """Whether the file has the layout described above."""
    try:
        page = os.pread(fd, PAGE_BYTES, 0)
    except OSError:
        return False
    if len(page) < PAGE_BYTES:
        return False
    magic, version, *_, page_bytes = _META.unpack_from(page, PAGE.size)
    return bool(magic == _MAGIC and version == _DATA_VERSION and page_bytes == PAGE_BYTES)


def locate(fd: int, tree: Tree, keys: Iterable[bytes]) -> dict[bytes, bytes | Extent]:
    """For each key: its value where that lies in the leaf, else the value's extent. Keys that are
    absent, or whose pages are not as expected, are left out."""
    found: dict[bytes, bytes | Extent] = {}
    page_of = dict.fromkeys(keys, tree.root)
    for level in range(tree.depth):
        pages = _read(fd, sorted(set(page_of.values())))
        children: dict[bytes, int] = {}
        for key, number in page_of.items():
            page = pages.get(number)
            if page is None:
                continue
            kind = PAGE.unpack_from(page)[2] & _KIND
            if kind == _LEAF and level == tree.depth - 1:
                value = _value(page, key)
                if value is not None:
                    found[key] = value
            elif kind == _BRANCH and level < tree.depth - 1:
                child = _child(page, key)
                if child is not None:
                    children[key] = child
        page_of = children
    return found


def _read(fd: int, numbers: list[int]) -> dict[int, bytes]:
    """Read these pages. Those that cannot be read, or have another number, are left out."""
    last = os.fstat(fd).st_size // PAGE_BYTES
    numbers = [number for number in numbers if number < last]
    if len(numbers) > 1:
        for number in numbers:
            os.posix_fadvise(fd, number * PAGE_BYTES, PAGE_BYTES, os.POSIX_FADV_WILLNEED)
    pages = {}
    for number in numbers:
        try:
            page = os.pread(fd, PAGE_BYTES, number * PAGE_BYTES)
        except OSError:  # LMDB will fail in the same way, and report it
            continue
        if len(page) == PAGE_BYTES and PAGE.unpack_from(page)[0] == number:
            pages[number] = page
    return pages


def _child(page: bytes, key: bytes) -> int | None:
    """The number of the child page for this key. A branch page's first key is a placeholder."""
    node = _seek(page, key, first=1)
    if node is None:
        return None
    low, high, highest, _ = _NODE.unpack_from(page, node)
    return int(low | high << 16 | highest << 32)


def _value(page: bytes, key: bytes) -> bytes | Extent | None:
    node = _seek(page, key, first=0)
    if node is None:
        return None
    low, high, flags, key_bytes = _NODE.unpack_from(page, node)
    num_bytes, start = low | high << 16, node + _NODE.size + len(key)
    if key_bytes != len(key) or page[start - key_bytes : start] != key:
        return None
    if flags == _BIG and start + _NUMBER.size <= PAGE_BYTES:
        (number,) = _NUMBER.unpack_from(page, start)
        return Extent(number * PAGE_BYTES + PAGE.size, num_bytes) if number < _MOST_PAGES else None
    if not flags and start + num_bytes <= PAGE_BYTES:
        return page[start : start + num_bytes]
    return None


def _seek(page: bytes, key: bytes, first: int) -> int | None:
    """The offset of the last node whose key is ≤ `key` (all keys are equally long). Nodes before
    number `first` are not compared. None where there is none, or it lies outside the page."""
    ends = PAGE.unpack_from(page)[3] & 0xFFFF
    if not PAGE.size < ends <= PAGE_BYTES or ends % 2:
        return None
    nodes = memoryview(page)[PAGE.size : ends].cast("H")
    skipped, length = _NODE.size, _NODE.size + len(key)
    above = bisect_right(nodes, key, first, key=lambda at: page[at + skipped : at + length])
    node = nodes[above - 1] if above else PAGE_BYTES
    return node if node + skipped <= PAGE_BYTES else None

"""Rebuilds an environment from its file alone, without using any of its trees.

    page  page  page …      LMDB's pages in file order (data.mdb)
    ──┬── ──┬──────────
      │     └ a run that begins with an overflow page holds one value
      └ a leaf holds headers, which are found by their magic and checked by their checksum

A value belongs to the header that holds its checksum. Such a pair is exactly what was stored under
that key, even if the block was removed since: bytes under a key never change. Values of less than
half a page lie inside leaves and are not recovered.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import lmdb
import xxhash

from hicache.tiers.block import PAGE_BYTES
from hicache.tiers.disk.environment import DATA_FILE, open_environment
from hicache.tiers.disk.format import MAGIC, Header, header_at, is_sound, most_growth_bytes
from hicache.tiers.disk.lmdb_pages import OVERFLOW, PAGE
from hicache.tiers.errors import TierError

_WINDOW_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """How many valid headers a file held, and how many of their blocks are in the new one."""

    num_headers: int
    num_blocks: int


def rebuild(directory: Path, target: Path, slot_bytes: int, map_bytes: int) -> Rebuilt:
    """Create an environment at `target` with every intact block of the one at `directory`, which
    stays unchanged. Raises TierError when the target is full; the blocks stored until then stay."""
    file = directory / DATA_FILE
    headers = {
        (header.checksum, header.block_bytes): header
        for header in _headers(file)
        if is_sound(header, header.key, slot_bytes)
    }
    shutil.rmtree(target, ignore_errors=True)
    opened = open_environment(target, map_bytes)
    num_blocks = 0
    try:
        lengths = sorted({length for _, length in headers})
        for value in _values(file, slot_bytes):
            for length in lengths:
                found = headers.get((xxhash.xxh3_64_intdigest(value[:length]), length))
                if found is None or len(value) < length:
                    continue
                if opened.file_bytes() + most_growth_bytes(1, length) > map_bytes:
                    raise TierError(f"{target} is full")
                header, content = found, value[:length]

                def store(
                    txn: lmdb.Transaction, header: Header = header, content: memoryview = content
                ) -> None:
                    txn.put(header.key, header.packed(), db=opened.meta)
                    txn.put(header.key, content, db=opened.blocks)

                opened.commit(store)
                break
        num_blocks = opened.num_blocks()
    finally:
        opened.close()
    return Rebuilt(len(headers), num_blocks)


def _headers(file: Path) -> Iterator[Header]:
    """Every intact header in the file, at any offset. Windows overlap by a page, so a header on the
    border of two is found too."""
    with file.open("rb") as source:
        at = 0
        while window := source.read(_WINDOW_BYTES + PAGE_BYTES):
            start = window.find(MAGIC)
            while start >= 0:
                header = header_at(window, start)
                if header is not None:
                    yield header
                start = window.find(MAGIC, start + 1)
            at += _WINDOW_BYTES
            source.seek(at)


def _values(file: Path, slot_bytes: int) -> Iterator[memoryview]:
    """The content of each run of overflow pages of this class, to the end of its last page."""
    most = slot_bytes // PAGE_BYTES + 1
    with file.open("rb") as source:
        number = 0
        while head := source.read(PAGE_BYTES):
            step = 1
            if len(head) == PAGE_BYTES:
                page, _, flags, pages = PAGE.unpack_from(head)
                if page == number and flags & OVERFLOW and 1 <= pages <= most:
                    rest = source.read((pages - 1) * PAGE_BYTES)
                    yield memoryview(head + rest)[PAGE.size :]
                    step = pages
            number += step
            source.seek(number * PAGE_BYTES)

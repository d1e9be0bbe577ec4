"""Rebuilds an environment from its file alone, without using any of its trees.

    page  page  page …      LMDB's pages in file order (data.mdb)
    ──┬── ──┬──────────
      │     └ a run that begins with an overflow page holds one value
      └ a leaf holds headers, which are found by their magic and checked by their checksum

A value belongs to every header with its checksum and length: blocks of equal bytes are all kept.
Such a pair is exactly what was stored under that key, even if the block was removed since: bytes
under a key never change. Values of less than half a page lie inside leaves, beside their key.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import lmdb
import xxhash

from hicache.tiers.block import PAGE_BYTES
from hicache.tiers.disk.environment import DATA_FILE, Environment, open_environment
from hicache.tiers.disk.format import (
    MAGIC,
    MAX_TOKEN_BYTES,
    Header,
    header_at,
    is_sound,
    most_growth_bytes,
)
from hicache.tiers.disk.lmdb_pages import OVERFLOW, PAGE, leaf_values
from hicache.tiers.errors import TierError

_WINDOW_BYTES = 64 << 20
_LONGEST_BYTES = MAX_TOKEN_BYTES + PAGE_BYTES
"""No header is longer."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """How many valid headers a file held, and how many of their blocks are in the new one."""

    num_headers: int
    num_blocks: int


def rebuild(directory: Path, target: Path, slot_bytes: int, map_bytes: int) -> Rebuilt:
    """Create an environment at `target` with every intact block of the one at `directory`, which
    stays unchanged. Raises TierError when the target is full; the blocks stored until then stay."""
    file = directory / DATA_FILE
    by_key = {
        header.key: header for header in _headers(file) if is_sound(header, header.key, slot_bytes)
    }
    by_content: defaultdict[tuple[int, int], list[Header]] = defaultdict(list)
    for header in by_key.values():
        by_content[header.checksum, header.block_bytes].append(header)
    shutil.rmtree(target, ignore_errors=True)
    opened = open_environment(target, map_bytes)
    num_blocks = 0
    try:
        lengths = sorted({length for _, length in by_content})
        for key, value in _values(file, slot_bytes):
            for length in lengths:
                if len(value) < length:
                    break
                content = value[:length]
                found = by_content.get((xxhash.xxh3_64_intdigest(content), length), [])
                for header in found:
                    if key is None or key == header.key:
                        _store(opened, header, content, map_bytes)
        num_blocks = opened.num_blocks()
    finally:
        opened.close()
    return Rebuilt(len(by_key), num_blocks)


def _store(opened: Environment, header: Header, content: memoryview, map_bytes: int) -> None:
    if opened.file_bytes() + most_growth_bytes(1, len(content)) > map_bytes:
        raise TierError(f"{opened.env.path()} is full")

    def change(txn: lmdb.Transaction) -> None:
        txn.put(header.key, header.packed(), db=opened.meta)
        txn.put(header.key, content, db=opened.blocks)

    opened.commit(change)


def _headers(file: Path) -> Iterator[Header]:
    """Every intact header in the file, at any offset. Windows overlap by the longest header, so one
    on the border of two is found too."""
    with file.open("rb") as source:
        at = 0
        while window := source.read(_WINDOW_BYTES + _LONGEST_BYTES):
            start = window.find(MAGIC)
            while start >= 0:
                header = header_at(window, start)
                if header is not None:
                    yield header
                start = window.find(MAGIC, start + 1)
            at += _WINDOW_BYTES
            source.seek(at)


def _values(file: Path, slot_bytes: int) -> Iterator[tuple[bytes | None, memoryview]]:
    """The content of each run of overflow pages of this class, to the end of its last page, with
    None; and each value that lies in a leaf, with its key."""
    most = slot_bytes // PAGE_BYTES + 1
    with file.open("rb") as source:
        number = 0
        while head := source.read(PAGE_BYTES):
            step = 1
            if len(head) == PAGE_BYTES:
                page, _, flags, pages = PAGE.unpack_from(head)
                if page == number and flags & OVERFLOW and 1 <= pages <= most:
                    rest = source.read((pages - 1) * PAGE_BYTES)
                    yield None, memoryview(head + rest)[PAGE.size :]
                    step = pages
                elif page == number:
                    yield from ((key, memoryview(value)) for key, value in leaf_values(head))
            number += step
            source.seek(number * PAGE_BYTES)

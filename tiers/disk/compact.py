"""Fits a device to a smaller capacity: removes the coldest blocks, then rewrites the files.

LMDB never shrinks a file. Each environment is copied to a new file, which replaces the old one by
one rename: after a kill at any moment the device holds the old file or the new one. During the
copy the device may take the old capacity plus the new one. Runs before any thread starts.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import lmdb

from hicache.tiers.block import PAGE_BYTES
from hicache.tiers.disk.environment import (
    DATA_FILE,
    Environment,
    remove_record,
    typed,
    volume_free_bytes,
)
from hicache.tiers.disk.format import record_pages, unpack_header, unpack_use
from hicache.tiers.errors import TierUnavailable

Progress = Callable[[int, int], None]
COPIES = "compact-"
_BATCH_KEYS = 1000
_LOOK_S = 1.0


def evict_coldest(environments: Mapping[int, Environment], room_bytes: int) -> int:
    """Remove the coldest blocks until the rest take at most `room_bytes`. Returns how many.

    Blocks are ordered by hits, then by time of last use. A block counts as at least as warm as its
    warmest descendant, so whole prefixes stay.
    """
    rows: dict[bytes, tuple[int, int]] = {}  # key → (slot bytes, depth)
    parents: dict[bytes, bytes] = {}
    warmth: dict[bytes, tuple[int, int]] = {}
    for slot_bytes, opened in environments.items():
        with opened.env.begin() as txn:
            for key, packed in txn.cursor(db=opened.meta):
                header = unpack_header(packed)
                if header is None:
                    continue  # the scan removes it
                use = unpack_use(txn.get(key, db=opened.usage))
                rows[key] = slot_bytes, header.depth
                parents[key] = header.parent
                warmth[key] = use if use is not None else (header.hits, int(header.created_s))
    for key in sorted(rows, key=lambda k: -rows[k][1]):
        above = parents[key]
        if above in warmth:
            warmth[above] = max(warmth[above], warmth[key])
    used = sum(record_pages(slot_bytes) * PAGE_BYTES for slot_bytes, _ in rows.values())
    gone: dict[int, list[bytes]] = {}
    for key in sorted(rows, key=lambda k: (warmth[k], -rows[k][1])):
        if used <= room_bytes:
            break
        slot_bytes = rows[key][0]
        gone.setdefault(slot_bytes, []).append(key)
        used -= record_pages(slot_bytes) * PAGE_BYTES
    for slot_bytes, keys in gone.items():
        _remove(environments[slot_bytes], keys)
    return sum(map(len, gone.values()))


def compact(opened: Environment, path: Path, min_free_bytes: int, progress: Progress) -> None:
    """Replace the environment's file by one with only its live pages, and close the environment.
    Raises TierUnavailable and changes nothing where the volume of `path` has too little room."""
    directory = Path(opened.env.path())
    needs, free = opened.live_bytes(), volume_free_bytes(str(path)) - min_free_bytes
    if needs > free:
        raise TierUnavailable(
            f"{path}: making it smaller needs {needs >> 20} MiB more while it is copied, and the "
            f"volume has {max(0, free) >> 20} MiB: free some space, or configure the old size"
        )
    target = path / (COPIES + directory.name)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(mode=0o700)
    with typed("shrink", str(path)):
        _copy(opened, target, needs, progress)
        file = target / DATA_FILE
        for name, flags in ((file, os.O_RDWR), (target, os.O_RDONLY)):
            fd = os.open(name, flags)
            os.fsync(fd)
            os.close(fd)
        opened.close()
        file.replace(directory / DATA_FILE)
    shutil.rmtree(target, ignore_errors=True)


def _copy(opened: Environment, target: Path, total_bytes: int, progress: Progress) -> None:
    """Copy in a separate thread, so that this one can report progress."""
    failed: list[Exception] = []

    def copy() -> None:
        try:
            opened.env.copy(str(target), compact=True)
        except (lmdb.Error, OSError) as error:
            failed.append(error)

    thread = threading.Thread(target=copy, name="hicache-compact")
    thread.start()
    file, done = target / DATA_FILE, 0
    while thread.is_alive():
        thread.join(_LOOK_S)
        now = file.stat().st_size if file.exists() else 0
        if now != done:  # no report while the copy hangs: the supervisor then ends this process
            done = now
            progress(min(done, total_bytes), total_bytes)
    if failed:
        raise failed[0]


def _remove(opened: Environment, keys: list[bytes]) -> None:
    opened.resize(opened.file_bytes() + (64 << 20))  # a deletion writes pages before it frees any
    for start in range(0, len(keys), _BATCH_KEYS):
        part = keys[start : start + _BATCH_KEYS]

        def remove(txn: lmdb.Transaction, part: list[bytes] = part) -> None:
            for key in part:
                remove_record(txn, opened, key)

        opened.commit(remove)

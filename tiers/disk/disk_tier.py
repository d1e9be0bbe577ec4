"""The `disk` tier: one LMDB environment per slot-size class under one device path.

Opened only in the disk worker's process: LMDB on a damaged file can end its process by SIGBUS or
abort. One reader thread calls `read`; one writer thread calls `put`, `delete` and `sync`; a third
thread may call `scan` at the same time; `close` comes last. `docs/disk-format.md` draws the files.

A record is a row of `meta` and one of `blocks`, committed together: after kill -9 a block is whole
or absent. A row of `usage` may hold its hits and last use. `read` checks the checksum on the
destination's bytes.

Races, and who wins:
1. The reader finds a bad record; before it removes it, the writer stores the block again. The
   removal compares the current header with the bad one and removes the record only if they match.
2. A read transaction is open while the writer frees pages: LMDB keeps those pages until the
   transaction ends, so it lasts one batch. The freed pages serve the commit after the next; a put
   that finds the map full commits an empty transaction and tries once more.
3. Two daemons open one path: the second waits for the lock, then fails with the first one's pid.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import lmdb
import xxhash

from hicache.tiers.block import PAGE_BYTES
from hicache.tiers.disk.compact import compact, evict_coldest
from hicache.tiers.disk.device import DiskDevice
from hicache.tiers.disk.environment import (
    Environment,
    keep_freed_memory,
    open_environment,
    remove_record,
    typed,
    volume_free_bytes,
)
from hicache.tiers.disk.format import (
    map_bytes,
    most_growth_bytes,
    pack_header,
    pack_use,
    unpack_header,
)
from hicache.tiers.disk.reader import Bytes, copy_all, find_all
from hicache.tiers.disk.scan import Scan
from hicache.tiers.disk.scrub import Scrub
from hicache.tiers.errors import (
    Identity,
    NoRoomForSize,
    TierCorrupt,
    TierDamaged,
    TierError,
    TierFull,
    TierMissing,
)
from hicache.tiers.restore_order import Scanned

Durability = Literal["fast", "batched", "sync"]
READERS = 4


class DiskTier:
    """The device at `path`. `capacity_bytes` bounds all its files together.

    `fast` leaves syncing to the kernel (safe against kill -9, not against power loss), `batched`
    syncs every commit, `sync` commits every block separately (the caller splits batches; see
    `blocks_per_commit`). The files do not grow into the last `min_free_bytes` of the volume; pages
    freed earlier are still reused. Where the files exceed the capacity on opening, the coldest
    blocks are removed until the rest take at most `usable_bytes`, and the files are rewritten;
    `progress` is called with (bytes done, bytes in all). `notes` holds one sentence for each repair
    made on opening. `readers` threads copy blocks.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        durability: Durability = "batched",
        read_ahead: bool = True,
        readers: int = READERS,
        min_free_bytes: int = 0,
        usable_bytes: int | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        lock_wait_s: float = 0.0,
        set_aside: bool = False,
    ) -> None:
        self.path = Path(path)
        self.capacity_bytes = capacity_bytes // PAGE_BYTES * PAGE_BYTES
        self.durability: Durability = durability
        self.blocks_per_commit = 1 if durability == "sync" else 1 << 30
        self._read_ahead = read_ahead
        self._min_free_bytes = min_free_bytes
        self._environments: dict[int, Environment] = {}
        self._is_open = True
        keep_freed_memory()
        self._device = DiskDevice(path, durability, lock_wait_s=lock_wait_s, set_aside=set_aside)
        self._pool = (
            ThreadPoolExecutor(readers, thread_name_prefix="hicache-copy") if readers > 1 else None
        )
        self.notes = self._device.notes
        with contextlib.ExitStack() as undo:
            undo.callback(self._release)  # if one fails to open: close the others, release the lock
            for slot_bytes in self._device.classes():
                self._reopen(slot_bytes)
            most = map_bytes(self.capacity_bytes)
            if sum(opened.file_bytes() for opened in list(self._environments.values())) > most:
                self._shrink(most - most // 20 if usable_bytes is None else usable_bytes, progress)
            undo.pop_all()

    # --- the writer's side ---------------------------------------------------------------------

    def put(self, slot_bytes: int, blocks: Sequence[tuple[Identity, Bytes]]) -> None:
        """Store blocks of one class in one transaction: all of them or, on TierError, none."""
        num_bytes = sum(view.nbytes for _, view in blocks)
        opened = self._with_room(slot_bytes, most_growth_bytes(len(blocks), num_bytes))
        now_s = time.time()

        def store(txn: lmdb.Transaction) -> None:
            for identity, view in blocks:  # one at a time: hashed bytes are still in the CPU cache
                checksum = xxhash.xxh3_64_intdigest(view.data)
                header = pack_header(identity, view.nbytes, checksum, now_s)
                txn.put(identity.key, header, db=opened.meta)
                txn.put(identity.key, view.data, db=opened.blocks)

        try:
            try:
                opened.commit(store)
            except TierFull as error:
                if not isinstance(error.__cause__, lmdb.MapFullError):
                    raise
                opened.commit(lambda txn: txn.put(b"commits", os.urandom(8)))  # race 2
                opened.commit(store)
        except TierFull as error:
            is_narrow = opened.map_bytes() < map_bytes(self.capacity_bytes)
            if is_narrow and isinstance(error.__cause__, lmdb.MapFullError):
                raise self._no_room(slot_bytes) from error
            raise

    def delete(self, slot_bytes: int, keys: Sequence[bytes]) -> None:
        """Remove records in one transaction; absent keys are ignored."""
        opened = self._environments.get(slot_bytes)
        if opened is None:
            return

        def remove(txn: lmdb.Transaction) -> None:
            for key in keys:
                remove_record(txn, opened, key)

        try:
            opened.commit(remove)
        except TierFull:  # the map was limited to leave room for others: use the kept reserve
            spare = self.room_bytes() + self._spare_bytes()
            most = min(map_bytes(self.capacity_bytes), opened.file_bytes() + spare)
            if most <= opened.map_bytes():
                raise
            opened.resize(most)
            opened.commit(remove)

    def note_uses(self, slot_bytes: int, uses: Sequence[tuple[bytes, int, int]]) -> None:
        """Store (key, hits, seconds since 1970) for those blocks that are stored; the next start
        reads them. On TierError the earlier notes stay."""
        opened = self._environments.get(slot_bytes)
        if opened is None:
            return
        self._with_room(slot_bytes, most_growth_bytes(len(uses), 0))

        def note(txn: lmdb.Transaction) -> None:
            for key, hits, used_s in sorted(uses):
                if txn.get(key, db=opened.meta) is not None:
                    txn.put(key, pack_use(hits, used_s), db=opened.usage)

        opened.commit(note)

    def describe_namespace(self, digest: bytes, description: Mapping[str, Any]) -> None:
        """Store a namespace's description as JSON beside its blocks, for people."""
        with contextlib.suppress(OSError):  # not worth ending the worker
            self._device.describe(digest, json.dumps(description, indent=1, sort_keys=True))

    def drop_descriptions(self, kept: Container[bytes]) -> None:
        """Delete the descriptions of namespaces that are not in `kept`, after a scan."""
        with contextlib.suppress(OSError, ValueError):  # a file with an unexpected name stays
            self._device.drop_descriptions(kept)

    def sync(self) -> None:
        """Write everything committed so far to the medium before returning."""
        for opened in list(self._environments.values()):
            with typed("sync", str(self.path)):
                opened.env.sync(True)

    # --- the reader's side ---------------------------------------------------------------------

    def read(
        self, slot_bytes: int, wanted: Sequence[tuple[Identity, Bytes]]
    ) -> list[TierError | None]:
        """Copy blocks of one class into their views, in one read transaction.

        Returns one result per block, in order. None: the view holds exactly the bytes stored under
        that identity. TierMissing or TierCorrupt: it does not. Corrupt records are removed.
        """
        opened = self._environments.get(slot_bytes)
        if opened is None:
            return [TierMissing("no block of this size is stored") for _ in wanted]
        with (
            typed("read", str(self.path)),
            opened.mapping,
            opened.env.begin(buffers=True) as txn,
        ):
            found = find_all(txn, opened, slot_bytes, wanted)
            results = copy_all(opened.data.fileno(), found, self._pool)
            bad = [
                (record.identity.key, record.packed)
                for record, problem in zip(found, results, strict=True)
                if isinstance(problem, TierCorrupt)
            ]
            del found
        if bad:
            self._remove_bad(opened, bad)
        return results

    def scan(self) -> Iterator[Scanned]:
        """All stored blocks, read from `meta` alone, in key order. Invalid rows are removed.
        Blocks may be read meanwhile; one stored or deleted meanwhile may or may not be included.
        Raises TierDamaged when a tree has a cycle."""
        for slot_bytes, opened in list(self._environments.items()):
            scan = Scan(opened, slot_bytes)
            yield from scan.rows()
            if scan.bad:
                num_bad = len(scan.bad)
                self.notes.append(f"{num_bad} records of {slot_bytes}-byte slots were damaged")
                self._remove_bad(opened, scan.bad)

    def scrub(self) -> Scrub:
        """A pass over all stored blocks, in steps. May be called from a separate thread."""
        return Scrub(dict(self._environments))

    def remove_bad(self, slot_bytes: int, key: bytes, row: bytes) -> tuple[bytes, bytes] | None:
        """Remove a record that a scrub found bad, unless it has been stored again since. Returns
        its namespace and the tokens of its whole prefix, None where an ancestor is missing."""
        opened = self._environments.get(slot_bytes)
        if opened is None:
            return None
        prefix = _prefix(opened, row)
        self._remove_bad(opened, [(key, row)])
        return prefix

    def num_blocks(self) -> int:
        """The number of stored blocks."""
        return sum(opened.num_blocks() for opened in list(self._environments.values()))

    def room_bytes(self) -> int:
        """Bytes by which all files together may still grow."""
        files = sum(opened.file_bytes() for opened in list(self._environments.values()))
        others = len(self._environments) > 1 or self._device.aside_bytes
        kept = self._device.aside_bytes + (self._spare_bytes() if others else 0)
        room = map_bytes(self.capacity_bytes) - files - kept
        with typed("write", str(self.path)):
            return min(room, volume_free_bytes(str(self.path)) - self._min_free_bytes)

    def close(self) -> None:
        """Sync, mark the device as cleanly closed, and release it. Idempotent."""
        if not self._is_open:
            return
        try:
            self.sync()
            with typed("close", str(self.path)):
                self._device.mark(is_clean=True)
        finally:
            self._release()

    def __enter__(self) -> DiskTier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- opening -------------------------------------------------------------------------------

    def _reopen(self, slot_bytes: int) -> None:
        """Open a class found on the device; delete it when empty, set it aside when damaged."""
        try:
            opened = self._open(slot_bytes)
            is_empty = not opened.num_blocks()
        except TierDamaged as error:
            self._device.set_aside(slot_bytes, str(error))
            return
        if is_empty:  # LMDB never shrinks a file: deleting it is the only way to free its space
            opened.close()
            del self._environments[slot_bytes]
            shutil.rmtree(self._device.directory(slot_bytes))

    def _open(self, slot_bytes: int) -> Environment:
        opened = open_environment(
            self._device.directory(slot_bytes),
            map_bytes(self.capacity_bytes),
            is_synced=self.durability != "fast",
            read_ahead=self._read_ahead,
        )
        self._environments[slot_bytes] = opened
        return opened

    def _shrink(self, usable_bytes: int, progress: Callable[[int, int], None]) -> None:
        """Remove the coldest blocks and rewrite the files, which exceed the capacity."""
        self._device.drop_aside()
        num_gone = evict_coldest(self._environments, usable_bytes)
        for slot_bytes, opened in list(self._environments.items()):
            compact(opened, self.path, self._min_free_bytes, progress)
            self._open(slot_bytes)
        self.notes.append(f"made to fit its new size; {num_gone} of the coldest blocks removed")

    def _release(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        for opened in self._environments.values():
            opened.close()
        self._environments.clear()
        self._device.close()
        self._is_open = False

    # --- room ----------------------------------------------------------------------------------

    def _with_room(self, slot_bytes: int, growth_bytes: int) -> Environment:
        """Open the class's environment, its map limited so that no commit exceeds the device's
        capacity or the volume's `min_free_bytes`. Raises NoRoomForSize or TierFull.

        Environments that were set aside are deleted first. Where that is not enough, the map is
        limited to the available room, and the class reuses the pages it has freed itself.
        """
        opened = self._environments.get(slot_bytes)
        room = self.room_bytes()
        if room < growth_bytes and self._device.drop_aside():
            room = self.room_bytes()
        if opened is None:
            if room < growth_bytes:
                raise self._no_room(slot_bytes)
            return self._open(slot_bytes)
        file_bytes, most = opened.file_bytes(), map_bytes(self.capacity_bytes)
        narrow = min(most, max(file_bytes, file_bytes + room))
        now = opened.map_bytes()
        if now > narrow if room < growth_bytes else now < min(most, file_bytes + growth_bytes):
            opened.resize(narrow)
        return opened

    def _spare_bytes(self) -> int:
        """Room kept for deletions, which write pages before they free any."""
        return min(16 << 20, self.capacity_bytes // 32)

    def _no_room(self, slot_bytes: int) -> TierFull:
        free_bytes = volume_free_bytes(str(self.path))
        if free_bytes <= self._min_free_bytes + self._spare_bytes():
            return TierFull(f"the volume of {self.path} has only {free_bytes >> 20} MiB left")
        return NoRoomForSize(
            f"{self.path}: other slot sizes use the room that {slot_bytes}-byte slots need"
        )

    # --- records -------------------------------------------------------------------------------

    def _remove_bad(self, opened: Environment, bad: Sequence[tuple[bytes, bytes | None]]) -> None:
        """Remove these records if unchanged. On TierError they stay, and are found bad again."""

        def remove(txn: lmdb.Transaction) -> None:
            for key, found in bad:
                if txn.get(key, db=opened.meta) == found:  # race 1
                    remove_record(txn, opened, key)

        with contextlib.suppress(TierError):
            opened.commit(remove)


def _prefix(opened: Environment, row: bytes) -> tuple[bytes, bytes] | None:
    """The namespace of a row of `meta`, and the tokens from the root to the end of its block. None
    where the row or an ancestor's is missing or damaged."""
    tokens: list[bytes] = []
    header = unpack_header(row)
    with typed("read", opened.env.path()), opened.env.begin() as txn:
        while header is not None:
            tokens.append(header.tokens)
            if header.parent == bytes(32):
                return header.namespace, b"".join(reversed(tokens))
            above = txn.get(header.parent, db=opened.meta)
            header = None if above is None else unpack_header(bytes(above))
    return None

"""The disk tier's medium: reads, writes and deletes blocks of an LMDB device.

The reader thread calls `DiskReader`; the writer thread calls `DiskWriter` and `DiskDeleter`, in the
order in which the daemon sent the batches. Without a codec bytes are copied directly between the
arena's mapping and the file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from hicache.engine.plan import BlockIdentity, Move, Outcome
from hicache.tiers.arena import Arena
from hicache.tiers.block import StoredRows, slot_bytes_for
from hicache.tiers.disk.builder import DiskOptions
from hicache.tiers.disk.disk_tier import DiskTier
from hicache.tiers.disk.environment import give_memory_back
from hicache.tiers.disk.format import derive_key
from hicache.tiers.errors import NoRoomForSize, TierBroken, TierDamaged, TierError, TierFull
from hicache.tiers.restore_order import Scanned, StoredForest
from hicache.transfer.media.codec import Bytes, Codec, codec_of
from hicache.transfer.media.medium import (
    Link,
    Measured,
    Progress,
    Scrubbed,
    Spoilt,
    by_size,
    failed,
    identity_of,
    options_of,
)
from hicache.transfer.worker_messages import WorkerConfig

PROGRESS_ROWS = 20_000
SCRUB_BYTES = 1 << 20
"""Read by a scrub in one transaction, which bounds how long a demand waits for it."""


class DiskReader:
    """disk → arena. A block is ok only when its destination's bytes match the stored checksum."""

    def __init__(self, src: str, tier: DiskTier, dst: str, arena: Arena, codec: Codec) -> None:
        self.src, self.dst = src, dst
        self._tier, self._arena, self._codec = tier, arena, codec

    def copy(self, batch: Sequence[Move]) -> list[Outcome]:
        outcomes = []
        for slot_bytes, moves in by_size(batch, of_source=True):
            views = [self._arena.view(move.dst_slot, move.block_bytes) for move in moves]
            buffers = [self._codec.buffer(view) for view in views]
            wanted = list(zip(map(identity_of, moves), buffers, strict=True))
            problems = self._tier.read(slot_bytes, wanted)
            for move, view, stored, problem in zip(moves, views, buffers, problems, strict=True):
                outcomes.append(self._decoded(move, view, stored, problem))
        return outcomes

    def _decoded(
        self, move: Move, view: Bytes, stored: Bytes, problem: TierError | None
    ) -> Outcome:
        try:
            if problem is None:
                self._codec.decode(stored, view)
                return Outcome(move.id, ok=True)
        except TierError as error:
            problem = error
        return failed(move, problem)


class DiskWriter:
    """arena → disk, with as many blocks per transaction as the durability mode allows."""

    def __init__(self, src: str, arena: Arena, dst: str, tier: DiskTier, codec: Codec) -> None:
        self.src, self.dst = src, dst
        self._tier, self._arena, self._codec = tier, arena, codec

    def copy(self, batch: Sequence[Move]) -> list[Outcome]:
        outcomes = []
        step = self._tier.blocks_per_commit
        for slot_bytes, moves in by_size(batch, of_source=False):
            for start in range(0, len(moves), step):
                outcomes += self._commit(slot_bytes, moves[start : start + step])
        return outcomes

    def _commit(self, slot_bytes: int, moves: Sequence[Move]) -> list[Outcome]:
        encode, view = self._codec.encode, self._arena.view
        blocks = [
            (identity_of(move), encode(view(move.src_slot, move.block_bytes))) for move in moves
        ]
        try:
            self._tier.put(slot_bytes, blocks)
        except TierBroken:
            raise
        except TierError as error:
            return _rejected(moves, error)
        return [Outcome(move.id, ok=True) for move in moves]


class DiskDeleter:
    """Deletes copies on disk, in a separate transaction before the puts that follow."""

    dst = None

    def __init__(self, src: str, tier: DiskTier) -> None:
        self.src = src
        self._tier = tier

    def copy(self, batch: Sequence[Move]) -> list[Outcome]:
        outcomes = []
        for slot_bytes, moves in by_size(batch, of_source=True):
            try:
                self._tier.delete(slot_bytes, [identity_of(move).key for move in moves])
            except TierBroken:
                raise
            except TierError as error:  # deleting needs free pages, too
                outcomes += _rejected(moves, error)
                continue
            outcomes += [Outcome(move.id, ok=True) for move in moves]
        return outcomes


class DiskMedium:
    """The disk tier as its worker opens it. Its options: DiskOptions."""

    remembers = True
    by_priority = False
    pages = None

    def __init__(self, config: WorkerConfig, near: Arena, progress: Progress) -> None:
        self._names = config.near, config.far
        self._options = options = options_of(DiskOptions, config)
        self._progress = progress
        self._codec = codec = codec_of(config.spec.codec)
        self._tier = tier = DiskTier(
            options.path,
            config.spec.capacity_bytes,
            durability=options.durability,
            read_ahead=options.read_ahead,
            min_free_bytes=options.min_free_bytes,
            usable_bytes=options.usable_bytes or None,
            progress=partial(progress, "bytes"),
            lock_wait_s=options.lock_wait_s,
            set_aside=config.set_aside,
        )
        self.detail = f"LMDB at {options.path}, durability {options.durability}"
        self.notes = tier.notes
        self.readers: Sequence[Link] = [DiskReader(config.far, tier, config.near, near, codec)]
        self.writers: Sequence[Link] = [
            DiskWriter(config.near, near, config.far, tier, codec),
            DiskDeleter(config.far, tier),
        ]

    def probe(self, num_bytes: int, block_bytes: int) -> list[Measured]:
        """Measured with a small temporary tier beside the real one. It is read after its pages were
        dropped from the page cache, as for a block not read recently. Nothing is measured where it
        would exceed the device's capacity."""
        if self._tier.room_bytes() < 2 * num_bytes + (1 << 20):
            return []
        path = self._tier.path / "probe"
        shutil.rmtree(path, ignore_errors=True)
        slot_bytes = slot_bytes_for(block_bytes)
        room = 4 * num_bytes + (1 << 20)
        tokens = [
            number.to_bytes(4, "little") for number in range(max(1, num_bytes // block_bytes))
        ]
        names = [
            BlockIdentity(bytes(32), derive_key(bytes(32), bytes(32), t), bytes(32), t, 0, 0)
            for t in tokens
        ]
        blocks = [(name, np.ones(block_bytes, np.uint8)) for name in names]
        near, far = self._names
        try:
            with DiskTier(path, room, durability=self._options.durability) as tier:
                start = time.perf_counter()
                tier.put(slot_bytes, blocks)
                write_s = time.perf_counter() - start
            fd = os.open(path / f"class-{slot_bytes}" / "data.mdb", os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
            with DiskTier(path, room, durability=self._options.durability) as tier:
                start = time.perf_counter()
                problems = tier.read(slot_bytes, blocks)
                read_s = time.perf_counter() - start
        finally:
            shutil.rmtree(path, ignore_errors=True)
        if any(problems):
            raise TierDamaged(f"the probe of {self._tier.path} read other bytes than it wrote")
        copied = len(blocks) * block_bytes
        return [Measured(near, far, copied, write_s), Measured(far, near, copied, read_s)]

    def stored(self) -> Iterator[StoredRows]:
        """All stored blocks, the hottest paths first. Blocks without their parent are deleted at
        the end: such a block was written while its parent was being deleted, and the daemon died in
        between."""
        forests: dict[tuple[bytes, int, int], StoredForest] = {}
        for rows in self._watched(self._tier.scan()):
            rows.block_bytes = self._codec.block_bytes(rows.block_bytes)
            kind = rows.namespace, rows.block_bytes, rows.step
            if kind not in forests:
                forests[kind] = StoredForest(*kind)
            forests[kind].add(rows)
        self._tier.drop_descriptions({namespace for namespace, _, _ in forests})
        total, first = sum(map(len, forests.values())), 0
        while forests:
            _, forest = forests.popitem()
            yield from forest.in_order(first, total)
            first += len(forest)
            if forest.orphans:
                self.notes.append(f"{len(forest.orphans)} blocks had lost their parent block")
                with contextlib.suppress(TierFull):  # they are found again at the next start
                    stored_bytes = self._codec.stored_bytes(forest.block_bytes)
                    self._tier.delete(slot_bytes_for(stored_bytes), forest.orphans)
        give_memory_back()

    def _watched(self, batches: Iterable[Scanned]) -> Iterator[Scanned]:
        """The same batches; reports progress now and then."""
        total, done, reported = self._tier.num_blocks(), 0, 0
        for batch in batches:
            done += len(batch)
            if done - reported >= PROGRESS_ROWS:
                reported = done
                self._progress("blocks", done, total)
            yield batch

    def forget(self, keys: Mapping[int, Sequence[bytes]]) -> None:
        for slot_bytes, some in keys.items():
            self._tier.delete(slot_bytes, some)

    def note(self, uses: Mapping[int, Sequence[tuple[bytes, int, int]]]) -> None:
        for slot_bytes, some in uses.items():
            self._tier.note_uses(slot_bytes, some)

    def scrub(self) -> Iterator[Scrubbed]:
        """Check every block; bad ones are removed, as by a read."""
        scrub = self._tier.scrub()
        is_more = True
        while is_more:
            is_more = scrub.step(SCRUB_BYTES)
            verdict, rows = scrub.verdict, scrub.bad_rows
            bad = []
            for slot_bytes, key, row in rows:
                problem = next(said for _, named, said in verdict.bad if named == key)
                prefix = self._tier.remove_bad(slot_bytes, key, row) or (b"", b"")
                bad.append(Spoilt(key, problem, *prefix))
            scrub.bad_rows = []
            total = verdict.total_blocks
            yield Scrubbed(verdict.num_blocks, verdict.num_bytes, total, bad, not is_more)

    def describe(self, namespace: bytes, description: Mapping[str, Any]) -> None:
        self._tier.describe_namespace(namespace, description)

    def close(self) -> None:
        self._tier.close()


def _rejected(moves: Sequence[Move], error: TierError) -> list[Outcome]:
    """The outcomes of moves that the disk refused. Unless only this slot size has no room, they say
    that it refuses all writes now."""
    rejected = not isinstance(error, NoRoomForSize)
    return [Outcome(move.id, ok=False, error=str(error), rejected=rejected) for move in moves]

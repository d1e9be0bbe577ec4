"""Between the arena and the archive: one file for each block, written beside its place and moved
there, so that a block is whole or absent. Another host may remove a file at any moment: then it is
missing, which is a miss.

    <folder>/<key in digits>         length of the header | header (msgpack) | the block, as encoded
    <folder>/<key in digits>.use     hits and seconds since 1970, as noted last
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import xxhash

from hicache.engine.plan import Move, Outcome
from hicache.tiers.arena import Arena
from hicache.tiers.block import StoredRows
from hicache.tiers.errors import TierCorrupt, TierError, TierMissing
from hicache.tiers.restore_order import Scanned, StoredForest
from hicache.transfer.media.codec import Codec, codec_of
from hicache.transfer.media.medium import (
    Link,
    Measured,
    Progress,
    Scrubbed,
    Spoilt,
    failed,
    identity_of,
    options_of,
)
from hicache.transfer.worker_messages import WorkerConfig
from tests.e2e.archive_tier import ArchiveOptions


class Folder:
    """The files. Whatever `read` returns was checked."""

    def __init__(self, path: Path, fsync: bool) -> None:
        self.path, self.fsync = path, fsync
        path.mkdir(parents=True, exist_ok=True)

    def write(self, key: bytes, header: list[Any], value: Any) -> None:
        packed = msgpack.packb([*header, xxhash.xxh3_64_intdigest(value)])
        new = self.path / f"{key.hex()}.new-{os.getpid()}"
        with new.open("wb") as out:
            out.write(len(packed).to_bytes(4, "little") + packed)
            out.write(value)
            if self.fsync:
                out.flush()
                os.fsync(out.fileno())
        new.replace(self.path / key.hex())

    def read(self, key: bytes) -> tuple[list[Any], bytes]:
        """Header and value. Raises TierMissing, or TierCorrupt and removes the file."""
        try:
            data = (self.path / key.hex()).read_bytes()
        except FileNotFoundError as error:
            raise TierMissing("there is no such file") from error
        try:
            start = 4 + int.from_bytes(data[:4], "little")
            *header, checksum = msgpack.unpackb(data[4:start])
            if xxhash.xxh3_64_intdigest(data[start:]) == checksum:
                return header, data[start:]
        except ValueError:
            pass
        self.remove(key)
        raise TierCorrupt("the file does not match its checksum")

    def remove(self, key: bytes) -> None:
        for name in (key.hex(), f"{key.hex()}.use"):
            (self.path / name).unlink(missing_ok=True)

    def all_keys(self) -> list[bytes]:
        return [bytes.fromhex(file.name) for file in self.path.iterdir() if "." not in file.name]

    def note(self, key: bytes, hits: int, used_s: int) -> None:
        (self.path / f"{key.hex()}.use").write_text(f"{hits} {used_s}")

    def use(self, key: bytes) -> tuple[int, int]:
        with contextlib.suppress(OSError, ValueError):
            hits, used_s = (self.path / f"{key.hex()}.use").read_text().split()
            return int(hits), int(used_s)
        return 0, 0


class ArchiveReader:
    """archive → arena."""

    def __init__(self, src: str, folder: Folder, dst: str, arena: Arena, codec: Codec) -> None:
        self.src, self.dst = src, dst
        self._folder, self._arena, self._codec = folder, arena, codec

    def copy(self, batch: Sequence[Move]) -> list[Outcome]:
        return [self._copy(move) for move in batch]

    def _copy(self, move: Move) -> Outcome:
        try:
            wanted = identity_of(move)
            header, value = self._folder.read(wanted.key)
            if header[:3] != [wanted.namespace, wanted.parent, wanted.tokens]:
                raise TierCorrupt("the file is another block's")
            block = self._arena.view(move.dst_slot, move.block_bytes)
            if len(value) != self._codec.stored_bytes(move.block_bytes):
                raise TierCorrupt(f"the file holds {len(value)} bytes")
            self._codec.decode(np.frombuffer(value, np.uint8), block)
        except (TierError, OSError) as error:
            return failed(move, error)
        return Outcome(move.id, ok=True)


class ArchiveWriter:
    """arena → archive."""

    def __init__(self, src: str, arena: Arena, dst: str, folder: Folder, codec: Codec) -> None:
        self.src, self.dst = src, dst
        self._arena, self._folder, self._codec = arena, folder, codec

    def copy(self, batch: Sequence[Move]) -> list[Outcome]:
        return [self._copy(move) for move in batch]

    def _copy(self, move: Move) -> Outcome:
        try:
            name = identity_of(move)
            value = self._codec.encode(self._arena.view(move.src_slot, move.block_bytes))
            header = [name.namespace, name.parent, name.tokens, name.hits]
            self._folder.write(name.key, header, value.data)
        except (TierError, OSError) as error:  # a full volume: the tier refuses for a while
            return Outcome(move.id, ok=False, error=str(error), rejected=True)
        return Outcome(move.id, ok=True)


class ArchiveDeleter:
    """Gives up copies in the archive."""

    dst = None

    def __init__(self, src: str, folder: Folder) -> None:
        self.src, self._folder = src, folder

    def copy(self, batch: Sequence[Move]) -> list[Outcome]:
        for move in batch:
            self._folder.remove(identity_of(move).key)
        return [Outcome(move.id, ok=True) for move in batch]


class ArchiveMedium:
    """The archive as its worker opens it."""

    remembers = True
    by_priority = False
    pages = None

    def __init__(self, config: WorkerConfig, near: Arena, progress: Progress) -> None:
        options = options_of(ArchiveOptions, config)
        self._codec = codec = codec_of(config.spec.codec)
        self._folder = folder = Folder(Path(options.path), options.fsync)
        self.detail = f"files in {options.path}"
        self.notes: list[str] = []
        self.readers: Sequence[Link] = [ArchiveReader(config.far, folder, config.near, near, codec)]
        self.writers: Sequence[Link] = [
            ArchiveWriter(config.near, near, config.far, folder, codec),
            ArchiveDeleter(config.far, folder),
        ]

    def probe(self, num_bytes: int, block_bytes: int) -> list[Measured]:
        return []  # use will tell

    def stored(self) -> Iterator[StoredRows]:
        forests: dict[tuple[bytes, int, int], StoredForest] = {}
        for key in self._folder.all_keys():
            with contextlib.suppress(TierError):
                (namespace, parent, tokens, hits), value = self._folder.read(key)
                block_bytes = self._codec.block_bytes(len(value))
                kind = namespace, block_bytes, len(tokens)
                noted, used_s = self._folder.use(key)
                uses = np.array([max(hits, noted)], np.uint32), np.array([used_s], np.uint32)
                forest = forests.setdefault(kind, StoredForest(*kind))
                forest.add(Scanned(*kind, key, parent, tokens, *uses))
        total, first = sum(map(len, forests.values())), 0
        for forest in forests.values():
            yield from forest.in_order(first, total)
            first += len(forest)

    def forget(self, keys: Mapping[int, Sequence[bytes]]) -> None:
        for key in (key for some in keys.values() for key in some):
            self._folder.remove(key)

    def note(self, uses: Mapping[int, Sequence[tuple[bytes, int, int]]]) -> None:
        for use in (use for some in uses.values() for use in some):
            self._folder.note(*use)

    def scrub(self) -> Iterator[Scrubbed]:
        num_bytes, keys = 0, self._folder.all_keys()
        for number, key in enumerate(keys):
            bad = []
            try:
                num_bytes += len(self._folder.read(key)[1])
            except TierError as error:
                bad.append(Spoilt(key, str(error)))
            yield Scrubbed(number + 1, num_bytes, len(keys), bad, False)
        yield Scrubbed(len(keys), num_bytes, len(keys), [], True)

    def describe(self, namespace: bytes, description: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass

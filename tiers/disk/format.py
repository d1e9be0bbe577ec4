"""What the disk stores beside the blocks' bytes: headers, the device's state file, its capacity.

Pure functions, and the reading and writing of the state file. `docs/disk-format.md` describes the
format.

A header identifies its block completely, so that a lost index or a swapped record is detected from
the record alone:

    magic  version  depth  hits  block bytes  created  XXH3 of the bytes
    namespace  key  parent  number of token bytes  tokens …  XXH3 of all this
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from hicache.tiers.block import PAGE_BYTES, slot_bytes_for
from hicache.tiers.errors import Identity, TierUnavailable

FORMAT = 1
MAGIC = b"hicB"
MAX_TOKEN_BYTES = 1 << 20
_FIXED = struct.Struct("<4sHHIIQdQ32s32s32sI")
FIELDS = np.dtype(
    [
        ("magic", "S4"),
        ("version", "<u2"),
        ("zero", "<u2"),
        ("depth", "<u4"),
        ("hits", "<u4"),
        ("block_bytes", "<u8"),
        ("created_s", "<f8"),
        ("checksum", "<u8"),
        ("namespace", "V32"),
        ("key", "V32"),
        ("parent", "V32"),
        ("token_bytes", "<u4"),
    ]
)
"""The layout of `_FIXED` for numpy, to decode many headers at once."""
_CHECK = struct.Struct("<Q")
CHECK_BYTES = _CHECK.size
_USE = struct.Struct("<II")
_SMALL_FILES_BYTES = 128 << 10
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


@dataclass(slots=True)
class Header:
    """A stored block's identity, length, time of creation and checksum. It is itself an `Identity`.

    Never changed once made. Not frozen: that took a third of the time of the scan at start."""

    namespace: bytes
    key: bytes
    parent: bytes
    tokens: bytes
    depth: int
    hits: int
    block_bytes: int
    checksum: int
    created_s: float

    def packed(self) -> bytes:
        """The header as stored."""
        return pack_header(self, self.block_bytes, self.checksum, self.created_s)

    def matches(self, identity: Identity) -> bool:
        """Whether this is the block of that identity; compares the tokens too, not only the key."""
        return (
            self.key == identity.key
            and self.namespace == identity.namespace
            and self.parent == identity.parent
            and self.tokens == identity.tokens
        )


def pack_header(identity: Identity, block_bytes: int, checksum: int, created_s: float) -> bytes:
    """The header of a block about to be stored."""
    fixed = _FIXED.pack(
        MAGIC,
        FORMAT,
        0,
        min(identity.depth, 0xFFFFFFFF),
        min(identity.hits, 0xFFFFFFFF),
        block_bytes,
        created_s,
        checksum,
        identity.namespace,
        identity.key,
        identity.parent,
        len(identity.tokens),
    )
    described = fixed + identity.tokens
    return described + _CHECK.pack(xxhash.xxh3_64_intdigest(described))


def unpack_header(packed: bytes) -> Header | None:
    """The header, or None when the bytes are not an intact header. Raises TierUnavailable when it
    is intact and of another format version: this version must neither read nor remove it."""
    if len(packed) < _FIXED.size + _CHECK.size:
        return None
    described = packed[: -_CHECK.size]
    if _CHECK.pack(xxhash.xxh3_64_intdigest(described)) != packed[-_CHECK.size :]:
        return None
    magic, version, _, depth, hits, block_bytes, created_s, checksum, *names, length = (
        _FIXED.unpack_from(described)
    )
    tokens = described[_FIXED.size :]
    if magic != MAGIC:
        return None
    refuse_format(version)
    if length != len(tokens):
        return None
    namespace, key, parent = names
    return Header(namespace, key, parent, tokens, depth, hits, block_bytes, checksum, created_s)


def pack_use(hits: int, used_s: int) -> bytes:
    """A row of `usage`: a block's hits, and its last use in seconds since 1970."""
    return _USE.pack(min(hits, 0xFFFFFFFF), min(max(0, used_s), 0xFFFFFFFF))


def unpack_use(noted: bytes | None) -> tuple[int, int] | None:
    """(hits, last use in seconds since 1970), or None where nothing valid is stored. These bytes
    have no checksum: if they are wrong, a block is evicted too early or too late."""
    if noted is None or len(noted) != _USE.size:
        return None
    hits, used_s = _USE.unpack(noted)
    return hits, used_s


def refuse_format(versions: npt.ArrayLike) -> None:
    """Raises TierUnavailable when one of these versions is not `FORMAT`."""
    for version in np.unique(versions).tolist():
        if version != FORMAT:
            raise TierUnavailable(
                f"a block is stored in format {version}; this hicache knows {FORMAT}"
            )


def header_at(data: bytes, start: int) -> Header | None:
    """The intact header that begins at `start`, or None."""
    if len(data) < start + _FIXED.size:
        return None
    token_bytes = _FIXED.unpack_from(data, start)[-1]
    if token_bytes > MAX_TOKEN_BYTES:
        return None
    return unpack_header(data[start : start + _FIXED.size + token_bytes + _CHECK.size])


def derive_key(namespace: bytes, parent: bytes, tokens: bytes) -> bytes:
    """The block's key, as in protocol/keys.py: a row with another key is dropped."""
    return hashlib.blake2b(namespace + parent + tokens, digest_size=32).digest()


def is_sound(header: Header, key: bytes, slot_bytes: int) -> bool:
    """Whether the header belongs under this key, in an environment of this slot size."""
    return (
        header.key == key == derive_key(header.namespace, header.parent, header.tokens)
        and header.block_bytes > 0
        and len(header.tokens) >= 4
        and len(header.tokens) % 4 == 0
        and slot_bytes_for(header.block_bytes) == slot_bytes
    )


def map_bytes(capacity_bytes: int) -> int:
    """The greatest length of one class's file. The rest of the capacity is for the small files:
    locks, state, descriptions of namespaces."""
    room = max(_SMALL_FILES_BYTES, capacity_bytes // 1000)
    return max(PAGE_BYTES, (capacity_bytes - room) // PAGE_BYTES * PAGE_BYTES)


def usable_bytes(capacity_bytes: int, batch_bytes: int) -> int:
    """How many bytes of blocks a device of this capacity may hold; the rest is LMDB's free space.

    Pages freed by one commit serve the commit after the next, so up to three batches of space are
    unavailable; with less than 5 % the B-trees and the free list would not fit. 0: the device is
    too small.
    """
    room = map_bytes(capacity_bytes)
    return max(0, room - max(room // 20, 3 * batch_bytes))


def most_growth_bytes(num_blocks: int, num_bytes: int) -> int:
    """An upper bound of a file's growth by one commit of these blocks, if no free page is reused:
    each value with its page header and remainder, a leaf and a branch in both trees, the free
    list."""
    return num_bytes + PAGE_BYTES * (6 * num_blocks + 64)


def record_pages(slot_bytes: int) -> int:
    """The pages that one block of this class takes in the map, its share of the B-trees included.

    A value that fills its pages needs one more for LMDB's page header. Single pages of the B-trees
    fragment short runs of pages, so classes below 16 pages get a second one.
    """
    pages = slot_bytes // PAGE_BYTES
    return pages + (2 if pages < 16 else 1)


@dataclass(frozen=True, slots=True)
class DeviceState:
    """The state file. `is_clean`: the device was closed; `boot_id`: the boot that opened it."""

    format: int
    durability: str
    is_clean: bool
    boot_id: str


def boot_id() -> str:
    """The kernel's id of this boot. Another one means that the page cache was lost since."""
    return BOOT_ID_FILE.read_text().strip()


def read_state(file: Path) -> DeviceState | None:
    """The state, or None when the file is missing or unreadable as JSON. Raises TierUnavailable for
    another format, and OSError when the device fails to read it."""
    try:
        found = json.loads(file.read_text())
        state = DeviceState(
            int(found["format"]),
            str(found["durability"]),
            found["clean"] is True,
            str(found["boot_id"]),
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    if state.format != FORMAT:
        age = "a newer" if state.format > FORMAT else "another"
        raise TierUnavailable(
            f"{file.parent} was written by {age} hicache (format {state.format}; this one knows "
            f"{FORMAT}): upgrade hicache, or give the disk tier another path"
        )
    return state


def write_state(file: Path, state: DeviceState) -> None:
    """Replace the file atomically, and sync it."""
    new = file.with_suffix(".new")
    content = {
        "format": state.format,
        "durability": state.durability,
        "clean": state.is_clean,
        "boot_id": state.boot_id,
    }
    with new.open("w") as out:
        json.dump(content, out)
        out.flush()
        os.fsync(out.fileno())
    new.rename(file)
    directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)

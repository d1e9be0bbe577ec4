"""Scrubbing: reads every stored block and compares it with its checksum, in small steps.

`Scrub` walks the environments of an open device in key order. Each `step` is one short read
transaction, so that the writer of a running worker can reuse its freed pages. It changes nothing: a
running worker removes the bad records (`DiskMedium.scrub`).

    python -m hicache.tiers.disk.scrub DIRECTORY SLOT_BYTES      by hicache/commands/disk_tools.py

scrubs one class of a device that is not open elsewhere, in a separate process because a damaged
file may end it; it prints one JSON map per line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from hicache.tiers.disk.environment import DATA_FILE, Environment, open_environment, typed
from hicache.tiers.disk.format import is_sound, unpack_header
from hicache.tiers.disk.reader import Value, fill, find_values, num_bytes
from hicache.tiers.errors import TierCorrupt, TierDamaged, TierError

STEP_BYTES = 8 << 20


@dataclass(slots=True)
class Verdict:
    """What a scrub has found so far. `bad`: (slot bytes, key, problem)."""

    num_blocks: int = 0
    num_bytes: int = 0
    total_blocks: int = 0
    bad: list[tuple[int, bytes, str]] = field(default_factory=list)


class Scrub:
    """One pass over `environments`, by slot size. Classes and blocks added meanwhile may be left
    out; blocks removed meanwhile are not reported."""

    def __init__(self, environments: Mapping[int, Environment]) -> None:
        self._left = sorted(environments.items())
        self.bad_rows: list[tuple[int, bytes, bytes]] = []
        """(slot bytes, key, row of `meta`) of the bad records."""
        self._after = b""
        self.verdict = Verdict(total_blocks=sum(e.num_blocks() for e in environments.values()))

    def step(self, max_bytes: int = STEP_BYTES) -> bool:
        """Check the next blocks, up to `max_bytes`. Returns False at the end. Raises TierDamaged
        when the trees are damaged."""
        if not self._left:
            return False
        slot_bytes, opened = self._left[0]
        verdict, seen_bytes = self.verdict, 0
        with (
            typed("verify", opened.env.path()),
            opened.mapping,
            opened.env.begin(buffers=True) as txn,
            txn.cursor(db=opened.meta) as cursor,
        ):
            rows: list[tuple[bytes, bytes]] = []
            is_there = cursor.set_range(self._after + b"\0") if self._after else cursor.first()
            while is_there and seen_bytes < max_bytes:
                key = bytes(cursor.key())
                if key <= self._after:
                    verdict.bad.append((slot_bytes, key, "the keys of its tree are out of order"))
                    is_there = False
                    break
                rows.append((key, bytes(cursor.value())))
                seen_bytes += slot_bytes
                self._after = key
                is_there = cursor.next()
            values = find_values(txn, opened, slot_bytes, [key for key, _ in rows])
            for (key, packed), value in zip(rows, values, strict=True):
                problem = _problem(key, slot_bytes, packed, value, opened.data.fileno())
                if problem:
                    verdict.bad.append((slot_bytes, key, problem))
                    self.bad_rows.append((slot_bytes, key, packed))
                verdict.num_blocks += 1
            del values
            if not is_there:
                num_blocks = txn.stat(opened.meta)["entries"]
                num_values = txn.stat(opened.blocks)["entries"]
                if num_values != num_blocks:
                    problem = f"{num_blocks} headers and {num_values} values"
                    verdict.bad.append((slot_bytes, b"", problem))
        verdict.num_bytes += seen_bytes
        if not is_there:
            self._left.pop(0)
            self._after = b""
        return bool(self._left)


def _problem(key: bytes, slot_bytes: int, packed: bytes, value: Value, fd: int) -> str:
    """A record's problem, "" where it is valid."""
    header = unpack_header(packed)
    if header is None:
        return "the header is damaged"
    if not is_sound(header, key, slot_bytes):
        return "the record belongs to another block"
    if value is None:
        return "half of the record is missing"
    if num_bytes(value) != header.block_bytes:
        return f"{num_bytes(value)} bytes are stored instead of {header.block_bytes}"
    view = np.empty(header.block_bytes, np.uint8)
    try:
        fill(view, value, fd)
    except TierCorrupt as error:
        return str(error)
    if xxhash.xxh3_64_intdigest(view.data) != header.checksum:
        return "the bytes do not match their checksum"
    return ""


def main(directory: Path, slot_bytes: int) -> int:
    """Scrub one class that is not open elsewhere. Returns the process's exit status.

    Damage is what the file shows. A file that cannot be read (permissions, a failing device) shows
    nothing, and is reported as unread."""
    try:
        size = (directory / DATA_FILE).stat().st_size
        opened = open_environment(directory, max(1 << 20, size), is_read_only=True)
        scrub = Scrub({slot_bytes: opened})
        while scrub.step():
            _report(scrub.verdict)
    except TierDamaged as error:
        print(json.dumps({"damage": str(error)}), flush=True)
        return 1
    except (TierError, OSError) as error:
        print(json.dumps({"unread": str(error)}), flush=True)
        return 1
    _report(scrub.verdict)
    return 0


def _report(verdict: Verdict) -> None:
    bad = [[slot_bytes, key.hex(), problem] for slot_bytes, key, problem in verdict.bad]
    print(json.dumps(asdict(verdict) | {"bad": bad}), flush=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))

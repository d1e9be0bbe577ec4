"""Verify and repair of a disk tier's folder while no daemon has it open.

Each class is scrubbed in its own process: LMDB can end the process that reads a damaged file. Only
records that fail their checksum are deleted. A damaged environment is kept: beside the rebuilt one,
or set aside by the daemon at its next start.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hicache.tiers.disk.device import classes_at, lock_device, set_asides_at
from hicache.tiers.disk.environment import open_environment, remove_record
from hicache.tiers.disk.format import FORMAT, DeviceState, boot_id, read_state, write_state
from hicache.tiers.disk.repair import rebuild
from hicache.tiers.errors import TierUnavailable

Progress = Callable[[int, int, int], None]
"""(slot bytes, blocks done, blocks in all)."""
LOCK_WAIT_S = 3.0  # after a daemon was killed, its worker takes a moment to end
_DIES_OF_DAMAGE = (signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE)
"""Signals by which LMDB ends a process that reads a damaged file. Others have another cause."""
_ROOT = Path(__file__).absolute().parents[2]


@dataclass(slots=True)
class ClassReport:
    """One slot-size class. `damage`: why its trees cannot be read at all."""

    slot_bytes: int
    blocks: int = 0
    bytes: int = 0
    bad: list[dict[str, Any]] = field(default_factory=list)
    damage: str = ""
    done: str = ""

    @property
    def is_clean(self) -> bool:
        return not self.bad and not self.damage


def verify(path: Path, progress: Progress) -> list[ClassReport]:
    """Read every block of a folder that no daemon has open. Changes nothing.

    Raises TierUnavailable when a class cannot be read; its blocks may be good or bad."""
    path = path.resolve()  # the readers run in another folder
    with _held(path):
        return [_verify(slot, folder, progress) for slot, folder in classes_at(path).items()]


def repair(path: Path, progress: Progress) -> list[ClassReport]:
    """Remove bad records, and rebuild environments that cannot be read from their whole blocks.
    `done` says in words what was done with each class.

    Raises TierUnavailable when a class cannot be read, before anything of any class is changed."""
    path = path.resolve()
    with _held(path):
        sources = set_asides_at(path) | classes_at(path)
        reports = [_verify(slot, folder, progress) for slot, folder in sources.items()]
        classes = classes_at(path)
        for report, (slot_bytes, folder) in zip(reports, sources.items(), strict=True):
            is_aside = slot_bytes not in classes
            if report.damage or is_aside:
                _rebuild(path, slot_bytes, folder, report)
            elif report.bad:
                _remove(folder, slot_bytes, report)
            else:
                report.done = "nothing to do"
        state = read_state(path / "state.json")
        durability = state.durability if state is not None else "batched"
        write_state(path / "state.json", DeviceState(FORMAT, durability, True, boot_id()))
        return reports


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    if not path.is_dir():
        raise TierUnavailable(f"{path} is not a folder")
    read_state(path / "state.json")  # refuses a folder in another format
    try:
        lock = lock_device(path, LOCK_WAIT_S)
    except OSError as error:
        raise TierUnavailable(f"{path}: {error.strerror}") from error
    try:
        yield
    finally:
        os.close(lock)


def _verify(slot_bytes: int, folder: Path, progress: Progress) -> ClassReport:
    report, unread = ClassReport(slot_bytes), ""
    command = [sys.executable, "-m", "hicache.tiers.disk.scrub", str(folder), str(slot_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as child:
        assert child.stdout is not None
        for line in child.stdout:
            row = json.loads(line)
            if "damage" in row:
                report.damage = row["damage"]
                continue
            if "unread" in row:
                unread = row["unread"]
                continue
            report.blocks, report.bytes = row["num_blocks"], row["num_bytes"]
            report.bad = [{"key": key, "problem": problem} for _, key, problem in row["bad"]]
            progress(slot_bytes, report.blocks, row["total_blocks"])
    status = child.returncode
    if -status in _DIES_OF_DAMAGE:
        report.damage = f"reading it ended with {signal.Signals(-status).name}"
    elif status and not report.damage:
        why = unread or f"its reader ended with status {status}"
        raise TierUnavailable(f"{folder} could not be read, and nothing was changed: {why}")
    if any("out of order" in row["problem"] for row in report.bad):
        report.damage = "the keys of its tree are out of order"
    return report


def _remove(folder: Path, slot_bytes: int, report: ClassReport) -> None:
    size = (folder / "data.mdb").stat().st_size
    opened = open_environment(folder, size + (64 << 20))
    try:
        with opened.env.begin(write=True) as txn:
            for row in report.bad:
                if row["key"]:
                    remove_record(txn, opened, bytes.fromhex(row["key"]))
            orphans = []
            for key in txn.cursor(db=opened.blocks).iternext(values=False):
                if txn.get(key, db=opened.meta) is None:
                    orphans.append(key)
            for key in orphans:
                txn.delete(key, db=opened.blocks)
    finally:
        opened.close()
    report.done = f"{len(report.bad)} bad records removed"


def _rebuild(path: Path, slot_bytes: int, folder: Path, report: ClassReport) -> None:
    """Rebuild beside the old environment, which stays as one that was set aside."""
    new = path / f"rebuilt-{slot_bytes}"
    size = (folder / "data.mdb").stat().st_size
    rebuilt = rebuild(folder, new, slot_bytes, 2 * size + (64 << 20))
    place = path / f"class-{slot_bytes}"
    if folder == place:
        old = path / f"aside-repaired-class-{slot_bytes}"
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    new.rename(place)
    report.done = f"rebuilt: {rebuilt.num_blocks} blocks of {rebuilt.num_headers} known are whole"

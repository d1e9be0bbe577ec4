"""A device path of the disk tier: its lock, its state file, and environments set aside.

One per disk worker process. The lock is a flock, so the kernel frees it when its holder is killed;
the clean mark says whether the page cache had been written out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Container, Iterator
from pathlib import Path

from hicache.tiers.disk.format import FORMAT, DeviceState, boot_id, read_state, write_state
from hicache.tiers.errors import TierUnavailable

_PREFIX, _ASIDE = "class-", "aside-"
_UNFINISHED = "compact-*"
_MOST_DESCRIBED_BYTES = 64 << 10


class DiskDevice:
    """The directory at `path`, locked. `notes`: one sentence for each repair made on opening."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        durability: str,
        *,
        lock_wait_s: float = 0.0,
        set_aside: bool = False,
    ) -> None:
        self.path = Path(path)
        self.notes: list[str] = []
        self._durability = durability
        self.aside_bytes = 0
        with _unavailable(self.path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = lock_device(self.path, lock_wait_s)
        with contextlib.ExitStack() as undo, _unavailable(self.path):
            undo.callback(self.close)  # release the lock on any failure
            self._recover(set_aside)
            for left in self.path.glob(_UNFINISHED):
                shutil.rmtree(left, ignore_errors=True)
            self.aside_bytes = self._aside_bytes()
            self._old_descriptions = {file.stem for file in self.path.glob("namespaces/*.json")}
            self.mark(is_clean=False)
            undo.pop_all()

    def directory(self, slot_bytes: int) -> Path:
        """The directory of one slot-size class's environment."""
        return self.path / f"{_PREFIX}{slot_bytes}"

    def classes(self) -> list[int]:
        """The slot-size classes that have a directory here."""
        return sorted(classes_at(self.path))

    def mark(self, is_clean: bool) -> None:
        """Write the state file: this boot, this durability, and whether it was closed cleanly."""
        write_state(
            self.path / "state.json", DeviceState(FORMAT, self._durability, is_clean, boot_id())
        )

    def set_aside(self, slot_bytes: int, reason: str) -> None:
        """Rename a class's environment out of the way. Only the newest one is kept, for repair."""
        directory = self.directory(slot_bytes)
        for old in self.path.glob(f"{_ASIDE}*-{directory.name}"):
            shutil.rmtree(old, ignore_errors=True)
        target = self.path / f"{_ASIDE}{time.strftime('%Y%m%dT%H%M%S')}-{directory.name}"
        directory.rename(target)
        self.aside_bytes = self._aside_bytes()
        self.notes.append(f"{directory} was set aside as {target.name}: {reason}")

    def drop_aside(self) -> bool:
        """Delete environments that were set aside. Returns False when there were none."""
        if not self.aside_bytes:
            return False
        for old in self.path.glob(_ASIDE + "*"):
            shutil.rmtree(old, ignore_errors=True)
        self.aside_bytes = self._aside_bytes()
        return True

    def describe(self, digest: bytes, text: str) -> None:
        """Store a namespace's description beside its blocks, for people. Skipped when the
        descriptions would take more than 64 KiB together."""
        folder = self.path / "namespaces"
        file = folder / f"{digest.hex()}.json"
        self._old_descriptions.discard(digest.hex())
        if file.exists():
            return
        folder.mkdir(mode=0o700, exist_ok=True)
        if _held_bytes(folder) + len(text) > _MOST_DESCRIBED_BYTES:
            return
        new = file.with_suffix(".new")
        new.write_text(text)
        new.rename(file)

    def drop_descriptions(self, kept: Container[bytes]) -> None:
        """Delete the descriptions that were found on opening, were not written again since, and
        belong to namespaces not in `kept`."""
        for name in list(self._old_descriptions):
            if bytes.fromhex(name) not in kept:
                (self.path / "namespaces" / f"{name}.json").unlink(missing_ok=True)

    def _aside_bytes(self) -> int:
        return sum(_held_bytes(old) for old in self.path.glob(_ASIDE + "*"))

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _recover(self, set_aside: bool) -> None:
        """Set all environments aside if the state file says that they cannot be trusted."""
        state = read_state(self.path / "state.json")
        if set_aside:
            reason = "its worker died more than once while it was open"
        elif state is None:
            reason = "there is no readable record of its format"
        elif state.durability == "fast" and not state.is_clean and state.boot_id != boot_id():
            reason = "the machine went down while it was open with durability 'fast'"
        else:
            return
        for slot_bytes in self.classes():
            self.set_aside(slot_bytes, reason)


def _held_bytes(folder: Path) -> int:
    """Bytes that the files of a folder take on the volume. Files may be deleted meanwhile."""
    num_bytes = 0
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            num_bytes += file.lstat().st_blocks * 512
    return num_bytes


def classes_at(path: Path) -> dict[int, Path]:
    """Slot size → directory of every slot-size class at a device path."""
    named = {p.name.removeprefix(_PREFIX): p for p in path.glob(_PREFIX + "*")}
    return {int(name): named[name] for name in sorted(named) if name.isdecimal()}


def set_asides_at(path: Path) -> dict[int, Path]:
    """Slot size → directory of the newest environment of each class that was set aside."""
    found = {}
    for old in sorted(path.glob(f"{_ASIDE}*-{_PREFIX}*")):
        name = old.name.rpartition(_PREFIX)[2]
        if name.isdecimal():
            found[int(name)] = old
    return found


def lock_device(path: Path, wait_s: float = 0.0) -> int:
    """Lock the device exclusively and write our pid into the lock file. Returns the descriptor,
    which holds the lock until it is closed. Raises TierUnavailable with the holder's pid when
    another process has held the lock for `wait_s`."""
    file = path / "hicache.lock"
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    give_up_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= give_up_s:
                holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
                os.close(fd)
                raise TierUnavailable(
                    f"{file.parent} is in use by the process with pid {holder}"
                ) from None
            time.sleep(0.02)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    except OSError:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def _unavailable(path: Path) -> Iterator[None]:
    """Raises OSError (a full volume, for example) as TierUnavailable."""
    try:
        yield
    except OSError as error:
        raise TierUnavailable(f"{path}: {error.strerror}") from error

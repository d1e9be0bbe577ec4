"""The file that keeps a daemon's estimates across restarts: small, versioned, replaced atomically.

It is in the folder of the first tier with a folder on this host, or beside the socket if there is
no such tier. An unreadable file is ignored, and replaced later; only the estimates are lost. It is
not synced: after a power cut, a few prefills teach as much. While the daemon serves, a separate
thread writes it, since a file system may be slow, or hang.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

from hicache.config import Config, VolumeTierConfig
from hicache.daemon.upkeep.supervised import WorkThread
from hicache.engine.planner.estimates import SavedEstimates
from hicache.protocol.endpoint import ipc_path

MAX_BYTES: Final = 16 << 20
EVERY_S: Final = 60.0

log = logging.getLogger("hicache")


def file_for(config: Config) -> Path | None:
    """The file for this configuration's estimates; None where there is no place for it."""
    for row, section in config.tiers.present():
        if isinstance(section, VolumeTierConfig) and not row.traits.shared_between_hosts:
            return Path(section.path) / "estimates.json"
    socket = ipc_path(config.socket.endpoint)
    return Path(socket).with_name(Path(socket).name + ".estimates.json") if socket else None


def read(file: Path) -> dict[str, Any]:
    """The file's content; empty where it is missing or unusable."""
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_BYTES + 1)
        known = json.loads(text) if len(text) <= MAX_BYTES else None
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("the saved estimates are not used: %s: %s", file, error)
        return {}
    if not isinstance(known, dict):
        log.warning("the saved estimates are not used: %s holds something else", file)
        return {}
    return known


def write(file: Path, known: dict[str, Any]) -> None:
    """Replace the file."""
    unfinished = file.with_name(file.name + ".new")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        opened = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(opened, "w", encoding="utf-8") as sink:
            json.dump(known, sink)
        os.replace(unfinished, file)
    except OSError as error:
        log.warning("the estimates could not be saved: %s: %s", file, error)
        with contextlib.suppress(OSError):
            unfinished.unlink()


class EstimatesFile:
    """Saves the cache engine's estimates now and then, and at the end. Called from the daemon's
    loop, which waits only in `close`. `work_thread` is None where there is no place for the
    file."""

    def __init__(self, config: Config, memory: SavedEstimates) -> None:
        self._memory = memory
        self._due_s = time.monotonic() + EVERY_S
        self.work_thread: WorkThread[dict[str, Any]] | None = None
        file = file_for(config)
        if file is not None:
            self._recall(file)
            self.work_thread = WorkThread(
                "the file of estimates", partial(write, file), max_waiting=2
            )

    def tick(self, now_s: float) -> None:
        """Save if it is due, and the last save has finished."""
        if self.work_thread is not None:
            self.work_thread.tick(now_s)
            if now_s >= self._due_s and not self.work_thread.num_waiting:
                self._due_s = now_s + EVERY_S
                self.work_thread.give(self._memory.snapshot())

    def close(self, patience_s: float) -> None:
        """Save a last time, for at most `patience_s`."""
        if self.work_thread is not None:
            self.work_thread.give(self._memory.snapshot())
            self.work_thread.close(patience_s)

    def _recall(self, file: Path) -> None:
        """Restore the estimates of an earlier run."""
        if known := read(file):
            try:
                self._memory.recall(known)
            except ValueError as error:
                log.warning("the saved estimates are not used: %s: %s", file, error)

"""The file in which a daemon's estimates survive its restart: small, versioned, replaced at once.

It lies beside the blocks of the first tier in a folder of this host's own, or beside the socket
where there is no such tier. What cannot be
read is left alone until it is replaced, and costs nothing but what was learned. It is not synced,
since after a power cut a few prefills teach as much. While the daemon serves, it is written by a
thread of its own: a file system may take its time, or never answer.
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
from hicache.daemon.upkeep.supervised import Hand
from hicache.engine.planner.estimates import SavedEstimates
from hicache.protocol.endpoint import ipc_path

MAX_BYTES: Final = 16 << 20
EVERY_S: Final = 60.0

log = logging.getLogger("hicache")


def file_for(config: Config) -> Path | None:
    """Where this configuration's estimates are kept; None where there is no place for them."""
    for row, section in config.tiers.present():
        if isinstance(section, VolumeTierConfig) and not row.traits.shared_between_hosts:
            return Path(section.path) / "estimates.json"
    socket = ipc_path(config.socket.endpoint)
    return Path(socket).with_name(Path(socket).name + ".estimates.json") if socket else None


def read(file: Path) -> dict[str, Any]:
    """What stands there; empty where there is nothing yet, or nothing that could be used."""
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_BYTES + 1)
        known = json.loads(text) if len(text) <= MAX_BYTES else None
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("what was learned about speeds is not used: %s: %s", file, error)
        return {}
    if not isinstance(known, dict):
        log.warning("what was learned about speeds is not used: %s holds something else", file)
        return {}
    return known


def write(file: Path, known: dict[str, Any]) -> None:
    """Put it in the place of what stands there."""
    unfinished = file.with_name(file.name + ".new")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        opened = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(opened, "w", encoding="utf-8") as sink:
            json.dump(known, sink)
        os.replace(unfinished, file)
    except OSError as error:
        log.warning("what was learned about speeds is not kept: %s: %s", file, error)
        with contextlib.suppress(OSError):
            unfinished.unlink()


class Keeper:
    """Has the engine's memory written every now and then, and at the end. Called from the daemon's
    loop, which waits for none of it but `close`. `hand` is None where there is no place for it."""

    def __init__(self, config: Config, memory: SavedEstimates) -> None:
        self._memory = memory
        self._due_s = time.monotonic() + EVERY_S
        self.hand: Hand[dict[str, Any]] | None = None
        file = file_for(config)
        if file is not None:
            self._recall(file)
            self.hand = Hand("the file of estimates", partial(write, file), max_waiting=2)

    def tick(self, now_s: float) -> None:
        """Write if it is time, and what was ordered last is written."""
        if self.hand is not None:
            self.hand.tick(now_s)
            if now_s >= self._due_s and not self.hand.num_waiting:
                self._due_s = now_s + EVERY_S
                self.hand.give(self._memory.snapshot())

    def close(self, patience_s: float) -> None:
        """Write a last time; what takes longer than that is left undone."""
        if self.hand is not None:
            self.hand.give(self._memory.snapshot())
            self.hand.close(patience_s)

    def _recall(self, file: Path) -> None:
        """What an earlier daemon learned."""
        if known := read(file):
            try:
                self._memory.recall(known)
            except ValueError as error:
                log.warning("what was learned about speeds is not used: %s: %s", file, error)

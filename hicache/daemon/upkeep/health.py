"""The daemon's health: its tiers, its parts, and whether it is live, ready and healthy.

    live      its loop runs: it answers
    ready     it accepts requests: every tier was tried once, and it is not stopping
    healthy   every tier is up and takes blocks, and every part makes progress

A part is judged by its progress, not by its existence: a worker's replies, the CPU time of a fit,
the finished orders of a thread. One without progress for `PATIENCE_S` is a problem.
Used from the daemon's loop only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from hicache.daemon.build import Parts
from hicache.daemon.upkeep.supervised import Faults
from hicache.engine.core import CacheEngine
from hicache.transfer.mover import Mover

PATIENCE_S: Final = 3.5
"""With 1 s between two pings of a worker, a stuck part is reported within 5 s."""
STALL_S: Final = 1.0

log = logging.getLogger("hicache")


@dataclass(slots=True)
class Loop:
    """The loop's turns. `num_stalls`: how often a turn took a second or more."""

    turned_s: float
    num_stalls: int = 0
    longest_s: float = 0.0

    def turn(self, now_s: float) -> None:
        """A turn of the loop begins."""
        gap_s = now_s - self.turned_s
        self.turned_s = now_s
        self.longest_s = max(self.longest_s, gap_s)
        if gap_s > STALL_S:
            self.num_stalls += 1


@dataclass(slots=True)
class _Watched:
    owes_s: Callable[[float], float]
    faults: list[Faults] = field(default_factory=list)


class Health:
    """`notes`: the last note about each tier."""

    def __init__(self, parts: Parts, engine: CacheEngine, mover: Mover, now_s: float) -> None:
        self.notes: dict[str, str] = {}
        self.started_s = now_s
        self.loop = Loop(now_s)
        self.is_stopping = False
        self._parts, self._engine, self._mover = parts, engine, mover
        self._watched: dict[str, _Watched] = {}
        self._was_ready = False
        self._told: dict[str, str] = {}

    def watch(self, part: str, owes_s: Callable[[float], float], *faults: Faults) -> None:
        """Watch a part: `owes_s` returns for how long it has made no progress with its work,
        `faults` are its failures."""
        self._watched[part] = _Watched(owes_s, list(faults))

    # --- tiers ----------------------------------------------------------------------------------

    def tier_states(self) -> dict[str, str]:
        """Each tier: up, down, starting or read-only."""
        devices = self._mover.states()
        states = {spec.name: "up" for spec in self._parts.tiers}
        for worker in self._parts.workers:
            states[worker.far] = devices[worker.device]
        for tier in self._engine.queries.restoring_tiers():
            if states[tier] == "up":
                states[tier] = "starting"
        for tier in self._refusing():
            if states[tier] == "up":
                states[tier] = "read-only"
        return states

    def tier_notes(self) -> dict[str, str]:
        """A note about each tier, for people."""
        said = {tier: note for tier, note in self.notes.items() if note}
        return {**self._parts.notes, **said, **self._refusing()}

    def log_refusals(self) -> None:
        """Log one line when a tier begins to refuse blocks, and one when it takes them again."""
        reasons = self._refusing()
        for tier in reasons.keys() - self._told.keys():
            log.warning("%s %s", tier, reasons[tier])
        for tier in self._told.keys() - reasons.keys():
            log.info("%s takes blocks again", tier)
        self._told = reasons

    def _refusing(self) -> dict[str, str]:
        """Tier → reason, for the tiers that refused the last write."""
        return {
            tier: f"takes no new blocks, and will be tried again later: {reason}"
            for tier, reason in self._engine.queries.refusing_tiers().items()
        }

    # --- the whole daemon -----------------------------------------------------------------------

    def is_ready(self) -> bool:
        """Whether requests may come. Stays true while a tier's worker is restarted: the other tiers
        serve."""
        if not self._was_ready:
            self._was_ready = "starting" not in self.tier_states().values()
        return self._was_ready and not self.is_stopping

    def report(self, now_s: float) -> dict[str, Any]:
        """The reply to `health`."""
        states = self.tier_states()
        why = {**self.notes, **self._refusing()}
        problems = {t: why.get(t) or "starting" for t, state in states.items() if state != "up"}
        parts = self._part_rows(now_s)
        problems |= {name: row["problem"] for name, row in parts.items() if row["problem"]}
        return {
            "live": True,
            "ready": self.is_ready(),
            "healthy": not problems,
            "tiers": states,
            "problems": problems,
            "parts": parts,
        }

    def _part_rows(self, now_s: float) -> dict[str, dict[str, Any]]:
        """For each part `owes_s`, the number of `faults`, and a `problem` in words."""
        loop = self.loop
        rows = {"loop": _row(0.0, loop.num_stalls)}
        starts = self._mover.num_starts()
        for device, owes_s in self._mover.overdue_s(now_s).items():
            rows[device] = _row(owes_s, max(0, starts[device] - 1))
        for name, watched in self._watched.items():
            faults = watched.faults
            error = next((f.error for f in faults if f.error), "")
            rows[name] = _row(watched.owes_s(now_s), sum(f.num for f in faults), error)
        return rows


def _row(owes_s: float, num_faults: int, error: str = "") -> dict[str, Any]:
    problem = f"failed, and will be tried again: {error}" if error else ""
    if owes_s > PATIENCE_S:
        problem = f"stuck: no progress for {owes_s:.1f} s"
    return {"owes_s": round(owes_s, 3), "faults": num_faults, "problem": problem}

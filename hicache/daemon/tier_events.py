"""Turns workers' reports into events of the cache engine.

Mover ──▶ outcomes of moves, a worker's state ──▶ TierEvents ──▶ CacheEngine
                                                      └──▶ replies to waiting requests (Service)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hicache.daemon.dispatch import Service
from hicache.daemon.operations.gpu_pages import GpuPages
from hicache.daemon.upkeep.health import Health
from hicache.daemon.upkeep.tier_restore import Restoring
from hicache.daemon.upkeep.tier_scrub import Scrubbing
from hicache.engine import plan as p
from hicache.transfer.mover import Mover
from hicache.transfer.worker_events import (
    MoverEvent,
    PageEvent,
    WorkerDown,
    WorkerEvent,
    WorkerMeasured,
    WorkerNoted,
    WorkerOpening,
    WorkerRestored,
    WorkerRows,
    WorkerScrubbed,
    WorkerUp,
)

log = logging.getLogger("hicache")


class TierEvents:
    """Used from the daemon's loop only."""

    def __init__(
        self,
        service: Service,
        mover: Mover,
        health: Health,
        restoring: Restoring,
        scrubbing: Scrubbing,
    ) -> None:
        self._service, self._mover, self._health = service, mover, health
        self._restoring, self._scrubbing = restoring, scrubbing
        self._gate = service.gate

    def take(self, events: Sequence[MoverEvent], now_s: float) -> None:
        """Handle the mover's events in order; consecutive outcomes become one event."""
        outcomes: list[p.Outcome] = []
        for item in events:
            if isinstance(item, p.Outcome):
                outcomes.append(item)
                continue
            self.moves_done(outcomes, now_s)
            outcomes = []
            self._take_one(item, now_s)
        self.moves_done(outcomes, now_s)

    def moves_done(self, outcomes: Sequence[p.Outcome], now_s: float) -> None:
        """These moves have ended."""
        if outcomes:
            self._log_corrupt(outcomes)
            self._service.answer_waiting(self._gate.do(p.MovesDone(outcomes, now_s)), now_s)

    def _take_one(self, item: WorkerEvent, now_s: float) -> None:
        gate, notes = self._gate, self._health.notes
        match item:
            case WorkerMeasured():
                gate.do(p.LinkMeasured(item.src, item.dst, item.num_bytes, item.seconds))
            case PageEvent():
                gate.state(GpuPages).take(item, now_s)
            case WorkerOpening():
                of = item.done, item.total, item.unit
                notes[item.tier] = self._restoring.note_progress(item.tier, "opening", *of)
            case WorkerRows():
                forget = self._restoring.take(item.tier, item.rows, now_s)
                self._mover.forget(item.device, forget)
                self._mover.taken(item.device)
                of = item.rows.first + len(item.rows), item.rows.total, "blocks"
                notes[item.tier] = self._restoring.note_progress(item.tier, "restoring", *of)
            case WorkerUp():
                gate.do(p.TierUp(item.tier, now_s, item.is_restoring))
                notes[item.tier] = " ".join(item.notes)
                log.info("%s", " ".join([f"{item.tier} is up (pid {item.pid})", *item.notes]))
            case WorkerRestored():
                gate.do(p.Restored(item.tier, now_s))
                notes[item.tier] = " ".join(item.notes)
                log.info("%s is restored %s", item.tier, notes[item.tier])
            case WorkerNoted():
                notes[item.tier] += f"; {item.note}"
                log.warning("%s: %s", item.tier, item.note)
            case WorkerScrubbed():
                for change in self._scrubbing.take(item, now_s):
                    self._service.answer_waiting(change, now_s)
            case WorkerDown():
                self._down(item, now_s)

    def _down(self, item: WorkerDown, now_s: float) -> None:
        self._gate.state(GpuPages).worker_gone(item.device, now_s)
        self._scrubbing.end(item.device, f"the tier went down: {item.error}")
        self._health.notes[item.tier] = item.error
        log.warning("%s is down: %s; tried again in %.1f s", item.tier, item.error, item.retry_s)
        self._service.answer_waiting(self._gate.do(p.TierDown(item.tier, now_s)), now_s)

    def _log_corrupt(self, outcomes: Sequence[p.Outcome]) -> None:
        engine = self._gate.engine
        for outcome in outcomes:
            move = engine.queries.move(outcome.move) if outcome.corrupt else None
            if move is not None:
                said = outcome.error, engine.story(move.block)
                log.warning("a stored block was corrupt: %s; %s", *said)

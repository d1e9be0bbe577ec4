"""Scrubs of persistent tiers while they serve: started, followed, and their results.

Used from the daemon's loop only. The worker reads block after block at a limited rate, removes
those that do not match their checksum, and reports them (`WorkerScrubbed`); the cache engine
removes these copies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from hicache.engine import plan as p
from hicache.transfer.worker_events import WorkerScrubbed
from hicache.transfer.worker_messages import WorkerConfig

MAX_TOLD: Final = 1000

log = logging.getLogger("hicache")


@dataclass(slots=True)
class Progress:
    """One device's last scrub. `bad`: key in hex and problem, of the first thousand; `error`: why
    it ended early."""

    device: str
    tier: str
    is_running: bool = True
    blocks: int = 0
    bytes: int = 0
    total_blocks: int = 0
    num_bad: int = 0
    bad: list[dict[str, str]] = field(default_factory=list)
    error: str = ""


class Scrubbing:
    """Persistent devices among those of `workers` can be scrubbed. `scrub(device, bytes_per_s)`
    starts one; `do` passes an event to the cache engine; `knows` returns whether that has a
    namespace."""

    def __init__(
        self,
        workers: Sequence[WorkerConfig],
        scrub: Callable[[str, float], None],
        do: Callable[[p.Event[Any]], Any],
        knows: Callable[[bytes], bool],
    ) -> None:
        self.devices = {w.device: w.far for w in workers if w.spec.traits.persistent}
        self._scrub, self._do, self._knows = scrub, do, knows
        self._scrubs: dict[str, Progress] = {}

    def begin(self, states: Mapping[str, str], bytes_per_s: float) -> None:
        """Start a scrub on each device without a running one. `states`: of the tiers."""
        for device, tier in self.devices.items():
            last = self._scrubs.get(device)
            if last is not None and last.is_running:
                continue
            self._scrubs[device] = Progress(device, tier)
            if states[tier] in ("up", "read-only"):
                self._scrub(device, bytes_per_s)
            else:
                self.end(device, f"the tier is {states[tier]}")

    def end(self, device: str, error: str) -> None:
        """The worker has ended, and with it its scrub."""
        scrub = self._scrubs.get(device)
        if scrub is not None and scrub.is_running:
            scrub.is_running, scrub.error = False, error

    def take(self, event: WorkerScrubbed, now_s: float) -> list[p.Arrivals]:
        """Record progress. Returns the results for requests that wait for blocks."""
        scrub = self._scrubs.setdefault(event.device, Progress(event.device, event.tier))
        scrub.blocks, scrub.bytes, scrub.total_blocks = (
            event.blocks,
            event.bytes,
            event.total_blocks,
        )
        scrub.is_running = not event.is_done
        changes = []
        for found in event.bad:
            log.warning("a scrub removed block %s: %s", found.key.hex(), found.problem)
            scrub.num_bad += 1
            if len(scrub.bad) < MAX_TOLD:
                scrub.bad.append({"key": found.key.hex(), "problem": found.problem})
            if found.tokens and self._knows(found.namespace):
                gone = p.Spoiled(event.tier, found.namespace, found.tokens, now_s)
                changes.append(self._do(gone))
        return changes

    def rows(self) -> list[dict[str, Any]]:
        """For the operation's reply."""
        return [asdict(scrub) for scrub in self._scrubs.values()]

"""The cache engine's settings, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hicache.engine.planner.cost import PrefillPrior
from hicache.engine.planner.planner import PlannerSettings

WritePolicy = Literal["write_back", "write_through", "write_through_selective"]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`max_moving_bytes`: bytes sent to one link at a time (more waits in the cache engine).

    `selective_hits`: hits after which write-through-selective writes a path.
    `prior`, `flop_per_s`: the prefill estimate before the first measurement; the machine's FLOP/s
    in a prefill, 0 where not configured.
    `hop_bytes_per_s`: the client's last copy, until it has been measured.
    `max_pinned`: share of each tier that all pins together may hold.
    """

    write_policy: WritePolicy = "write_back"
    selective_hits: int = 2
    planner: PlannerSettings = field(default_factory=PlannerSettings)
    prior: PrefillPrior = field(default_factory=PrefillPrior)
    flop_per_s: float = 0.0
    max_moving_bytes: int = 256 << 20
    hop_bytes_per_s: float = 2e9
    max_pinned: float = 0.25

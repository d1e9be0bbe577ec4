"""What an operator can tune of the cache engine, as one frozen piece."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from hicache.engine.planner.cost import PrefillPrior
from hicache.engine.planner.planner import PlannerSettings

WritePolicy = Literal["write_back", "write_through", "write_through_selective"]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`max_moving_bytes`: bytes handed to one link at a time (more waits in the engine).

    `selective_hits`: hits after which write-through-selective writes a path down.
    `prior`, `flop_per_s`: what a prefill is believed to cost until one was measured; what the
    machine computes in one, 0 where nobody has said so.
    `hop_bytes_per_s`: the client's last copy, until it has been measured.
    `min_return`, `write_bytes_per_s`: what memory gives up is written to a durable tier only if it
    returns with this probability, and on average no more of it (see WriteGate).
    `max_pinned`: share of each tier that all pins together may hold.
    """

    write_policy: WritePolicy = "write_back"
    selective_hits: int = 2
    planner: PlannerSettings = field(default_factory=PlannerSettings)
    prior: PrefillPrior = field(default_factory=PrefillPrior)
    flop_per_s: float = 0.0
    max_moving_bytes: int = 256 << 20
    hop_bytes_per_s: float = 2e9
    min_return: float = 0.0
    write_bytes_per_s: float = math.inf
    max_pinned: float = 0.25

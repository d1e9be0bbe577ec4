"""The time of a reload, run by run: links work in parallel, and the last copy is added.

Each run is either readable in place, or comes over one link behind its queue. The time of the first
k runs is that of the slowest link for its share of them. So a run adds no time while another link
takes longer, and the best cut may be where that ends: such a run is split there
(`docs/planner.md`).

    link a   [ queue ][ run 0        ]
    link b   [ run 1          ¦      ]
                              └ stopping here costs no more than run 0 alone

The last copy, into the inference engine's memory, is done by the client or by the GPU's worker,
which reads some tiers faster than others. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from typing import Protocol

from hicache.engine.plan import TierRun
from hicache.engine.planner.cost import LinkCost


@dataclass(slots=True, eq=False)
class QueuedLink:
    """A link with `ahead_bytes` queued, and `num_bytes` of this reload behind them. If the link's
    last batch is `late_s` overdue, it is expected to need as long again."""

    cost: LinkCost
    ahead_bytes: float
    late_s: float = 0.0
    num_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """Until `num_bytes` have come; if 0, until the first byte could."""
        return self.late_s + self.cost.seconds(max(self.num_bytes, 1.0), self.ahead_bytes)

    @property
    def doubt_s(self) -> float:
        return self.cost.doubt_s(max(self.num_bytes, 1.0), self.ahead_bytes)


class LastCopy(Protocol):
    """The time of the last copy; `bytes_from`: tier that it reads → bytes."""

    def seconds(self, bytes_from: Mapping[int, float]) -> float: ...
    def doubt_s(self, bytes_from: Mapping[int, float]) -> float: ...
    def note_decision(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ClientCopy:
    """The client's last copy, equally fast from all tiers."""

    s_per_byte: float

    def seconds(self, bytes_from: Mapping[int, float]) -> float:
        return sum(bytes_from.values()) * self.s_per_byte

    def doubt_s(self, bytes_from: Mapping[int, float]) -> float:
        """The client's figure is taken as exact."""
        return 0.0

    def note_decision(self) -> None:
        pass


@dataclass(slots=True)
class Reload:
    """Per run (some are split): expected seconds until it and those before it are in the inference
    engine, and their standard deviation. `start_s`: seconds until the first block."""

    runs: list[TierRun]
    seconds: list[float]
    doubt_s: list[float]
    start_s: float


@dataclass(frozen=True, slots=True)
class Route:
    """How a tier's blocks are reloaded: over `link` to tier `read_from`, where the last copy reads
    them. `link` is None if they are there already."""

    read_from: int
    link: QueuedLink | None


def reload_over(
    runs: Sequence[TierRun], routes: Mapping[str, Route], block_bytes: int, last_copy: LastCopy
) -> Reload:
    """The time of reloading these runs. `routes`: by tier, for each tier that holds a run."""
    reload = Reload([], [], [], 0.0)
    busy: list[QueuedLink] = []
    bytes_from: dict[int, float] = {}
    for run in runs:
        tier, link = routes[run.tier].read_from, routes[run.tier].link
        pieces = [run]
        if link is not None:
            if not bytes_from:
                reload.start_s = link.seconds
            others_s = max([other.seconds for other in busy if other is not link], default=0.0)
            free = int((others_s - link.seconds) * link.cost.bytes_per_s / block_bytes)
            if 0 < free < run.num_blocks:
                pieces = [TierRun(run.tier, free), TierRun(run.tier, run.num_blocks - free)]
            if link not in busy:
                busy.append(link)
        for piece in pieces:
            num_bytes = piece.num_blocks * block_bytes
            if link is not None:
                link.num_bytes += num_bytes
            bytes_from[tier] = bytes_from.get(tier, 0.0) + num_bytes
            slowest = max(busy, key=_seconds_of, default=None)
            copy_s, copy_doubt_s = last_copy.seconds(bytes_from), last_copy.doubt_s(bytes_from)
            reload.runs.append(piece)
            reload.seconds.append(copy_s if slowest is None else slowest.seconds + copy_s)
            reload.doubt_s.append(hypot(slowest.doubt_s if slowest else 0.0, copy_doubt_s))
    return reload


def _seconds_of(link: QueuedLink) -> float:
    return link.seconds

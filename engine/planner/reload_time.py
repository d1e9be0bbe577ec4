"""What reloading takes, run by run: links work side by side, the last copy comes on top.

Each run is either readable in place, or comes over one link behind what is queued there. The time
of the first k runs is the slowest link's time for its share of them. So a run costs nothing more
for as long as another link is busy, and it may be best to stop where that ends: such a run is cut
in two there (`docs/planner.md`).

    link a   [ queue ][ run 0        ]
    link b   [ run 1          ¦      ]
                              └ stopping here costs no more than run 0 alone

The last copy, into the inference engine's own memory, is the client's or that of the GPU's worker,
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
class Way:
    """How a tier's blocks come to where they can be read: over a link, behind `ahead_bytes`. A link
    that should have brought something `late_s` ago may well need as long again."""

    cost: LinkCost
    ahead_bytes: float
    late_s: float = 0.0
    num_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """Until `num_bytes` have come; with none, until the first could."""
        return self.late_s + self.cost.seconds(max(self.num_bytes, 1.0), self.ahead_bytes)

    @property
    def doubt_s(self) -> float:
        return self.cost.doubt_s(max(self.num_bytes, 1.0), self.ahead_bytes)


class LastCopy(Protocol):
    """Of so many bytes from each tier that they are read from."""

    def seconds(self, bytes_from: Mapping[int, float]) -> float: ...
    def doubt_s(self, bytes_from: Mapping[int, float]) -> float: ...
    def relied_on(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OwnCopy:
    """The client's, wherever the bytes lie."""

    s_per_byte: float

    def seconds(self, bytes_from: Mapping[int, float]) -> float:
        return sum(bytes_from.values()) * self.s_per_byte

    def doubt_s(self, bytes_from: Mapping[int, float]) -> float:
        """It is taken at its word."""
        return 0.0

    def relied_on(self) -> None:
        pass


@dataclass(slots=True)
class Reload:
    """Per run (some cut in two): expected seconds until it and those before it are in the inference
    engine, and how far off that may be. `start_s`: before the first block comes."""

    runs: list[TierRun]
    seconds: list[float]
    doubt_s: list[float]
    start_s: float


@dataclass(frozen=True, slots=True)
class Route:
    """How a tier's blocks come: the last copy reads them from tier `read_from`, and they come there
    over `way`; None: they are there."""

    read_from: int
    way: Way | None


def reload_over(
    runs: Sequence[TierRun], routes: Mapping[str, Route], block_bytes: int, last_copy: LastCopy
) -> Reload:
    """`routes`: of each tier that has one of the runs."""
    reload = Reload([], [], [], 0.0)
    busy: list[Way] = []
    bytes_from: dict[int, float] = {}
    for run in runs:
        tier, way = routes[run.tier].read_from, routes[run.tier].way
        pieces = [run]
        if way is not None:
            if not bytes_from:
                reload.start_s = way.seconds
            others_s = max([other.seconds for other in busy if other is not way], default=0.0)
            free = int((others_s - way.seconds) * way.cost.bytes_per_s / block_bytes)
            if 0 < free < run.num_blocks:
                pieces = [TierRun(run.tier, free), TierRun(run.tier, run.num_blocks - free)]
            if way not in busy:
                busy.append(way)
        for piece in pieces:
            num_bytes = piece.num_blocks * block_bytes
            if way is not None:
                way.num_bytes += num_bytes
            bytes_from[tier] = bytes_from.get(tier, 0.0) + num_bytes
            slowest = max(busy, key=_seconds_of, default=None)
            copy_s, copy_doubt_s = last_copy.seconds(bytes_from), last_copy.doubt_s(bytes_from)
            reload.runs.append(piece)
            reload.seconds.append(copy_s if slowest is None else slowest.seconds + copy_s)
            reload.doubt_s.append(hypot(slowest.doubt_s if slowest else 0.0, copy_doubt_s))
    return reload


def _seconds_of(way: Way) -> float:
    return way.seconds

"""Compares a model's order with LRU's, by the hits each would have had, for tiers of every size.
It uses only uses since the model was fitted, which the model cannot have learnt from.

Between two fits, the ghost index counts per (class, age) cell the block-seconds that blocks spent
there, held or not, and the blocks that were used again at that age. A tier that keeps blocks up to
some age (LRU), or while their rank is above some value (the model), covers a part of these cells:

              age →                      LRU keeps the cells left of an age;
    class a  [ ■ ■ ■ ■ □ □ ]             the model keeps the cells of the highest ranks (■).
    class b  [ ■ ■ □ □ □ □ ]             Hits: the uses in the cells kept. Size: their
                                         block-seconds / seconds passed (Little's law).

So both orders' hits are known for each size, whichever of them was in use. Two things are left out,
which affect both equally: leaves are evicted first, and the need for room varies.

The ages that matter for a large tier are not those of a small one, so a model may be better for one
and worse for the other. Pure; called in the process that fits.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]

SIZES_BLOCKS: Final[Matrix] = np.exp2(np.arange(28.0))
"""The sizes of tiers for which hits are computed."""
KEPT: Final = 0.9
"""Earlier hits are weighted by this at each fit: half after seven fits."""


def unjudged() -> Matrix:
    """`Model.hits` of a model that has not been compared yet: zeros."""
    return np.zeros((2, len(SIZES_BLOCKS)))


def hits_at(hits: Matrix, num_blocks: int) -> tuple[float, float]:
    """Both rows of `hits_by_size` for a tier of this size, interpolated linearly over the logarithm
    of the size."""
    place = min(math.log2(max(1, num_blocks)), len(SIZES_BLOCKS) - 1.0)
    below = int(place)
    above = min(below + 1, len(SIZES_BLOCKS) - 1)
    by_rank, by_age = hits[:, below] + (place - below) * (hits[:, above] - hits[:, below])
    return float(by_rank), float(by_age)


def hits_by_size(ranks: Matrix, events: Matrix, exposure_s: Matrix, span_s: float) -> Matrix:
    """The hits of tiers of SIZES_BLOCKS in `span_s` seconds, shape [2, sizes]: in the order of
    `ranks`, and in LRU's. Arguments are by (class, age bin): the earlier model's `ranks`; `events`,
    blocks used again; `exposure_s`, block-seconds spent."""
    rooms = SIZES_BLOCKS * span_s
    lowest = np.minimum.accumulate(ranks, axis=1)  # a block evicted at some age stays evicted
    best_first = np.argsort(-lowest, axis=None, kind="stable")
    by_rank = _covered(rooms, events.ravel()[best_first], exposure_s.ravel()[best_first])
    by_age = _covered(rooms, events.sum(axis=0), exposure_s.sum(axis=0))
    return np.stack((by_rank, by_age))


def _covered(rooms: Matrix, events: Matrix, exposure_s: Matrix) -> Matrix:
    """For each of `rooms`: the events in the first cells with that many block-seconds in all."""
    room = np.concatenate(([0.0], np.cumsum(exposure_s)))
    found: Matrix = np.interp(rooms, room, np.concatenate(([0.0], np.cumsum(events))))
    return found

"""Whether a model's order keeps more of what returns than age does, for tiers of every size: worked
out from what has returned since the model was fitted, which it cannot have learnt from.

Between two fits the blocks of each class spent so many block-seconds at each age, held or not, and
so many of them returned at that age: the ghost index has seen it. A tier that keeps blocks up to
some age (LRU), or for as long as their rank does not fall below some price (the model), covers a
part of these (class, age) cells. It hits the returns in them, and the room it needs is their
block-seconds over the time that has passed (Little's law). So for each size both orders' hits are
known, whichever of them ruled, and without trying either. What this leaves out hits both alike:
that leaves go first, and that the need for room changes from minute to minute.

Large tiers ask about other ages than small ones, and a model may be right about one and wrong about
the other. Pure; called in the process that fits.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]

SIZES_BLOCKS: Final[Matrix] = np.exp2(np.arange(28.0))
"""The sizes of tiers that are looked at."""
KEPT: Final = 0.9
"""Of earlier verdicts, from one fit to the next: half of it is forgotten after seven fits."""


def unjudged() -> Matrix:
    """What is known of a model that nothing has been compared with yet."""
    return np.zeros((2, len(SIZES_BLOCKS)))


def hits_at(hits: Matrix, num_blocks: int) -> tuple[float, float]:
    """Both rows of `hits_by_size` for a tier of so many blocks: between two of SIZES_BLOCKS on a
    line over the size's logarithm."""
    place = min(math.log2(max(1, num_blocks)), len(SIZES_BLOCKS) - 1.0)
    below = int(place)
    above = min(below + 1, len(SIZES_BLOCKS) - 1)
    by_rank, by_age = hits[:, below] + (place - below) * (hits[:, above] - hits[:, below])
    return float(by_rank), float(by_age)


def hits_by_size(ranks: Matrix, events: Matrix, exposure_s: Matrix, span_s: float) -> Matrix:
    """What tiers of SIZES_BLOCKS would have hit in `span_s` seconds, shape [2, sizes]: in the order
    of `ranks`, and in LRU's. All are by (class, age bin): `ranks` from before; `events`, blocks
    that returned; `exposure_s`, block-seconds spent."""
    rooms = SIZES_BLOCKS * span_s
    lowest = np.minimum.accumulate(ranks, axis=1)  # what has once been given up stays so
    best_first = np.argsort(-lowest, axis=None, kind="stable")
    by_rank = _covered(rooms, events.ravel()[best_first], exposure_s.ravel()[best_first])
    by_age = _covered(rooms, events.sum(axis=0), exposure_s.sum(axis=0))
    return np.stack((by_rank, by_age))


def _covered(rooms: Matrix, events: Matrix, exposure_s: Matrix) -> Matrix:
    """Events of the first cells that come to so much room."""
    room = np.concatenate(([0.0], np.cumsum(exposure_s)))
    found: Matrix = np.interp(rooms, room, np.concatenate(([0.0], np.cumsum(events))))
    return found

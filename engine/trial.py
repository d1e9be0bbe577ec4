"""Whether a model chooses better victims than age does: judged by what returns first.

When room is made in a tier, the model would give up one run of blocks and LRU another. Whichever of
the two is asked for first, within the time that LRU would have kept the one, should have been kept:
MIN gives up what returns last. A moving average over some 200 such pairs says whose choice is
better in this tier: large tiers ask about other ages than small ones, and a model may be right
about one and wrong about the other. What returns is seen by the ghost index, held or not.
Owned by the daemon's one loop.
"""

from __future__ import annotations

from typing import Final

from hicache.engine.ghost import Run

_STEP: Final = 1 / 200


class Trial:
    """One tier's. `share`: how often of late the model was right, of the pairs that told."""

    def __init__(self) -> None:
        self.share = 0.5

    @property
    def is_won(self) -> bool:
        """Whether the model's choice is at least as good as LRU's."""
        return self.share >= 0.5

    def begin(self, by_model: Run, by_age: Run, now_s: float) -> None:
        """The model would give up the one now, and LRU the other."""
        if by_model is not by_age:
            kept_s = now_s - by_age.last_s
            pair = Pair(self, by_model, by_age, by_model.last_s + kept_s)
            for run in (by_model, by_age):
                pairs = [known for known in run.pairs or () if known.is_open]
                run.pairs = [*pairs[-_MAX_PAIRS:], pair]


_MAX_PAIRS: Final = 7


class Pair:
    """Two runs of which the first to return decides."""

    __slots__ = ("by_age", "by_model", "is_open", "trial", "until_s")

    def __init__(self, trial: Trial, by_model: Run, by_age: Run, until_s: float) -> None:
        self.trial = trial
        self.by_model = by_model
        self.by_age = by_age
        self.until_s = until_s
        self.is_open = True

    def returned(self, run: Run, now_s: float) -> None:
        """One of the two was asked for."""
        if self.is_open and now_s <= self.until_s:
            self.trial.share += _STEP * ((run is self.by_age) - self.trial.share)
        self.is_open = False

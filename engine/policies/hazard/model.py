"""The hazard model of reuse, and the Gittins index that ranks blocks by it. Pure, so a fit can run
in another process.

A block of class x, unused for a time `age`, is used again with hazard

    h(x, age) = h0(age) · Π_f m_f(level of feature f in x, band of ages) · r(x, band)

fitted to events and exposure per (class, age bin) by iterative proportional scaling (Deming and
Stephan, 1940; for rates: Holford, 1980). Each factor m and each class's residual r is shrunk
towards 1 by a prior worth a number of events, so rare classes follow their features, and rare
features follow the whole. Open intervals count as exposure up to now (censoring).

Each role (the first feature) is fitted separately, with a separate h0. A trunk is requested by any
next request, a tail only by its conversation, after a person has read the answer: their hazards
have different shapes over age, which a factor per band of ages cannot express, and most uses are of
trunks that are a second old.

At ages that few blocks have reached, h0 continues from the bin before as 1/age: so of blocks unused
for longer than any known interval, the longest unused is evicted first, as under LRU.

The rank of a block is its Gittins index, over all times T to keep it:

    rank(x, age) = max_T  P(reuse ≤ T) / E[min(reuse, T)]

(Gittins, 1979; as an eviction rule: Aalto, Ayesta, Righter, 2009): expected hits per second kept.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.engine.policies.hazard.evaluation import KEPT, hits_at, hits_by_size, unjudged

Matrix = npt.NDArray[np.float64]

FIRST_EDGE_S: Final = 1.0
GROWTH: Final = 1.3
NUM_BINS: Final = 43
"""Age bins: 0 … 1 s, then each edge 1.3 times the one before, the last bin from 17 hours on."""

_EDGES_S: Final = [FIRST_EDGE_S * GROWTH**n for n in range(NUM_BINS - 1)]
WIDTHS_S: Final = np.diff([0.0, *_EDGES_S, _EDGES_S[-1] * GROWTH])
BAND_EDGES_S: Final = (20.0, 120.0, 900.0)
_STARTS_S: Final = [0.0, *_EDGES_S]
_PER_WIDTH: Final[list[float]] = (1.0 / WIDTHS_S).tolist()
_BAND_OF: Final = np.array([bisect_right(BAND_EDGES_S, start_s) for start_s in _STARTS_S])
_NUM_BANDS: Final = len(BAND_EDGES_S) + 1

AGE_PRIOR_EVENTS: Final = 0.3
FACTOR_PRIOR_EVENTS: Final = 8.0
RESIDUAL_PRIOR_EVENTS: Final = 20.0
MIN_EVENTS: Final = 50.0
"""With fewer uses than this, no model is fitted."""

_SWEEPS: Final = 8


def bin_of(age_s: float) -> int:
    """The age bin of an age in seconds."""
    return bisect_right(_EDGES_S, age_s)


def bins_of(ages_s: Matrix) -> npt.NDArray[np.intp]:
    """The age bins of many ages."""
    return np.searchsorted(_EDGES_S, ages_s, side="right")


@dataclass(frozen=True, slots=True)
class Fate:
    """Blocks counted up to `now_s`, by class and by age at the end of the interval: `used`: ended
    with a use; `unused`: without one so far. Shape [classes, NUM_BINS]."""

    now_s: float
    used: Matrix
    unused: Matrix


@dataclass(frozen=True, slots=True)
class Before:
    """The model that a fit replaces, and the counts that it was fitted to."""

    ranks: list[list[float]]
    default_ranks: list[float]
    hits: Matrix
    fate: Fate


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The data for a fit. `levels[class]`: its level in each feature, shape [classes, features];
    the first feature is the role. `events`, `censored`: weights of intervals that ended with a use,
    or without one so far, by age at their end, shape [classes, NUM_BINS]."""

    levels: npt.NDArray[np.int64]
    events: Matrix
    censored: Matrix
    fate: Fate
    before: Before | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """`ranks[class][bin]`: expected uses per second kept, as lists since single ranks are looked
    up. `returns[class][bin]`: the probability of another use within the observed time.
    `default_ranks`, `default_returns`: for classes that came after the fit, or unknown ones (-1).
    `hits`: the recent hits of its order and of LRU's, by the tier's size (`hits_by_size`); all 0
    before the first comparison."""

    ranks: list[list[float]]
    default_ranks: list[float]
    returns: list[list[float]]
    default_returns: list[float]
    hits: Matrix = field(default_factory=unjudged)

    def rank(self, kind: int, age_s: float) -> float:
        """The Gittins index of a class at an age, interpolated linearly between the starts of bins,
        so that blocks of one bin are ordered by age too."""
        ranks = self.ranks[kind] if 0 <= kind < len(self.ranks) else self.default_ranks
        number = bisect_right(_EDGES_S, age_s)
        if number == NUM_BINS - 1:
            return ranks[number]
        share = (age_s - _STARTS_S[number]) * _PER_WIDTH[number]
        return ranks[number] + share * (ranks[number + 1] - ranks[number])

    def beats_age(self, num_blocks: int) -> bool:
        """Whether a tier of this size would have had more recent hits in the model's order than in
        LRU's. False before the first comparison, and where both had the same."""
        by_rank, by_age = hits_at(self.hits, num_blocks)
        return by_rank > by_age

    def returns_at(self, kind: int, age_s: float) -> float:
        """The probability that a block of a class, unused for `age_s`, is used again."""
        is_known = 0 <= kind < len(self.returns)
        returns = self.returns[kind] if is_known else self.default_returns
        return returns[bisect_right(_EDGES_S, age_s)]


def fit(snapshot: Snapshot) -> Model | None:
    """Fit the model; None if there are fewer than MIN_EVENTS uses."""
    events = snapshot.events
    if events.sum() < MIN_EVENTS:
        return None
    exposure_s = _exposure(events + snapshot.censored)
    hazards, seen = np.empty_like(events), np.empty_like(events)
    roles = snapshot.levels[:, 0]
    for alike in (roles == role for role in np.unique(roles)):
        base, base_seen = _over_age(events[alike], exposure_s[alike])
        levels, expected = snapshot.levels[alike], exposure_s[alike] * base
        factors = _factors(levels, events[alike], expected)[:, _BAND_OF]
        hazards[alike], seen[alike] = factors * base, factors * base_seen
    default_hazard, default_seen = _over_age(events, exposure_s)
    ranks = gittins(np.vstack((hazards, default_hazard)))
    lasting = np.exp(-np.vstack((seen, default_seen)) * WIDTHS_S)
    returns = 1.0 - np.cumprod(lasting[:, ::-1], axis=1)[:, ::-1]
    return Model(
        ranks[:-1].tolist(),
        ranks[-1].tolist(),
        returns[:-1].tolist(),
        returns[-1].tolist(),
        _judged(snapshot),
    )


def gittins(hazards: Matrix) -> Matrix:
    """The Gittins index of each (class, age bin), in the shape of `hazards` (per second)."""
    ranks = np.empty_like(hazards)
    survives = np.exp(-hazards * WIDTHS_S)
    for start in range(NUM_BINS):
        alive_after = np.cumprod(survives[:, start:], axis=1)
        alive_before = np.hstack((np.ones((len(hazards), 1)), alive_after[:, :-1]))
        kept_s = np.cumsum((alive_before + alive_after) / 2 * WIDTHS_S[start:], axis=1)
        ranks[:, start] = ((1 - alive_after) / kept_s).max(axis=1)
    return ranks


def _judged(snapshot: Snapshot) -> Matrix:
    """The next `Model.hits`: earlier hits, and those of the model being replaced since its fit."""
    before, after = snapshot.before, snapshot.fate
    if before is None:
        return unjudged()
    num_new = len(after.used) - len(before.fate.used)
    used, unused = (
        np.vstack((counts, np.zeros((num_new, NUM_BINS))))
        for counts in (before.fate.used, before.fate.unused)
    )
    ranks = np.array(before.ranks + [before.default_ranks] * (len(after.used) - len(before.ranks)))
    spent_s = _exposure(after.used + after.unused) - _exposure(used + unused)
    span_s = after.now_s - before.fate.now_s
    hits = hits_by_size(ranks, after.used - used, np.maximum(spent_s, 0.0), span_s)
    judged: Matrix = KEPT * before.hits + hits
    return judged


def _exposure(ended: Matrix) -> Matrix:
    """Seconds at risk per bin: an interval's last bin counts half, earlier bins in full."""
    outlasting = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1] - ended
    exposure: Matrix = (outlasting + ended / 2) * WIDTHS_S
    return exposure


def _over_age(events: Matrix, exposure_s: Matrix) -> tuple[Matrix, Matrix]:
    """The hazard of all these classes together, shape [NUM_BINS]: each bin shrunk towards the
    continuation of the bin before; and the unshrunk one, 0 at ages that no block has reached."""
    num_events, total_s = events.sum(axis=0), exposure_s.sum(axis=0)
    seen: Matrix = num_events / np.maximum(total_s, 1e-9)
    base = np.empty(NUM_BINS)
    expected = (num_events.sum() + AGE_PRIOR_EVENTS) / max(total_s.sum(), 1e-9)
    for age, (num, at_risk_s) in enumerate(zip(num_events, total_s, strict=True)):
        base[age] = (num + AGE_PRIOR_EVENTS) / (at_risk_s + AGE_PRIOR_EVENTS / expected)
        expected = base[age] / GROWTH
    return base, seen


def _factors(levels: npt.NDArray[np.int64], events: Matrix, expected: Matrix) -> Matrix:
    """The factor of the base hazard for each class and band, from its features and residual."""
    in_band = np.equal.outer(_BAND_OF, np.arange(_NUM_BANDS)).astype(float)
    seen, expected = events @ in_band, expected @ in_band
    product = np.ones_like(seen)
    varying = [column for column in levels.T if (column != column[0]).any()]
    factors = [np.ones((column.max() + 1, _NUM_BANDS)) for column in varying]
    for _ in range(_SWEEPS):
        for number, column in enumerate(varying):
            old = factors[number]
            seen_at, expected_at = np.zeros_like(old), np.zeros_like(old)
            np.add.at(seen_at, column, seen)
            np.add.at(expected_at, column, expected * product / old[column])
            new = (seen_at + FACTOR_PRIOR_EVENTS) / (expected_at + FACTOR_PRIOR_EVENTS)
            product *= (new / old)[column]
            factors[number] = new
    residual = (seen + RESIDUAL_PRIOR_EVENTS) / (expected * product + RESIDUAL_PRIOR_EVENTS)
    result: Matrix = product * residual
    return result

"""An online fit of seconds ≈ θ·x, with two or three terms, none of them negative.

Regularised least squares, with four properties that measurements of machines need:

- **a constant prior**, so that terms which the data do not determine stay bounded. It may be more
  certain of the ratios of the terms (`alone`) than of their size (`common`): a model's shape is
  known before its hardware's speed, and the first step scales all terms;
- **forgetting**: a step's weight falls to 1/e after about thirty more steps;
- **robustness against stragglers**: beyond three standard deviations a step's weight falls with its
  distance (Huber);
- **change detection**: several steps in a row that are far off to the same side are not stragglers.
  Then earlier steps are forgotten.

The noise is relative (20 % of the expected seconds), so `variance` is in seconds². Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from typing import Any, Final

FORGET: Final = 0.97
RELATIVE_NOISE: Final = 0.2
HUBER: Final = 3.0
LEAST_NOISE_S: Final = 1e-6
"""Steps are not timed more finely; weights for less noise would outweigh the prior, and make the
solver inaccurate."""
MAX_WRONG: Final = 5.0
"""If the prior is off by a larger factor at the first step, only its ratios are used."""
LEAST_SHARE: Final = 0.02
"""A term that is 0 in the prior may be up to this share of the largest."""
RESTORED: Final = 4
"""A restored fit counts as this many steps."""
_LEAST_PIVOT: Final = 1e-12

Row = list[float]


@dataclass(frozen=True, slots=True)
class FitSettings:
    """What differs between prefills and links.

    `common`: relative standard deviation of all terms of a prior together; `alone`: of one of them
    against the others. `steps` in a row that are off by more than `factor` to the same side are a
    change; `first_steps` are, after few steps."""

    common: float
    alone: float
    first_steps: int
    steps: int
    factor: float


class Fit:
    """`theta` is the estimate, `num_learned` the steps so far, `num_fresh` those since the start or
    the last change. The caller chooses units that bring features and `theta` near 1."""

    def __init__(self, theta: Sequence[float], settings: FitSettings) -> None:
        self.num_learned = self.num_fresh = 0
        self.theta: Row = list(theta)
        self._settings = settings
        self._outliers: Row = []  # ratios of the last steps that were far off to the same side
        self._size = range(len(theta))
        self._info = [[0.0 for _ in self._size] for _ in self._size]
        self._vector = [0.0 for _ in self._size]
        self._shape = list(theta)
        self._set_prior(self.theta)

    def expect(self, x: Sequence[float]) -> float:
        """Seconds for these features."""
        return _dot(self.theta, x)

    def variance(self, x: Sequence[float]) -> float:
        """The variance of `expect(x)`, in seconds², without the noise of a single step. For a
        difference of two estimates, pass the difference of their features."""
        total = 0.0
        for row, a in zip(self._covariance, x, strict=True):
            total += a * _dot(row, x)
        return max(total, 0.0)

    def learn(self, x: Sequence[float], seconds: float) -> None:
        """Learn from a step with these features that took `seconds`."""
        expected = self.expect(x)
        if not self.num_learned and _are_apart(seconds, expected, MAX_WRONG):
            expected = self._reset(x, seconds) or expected
        scale = max(expected, 0.25 * seconds) if self.num_learned else seconds
        noise = max(RELATIVE_NOISE * scale, LEAST_NOISE_S)
        surprise = abs(seconds - expected) / noise
        weight = min(1.0, HUBER / surprise) if self.num_fresh and surprise else 1.0
        typical = self._changed_to(seconds, expected)
        if typical:
            self._reset(x, typical)
            noise = max(RELATIVE_NOISE * typical, LEAST_NOISE_S)
            weight = 1.0
        self._forget(FORGET)
        weight /= noise * noise
        for i in self._size:
            row, share = self._info[i], weight * x[i]
            for j in self._size:
                row[j] += share * x[j]
            self._vector[i] += share * seconds
        self.num_learned += 1
        self.num_fresh += 1
        self._solve()

    @property
    def has_outliers(self) -> bool:
        """Whether the last step was far off: a straggler, or the first one after a change."""
        return bool(self._outliers)

    def snapshot(self) -> dict[str, Any]:
        """The fit as plain values."""
        return {"info": self._info, "vector": self._vector, "shape": self._shape}

    def restore(self, known: object, kept: float) -> None:
        """Continue from a snapshot, weighted by `kept`. Raises ValueError, and changes nothing,
        where it is invalid."""
        if not isinstance(known, dict):
            raise ValueError("not a fit")
        info, vector, shape = known.get("info"), known.get("vector"), known.get("shape")
        size = len(self._size)
        rows = info if isinstance(info, list) else []
        if len(rows) != size or any(not _are_numbers(row, size) for row in [*rows, vector, shape]):
            raise ValueError("not a fit of this size")
        assert isinstance(vector, list)
        assert isinstance(shape, list)
        diagonal = [rows[i][i] for i in self._size]
        if min(*diagonal, *shape) < 0 or not max(shape):
            raise ValueError("not a fit")
        self._info = [[float(value) * kept for value in row] for row in rows]
        self._vector = [float(value) * kept for value in vector]
        self._shape = [float(value) for value in shape]
        self.num_learned = max(self.num_learned, 1)
        self.num_fresh = max(self.num_fresh, RESTORED)
        self._set_prior(self._shape)
        self._solve()

    def _changed_to(self, seconds: float, expected: float) -> float:
        """The expected seconds of such a step after a change; 0 where there was no change."""
        outliers = self._outliers
        if not self.num_learned:
            return 0.0  # at the first step the prior is wrong, not the machine changed
        if not _are_apart(seconds, expected, self._settings.factor):
            outliers.clear()
            return 0.0
        ratio = seconds / max(expected, LEAST_NOISE_S)
        if outliers and (outliers[-1] > 1.0) != (ratio > 1.0):
            outliers.clear()
        outliers.append(ratio)
        needed = self._settings.first_steps + self.num_fresh // 4
        if len(outliers) < min(needed, self._settings.steps):
            return 0.0
        typical = expected * sorted(outliers)[len(outliers) // 2]
        outliers.clear()
        return typical or seconds

    def _reset(self, x: Sequence[float], seconds: float) -> float:
        """Forget all steps and set another prior: the old one scaled to this step; or, if terms are
        independent (`common` is 0), with a new value of the largest term only. Returns the expected
        seconds for `x` now, 0 (and nothing changed) where the prior expects 0."""
        shares = [t * value for t, value in zip(self._shape, x, strict=True)]
        usual = sum(shares)
        if usual <= 0:
            return 0.0
        if self._settings.common:
            self._shape = [t * seconds / usual for t in self._shape]
        else:
            most = shares.index(max(shares))
            self._shape = list(self.theta)
            self._shape[most] = seconds / x[most]
        self._forget(0.0)
        self.num_fresh = 0
        self._set_prior(self._shape)
        return self.expect(x)

    def _set_prior(self, theta: Row) -> None:
        """Set the prior: its covariance is D·(common²·11ᵀ + alone²·1)·D with D = diag(θ); stored as
        the inverse."""
        least = LEAST_SHARE * max(*theta, 1e-6)
        common, alone = self._settings.common**2, self._settings.alone**2
        spread = [max(t, least) for t in theta]
        shared = common / (alone + len(theta) * common)
        self._prior_info = [
            [((i == j) - shared) / (alone * spread[i] * spread[j]) for j in self._size]
            for i in self._size
        ]
        self._prior_vector = [_dot(row, theta) for row in self._prior_info]
        self.theta = list(theta)
        self._covariance = _inverse(self._prior_info)

    def _forget(self, kept: float) -> None:
        self._info = [[kept * value for value in row] for row in self._info]
        self._vector = [kept * value for value in self._vector]

    def _solve(self) -> None:
        info = [
            [a + b for a, b in zip(row, prior, strict=True)]
            for row, prior in zip(self._info, self._prior_info, strict=True)
        ]
        vector = [a + b for a, b in zip(self._vector, self._prior_vector, strict=True)]
        self._covariance = _inverse(info)
        self.theta = _non_negative(info, vector, self._covariance)


def _are_apart(a: float, b: float, factor: float) -> bool:
    return a > factor * b or b > factor * a


def _are_numbers(row: object, size: int) -> bool:
    return (
        isinstance(row, list)
        and len(row) == size
        and all(type(value) in (int, float) and abs(value) < 1e300 for value in row)
    )


def _non_negative(info: list[Row], vector: Row, inverse: list[Row]) -> Row:
    """argmin over θ ≥ 0 of ½ θᵀ·info·θ − vectorᵀ·θ: exact, by trying the active sets."""
    theta = [_dot(row, vector) for row in inverse]
    if min(theta) >= 0:
        return theta
    size = len(vector)
    best, best_value = [0.0] * size, 0.0
    for count in range(size - 1, 0, -1):
        for kept in combinations(range(size), count):
            part = _inverse([[info[i][j] for j in kept] for i in kept])
            given = [vector[i] for i in kept]
            solved = [_dot(row, given) for row in part]
            value = -0.5 * _dot(solved, given)
            if min(solved) >= 0 and value < best_value:
                best_value, best = value, [0.0] * size
                for i, t in zip(kept, solved, strict=True):
                    best[i] = t
    return best


def _inverse(matrix: list[Row]) -> list[Row]:
    """The inverse of a symmetric positive definite matrix, by Gauss-Jordan elimination after
    scaling to a unit diagonal. Pivots have a lower limit, so the inverse is finite even where
    rounding made the matrix singular."""
    size = range(len(matrix))
    scale = [1.0 / sqrt(max(matrix[i][i], 1e-300)) for i in size]
    rows = [
        [matrix[i][j] * scale[i] * scale[j] for j in size] + [float(i == j) for j in size]
        for i in size
    ]
    for i in size:
        pivot = max(rows[i][i], _LEAST_PIVOT)
        rows[i] = [value / pivot for value in rows[i]]
        for j in size:
            if j != i:
                factor = rows[j][i]
                rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    width = len(matrix)
    return [[rows[i][width + j] * scale[i] * scale[j] for j in size] for i in size]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum([x * y for x, y in zip(a, b, strict=True)])

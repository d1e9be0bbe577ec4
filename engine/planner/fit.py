"""A small fit that learns while it is used: seconds ≈ θ·x, with two or three terms, none negative.

Regularised least squares with four habits that machines call for:

- **a prior that never fades**, so terms that the data leave open cannot wind up. It may be surer of
  how the terms compare (`alone`) than of their size (`common`): a model's shape is known before its
  hardware's speed, and the first step scales all terms;
- **forgetting**: a step counts 1/e after some thirty more;
- **deafness to stragglers**: beyond three deviations a step's weight falls with its distance
  (Huber);
- **change**: steps that are far off in a row, all to one side, are no stragglers. What was learned
  of the machine before is forgotten then.

The noise is taken as relative (20 % of what is expected), so `variance` is in seconds². Pure.
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
"""No step is timed more finely; weights of less noise would drown the prior and the solver."""
MAX_WRONG: Final = 5.0
"""A prior that is off by more than this at the first step only says how the terms compare."""
LEAST_SHARE: Final = 0.02
"""A term that the prior takes for nothing may be this share of the largest."""
RESTORED: Final = 4
"""What was restored counts for so many fresh steps."""
_LEAST_PIVOT: Final = 1e-12

Row = list[float]


@dataclass(frozen=True, slots=True)
class Habits:
    """What differs from one kind of machine to another.

    `common`: how far, relatively, all terms of a prior may be off together; `alone`: one of them
    against the others. `steps` in a row that are off by more than `factor` to one side mean a
    change; `first_steps`, while hardly anything has been learned."""

    common: float
    alone: float
    first_steps: int
    steps: int
    factor: float


class Fit:
    """`theta` is the estimate, `num_learned` the steps so far, `num_fresh` those since it began or
    changed. Features and `theta` are the caller's, in units that bring them near 1."""

    def __init__(self, theta: Sequence[float], habits: Habits) -> None:
        self.num_learned = self.num_fresh = 0
        self.theta: Row = list(theta)
        self._habits = habits
        self._strange: Row = []  # how far the last steps were off, as long as all are to one side
        self._size = range(len(theta))
        self._info = [[0.0 for _ in self._size] for _ in self._size]
        self._vector = [0.0 for _ in self._size]
        self._shape = list(theta)
        self._assume(self.theta)

    def expect(self, x: Sequence[float]) -> float:
        """Seconds for these features."""
        return _dot(self.theta, x)

    def variance(self, x: Sequence[float]) -> float:
        """Of `expect(x)`, or of a difference of two such, in seconds²; the noise of a single step
        is not in it."""
        total = 0.0
        for row, a in zip(self._covariance, x, strict=True):
            total += a * _dot(row, x)
        return max(total, 0.0)

    def learn(self, x: Sequence[float], seconds: float) -> None:
        """One step with these features took so long."""
        expected = self.expect(x)
        if not self.num_learned and _are_apart(seconds, expected, MAX_WRONG):
            expected = self._start_anew(x, seconds) or expected
        scale = max(expected, 0.25 * seconds) if self.num_learned else seconds
        noise = max(RELATIVE_NOISE * scale, LEAST_NOISE_S)
        surprise = abs(seconds - expected) / noise
        weight = min(1.0, HUBER / surprise) if self.num_fresh and surprise else 1.0
        typical = self._changed_to(seconds, expected)
        if typical:
            self._start_anew(x, typical)
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
    def is_puzzled(self) -> bool:
        """Whether the last step was far off: a straggler, or the first of another machine."""
        return bool(self._strange)

    def snapshot(self) -> dict[str, Any]:
        """What was learned, as plain values."""
        return {"info": self._info, "vector": self._vector, "shape": self._shape}

    def restore(self, known: object, kept: float) -> None:
        """Go on from a snapshot, believing `kept` of it. Raises ValueError, with nothing changed,
        where it is not of this kind."""
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
        self._assume(self._shape)
        self._solve()

    def _changed_to(self, seconds: float, expected: float) -> float:
        """What such a step takes since the machine changed; 0 where it has not."""
        strange = self._strange
        if not self.num_learned:
            return 0.0  # the prior was wrong, and nothing has changed
        if not _are_apart(seconds, expected, self._habits.factor):
            strange.clear()
            return 0.0
        ratio = seconds / max(expected, LEAST_NOISE_S)
        if strange and (strange[-1] > 1.0) != (ratio > 1.0):
            strange.clear()
        strange.append(ratio)
        needed = self._habits.first_steps + self.num_fresh // 4
        if len(strange) < min(needed, self._habits.steps):
            return 0.0
        typical = expected * sorted(strange)[len(strange) // 2]
        strange.clear()
        return typical or seconds

    def _start_anew(self, x: Sequence[float], seconds: float) -> float:
        """Another kind of machine: the prior's shape is kept, not its size; or only the term that
        counts most here is new, where terms have nothing in common. Returns what is expected for
        `x` now, 0 where the prior says nothing about it."""
        shares = [t * value for t, value in zip(self._shape, x, strict=True)]
        usual = sum(shares)
        if usual <= 0:
            return 0.0
        if self._habits.common:
            self._shape = [t * seconds / usual for t in self._shape]
        else:
            most = shares.index(max(shares))
            self._shape = list(self.theta)
            self._shape[most] = seconds / x[most]
        self._forget(0.0)
        self.num_fresh = 0
        self._assume(self._shape)
        return self.expect(x)

    def _assume(self, theta: Row) -> None:
        """The prior: its covariance is D·(common²·11ᵀ + alone²·1)·D with D = diag(θ), here as its
        inverse."""
        least = LEAST_SHARE * max(*theta, 1e-6)
        common, alone = self._habits.common**2, self._habits.alone**2
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
    """Of a symmetric positive definite matrix, by Gauss-Jordan on it brought to a unit diagonal.
    Where rounding has left it singular, pivots are held up: the inverse is finite all the same."""
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

"""The two estimates behind every decision: what a prefill costs, and what a reload costs.

Prefill of n new tokens on context c takes, for r requests in one step,

    seconds = t0·r + a·Σn + b·Σ(n·c + n²/2)

(attention is the quadratic term; docs/planner.md derives it). The three coefficients are
fitted per namespace by regularised least squares in scaled units: shrunk towards a prior that never
fades (so constant chunk sizes, which leave t0 and a unidentifiable, cannot wind anything up),
forgetting old steps, non-negative, and robust to stragglers (Huber weights on the relative error).

A link copies `bytes` in `latency + bytes / bandwidth`; a hop is the client's own last copy.

Clients send their measurements, and one that errs or lies must not spoil what its namespace is
planned by: what no machine could have done is not believed, nothing becomes infinite, and whatever
was learned wrongly is forgotten after a few right ones. Pure: measurements come in as events.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

FORGET: Final = 0.97
RELATIVE_NOISE: Final = 0.2
HUBER: Final = 3.0
LEAST_NOISE_S: Final = 1e-6
"""No step is timed more finely; weights of less noise would drown the prior and the solver."""
MAX_WRONG: Final = 5.0
"""A prior that is off by more than this at the first step only says how the terms compare."""
MAX_STRANGE: Final = 8
"""So many steps in a row that are off by more than that: what was learned is of another machine."""
MAX_MEASURED_S: Final = 3600.0
MAX_STEP_TOKENS: Final = 1e8
MAX_CONTEXT_TOKENS: Final = 1e8
MIN_HOP_BYTES_PER_S, MAX_HOP_BYTES_PER_S = 1e4, 1e14
MAX_HOP_CHANGE: Final = 8.0
"""One hop that is off by more than this counts as off by this."""
_SCALE: Final = np.array([1.0, 1e-3, 1e-6])
"""Features in requests, thousands of tokens, millions of token pairs: all near 1 in use."""


def is_measurable(seconds: float) -> bool:
    """Whether anybody can have measured, within one request, something that took so long."""
    return LEAST_NOISE_S <= seconds <= MAX_MEASURED_S


def plausible_hop(bytes_per_s: float) -> float:
    """The speed of a client's own copy as it says, 0 (not known) included, within reason."""
    if bytes_per_s <= 0:
        return 0.0
    return min(max(bytes_per_s, MIN_HOP_BYTES_PER_S), MAX_HOP_BYTES_PER_S)


def learn_hop(known_s_per_byte: float, num_bytes: float, seconds: float) -> float:
    """Seconds per byte of a namespace's hop after one more measurement; unchanged by one that says
    nothing. Averaged with exponential weights."""
    if num_bytes < 1 or not is_measurable(seconds):
        return known_s_per_byte
    seen = 1.0 / plausible_hop(num_bytes / seconds)
    seen = min(max(seen, known_s_per_byte / MAX_HOP_CHANGE), known_s_per_byte * MAX_HOP_CHANGE)
    return 0.75 * known_s_per_byte + 0.25 * seen


@dataclass(frozen=True, slots=True)
class PrefillPrior:
    """Where a namespace starts: seconds per request, per token, per token pair.

    `is_guess`: nobody has said so; nothing should be decided by it before a prefill was measured.
    """

    fixed_s: float = 0.005
    per_token_s: float = 1e-4
    per_pair_s: float = 0.0
    is_guess: bool = True


class PrefillCost:
    """One namespace's prefill time. `num_observed` steps have been seen."""

    def __init__(self, prior: PrefillPrior) -> None:
        self._info = np.zeros((3, 3))
        self._vector = np.zeros(3)
        self._is_stale = False
        self._is_given = not prior.is_guess
        self.num_observed = 0
        self._num_strange = 0
        if not (prior.fixed_s or prior.per_token_s or prior.per_pair_s):
            prior = PrefillPrior()  # nothing takes no time: that would never be unlearned
        self._shape = np.array([prior.fixed_s, prior.per_token_s, prior.per_pair_s]) / _SCALE
        self._assume(self._shape)

    @property
    def is_known(self) -> bool:
        """Whether it rests on a measurement, or at least on an operator's word."""
        return self._is_given or self.num_observed > 0

    def _assume(self, theta: Vector) -> None:
        """The prior speaks with the weight of one observation of a 1,000-token prefill, loosely."""
        spread = np.maximum(theta, 0.02 * max(theta.max(), 1e-6)) * 2.0
        self._prior_info = np.diag(1.0 / spread**2) * 0.25
        self._prior_vector = self._prior_info @ theta
        self._theta: Vector = theta
        self._seconds_per: list[float] = (theta * _SCALE).tolist()

    def observe(self, num_requests: int, sum_n: float, sum_nc: float, seconds: float) -> None:
        """Learn from one step. One without tokens or time, or beyond all reason, says nothing."""
        if not 1 <= sum_n <= MAX_STEP_TOKENS or not is_measurable(seconds):
            return
        x = np.array([num_requests, sum_n, min(sum_nc, sum_n * MAX_CONTEXT_TOKENS)]) * _SCALE
        expected = float(x @ self._solve())
        is_strange = seconds > MAX_WRONG * expected or expected > MAX_WRONG * seconds
        self._num_strange = self._num_strange + 1 if is_strange else 0
        if is_strange and (not self.num_observed or self._num_strange >= MAX_STRANGE):
            expected = self._start_anew(x, seconds) or expected
        scale = RELATIVE_NOISE * (max(expected, 0.25 * seconds) if self.num_observed else seconds)
        scale = max(scale, LEAST_NOISE_S)
        surprise = abs(seconds - expected) / scale
        weight = min(1.0, HUBER / surprise) if self.num_observed > 2 and surprise else 1.0
        weight /= scale * scale
        self._info = FORGET * self._info + weight * np.outer(x, x)
        self._vector = FORGET * self._vector + weight * seconds * x
        self._is_stale = True
        self.num_observed += 1

    def _start_anew(self, x: Vector, seconds: float) -> float:
        """Another kind of machine: the prior's shape is kept, not its size, and nothing that was
        learned. Returns what is expected for `x` now, 0 where the prior says nothing about it."""
        usual = float(x @ self._shape)
        if usual <= 0:
            return 0.0
        self._info[:] = 0.0
        self._vector[:] = 0.0
        self._assume(self._shape * (seconds / usual))
        self._is_stale = False
        self._num_strange = 0
        return seconds

    def seconds(self, new_tokens: float, context_tokens: float) -> float:
        """Expected seconds to prefill `new_tokens` of one request on `context_tokens`."""
        if new_tokens <= 0:
            return 0.0
        if self._is_stale:
            self._solve()
        fixed_s, per_token_s, per_pair_s = self._seconds_per
        pairs = new_tokens * context_tokens + new_tokens * new_tokens / 2
        return fixed_s + per_token_s * new_tokens + per_pair_s * pairs

    def tokens_per_s(self, new_tokens: int = 1024) -> float:
        """Prefill speed at a round size, for people to read."""
        return new_tokens / max(self.seconds(new_tokens, 0), 1e-9)

    def _solve(self) -> Vector:
        if self._is_stale:
            self._theta = _non_negative(
                self._info + self._prior_info, self._vector + self._prior_vector
            )
            self._seconds_per = (self._theta * _SCALE).tolist()
            self._is_stale = False
        return self._theta


def _non_negative(info: Vector, vector: Vector) -> Vector:
    """argmin over θ ≥ 0 of ½ θᵀ·info·θ − vectorᵀ·θ: exact, by trying the 2³ active sets."""
    best = np.zeros(3)
    best_value = 0.0
    for size in (3, 2, 1):
        for kept in combinations(range(3), size):
            rows = list(kept)
            try:
                part = np.linalg.solve(info[np.ix_(rows, rows)], vector[rows])
            except np.linalg.LinAlgError:  # what was seen cannot tell these terms apart
                continue
            if (part < 0).any():
                continue
            value = -0.5 * float(vector[rows] @ part)
            if value < best_value:
                best_value = value
                best = np.zeros(3)
                best[rows] = part
        if best_value < 0 and size == 3:
            break
    return best


class LinkCost:
    """How fast one link copies. Until it is measured, `bytes_per_s` is a cautious guess."""

    GUESS_BYTES_PER_S: Final = 5e8
    WEIGHT: Final = 0.25

    def __init__(self, latency_s: float = 0.0005) -> None:
        self.latency_s = latency_s
        self.bytes_per_s = self.GUESS_BYTES_PER_S
        self.num_measured = 0

    def measured(self, num_bytes: float, seconds: float) -> None:
        """Learn from a batch: seconds per byte, averaged with exponential weights."""
        if num_bytes <= 0 or seconds <= 0:
            return
        per_byte = max(seconds - self.latency_s, 0.1 * seconds) / num_bytes
        if self.num_measured:
            per_byte = self.WEIGHT * per_byte + (1 - self.WEIGHT) / self.bytes_per_s
        self.bytes_per_s = 1.0 / per_byte
        self.num_measured += 1

    def seconds(self, num_bytes: float, queued_bytes: float = 0.0) -> float:
        """Expected seconds until `num_bytes` behind `queued_bytes` have arrived."""
        if num_bytes <= 0:
            return 0.0
        return self.latency_s + (queued_bytes + num_bytes) / self.bytes_per_s

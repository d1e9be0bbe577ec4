"""The two estimates behind every decision: the time of a prefill, and the time of a reload.

Prefill of n new tokens on context c takes, for r requests in one step,

    seconds = t0·r + a·Σn + b·Σ(n·c + n²/2)

(attention is the quadratic term; docs/planner.md derives it). A link copies in

    seconds = latency + bytes / bandwidth

followed by a last copy into the inference engine's memory: by the client itself (its hop), or by
the GPU's worker (a load). Coefficients are fitted (`fit.py`), per namespace and per link; `doubt_s`
is an estimate's standard deviation.

Clients send their measurements, and a wrong one must not spoil the estimates of its namespace for
long: implausible values are ignored or clamped, no estimate becomes infinite, and a wrong estimate
is corrected by a few right measurements. Pure: measurements come in as events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, Final

from hicache.engine.planner.fit import LEAST_NOISE_S, Fit, FitSettings

PREFILL_FIT: Final = FitSettings(common=3.0, alone=1.0, first_steps=8, steps=8, factor=5.0)
"""Several steps in a row may differ from their estimate by up to five times without a change of the
machine."""
LINK_FIT: Final = FitSettings(common=0.0, alone=3.0, first_steps=2, steps=4, factor=1.6)
"""One copy in fifty is a straggler; four slow copies in a row are a change."""
MAX_MEASURED_S: Final = 3600.0
MAX_STEP_TOKENS: Final = 1e8
MAX_CONTEXT_TOKENS: Final = 1e8
MIN_TOKEN_S, MAX_TOKEN_S = 1e-9, 1.0
"""Limits of a prior computed from a model's arithmetic and a machine's speed."""
MIN_HOP_BYTES_PER_S, MAX_HOP_BYTES_PER_S = 1e4, 1e14
MAX_HOP_CHANGE: Final = 8.0
"""A hop that differs by a larger factor counts as differing by this one."""
DRIFT: Final = 0.005
"""Relative variance that a link's estimate gains with each decision since its last copy: after 200
decisions it may be three times as fast."""
# Features in requests, thousands of tokens and millions of token pairs, in MB: all near 1 in use.
_PER_TOKEN, _PER_PAIR, _PER_BYTE = 1e-3, 1e-6, 1e-6


def is_measurable(seconds: float) -> bool:
    """Whether a duration is plausible as a measurement within one request."""
    return LEAST_NOISE_S <= seconds <= MAX_MEASURED_S


def plausible_hop(bytes_per_s: float) -> float:
    """A client's reported copy speed, clamped to plausible values; 0 (unknown) stays 0."""
    if bytes_per_s <= 0:
        return 0.0
    return min(max(bytes_per_s, MIN_HOP_BYTES_PER_S), MAX_HOP_BYTES_PER_S)


def learn_hop(known_s_per_byte: float, num_bytes: float, seconds: float) -> float:
    """Seconds per byte of a namespace's hop after one more measurement, averaged with exponential
    weights. Implausible measurements are ignored."""
    if num_bytes < 1 or not is_measurable(seconds):
        return known_s_per_byte
    seen = 1.0 / plausible_hop(num_bytes / seconds)
    seen = min(max(seen, known_s_per_byte / MAX_HOP_CHANGE), known_s_per_byte * MAX_HOP_CHANGE)
    return 0.75 * known_s_per_byte + 0.25 * seen


@dataclass(frozen=True, slots=True)
class PrefillPrior:
    """A namespace's first estimate: seconds per request, per token, per token pair.

    `is_guess`: not configured; no decision should use it before a prefill was measured.
    """

    fixed_s: float = 0.005
    per_token_s: float = 1e-4
    per_pair_s: float = 0.0
    is_guess: bool = True

    def for_model(
        self, flop_per_token: float, flop_per_pair: float, flop_per_s: float
    ) -> PrefillPrior:
        """This prior for a model's arithmetic per token and pair (docs/planner.md); 0: unknown.

        Configured seconds stay. Otherwise the seconds per token follow from the machine's FLOP/s in
        a prefill (0: unknown), and the seconds per pair from the ratio of the arithmetic: so that
        even without a speed the first measured step sets all terms.
        """
        if flop_per_token <= 0:
            return self
        per_token_s, is_guess = self.per_token_s, self.is_guess
        if is_guess and flop_per_s > 0:
            per_token_s = min(max(flop_per_token / flop_per_s, MIN_TOKEN_S), MAX_TOKEN_S)
            is_guess = False
        share = min(flop_per_pair / flop_per_token, 1.0)
        return PrefillPrior(
            self.fixed_s, per_token_s, self.per_pair_s or per_token_s * share, is_guess
        )


class _Learned:
    """An estimate based on a fit, with a snapshot as plain values."""

    _fit: Fit

    def snapshot(self) -> dict[str, Any]:
        """The fit as plain values."""
        return self._fit.snapshot()

    def restore(self, known: object, kept: float) -> None:
        """Continue from a snapshot, weighted by `kept`. Raises ValueError, and changes nothing, if
        it is invalid."""
        self._fit.restore(known, kept)
        self._read_fit()

    def _read_fit(self) -> None:
        """Copy the fit's values that are read often."""
        raise NotImplementedError


class PrefillCost(_Learned):
    """One namespace's prefill time. `num_observed`: measured steps; `is_known`: it is measured, or
    at least configured."""

    def __init__(self, prior: PrefillPrior) -> None:
        self.is_known = not prior.is_guess
        if not (prior.fixed_s or prior.per_token_s or prior.per_pair_s):
            prior = PrefillPrior()  # a prior of 0 s could never be corrected
        theta = prior.fixed_s, prior.per_token_s / _PER_TOKEN, prior.per_pair_s / _PER_PAIR
        self._fit = Fit(theta, PREFILL_FIT)
        self._read_fit()

    def observe(
        self,
        num_requests: int,
        sum_n: float,
        sum_nc: float,
        seconds: float,
        decode_tokens: float = 0.0,
    ) -> None:
        """Learn from one step. Steps without prefill and implausible ones are ignored. Tokens
        decoded in the same step count as tokens, since they use the same weights."""
        if not 1 <= sum_n <= MAX_STEP_TOKENS or not is_measurable(seconds):
            return
        pairs = min(sum_nc, sum_n * MAX_CONTEXT_TOKENS)
        tokens = sum_n + min(decode_tokens, MAX_STEP_TOKENS)
        self._fit.learn((num_requests, tokens * _PER_TOKEN, pairs * _PER_PAIR), seconds)
        self._read_fit()

    def seconds(self, new_tokens: float, context_tokens: float) -> float:
        """Expected seconds to prefill `new_tokens` of one request on `context_tokens`."""
        if new_tokens <= 0:
            return 0.0
        pairs = new_tokens * (context_tokens + new_tokens / 2)
        return self._fixed_s + self._per_token_s * new_tokens + self._per_pair_s * pairs

    def doubt_s(self, n: float, c: float, other_n: float, other_c: float) -> float:
        """Standard deviation of the difference between two prefills, of n tokens on c each."""
        pairs = n * (c + n / 2) - other_n * (other_c + other_n / 2)
        x = (n > 0) - (other_n > 0), (n - other_n) * _PER_TOKEN, pairs * _PER_PAIR
        return sqrt(self._fit.variance(x))

    def predict(
        self, num_requests: int, sum_n: float, sum_nc: float, decode_tokens: float = 0.0
    ) -> tuple[float, float]:
        """Expected seconds of a step, and their standard deviation."""
        x = num_requests, (sum_n + decode_tokens) * _PER_TOKEN, sum_nc * _PER_PAIR
        return self._fit.expect(x), sqrt(self._fit.variance(x))

    def tokens_per_s(self, new_tokens: int = 1024) -> float:
        """Prefill speed for a prompt of this size, for people."""
        return new_tokens / max(self.seconds(new_tokens, 0), 1e-9)

    def _read_fit(self) -> None:
        self.num_observed = self._fit.num_learned
        self.is_known |= self.num_observed > 0
        fixed_s, per_token, per_pair = self._fit.theta
        self._fixed_s = fixed_s
        self._per_token_s, self._per_pair_s = per_token * _PER_TOKEN, per_pair * _PER_PAIR


class _CopyCost(_Learned):
    """The time of copies."""

    def __init__(self, theta: Sequence[float]) -> None:
        self._fit = Fit(theta, LINK_FIT)
        self._num_unchecked = 0
        self._read_fit()

    def note_decision(self) -> None:
        """A decision has used this estimate. Reading it alone changes nothing."""
        self._num_unchecked += 1

    def _learn(self, x: Sequence[float], seconds: float) -> None:
        if is_measurable(seconds):
            self._fit.learn(x, seconds)
            self._num_unchecked = 0
            self._read_fit()

    def _doubt_s(self, x: Sequence[float]) -> float:
        """Grows with each decision since the last copy; larger while there are few copies, or when
        the last one was far off, since they may have been stragglers."""
        expected_s = self._fit.expect(x)
        few = 1.0 if self._fit.has_outliers else 1.0 / max(self._fit.num_fresh, 1)
        relative = DRIFT * self._num_unchecked + few * few
        return sqrt(self._fit.variance(x) + relative * expected_s * expected_s)

    def _read_fit(self) -> None:
        self.num_measured = self._fit.num_learned


class LinkCost(_CopyCost):
    """One link's copy time. `bytes_per_s`: of long copies; `num_measured`: copies measured. Before
    the first its speed is a low guess."""

    GUESS_BYTES_PER_S: Final = 5e8
    GUESS_LATENCY_S: Final = 0.0005

    def __init__(
        self, latency_s: float = GUESS_LATENCY_S, bytes_per_s: float = GUESS_BYTES_PER_S
    ) -> None:
        super().__init__((latency_s, 1.0 / bytes_per_s / _PER_BYTE))

    def measured(self, num_bytes: float, seconds: float) -> None:
        """Learn from one batch."""
        if num_bytes > 0:
            self._learn((1.0, num_bytes * _PER_BYTE), seconds)

    def seconds(self, num_bytes: float, queued_bytes: float = 0.0) -> float:
        """Expected seconds until `num_bytes`, queued behind `queued_bytes`, have arrived."""
        if num_bytes <= 0:
            return 0.0
        return self.latency_s + (queued_bytes + num_bytes) * self._s_per_byte

    def doubt_s(self, num_bytes: float, queued_bytes: float = 0.0) -> float:
        """Standard deviation of `seconds`."""
        if num_bytes <= 0:
            return 0.0
        return self._doubt_s((1.0, (queued_bytes + num_bytes) * _PER_BYTE))

    def _read_fit(self) -> None:
        super()._read_fit()
        self.latency_s, per_mb = self._fit.theta
        self._s_per_byte = per_mb * _PER_BYTE
        self.bytes_per_s = 1.0 / max(self._s_per_byte, 1e-18)


class LoadCost(_CopyCost):
    """How fast the GPU's worker copies a namespace's blocks into an inference engine's pages, from
    GPU memory and from host memory. The size of the pages matters as much as the hardware, so each
    namespace has its own estimate.

    One load may take blocks from both and has one time, so both are fitted together. `tiers`: the
    numbers of the tiers that the worker reads. Until a load was measured, both are estimated as
    fast as `link`, from host memory to the GPU, which is slower than any copy within the GPU.
    """

    def __init__(self, tiers: Sequence[int], link: LinkCost) -> None:
        self._tiers, self._link = tuple(tiers), link
        super().__init__(self._theta_of_link())

    def measured(self, bytes_from: Mapping[int, float], seconds: float) -> None:
        """Learn from a load; `bytes_from`: tier → bytes."""
        if any(bytes_from.values()):
            self._follow_link()
            self._learn(self._features(bytes_from), seconds)

    def seconds(self, bytes_from: Mapping[int, float]) -> float:
        """Expected seconds of a load; `bytes_from`: tier → bytes."""
        self._follow_link()
        return self._fit.expect(self._features(bytes_from)) if any(bytes_from.values()) else 0.0

    def doubt_s(self, bytes_from: Mapping[int, float]) -> float:
        """Standard deviation of `seconds`."""
        self._follow_link()
        return self._doubt_s(self._features(bytes_from)) if any(bytes_from.values()) else 0.0

    @property
    def bytes_per_s(self) -> dict[int, float]:
        """Tier → speed of long loads from it."""
        self._follow_link()
        speeds = self._fit.theta[1:]
        return {
            tier: 1.0 / max(per_mb * _PER_BYTE, 1e-18)
            for tier, per_mb in zip(self._tiers, speeds, strict=True)
        }

    def _theta_of_link(self) -> list[float]:
        per_mb = 1.0 / self._link.bytes_per_s / _PER_BYTE
        return [self._link.latency_s, *(per_mb for _ in self._tiers)]

    def _follow_link(self) -> None:
        """Until a load is measured, use the link's current estimate."""
        if not self.num_measured:
            self._fit = Fit(self._theta_of_link(), LINK_FIT)

    def _features(self, bytes_from: Mapping[int, float]) -> list[float]:
        return [1.0, *(bytes_from.get(tier, 0.0) * _PER_BYTE for tier in self._tiers)]

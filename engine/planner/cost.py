"""The two estimates behind every decision: what a prefill costs, and what a reload costs.

Prefill of n new tokens on context c takes, for r requests in one step,

    seconds = t0·r + a·Σn + b·Σ(n·c + n²/2)

(attention is the quadratic term; docs/planner.md derives it). A link copies so many bytes in

    seconds = latency + bytes / bandwidth

and then comes a last copy into the inference engine's memory: by the client itself (its hop), or by
the GPU's worker (a load). Coefficients are fitted (`fit.py`), per namespace and per link; they say
how far off they may be (`doubt_s`, one standard deviation).

Clients send their measurements, and one that errs or lies must not spoil what its namespace is
planned by: what no machine could have done is not believed, nothing becomes infinite, and whatever
was learned wrongly is forgotten after a few right ones. Pure: measurements come in as events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, Final

from hicache.engine.planner.fit import LEAST_NOISE_S, Fit, Habits

OF_PREFILLS: Final = Habits(common=3.0, alone=1.0, first_steps=8, steps=8, factor=5.0)
"""Steps of different kinds may be off by less than five times, in rows, without a change."""
OF_LINKS: Final = Habits(common=0.0, alone=3.0, first_steps=2, steps=4, factor=1.6)
"""One copy in fifty is a straggler; four in a row are none."""
MAX_MEASURED_S: Final = 3600.0
MAX_STEP_TOKENS: Final = 1e8
MAX_CONTEXT_TOKENS: Final = 1e8
MIN_TOKEN_S, MAX_TOKEN_S = 1e-9, 1.0
"""Of a prior that follows from a model's arithmetic and a machine's speed."""
MIN_HOP_BYTES_PER_S, MAX_HOP_BYTES_PER_S = 1e4, 1e14
MAX_HOP_CHANGE: Final = 8.0
"""One hop that is off by more than this counts as off by this."""
DRIFT: Final = 0.005
"""Relative variance that a link's speed gains with each decision that no copy has checked: after
some two hundred it may be three times as fast by now."""
# Features in requests, thousands of tokens and millions of token pairs, in MB: all near 1 in use.
_PER_TOKEN, _PER_PAIR, _PER_BYTE = 1e-3, 1e-6, 1e-6


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

    def for_model(
        self, flop_per_token: float, flop_per_pair: float, flop_per_s: float
    ) -> PrefillPrior:
        """This prior for a model of so much arithmetic (docs/planner.md), 0: not known.

        What was said of seconds stays. Otherwise a machine of so many FLOP/s in a prefill (0: not
        known) says what a token takes, and the arithmetic what a pair takes beside it; so that
        without any speed the first measured step tells all terms.
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
    """What rests on a fit, and outlives its owner as plain values."""

    _fit: Fit

    def snapshot(self) -> dict[str, Any]:
        """What was learned, as plain values."""
        return self._fit.snapshot()

    def restore(self, known: object, kept: float) -> None:
        """Go on from a snapshot, believing `kept` of it. Raises ValueError, with nothing changed,
        if it is none."""
        self._fit.restore(known, kept)
        self._take_over()

    def _take_over(self) -> None:
        """Read out of the fit what is asked for often."""
        raise NotImplementedError


class PrefillCost(_Learned):
    """One namespace's prefill time. `num_observed` steps have been seen; `is_known`: it rests on a
    measurement, or at least on an operator's word."""

    def __init__(self, prior: PrefillPrior) -> None:
        self.is_known = not prior.is_guess
        if not (prior.fixed_s or prior.per_token_s or prior.per_pair_s):
            prior = PrefillPrior()  # nothing takes no time: that would never be unlearned
        theta = prior.fixed_s, prior.per_token_s / _PER_TOKEN, prior.per_pair_s / _PER_PAIR
        self._fit = Fit(theta, OF_PREFILLS)
        self._take_over()

    def observe(
        self,
        num_requests: int,
        sum_n: float,
        sum_nc: float,
        seconds: float,
        decode_tokens: float = 0.0,
    ) -> None:
        """Learn from one step. One without prefill or time, or beyond all reason, says nothing.
        Tokens decoded in the same step go through the same weights."""
        if not 1 <= sum_n <= MAX_STEP_TOKENS or not is_measurable(seconds):
            return
        pairs = min(sum_nc, sum_n * MAX_CONTEXT_TOKENS)
        tokens = sum_n + min(decode_tokens, MAX_STEP_TOKENS)
        self._fit.learn((num_requests, tokens * _PER_TOKEN, pairs * _PER_PAIR), seconds)
        self._take_over()

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

    def foreseen(
        self, num_requests: int, sum_n: float, sum_nc: float, decode_tokens: float = 0.0
    ) -> tuple[float, float]:
        """Expected seconds of a step, and their standard deviation."""
        x = num_requests, (sum_n + decode_tokens) * _PER_TOKEN, sum_nc * _PER_PAIR
        return self._fit.expect(x), sqrt(self._fit.variance(x))

    def tokens_per_s(self, new_tokens: int = 1024) -> float:
        """Prefill speed at a round size, for people to read."""
        return new_tokens / max(self.seconds(new_tokens, 0), 1e-9)

    def _take_over(self) -> None:
        self.num_observed = self._fit.num_learned
        self.is_known |= self.num_observed > 0
        fixed_s, per_token, per_pair = self._fit.theta
        self._fixed_s = fixed_s
        self._per_token_s, self._per_pair_s = per_token * _PER_TOKEN, per_pair * _PER_PAIR


class _CopyCost(_Learned):
    """What copies take, by their features."""

    def __init__(self, theta: Sequence[float]) -> None:
        self._fit = Fit(theta, OF_LINKS)
        self._num_unchecked = 0
        self._take_over()

    def relied_on(self) -> None:
        """A decision is taken by it. Asking alone changes nothing."""
        self._num_unchecked += 1

    def _learn(self, x: Sequence[float], seconds: float) -> None:
        if is_measurable(seconds):
            self._fit.learn(x, seconds)
            self._num_unchecked = 0
            self._take_over()

    def _doubt_s(self, x: Sequence[float]) -> float:
        """It grows with each decision while nothing is copied; and the first copies, or one far
        off, may have been stragglers."""
        expected_s = self._fit.expect(x)
        few = 1.0 if self._fit.is_puzzled else 1.0 / max(self._fit.num_fresh, 1)
        relative = DRIFT * self._num_unchecked + few * few
        return sqrt(self._fit.variance(x) + relative * expected_s * expected_s)

    def _take_over(self) -> None:
        self.num_measured = self._fit.num_learned


class LinkCost(_CopyCost):
    """How fast one link copies (`bytes_per_s`: long copies). Until it is measured, `num_measured`
    times, its speed is a cautious guess."""

    GUESS_BYTES_PER_S: Final = 5e8
    GUESS_LATENCY_S: Final = 0.0005

    def __init__(
        self, latency_s: float = GUESS_LATENCY_S, bytes_per_s: float = GUESS_BYTES_PER_S
    ) -> None:
        super().__init__((latency_s, 1.0 / bytes_per_s / _PER_BYTE))

    def measured(self, num_bytes: float, seconds: float) -> None:
        """Learn from a batch."""
        if num_bytes > 0:
            self._learn((1.0, num_bytes * _PER_BYTE), seconds)

    def seconds(self, num_bytes: float, queued_bytes: float = 0.0) -> float:
        """Expected seconds until `num_bytes` behind `queued_bytes` have arrived."""
        if num_bytes <= 0:
            return 0.0
        return self.latency_s + (queued_bytes + num_bytes) * self._s_per_byte

    def doubt_s(self, num_bytes: float, queued_bytes: float = 0.0) -> float:
        """Standard deviation of that."""
        if num_bytes <= 0:
            return 0.0
        return self._doubt_s((1.0, (queued_bytes + num_bytes) * _PER_BYTE))

    def _take_over(self) -> None:
        super()._take_over()
        self.latency_s, per_mb = self._fit.theta
        self._s_per_byte = per_mb * _PER_BYTE
        self.bytes_per_s = 1.0 / max(self._s_per_byte, 1e-18)


class LoadCost(_CopyCost):
    """How fast the GPU's worker copies a namespace's blocks into an inference engine's pages: from
    its own memory, and from the host's over the link. How small the pages are counts as much as the
    hardware, so each namespace has its own.

    One load may take blocks from both, and tells one time: they are fitted together. `tiers`: the
    numbers of those that the worker reads. Until a load was measured both cost what `link`, from
    host memory to the GPU's, does: nothing within the GPU is slower than that.
    """

    def __init__(self, tiers: Sequence[int], link: LinkCost) -> None:
        self._tiers, self._link = tuple(tiers), link
        super().__init__(self._as_the_link())

    def measured(self, bytes_from: Mapping[int, float], seconds: float) -> None:
        """Learn from a load of so many bytes from each tier."""
        if any(bytes_from.values()):
            self._follow_link()
            self._learn(self._features(bytes_from), seconds)

    def seconds(self, bytes_from: Mapping[int, float]) -> float:
        """Expected seconds of such a load."""
        self._follow_link()
        return self._fit.expect(self._features(bytes_from)) if any(bytes_from.values()) else 0.0

    def doubt_s(self, bytes_from: Mapping[int, float]) -> float:
        """Standard deviation of that."""
        self._follow_link()
        return self._doubt_s(self._features(bytes_from)) if any(bytes_from.values()) else 0.0

    @property
    def bytes_per_s(self) -> dict[int, float]:
        """From each tier, in long loads."""
        self._follow_link()
        speeds = self._fit.theta[1:]
        return {
            tier: 1.0 / max(per_mb * _PER_BYTE, 1e-18)
            for tier, per_mb in zip(self._tiers, speeds, strict=True)
        }

    def _as_the_link(self) -> list[float]:
        per_mb = 1.0 / self._link.bytes_per_s / _PER_BYTE
        return [self._link.latency_s, *(per_mb for _ in self._tiers)]

    def _follow_link(self) -> None:
        """While no load was measured: the link may have been measured since it was asked last."""
        if not self.num_measured:
            self._fit = Fit(self._as_the_link(), OF_LINKS)

    def _features(self, bytes_from: Mapping[int, float]) -> list[float]:
        return [1.0, *(bytes_from.get(tier, 0.0) * _PER_BYTE for tier in self._tiers)]

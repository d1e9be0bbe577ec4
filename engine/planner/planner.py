"""Decides per hit: reload, recompute, or reload a part.

A hit is a sequence of runs, each in one tier. Reloading k runs and recomputing the rest takes

    reload(k) + prefill(n - tokens(k), context = tokens(k))

Within a run the reload grows linearly and the remaining prefill is concave in the cut, so the best
cut is at a run's end: only those are compared. A tie is recomputed, since that cannot fail, and so
is a hit whose gain is small against the estimates' uncertainty. Hits like one that was reloaded
last time are reloaded until that is slower, so that noise does not flip the decision. Now and then
the other choice is tried, within a budget of time (`exploration`). Pure; the caller passes the
clock and the randomness.

                 ┌── reload ──┐┌───────── recompute ─────────┐
    prompt       [ run 0 hbm ][ run 1 disk ][ new tokens      ]
    cut points   0            1             2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import hypot
from typing import Final, Literal

import msgspec

from hicache.engine.plan import Forecast, ReloadDecision, TierRun

_WHY_RELOAD = {
    "faster": "against {recompute} to recompute everything",
    "mode": "because the planner's mode is always_reload",
    "unmeasured": "since no prefill of this model has been measured yet",
    "exploration": "to learn what it takes: {recompute} to recompute everything looked no slower",
}
_WHY_RECOMPUTE = {
    "slower": "the best reload would take {best}",
    "tie": "the best reload ({best}) is not clearly faster",
    "uncertain": "the best reload ({best}) is not faster for certain",
    "exploration": "to learn what it takes, although the best reload would take {best}",
    "mode": "the planner's mode is always_recompute",
}

Mode = Literal["measured", "always_reload", "always_recompute"]


TRY_SHARE: Final = 0.25
"""Of the decisions that could explore, this share do: not all of a series of similar requests."""
LEAST_CREDIT, MOST_CREDIT = 0.01, 0.3
"""Limits of the time for exploration, as a share of one request's prefill."""
FAR: Final = 0.7
"""A reload that takes less than this share of recomputing is clearly faster."""
WORTH_WAITING: Final = 0.1
_MAX_KINDS: Final = 4096


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """`recompute_band`: gains up to this share are ties; gains up to `doubt_band` must exceed their
    standard deviation. `exploration`: the share of all time that may be spent on trying the other
    choice, to keep estimates up to date. A load may take (1 + `deadline_share`) times its estimate,
    and at least `min_deadline_s`."""

    mode: Mode = "measured"
    recompute_band: float = 0.05
    doubt_band: float = 0.10
    exploration: float = 0.0
    deadline_share: float = 1.0
    min_deadline_s: float = 0.1


class Hit(msgspec.Struct):
    """A hit to decide on. `reload_s[k]`: expected seconds until the first k+1 runs are in the
    inference engine; `prefill_s(n, c)`: expected seconds to prefill n tokens on context c.

    `is_measured` is False while `prefill_s` is only a guess: then a hit is reloaded, which also
    gives the first measurement of a reload. `skipped_tokens` at the front are in the inference
    engine already; runs begin after them. `reload_doubt_s` and `prefill_doubt_s(n, c, n', c')` are
    the standard deviations of a reload and of the difference between two prefills; empty and None
    stand for 0. `start_s`: seconds until a reload's first block. `by_worker`: the GPU's worker does
    the last copy.
    """

    prompt_tokens: int
    block_tokens: int
    skipped_tokens: int
    runs: Sequence[TierRun]
    reload_s: Sequence[float]
    prefill_s: Callable[[float, float], float]
    is_measured: bool = True
    reload_doubt_s: Sequence[float] = ()
    prefill_doubt_s: Callable[[float, float, float, float], float] | None = None
    start_s: float = 0.0
    namespace: int = 0
    by_worker: bool = False


class _Cut(msgspec.Struct, frozen=True):
    """Reload up to and including `run`, as far as `end_tokens` of the prompt."""

    run: int
    end_tokens: int
    total_s: float
    reload_s: float
    prefill_s: float


class Planner:
    """Chooses the cut. `rng()` returns a float in [0, 1). `num_tried`: decisions that explored;
    `tried_s`: the expected cost of these in all."""

    def __init__(self, settings: PlannerSettings, rng: Callable[[], float]) -> None:
        self.settings = settings
        self.num_tried = 0
        self.tried_s = 0.0
        self._rng = rng
        self._credit = MOST_CREDIT
        self._reloaded: set[tuple[int, str, int]] = set()

    def decide(self, hit: Hit) -> ReloadDecision:
        """How much of the hit to reload, and why. No runs: recompute."""
        context = hit.skipped_tokens
        recompute_s = hit.prefill_s(hit.prompt_tokens - context, context)
        if not hit.runs:
            return ReloadDecision(
                "recompute",
                0,
                "no_hit",
                0.0,
                recompute_s,
                recompute_s,
                partial(_explain_no_hit, hit, recompute_s),
            )
        mode = self.settings.mode
        best = _best_cut(hit, takes_all=self._takes_all(hit))
        if mode == "always_reload":
            return _reload(hit, best, recompute_s, "mode")
        if mode == "always_recompute":
            return _recompute(hit, best, recompute_s, "mode")
        if not hit.is_measured:
            return _reload(hit, best, recompute_s, "unmeasured")
        is_far = best.total_s < FAR * recompute_s
        reason = "" if is_far else self._why_not(hit, best, recompute_s)
        if self.settings.exploration:
            credit = self._credit + self.settings.exploration
            self._credit = credit if credit < MOST_CREDIT else MOST_CREDIT
            if credit >= LEAST_CREDIT and self._rng() < TRY_SHARE:
                tried = self._try(hit, best, recompute_s, is_reload=not reason)
                if tried is not None:
                    return tried
        if reason:
            return _recompute(hit, best, recompute_s, reason)
        return _reload(hit, best, recompute_s, "faster")

    def forecast(self, hit: Hit) -> Forecast:
        """The expected times of a hit. Changes nothing."""
        context = hit.skipped_tokens
        recompute_s = hit.prefill_s(hit.prompt_tokens - context, context)
        if hit.runs and self.settings.mode != "always_recompute":
            takes_all = self._takes_all(hit)
            best = _best_cut(hit, takes_all=takes_all)
            if takes_all or best.total_s < recompute_s:
                blocks = (best.end_tokens - context) // hit.block_tokens
                return Forecast(blocks, best.reload_s, best.prefill_s, recompute_s)
        return Forecast(0, 0.0, recompute_s, recompute_s)

    def _takes_all(self, hit: Hit) -> bool:
        """Whether everything is reloaded without a comparison."""
        return self.settings.mode == "always_reload" or not hit.is_measured

    def _why_not(self, hit: Hit, best: _Cut, recompute_s: float) -> str:
        """The reason against reloading; "" to reload."""
        kind = hit.namespace, hit.runs[best.run].tier, best.end_tokens.bit_length()
        gain = 1.0 - best.total_s / recompute_s if recompute_s > 0 else 0.0
        if kind in self._reloaded:
            if gain > 0.0:
                return ""
            self._reloaded.discard(kind)
        settings = self.settings
        if gain <= settings.recompute_band:
            return "slower" if gain < 0.0 else "tie"
        if gain <= settings.doubt_band and gain * recompute_s < _doubt_s(hit, best):
            return "uncertain"
        if len(self._reloaded) >= _MAX_KINDS:
            self._reloaded.clear()
        self._reloaded.add(kind)
        return ""

    def _try(
        self, hit: Hit, best: _Cut, recompute_s: float, is_reload: bool
    ) -> ReloadDecision | None:
        """Explore: the other choice, if it may be the faster one within its uncertainty, and as
        large a part of it as the credit allows. None if not."""
        usual_s = best.total_s if is_reload else recompute_s
        band_s = 0.0 if is_reload else self.settings.recompute_band * recompute_s
        other_s = recompute_s if is_reload else best.total_s
        if other_s - _doubt_s(hit, best) >= usual_s - band_s:
            return None
        most = (best.end_tokens - hit.skipped_tokens) // hit.block_tokens
        for divisor in (1, 2, 4, 8, 16, 32):
            part = most // divisor
            if not part:
                return None
            blocks = most - part if is_reload else part
            cut = _cut_at(hit, blocks)
            if cut.total_s - usual_s > self._credit * usual_s:
                continue
            self.num_tried += 1
            self.tried_s += max(cut.total_s - usual_s, 0.0)
            self._credit -= max(cut.total_s / usual_s - 1.0, LEAST_CREDIT)
            if not blocks:
                return _recompute(hit, best, recompute_s, "exploration")
            return _reload(hit, cut, recompute_s, "exploration")
        return None


def load_limit_s(
    settings: PlannerSettings, expected_s: float, doubt_s: float, saves_s: float
) -> float:
    """The deadline of a load: 1.5 times the expected seconds plus two standard deviations, at most
    (1 + deadline_share) times the expected seconds; at least min_deadline_s, and at least a tenth
    of the prefill it saves, since that much waiting is cheap compared with the prefill."""
    more_s = min(0.5 * expected_s + 2.0 * doubt_s, settings.deadline_share * expected_s)
    return max(expected_s + more_s, settings.min_deadline_s, WORTH_WAITING * saves_s)


def _doubt_s(hit: Hit, cut: _Cut) -> float:
    """Standard deviation of the cut's gain over recomputing everything."""
    reload_s = hit.reload_doubt_s[cut.run] if hit.reload_doubt_s else 0.0
    if hit.prefill_doubt_s is None:
        return reload_s
    skipped, end = hit.skipped_tokens, cut.end_tokens
    all_tokens = hit.prompt_tokens
    return hypot(
        reload_s, hit.prefill_doubt_s(all_tokens - skipped, skipped, all_tokens - end, end)
    )


def _best_cut(hit: Hit, *, takes_all: bool) -> _Cut:
    """The cut at a run's end with the least expected time, or (`takes_all`) the last one."""
    context = hit.skipped_tokens
    best = None
    for number, run in enumerate(hit.runs):
        context += run.num_blocks * hit.block_tokens
        prefill_s = hit.prefill_s(hit.prompt_tokens - context, context)
        reload_s = hit.reload_s[number]
        total_s = reload_s + prefill_s
        if best is None or total_s < best.total_s or takes_all:
            best = _Cut(number, context, total_s, reload_s, prefill_s)
    assert best is not None
    return best


def _cut_at(hit: Hit, blocks: int) -> _Cut:
    """The cut after this many blocks, possibly within a run."""
    end = hit.skipped_tokens + blocks * hit.block_tokens
    prefill_s = hit.prefill_s(hit.prompt_tokens - end, end)
    if not blocks:
        return _Cut(-1, end, prefill_s, 0.0, prefill_s)
    before, before_s = 0, hit.start_s
    for number, run in enumerate(hit.runs):
        if blocks <= before + run.num_blocks:
            break
        before, before_s = before + run.num_blocks, hit.reload_s[number]
    share = (blocks - before) / hit.runs[number].num_blocks
    reload_s = before_s + share * (hit.reload_s[number] - before_s)
    return _Cut(number, end, reload_s + prefill_s, reload_s, prefill_s)


def _reload(hit: Hit, cut: _Cut, recompute_s: float, reason: str) -> ReloadDecision:
    is_last = cut.run == len(hit.runs) - 1
    return ReloadDecision(
        "reload" if is_last and cut.reload_s == hit.reload_s[-1] else "partial",
        (cut.end_tokens - hit.skipped_tokens) // hit.block_tokens,
        reason,
        cut.reload_s,
        cut.prefill_s,
        recompute_s,
        partial(_explain_reload, hit, cut, recompute_s, reason),
    )


def _recompute(hit: Hit, best: _Cut, recompute_s: float, reason: str) -> ReloadDecision:
    explain = partial(_explain_recompute, hit, best, recompute_s, reason)
    return ReloadDecision("recompute", 0, reason, 0.0, recompute_s, recompute_s, explain)


def _explain_no_hit(hit: Hit, recompute_s: float) -> str:
    return (
        f"Nothing of these {hit.prompt_tokens} tokens is held; "
        f"prefill is expected to take {_ms(recompute_s)}."
    )


def _explain_reload(hit: Hit, cut: _Cut, recompute_s: float, reason: str) -> str:
    sources = " and ".join(dict.fromkeys(run.tier for run in hit.runs[: cut.run + 1]))
    why = _WHY_RELOAD[reason].format(recompute=_ms(recompute_s))
    return (
        f"Reload {cut.end_tokens - hit.skipped_tokens} tokens from {sources} "
        f"({_ms(cut.reload_s)}) and prefill {hit.prompt_tokens - cut.end_tokens} "
        f"({_ms(cut.prefill_s)}), {why}."
    )


def _explain_recompute(hit: Hit, best: _Cut, recompute_s: float, reason: str) -> str:
    why = _WHY_RECOMPUTE[reason].format(best=_ms(best.total_s))
    return f"Recompute all {hit.prompt_tokens} tokens ({_ms(recompute_s)}): {why}."


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"

"""Reload, recompute, or reload a part: decided per hit.

The hit is a row of runs, each in one tier. Reloading k runs and recomputing the rest takes

    reload(k) + prefill(n - tokens(k), context = tokens(k))

Within a run the reload grows linearly and the prefill that remains is concave in the cut, so the
best cut is at a run's end: only those are compared. Ties, within `recompute_band`, go to
recomputing, which cannot fail. Pure; the clock and the randomness are the caller's.

                 ┌── reload ──┐┌───────── recompute ─────────┐
    prompt       [ run 0 hbm ][ run 1 disk ][ new tokens      ]
    cut points   0            1             2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from hicache.engine.plan import Decision, TierRun

_WHY_RELOAD = {
    "faster": "against {recompute} to recompute everything",
    "mode": "because the planner's mode is always_reload",
    "unmeasured": "since no prefill of this model has been measured yet",
    "exploration": "to keep the estimates alive, although recomputing looked no slower",
}
_WHY_RECOMPUTE = {
    "slower": "the best reload would take {best}",
    "tie": "the best reload ({best}) is not clearly faster",
    "mode": "the planner's mode is always_recompute",
}

Mode = Literal["measured", "always_reload", "always_recompute"]


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """`exploration`: the share of recompute decisions that reload all the same, to keep the
    estimates alive."""

    mode: Mode = "measured"
    recompute_band: float = 0.05
    exploration: float = 0.0


@dataclass(slots=True)
class Hit:
    """What there is to decide on. `reload_s[k]`: expected seconds until the first k+1 runs are in
    the engine; `prefill_s(n, c)`: expected seconds to prefill n tokens on context c.

    `is_measured` is False while `prefill_s` is only a guess: then there is nothing to compare with,
    and a hit is reloaded, which also brings the first measurement of the reload.
    `skipped_tokens` at the front are in the engine already; runs begin after them.
    """

    prompt_tokens: int
    block_tokens: int
    skipped_tokens: int
    runs: Sequence[TierRun]
    reload_s: Sequence[float]
    prefill_s: Callable[[float, float], float]
    is_measured: bool = True


@dataclass(slots=True)
class _Cut:
    """Reload up to and including `run`, which ends at `end_tokens` of the prompt."""

    run: int
    end_tokens: int
    total_s: float
    prefill_s: float


class Planner:
    """Chooses the cut. `rng()` gives a float in [0, 1)."""

    def __init__(self, settings: PlannerSettings, rng: Callable[[], float]) -> None:
        self.settings = settings
        self._rng = rng

    def decide(self, hit: Hit) -> Decision:
        """How much of the hit to reload, and why. No runs: recompute."""
        context = hit.skipped_tokens
        recompute_s = hit.prefill_s(hit.prompt_tokens - context, context)
        if not hit.runs:
            return Decision(
                "recompute",
                0,
                "no_hit",
                0.0,
                recompute_s,
                recompute_s,
                partial(_tell_no_hit, hit, recompute_s),
            )
        mode = self.settings.mode
        takes_all = mode == "always_reload" or not hit.is_measured
        best = None
        for number, run in enumerate(hit.runs):
            context += run.num_blocks * hit.block_tokens
            prefill_s = hit.prefill_s(hit.prompt_tokens - context, context)
            total_s = hit.reload_s[number] + prefill_s
            if best is None or total_s < best.total_s or takes_all:
                best = _Cut(number, context, total_s, prefill_s)
        assert best is not None
        if mode == "always_reload":
            return self._reload(hit, best, recompute_s, "mode")
        if mode == "always_recompute":
            return self._recompute(hit, best, recompute_s, "mode")
        if not hit.is_measured:
            return self._reload(hit, best, recompute_s, "unmeasured")
        if best.total_s < recompute_s * (1.0 - self.settings.recompute_band):
            return self._reload(hit, best, recompute_s, "faster")
        if self.settings.exploration and self._rng() < self.settings.exploration:
            return self._reload(hit, best, recompute_s, "exploration")
        reason = "slower" if best.total_s > recompute_s else "tie"
        return self._recompute(hit, best, recompute_s, reason)

    def _reload(self, hit: Hit, cut: _Cut, recompute_s: float, reason: str) -> Decision:
        return Decision(
            "reload" if cut.run == len(hit.runs) - 1 else "partial",
            (cut.end_tokens - hit.skipped_tokens) // hit.block_tokens,
            reason,
            hit.reload_s[cut.run],
            cut.prefill_s,
            recompute_s,
            partial(_tell_reload, hit, cut, recompute_s, reason),
        )

    def _recompute(self, hit: Hit, best: _Cut, recompute_s: float, reason: str) -> Decision:
        told = partial(_tell_recompute, hit, best, recompute_s, reason)
        return Decision("recompute", 0, reason, 0.0, recompute_s, recompute_s, told)


def _tell_no_hit(hit: Hit, recompute_s: float) -> str:
    return (
        f"Nothing of these {hit.prompt_tokens} tokens is held; "
        f"prefill is expected to take {_ms(recompute_s)}."
    )


def _tell_reload(hit: Hit, cut: _Cut, recompute_s: float, reason: str) -> str:
    sources = " and ".join(dict.fromkeys(run.tier for run in hit.runs[: cut.run + 1]))
    why = _WHY_RELOAD[reason].format(recompute=_ms(recompute_s))
    return (
        f"Reload {cut.end_tokens - hit.skipped_tokens} tokens from {sources} "
        f"({_ms(hit.reload_s[cut.run])}) and prefill {hit.prompt_tokens - cut.end_tokens} "
        f"({_ms(cut.prefill_s)}), {why}."
    )


def _tell_recompute(hit: Hit, best: _Cut, recompute_s: float, reason: str) -> str:
    why = _WHY_RECOMPUTE[reason].format(best=_ms(best.total_s))
    return f"Recompute all {hit.prompt_tokens} tokens ({_ms(recompute_s)}): {why}."


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"

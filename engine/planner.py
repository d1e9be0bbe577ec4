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
from typing import Literal

from hicache.engine.plan import Decision, DecisionName, TierRun

_WHY_RELOAD = {
    "mode": "because the planner's mode is always_reload",
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

    `skipped_tokens` at the front are in the engine already; runs begin after them.
    """

    prompt_tokens: int
    block_tokens: int
    skipped_tokens: int
    runs: Sequence[TierRun]
    reload_s: Sequence[float]
    prefill_s: Callable[[float, float], float]


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
                f"Nothing of these {hit.prompt_tokens} tokens is held; "
                f"prefill is expected to take {_ms(recompute_s)}.",
                0.0,
                recompute_s,
                recompute_s,
            )
        totals = []
        ends = []
        for run, reload_s in zip(hit.runs, hit.reload_s, strict=True):
            context += run.num_blocks * hit.block_tokens
            ends.append(context)
            totals.append(reload_s + hit.prefill_s(hit.prompt_tokens - context, context))
        best = min(range(len(totals)), key=totals.__getitem__)
        if self.settings.mode == "always_reload":
            return self._reload(hit, len(totals) - 1, totals, ends, recompute_s, "mode")
        if self.settings.mode == "always_recompute":
            return self._recompute(hit, best, totals, recompute_s, "mode")
        if totals[best] < recompute_s * (1.0 - self.settings.recompute_band):
            return self._reload(hit, best, totals, ends, recompute_s, "faster")
        if self.settings.exploration and self._rng() < self.settings.exploration:
            return self._reload(hit, best, totals, ends, recompute_s, "exploration")
        reason = "slower" if totals[best] > recompute_s else "tie"
        return self._recompute(hit, best, totals, recompute_s, reason)

    def _reload(
        self,
        hit: Hit,
        cut: int,
        totals: Sequence[float],
        ends: Sequence[int],
        recompute_s: float,
        reason: str,
    ) -> Decision:
        name: DecisionName = "reload" if cut == len(totals) - 1 else "partial"
        reload_s = hit.reload_s[cut]
        blocks = sum(run.num_blocks for run in hit.runs[: cut + 1])
        tokens = blocks * hit.block_tokens
        rest = hit.prompt_tokens - ends[cut]
        sources = " and ".join(dict.fromkeys(run.tier for run in hit.runs[: cut + 1]))
        if reason == "faster":
            why = f"against {_ms(recompute_s)} to recompute everything"
        else:
            why = _WHY_RELOAD[reason]
        sentence = (
            f"Reload {tokens} tokens from {sources} ({_ms(reload_s)}) and prefill {rest} "
            f"({_ms(totals[cut] - reload_s)}), {why}."
        )
        return Decision(
            name, blocks, reason, sentence, reload_s, totals[cut] - reload_s, recompute_s
        )

    def _recompute(
        self, hit: Hit, best: int, totals: Sequence[float], recompute_s: float, reason: str
    ) -> Decision:
        why = _WHY_RECOMPUTE[reason].format(best=_ms(totals[best]))
        sentence = f"Recompute all {hit.prompt_tokens} tokens ({_ms(recompute_s)}): {why}."
        return Decision("recompute", 0, reason, sentence, 0.0, recompute_s, recompute_s)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"

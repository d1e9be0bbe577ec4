"""The planner's decisions on hits: the predicted times, the actual times, and the regret.

A decision is recorded once its reply has been sent. The reload's actual time comes with the end of
the lease, the prefill's with the inference engine's measurement of a step of exactly that size.
Then the regret is computed: the time taken, less the estimated time of the best other cut
(recomputing everything is one), by the current estimates.
Keeps the last decisions and totals since the start. Owned by the daemon's one loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import hypot, log
from typing import Any, Final

from hicache.engine.plan import Observe, ReloadDecision
from hicache.engine.planner.cost import PrefillCost
from hicache.engine.planner.fit import RELATIVE_NOISE
from hicache.engine.planner.planner import Hit

KEPT: Final = 256
PREFILL: Final = "prefill"
"""In the place of a tier's name: the errors of the prefill estimate."""
_MAX_TOTALS: Final = 4096


@dataclass(slots=True)
class Record:
    """One decision. Actual seconds are None while unknown. `regret_s`: how much longer it took than
    the best other cut would have; None while unknown."""

    number: int
    now_s: float
    hit: Hit
    decision: ReloadDecision
    blocks_came: int | None = None
    reload_s: float | None = None
    prefill_s: float | None = None
    taken_s: float = 0.0
    regret_s: float | None = None

    @property
    def last_run(self) -> int:
        """The number of the run that the reload ends in; the hit's last one for a recompute."""
        end = 0
        for number, run in enumerate(self.hit.runs):
            end += run.num_blocks
            if end >= self.decision.reload_blocks > 0:
                return number
        return len(self.hit.runs) - 1

    @property
    def context_tokens(self) -> int:
        """The context of the prefill: as decided, and once loaded, as actually loaded."""
        came = self.decision.reload_blocks if self.blocks_came is None else self.blocks_came
        return self.hit.skipped_tokens + came * self.hit.block_tokens

    @property
    def prefill_tokens(self) -> int:
        return self.hit.prompt_tokens - self.context_tokens


@dataclass(slots=True)
class Errors:
    """Sums over predictions and actual times. `within`: predictions off by at most two standard
    deviations of estimate and noise; about 95 % of them if `doubt_s` is right."""

    num: int = 0
    abs_error_s: float = 0.0
    relative_error: float = 0.0
    log_ratio: float = 0.0
    within: int = 0

    def add(self, predicted_s: float, actual_s: float, doubt_s: float) -> None:
        error_s = abs(predicted_s - actual_s)
        self.num += 1
        self.abs_error_s += error_s
        self.relative_error += error_s / max(actual_s, 1e-9)
        self.log_ratio += log(max(actual_s, 1e-9) / max(predicted_s, 1e-9))
        self.within += error_s <= 2.0 * hypot(doubt_s, RELATIVE_NOISE * predicted_s)

    def summary(self) -> dict[str, Any]:
        """For `stats`. `bias`: the mean of log(actual / predicted), above 0 where predictions are
        too short."""
        num = max(self.num, 1)
        return {
            "judged": self.num,
            "mean_abs_error_s": self.abs_error_s / num,
            "mean_relative_error": self.relative_error / num,
            "bias": self.log_ratio / num,
            "within_doubt": self.within / num,
        }


@dataclass(slots=True)
class Regrets:
    """Over all judged decisions: the time taken, and what the best other cut would have saved."""

    num: int = 0
    num_wrong: int = 0
    regret_s: float = 0.0
    taken_s: float = 0.0


@dataclass(slots=True)
class DecisionLog:
    """`reload_again(hit, blocks)`: expected seconds to reload the first `blocks` of a hit by the
    current estimates, behind the queue of the time of the decision."""

    prefill: list[PrefillCost]
    reload_again: Callable[[Hit, int], float]
    rows: deque[Record] = field(default_factory=lambda: deque(maxlen=KEPT))
    errors: dict[tuple[int, str], Errors] = field(default_factory=dict)
    regrets: Regrets = field(default_factory=Regrets)
    num_cut_short: int = 0
    _of_lease: dict[int, Record] = field(default_factory=dict)
    _awaited: dict[tuple[int, int], Record] = field(default_factory=dict)
    _serial: int = 0

    def decided(self, hit: Hit, decision: ReloadDecision, lease: int, now_s: float) -> None:
        """Record a decision; `lease` is 0 where nothing is reloaded."""
        self._serial += 1
        record = Record(self._serial, now_s, hit, decision)
        self.rows.append(record)
        if lease:
            self._of_lease[lease] = record
        else:
            self._await(record)

    def reloaded(self, lease: int, blocks_came: int, seconds: float | None) -> None:
        """A lease has ended: `blocks_came` of its blocks were loaded within `seconds` (None:
        unknown)."""
        record = self._of_lease.pop(lease, None)
        if record is None:
            return
        record.blocks_came, record.reload_s = blocks_came, seconds
        is_cut_short = blocks_came < record.decision.reload_blocks
        self.num_cut_short += is_cut_short
        if seconds is not None:
            if not is_cut_short:
                hit, run = record.hit, record.last_run
                doubt_s = hit.reload_doubt_s[run] if hit.reload_doubt_s else 0.0
                errors = self._errors(hit.namespace, hit.runs[run].tier)
                errors.add(record.decision.reload_s, seconds, doubt_s)
            self._judge(record)
        self._await(record)

    def dropped(self, lease: int) -> None:
        """A lease has ended without a fetch: nothing was measured."""
        self._of_lease.pop(lease, None)

    def prefilled(self, step: Observe) -> None:
        """A step was measured. Call before the estimate learns from it."""
        cost, n, nc = self.prefill[step.namespace], step.sum_n, step.sum_nc
        predicted_s, doubt_s = cost.predict(step.num_requests, n, nc, step.decode_tokens)
        self._errors(step.namespace, PREFILL).add(predicted_s, step.seconds, doubt_s)
        record = self._awaited.get((step.namespace, int(n)))
        is_alone = step.num_requests == 1 and not step.decode_tokens
        if record is None or not is_alone or nc != n * record.context_tokens + n * n / 2:
            return
        del self._awaited[step.namespace, int(n)]
        record.prefill_s = step.seconds
        if record.reload_s is not None or not record.decision.reload_blocks:
            self._judge(record)

    def last(self, count: int) -> Iterator[Record]:
        """The last `count` decisions, newest first."""
        for number, record in enumerate(reversed(self.rows)):
            if number == count:
                return
            yield record

    def reload_errors(self) -> Errors:
        """The errors of all reloads, from all tiers together."""
        total = Errors()
        for (_, what), errors in self.errors.items():
            if what != PREFILL:
                total.num += errors.num
                total.abs_error_s += errors.abs_error_s
                total.relative_error += errors.relative_error
                total.log_ratio += errors.log_ratio
                total.within += errors.within
        return total

    def forget(self, namespace: int) -> None:
        """Delete a namespace's rows and errors: its number will be used for another namespace."""
        for key in [key for key in self.errors if key[0] == namespace]:
            del self.errors[key]
        for record in [record for record in self.rows if record.hit.namespace == namespace]:
            self.rows.remove(record)

    def _await(self, record: Record) -> None:
        if len(self._awaited) >= KEPT:
            del self._awaited[next(iter(self._awaited))]
        self._awaited[record.hit.namespace, record.prefill_tokens] = record

    def _errors(self, namespace: int, what: str) -> Errors:
        errors = self.errors.get((namespace, what))
        if errors is None:
            if len(self.errors) >= _MAX_TOTALS:
                del self.errors[next(iter(self.errors))]
            errors = self.errors[namespace, what] = Errors()
        return errors

    def _judge(self, record: Record) -> None:
        """Compute the regret: measured times of the cut taken, current estimates of the others."""
        hit, cost = record.hit, self.prefill[record.hit.namespace]
        rest_s = record.prefill_s
        if rest_s is None:
            rest_s = cost.seconds(record.prefill_tokens, record.context_tokens)
        taken_s = (record.reload_s or 0.0) + rest_s
        other_s, end = taken_s, 0
        for num_blocks in (0, *(run.num_blocks for run in hit.runs)):
            end += num_blocks
            if end == record.decision.reload_blocks:
                continue
            context = hit.skipped_tokens + end * hit.block_tokens
            prefill_s = cost.seconds(hit.prompt_tokens - context, context)
            reload_s = self.reload_again(hit, end) if end else 0.0
            other_s = min(other_s, reload_s + prefill_s)
        regrets = self.regrets
        if record.regret_s is None:
            regrets.num += 1
        else:  # judged before with fewer measurements: replace that result
            regrets.regret_s -= record.regret_s
            regrets.num_wrong -= record.regret_s > 0
            regrets.taken_s -= record.taken_s
        record.regret_s, record.taken_s = max(taken_s - other_s, 0.0), taken_s
        regrets.regret_s += record.regret_s
        regrets.num_wrong += record.regret_s > 0
        regrets.taken_s += taken_s

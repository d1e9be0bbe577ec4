"""The planner's own record: what it foresaw for each decision on a hit, and what came of it.

A decision is recorded once its answer has left. What the reload took comes with the lease's end,
what the prefill took with the inference engine's measurement of a step of just that size. Then the
decision is judged in hindsight: against what the best other cut, recomputing everything among them,
would take by what is known by now.
Owned by the daemon's one loop; a row of the last decisions, and totals that never go.
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
"""What stands in a tier's place for the other estimate."""
_MAX_TOTALS: Final = 4096


@dataclass(slots=True)
class Record:
    """One decision. Actual seconds are None while they are not known; `regret_s` is how much longer
    it took than the best other way would have, None while that cannot be said."""

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
        """The run that the reload ends in; of what is recomputed, the last one of the hit."""
        end = 0
        for number, run in enumerate(self.hit.runs):
            end += run.num_blocks
            if end >= self.decision.reload_blocks > 0:
                return number
        return len(self.hit.runs) - 1

    @property
    def context_tokens(self) -> int:
        """What is left to prefill stands on so many tokens: as decided, then as it came."""
        came = self.decision.reload_blocks if self.blocks_came is None else self.blocks_came
        return self.hit.skipped_tokens + came * self.hit.block_tokens

    @property
    def prefill_tokens(self) -> int:
        return self.hit.prompt_tokens - self.context_tokens


@dataclass(slots=True)
class Errors:
    """How predictions compare with what came. `within`: those not further off than two standard
    deviations of estimate and noise, about 95 % of them if the doubt is right."""

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
        """`bias` above 0: things take so much longer than foreseen."""
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
    """What judged decisions took, and how much of that the best other way would have saved."""

    num: int = 0
    num_wrong: int = 0
    regret_s: float = 0.0
    taken_s: float = 0.0


@dataclass(slots=True)
class DecisionLog:
    """`reload_again(hit, blocks)`: what reloading so much of a hit would take by what is known now,
    behind the queue of then."""

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
        """A hit was decided on."""
        self._serial += 1
        record = Record(self._serial, now_s, hit, decision)
        self.rows.append(record)
        if lease:
            self._of_lease[lease] = record
        else:
            self._await(record)

    def reloaded(self, lease: int, blocks_came: int, seconds: float | None) -> None:
        """The lease has ended: so many of its blocks had come, after so long (None: not known)."""
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
        """The lease has ended without having been fetched."""
        self._of_lease.pop(lease, None)

    def prefilled(self, step: Observe) -> None:
        """A step was measured, and is not yet learned from."""
        cost, n, nc = self.prefill[step.namespace], step.sum_n, step.sum_nc
        predicted_s, doubt_s = cost.foreseen(step.num_requests, n, nc, step.decode_tokens)
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
        """The youngest first."""
        for number, record in enumerate(reversed(self.rows)):
            if number == count:
                return
            yield record

    def reload_errors(self) -> Errors:
        """Of all reloads, whatever the tier."""
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
        """Its number will mean another one."""
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
        """What was measured of the way taken, and what is foreseen now of every other one."""
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
        else:  # judged before, by less
            regrets.regret_s -= record.regret_s
            regrets.num_wrong -= record.regret_s > 0
            regrets.taken_s -= record.taken_s
        record.regret_s, record.taken_s = max(taken_s - other_s, 0.0), taken_s
        regrets.regret_s += record.regret_s
        regrets.num_wrong += record.regret_s > 0
        regrets.taken_s += taken_s

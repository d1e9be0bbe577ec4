"""The rows of one check. Each row is written at once, so that a crash leaves the rows before it.

A check is a function of one `Check`, run in its own process. Its steps are as independent as
possible: a step that fails is a row, and the next step begins.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from hicache.bench.gpu_check.stand_in import StandIn

Status = Literal["ok", "below", "FAILED", "told", "skipped", "dry"]
"""`told`: a fact without a target. `below`: works, but misses its target. `dry`: not measured."""


@dataclass(frozen=True, slots=True)
class Row:
    """One result. `figures` are for the JSON: plain numbers, units in names."""

    check: str
    what: str
    status: Status
    value: str = ""
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)


class Skipped(Exception):
    """Raised in a step that cannot be done here, with the reason."""


@dataclass(slots=True)
class CheckStep:
    """The result of a step, set by the step."""

    value: str = ""
    status: Status = "ok"
    figures: dict[str, Any] = field(default_factory=dict)

    def judge(self, is_met: bool, value: str, **figures: Any) -> None:
        """Compare a figure with its target."""
        self.status, self.value = ("ok" if is_met else "below"), value
        self.figures |= figures


class Check:
    """`folder`: for logs. In a dry run `cupy` is the stand-in, and figures are not judged."""

    def __init__(self, name: str, report: Path, folder: Path, is_dry: bool, is_small: bool) -> None:
        self.name, self.folder, self.is_dry, self.is_small = name, folder, is_dry, is_small
        self._report = report
        self._cupy: Any = StandIn() if is_dry else None

    @property
    def cupy(self) -> Any:
        if self._cupy is None:
            import cupy

            self._cupy = cupy
        return self._cupy

    def note(self, what: str, value: object, **figures: Any) -> None:
        """Write a row with a fact."""
        self._add(Row(self.name, what, "told", str(value), 0.0, figures))

    @contextmanager
    def step(self, what: str) -> Iterator[CheckStep]:
        """Write a row in every case; after an exception the check goes on."""
        step, started_s = CheckStep(), time.perf_counter()
        print(f"{self.name}: {what}", flush=True)
        try:
            yield step
        except Skipped as reason:
            step.status, step.value = "skipped", str(reason)
        except Exception as error:  # the boundary: a failed step is a row
            traceback.print_exc()
            step.status, step.value = "FAILED", f"{type(error).__name__}: {error}"
        if self.is_dry and step.status in ("ok", "below") and step.figures:
            step.status = "dry"
        seconds = time.perf_counter() - started_s
        self._add(Row(self.name, what, step.status, step.value, seconds, step.figures))

    def _add(self, row: Row) -> None:
        line = json.dumps(asdict(row))
        print(line, flush=True)
        with self._report.open("a") as report:
            report.write(line + "\n")

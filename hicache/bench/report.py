"""How a benchmark tells: rows as a table for people, or as JSON; progress on stderr."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

MIN_WIDTH = 100


class BenchError(click.ClickException):
    """The benchmark cannot go on; the message is a sentence."""


@dataclass(frozen=True, slots=True)
class RpcRow:
    """One kind of call: microseconds of `n` calls, beside a bare echo of the same payload."""

    op: str
    tokens: int
    p50_us: float
    p99_us: float
    floor_p50_us: float
    ratio: float
    n: int

    @classmethod
    def of(cls, op: str, tokens: int, seconds: list[float], floor: list[float]) -> RpcRow:
        p50, p99 = np.percentile(seconds, (50, 99)) * 1e6
        floor_p50 = float(np.median(floor)) * 1e6
        ratio = round(float(p50) / floor_p50, 3)
        p50_us, p99_us = round(float(p50), 2), round(float(p99), 2)
        return cls(op, tokens, p50_us, p99_us, round(floor_p50, 2), ratio, len(seconds))


@dataclass(frozen=True, slots=True)
class StoreRow:
    """Blocks per second in GB (10⁹ bytes), from the median of `n` calls, beside a bare copy."""

    op: str
    value_bytes: int
    blocks_per_call: int
    gb_s: float
    floor_gb_s: float
    ratio: float
    n: int

    @classmethod
    def of(
        cls, op: str, value_bytes: int, blocks: int, seconds: list[float], floor: list[float]
    ) -> StoreRow:
        total = value_bytes * blocks / 1e9
        speed, floor_speed = total / float(np.median(seconds)), total / float(np.median(floor))
        figures = (round(speed, 3), round(floor_speed, 3), round(speed / floor_speed, 3))
        return cls(op, value_bytes, blocks, *figures, len(seconds))


@dataclass(frozen=True, slots=True)
class IndexRow:
    """Microseconds of thread-CPU time for one operation of the index, over `n` samples."""

    op: str
    page_tokens: int
    query_tokens: int
    p50_us: float
    p99_us: float
    n: int
    indexed_tokens: int

    @classmethod
    def of(cls, op: str, page: int, query: int, seconds: list[float], indexed: int) -> IndexRow:
        p50, p99 = np.percentile(seconds, (50, 99)) * 1e6
        p50_us, p99_us = round(float(p50), 2), round(float(p99), 2)
        return cls(op, page, query, p50_us, p99_us, len(seconds), indexed)


@dataclass(frozen=True, slots=True)
class DiskRow:
    """Values in GB (10⁹ bytes) per second, median of several rounds, beside raw reads or writes."""

    op: str
    temperature: str
    value_bytes: int
    workers: int
    gb_s: float
    floor_gb_s: float
    ratio: float


@dataclass(frozen=True, slots=True)
class ReloadRow:
    """A model's time to first token on a throttled disk: medians in milliseconds. `of_best`: the
    planner's over the better of the two fixed policies'; `spread`: how far two medians of the same
    policy are apart, as a share; `reloads`: of the planner's `n` requests."""

    speed: str
    prefix: int
    planner_ms: float
    reload_ms: float
    recompute_ms: float
    of_best: float
    spread: float
    reloads: int
    n: int

    @property
    def is_good(self) -> bool:
        """Whether the planner was within a tenth of the best, or within the spread."""
        return self.of_best <= 1.1 or self.of_best - 1.0 <= self.spread


@dataclass(frozen=True, slots=True)
class RestartRow:
    """A start of the daemon, in seconds from its launch: until it answers, until the first hit is
    served, until all blocks are known again; the longest round trip of a match meanwhile."""

    blocks: int
    answers_s: float
    first_hit_s: float
    all_s: float
    longest_match_s: float
    num_matches: int

    @classmethod
    def of(
        cls, blocks: int, seconds: tuple[float, float, float, float], num_matches: int
    ) -> RestartRow:
        answers_s, first_hit_s, all_s, longest_s = (round(s, 3) for s in seconds)
        return cls(blocks, answers_s, first_hit_s, all_s, longest_s, num_matches)


@dataclass(frozen=True, slots=True)
class RefitRow:
    """Round trips of ping in microseconds: `n` of them while the eviction model is refitted,
    `fits` times, and `idle_n` between refits, in turns. `ratio`: p99 over idle p99."""

    op: str
    fits: int
    p50_us: float
    p99_us: float
    longest_us: float
    idle_p50_us: float
    idle_p99_us: float
    idle_longest_us: float
    ratio: float
    n: int
    idle_n: int

    @classmethod
    def of(cls, fits: int, during: list[float], idle: list[float]) -> RefitRow:
        figures = [np.percentile(seconds, (50, 99, 100)) * 1e6 for seconds in (during, idle)]
        (p50, p99, longest), (idle_p50, idle_p99, idle_longest) = np.round(figures, 2).tolist()
        ratio = round(p99 / idle_p99, 3)
        return cls(
            "ping",
            fits,
            p50,
            p99,
            longest,
            idle_p50,
            idle_p99,
            idle_longest,
            ratio,
            len(during),
            len(idle),
        )


Row = RpcRow | StoreRow | IndexRow | DiskRow | ReloadRow | RestartRow | RefitRow


class ProgressStep(Protocol):
    """Called as work goes on."""

    def __call__(self, what: str, done: int, total: int) -> None: ...


class ProgressLine(AbstractContextManager["ProgressLine"]):
    """One line on stderr that says what is measured now."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=None)

    def __call__(self, what: str, done: int, total: int) -> None:
        self._progress.update(self._task, description=what, completed=done, total=total)

    def __enter__(self) -> ProgressLine:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def tell(
    rows: Sequence[Row],
    title: str,
    json_target: str | None,
    more: Mapping[str, object] | None = None,
) -> None:
    """A table on stdout; or JSON, on stdout (`-`) or into a file beside the table."""
    data = json.dumps({"rows": [asdict(row) for row in rows], **(more or {})}, indent=2)
    if json_target == "-":
        click.echo(data)
        return
    if json_target:
        Path(json_target).write_text(data + "\n")
    wide_console().print(_table(rows, title))


def tell_figures(figures: Mapping[str, Any], title: str, json_target: str | None) -> None:
    """Named figures instead of rows; a group of figures is a line for each."""
    data = json.dumps(figures, indent=2)
    if json_target == "-":
        click.echo(data)
        return
    if json_target:
        Path(json_target).write_text(data + "\n")
    table = Table(title=title)
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        group = value if isinstance(value, dict) else {"": value}
        for part, figure in group.items():
            is_share = isinstance(figure, float) and not name.endswith("_us")
            shown = f"{figure:.2%}" if is_share else str(figure)
            table.add_row(f"{name} {part}".strip(), shown)
    wide_console().print(table)


def wide_console() -> Console:
    """Stdout, never narrower than our tables when it is a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=max(MIN_WIDTH, console.width))


def _table(rows: Sequence[Row], title: str) -> Table:
    table = Table(title=title)
    for position, field in enumerate(fields(rows[0])):
        table.add_column(field.name, justify="right" if position else "left")
    for row in rows:
        table.add_row(*(_shown(value) for value in asdict(row).values()))
    return table


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)

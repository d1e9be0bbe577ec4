"""The output of a benchmark: its rows as a table or as JSON, and its progress on stderr."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MIN_WIDTH = 100


class BenchError(click.ClickException):
    """The benchmark cannot go on; the message is a sentence."""


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


def show_rows(
    rows: Sequence[DataclassInstance],
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


def wide_console() -> Console:
    """Stdout, never narrower than our tables when it is a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=max(MIN_WIDTH, console.width))


def _table(rows: Sequence[DataclassInstance], title: str) -> Table:
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

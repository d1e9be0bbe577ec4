"""The output of a benchmark: its rows as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MIN_WIDTH = 100


class BenchError(click.ClickException):
    """The benchmark cannot go on; the message is a sentence."""


class ProgressStep(Protocol):
    """Called to report progress."""

    def __call__(self, what: str, done: int, total: int) -> None: ...


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
    """Stdout; if it is a pipe, at least as wide as our tables."""
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

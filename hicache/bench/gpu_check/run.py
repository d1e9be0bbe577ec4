"""All checks in order, each in a process of its own with a time limit; a table last, and JSON.

    python -m hicache.bench.gpu NAME --report FILE --folder FOLDER [--dry] [--small]

is one such process. What it has reported counts even if it crashes or has to be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from hicache.bench.gpu_check.check import Row
from hicache.bench.report import wide_console

CHECKS = {  # name: the longest it may take, in seconds; the most telling ones first
    "machine": 60.0,
    "copies": 60.0,
    "speed": 60.0,
    "pages": 45.0,
    "ipc": 40.0,
    "daemon": 90.0,
    "engine": 100.0,
    "model": 100.0,
    "sanitizer": 60.0,
    "neighbour": 80.0,
}
DRY_PATIENCE = 3.0
"""Of a dry run, which is a test, and shares its machine with others: so many times the above."""
WIDTH = 150
_COLOURS = {"FAILED": "bold red", "below": "yellow", "ok": "green"}


def run(names: Sequence[str], is_dry: bool, folder: Path, budget_s: float) -> list[Row]:
    """The rows of these checks. One for which no time is left is a row that says so; an interrupt
    ends them all, and what was found until then counts."""
    ends_s = time.monotonic() + budget_s
    rows: list[Row] = []
    for name in names:
        left_s = ends_s - time.monotonic()
        if left_s < 5.0:
            rows.append(Row(name, "all of it", "skipped", "no time was left"))
            continue
        click.echo(f"==> {name}", err=True)
        limit_s = CHECKS[name] * (DRY_PATIENCE if is_dry else 1.0)
        try:
            found = _run_one(name, is_dry, folder, min(left_s, limit_s))
        except KeyboardInterrupt:
            rows += _rows_of(folder / f"{name}.jsonl")
            rows.append(Row(name, "all of it", "FAILED", "interrupted"))
            break
        counts = Counter(row.status for row in found)
        click.echo("    " + ", ".join(f"{n} {status}" for status, n in counts.items()), err=True)
        rows += found
    return rows


def _run_one(name: str, is_dry: bool, folder: Path, limit_s: float) -> list[Row]:
    report, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "hicache.bench.gpu", name]
    command += ["--report", str(report), "--folder", str(folder)]
    started_s = time.monotonic()
    with log.open("wb") as sink:
        child = subprocess.Popen(
            [*command, *(["--dry"] if is_dry else [])],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = child.wait(limit_s)
            end = f"ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            end = f"took longer than {limit_s:.0f} s and was killed"
        finally:
            # Whatever it has left running is in its process group.
            _kill_group(child.pid)
            child.wait()
    rows = _rows_of(report)
    seconds = time.monotonic() - started_s
    if end:
        last = " | ".join(log.read_text(errors="replace").splitlines()[-4:])
        rows.append(Row(name, "its process", "FAILED", f"{end}; {last}", seconds))
    return rows


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _rows_of(report: Path) -> list[Row]:
    if not report.exists():
        return []
    lines = report.read_text().splitlines()
    return [Row(**json.loads(line)) for line in lines if line.endswith("}")]


def show(rows: Sequence[Row], is_dry: bool, json_target: Path | None) -> bool:
    """The table on stdout, JSON into the file; whether nothing failed or missed its target."""
    if json_target is not None:
        data = {"dry": is_dry, "rows": [asdict(row) for row in rows]}
        json_target.write_text(json.dumps(data, indent=1) + "\n")
    title = "gpu-check, a dry run: nothing was measured" if is_dry else "gpu-check"
    table = Table(title=title, box=SIMPLE_HEAD)
    for column in ("check", "what", "status", "found", "s"):
        table.add_column(column, justify="right" if column == "s" else "left")
    for row in rows:
        colour = _COLOURS.get(row.status, "")
        shown = (row.check, row.what, row.status, row.value, f"{row.seconds:.1f}")
        table.add_row(*(Text(text, style=colour if n == 2 else "") for n, text in enumerate(shown)))
    console = wide_console()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    console.print(table)
    bad = [row for row in rows if row.status in ("FAILED", "below")]
    for status in ("FAILED", "below"):
        if num := sum(row.status == status for row in bad):
            click.echo(f"{num} {'failed' if status == 'FAILED' else 'below target'}")
    return not bad


def default_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="hicache-gpu-check-"))

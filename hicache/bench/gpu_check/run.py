"""Runs all checks in order, each in its own process with a time limit; then a table, and JSON.

    python -m hicache.bench.gpu_check NAME --report FILE --folder FOLDER [--dry] [--small]

is one such process. The rows it wrote count even if it crashes or is killed.
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

CHECKS = {  # name: its module, and its time limit in seconds; the checks that show most come first
    "machine": ("gpu_machine", 60.0),
    "copies": ("copies_check", 60.0),
    "speed": ("speed", 60.0),
    "pages": ("pages_check", 45.0),
    "ipc": ("ipc_check", 40.0),
    "daemon": ("through_daemon", 90.0),
    "engine": ("engine_pages_check", 100.0),
    "model": ("model_check", 100.0),
    "sanitizer": ("sanitizer", 60.0),
    "neighbour": ("neighbour", 80.0),
}
DRY_PATIENCE = 3.0
"""Multiplies the time limits of a dry run, a test on a machine that has other work."""
WIDTH = 150
_COLOURS = {"FAILED": "bold red", "below": "yellow", "ok": "green"}


def run(names: Sequence[str], is_dry: bool, folder: Path, budget_s: float) -> list[Row]:
    """Returns the rows of these checks. A check for which no time is left gives a row that says
    so. An interrupt ends all checks; the rows found until then are returned."""
    ends_s = time.monotonic() + budget_s
    rows: list[Row] = []
    for name in names:
        left_s = ends_s - time.monotonic()
        if left_s < 5.0:
            rows.append(Row(name, "all of it", "skipped", "no time was left"))
            continue
        click.echo(f"==> {name}", err=True)
        limit_s = CHECKS[name][1] * (DRY_PATIENCE if is_dry else 1.0)
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
    command = [sys.executable, "-m", "hicache.bench.gpu_check", name]
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
            # Processes it left running are in its process group.
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
    """Prints the table and writes JSON into the file. Returns whether every check passed."""
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

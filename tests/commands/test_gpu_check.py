"""`hicache gpu-check` without a GPU: the checks that need only copies run on the stand-in, and what
goes wrong in one of them is a row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hicache.bench.gpu_check.check import Check, Row, Skipped
from hicache.bench.gpu_check.run import CHECKS, show

pytestmark = pytest.mark.thorough


def gpu_check(folder: Path, *more: str) -> tuple[int, list[dict[str, Any]], str]:
    """(status, rows, output) of a dry run."""
    target = folder / "rows.json"
    command = [sys.executable, "-m", "hicache", "gpu-check", "--dry", "--json", str(target)]
    ran = subprocess.run(
        [*command, "--logs", str(folder / "logs"), *more],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    data = json.loads(target.read_text())
    assert data["dry"] is True
    return ran.returncode, data["rows"], ran.stdout + ran.stderr


def test_a_dry_run_of_the_copies(tmp_path: Path) -> None:
    status, rows, said = gpu_check(tmp_path, "--only", "copies")
    assert status == 0, said
    assert {row["status"] for row in rows} == {"ok", "skipped"}
    assert "nothing was measured" in said


@pytest.mark.e2e
@pytest.mark.timeout(920)
def test_a_dry_run_of_everything(tmp_path: Path) -> None:
    status, rows, said = gpu_check(tmp_path, "--budget", "840")
    assert status == 0, said
    assert {row["check"] for row in rows} == set(CHECKS)
    engine = [row["status"] for row in rows if row["check"] == "engine"]
    assert engine.count("ok") == 15, "nothing of it needs more than the stand-in"
    assert engine.count("dry") == 1


def test_what_fails_is_a_row_and_the_rest_goes_on(tmp_path: Path) -> None:
    check = Check("copies", tmp_path / "rows", tmp_path, is_dry=False, is_small=False)
    with check.step("first"):
        raise ValueError("no luck")
    with check.step("second") as step:
        step.judge(False, "3 of 4", share=0.75)
    with check.step("third"):
        raise Skipped("not here")
    check.note("fact", 5)
    rows = [Row(**json.loads(line)) for line in (tmp_path / "rows").read_text().splitlines()]
    found = [(row.what, row.status, row.value) for row in rows]
    assert found == [
        ("first", "FAILED", "ValueError: no luck"),
        ("second", "below", "3 of 4"),
        ("third", "skipped", "not here"),
        ("fact", "told", "5"),
    ]
    assert show(rows, False, None) is False
    assert show(rows[2:], False, None) is True


def test_no_time_left_is_said(tmp_path: Path) -> None:
    status, rows, _ = gpu_check(tmp_path, "--only", "copies,speed", "--budget", "0")
    assert status == 0
    assert [row["value"] for row in rows] == ["no time was left"] * 2

"""docs/faults.md names the test behind every promise: they exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def test_every_test_that_the_page_names_exists() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    named = NAMED.findall(page)
    assert len(named) > 60
    tests_of = {file: names_in(ROOT / "tests" / file) for file in {file for file, _ in named}}
    missing = [f"{file}::{name}" for file, name in named if name not in tests_of[file]]
    assert not missing


def names_in(file: Path) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, kinds)}


def test_every_row_names_one() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    heads = ("| fault ", "| complaint ", "| --- ")
    unproven = [row for row in rows if not row.startswith(heads) and not NAMED.search(row)]
    assert not unproven

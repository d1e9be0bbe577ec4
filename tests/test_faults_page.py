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
    missing = []
    for file, name in named:
        tree = ast.parse((ROOT / "tests" / file).read_text())
        found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)}
        if name not in found:
            missing.append(f"{file}::{name}")
    assert not missing


def test_every_row_names_one() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    heads = ("| fault ", "| complaint ", "| --- ")
    unproven = [row for row in rows if not row.startswith(heads) and not NAMED.search(row)]
    assert not unproven

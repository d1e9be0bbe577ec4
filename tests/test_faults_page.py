"""docs/faults.md names the test behind every promise: they exist, and run."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "faults.md"
LEFT_OUT = re.compile(r"mark\.(slow|system)\b")
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def test_every_test_that_the_page_names_exists() -> None:
    named = NAMED.findall(PAGE.read_text())
    assert len(named) > 60
    missing = [f"{file}::{name}" for file, name in named if name not in marks_in(file)]
    assert not missing


def test_every_row_names_one_that_make_test_runs() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    heads = ("| fault ", "| complaint ", "| --- ")
    assert not [row for row in rows if not row.startswith(heads) and not is_shown(row)]


def is_shown(row: str) -> bool:
    return any(not LEFT_OUT.search(marks_in(file)[name]) for file, name in NAMED.findall(row))


@cache
def marks_in(file: str) -> dict[str, str]:
    """The tests of a file, and how each is marked."""
    body = ast.parse((ROOT / "tests" / file).read_text()).body
    assigned = [node for node in body if isinstance(node, ast.Assign)]
    of_all = [ast.unparse(node) for node in assigned if ast.unparse(node).startswith("pytestmark")]
    tests = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {
        test.name: " ".join([*of_all, *map(ast.unparse, test.decorator_list)]) for test in tests
    }

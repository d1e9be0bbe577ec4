"""`make check` runs vulture with the names of `not_dead.py`: each of them must be needed."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MIN_CONFIDENCE = 80


def test_every_exception_is_needed() -> None:
    core = pytest.importorskip("vulture", reason="needs the extra: pip install .[dev]")
    vulture = core.Vulture()
    vulture.scavenge([str(ROOT / folder) for folder in ("hicache", "engine", "tiers", "transfer")])
    reported = {item.name for item in vulture.get_unused_code(min_confidence=MIN_CONFIDENCE)}
    exceptions = ast.parse((Path(__file__).parent / "not_dead.py").read_text())
    kept = [node.attr for node in ast.walk(exceptions) if isinstance(node, ast.Attribute)]
    assert set(kept) == reported

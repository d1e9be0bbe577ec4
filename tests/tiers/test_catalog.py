"""Kinds of tiers differ by their row in the catalogue, and by nothing else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from hicache.config import Config, TiersConfig, config_model
from hicache.tiers import catalog
from hicache.tiers.tier import TierKind

ROOT: Final = Path(__file__).resolve().parents[2]
LINKED: Final = ("engine", "tiers", "transfer")
ALLOWED: Final = {
    "hicache/bench": "benchmarks choose the tiers that they measure",
    "hicache/cli.py": "`hicache disk` is a command's name",
    "hicache/commands/doctor.py": "the doctor looks at the machine for what hbm needs",
    "hicache/config/machine.py": "memory and GPUs of the machine, as its own kinds use them",
    "hicache/config/models.py": "the sections themselves: `hbm: auto`",
    "hicache/connectors/vllm": "vLLM has words of its own for where blocks come from",
    "hicache/demo": "the demo shows three tiers and chooses their configuration",
    "tiers/catalog.py": "the rows",
}
"""Files and folders that may name a kind, and why."""


def product_files() -> Iterator[tuple[str, ast.Module]]:
    for room in ("hicache", "engine", "tiers", "transfer"):
        for file in sorted((ROOT / room).rglob("*.py")):
            name = str(file.relative_to(ROOT))
            if room != "hicache" or not name.startswith(
                tuple(f"hicache/{link}/" for link in LINKS)
            ):
                yield name, ast.parse(file.read_text())


LINKS: Final = ("engine", "tiers", "transfer")


def namings(tree: ast.Module, names: set[str]) -> Iterator[int]:
    """Lines with a kind's name as a string, or as a section of `tiers`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in names:
            yield node.lineno
        if isinstance(node, ast.Attribute) and node.attr in names:
            of = node.value
            if (isinstance(of, ast.Attribute) and of.attr == "tiers") or (
                isinstance(of, ast.Name) and of.id == "tiers"
            ):
                yield node.lineno


def test_nobody_else_names_a_kind() -> None:
    names = {row.name for row in catalog.kinds()}
    found: dict[str, list[int]] = {}
    for name, tree in product_files():
        if lines := list(namings(tree, names)):
            found[name] = lines
    reasons = {name: [a for a in ALLOWED if name.startswith(a)] for name in found}
    assert not {name: found[name] for name, why in reasons.items() if not why}
    assert {why for some in reasons.values() for why in some} == set(ALLOWED), "no longer needed"


@pytest.mark.parametrize("text", ['x == "disk"', '{"hbm": 1}', "config.tiers.dram", "tiers.disk"])
def test_a_naming_is_found(text: str) -> None:
    assert list(namings(ast.parse(text), {"disk", "hbm", "dram"})) == [1]
    assert not list(namings(ast.parse('"the disk"\ntiers.tape\nlease.disk'), {"disk"}))


def test_every_row_has_its_section_and_its_builder() -> None:
    rows = catalog.kinds()
    assert [row.rank for row in rows] == sorted(row.rank for row in rows)
    for row in rows:
        field = TiersConfig.model_fields[row.name]
        section = catalog.section_of(row)
        assert field.annotation in (section, section | None)
        assert field.description == row.summary
        assert callable(catalog.builder_of(row))
    assert [row.name for row in rows if row.is_near] == [catalog.near_kind().name]
    assert config_model() is Config


def test_every_link_can_be_throttled() -> None:
    debug = Config.model_validate({"tiers": {"dram": {"size": 1 << 20}}}).debug
    near = catalog.near_kind().name
    for row in catalog.kinds():
        if row.name != near:
            assert debug.bytes_per_s(f"{row.name}_to_{near}") == float("inf")
            assert debug.bytes_per_s(f"{near}_to_{row.name}") == float("inf")


@pytest.mark.parametrize("change", [{"name": "tape"}, {"rank": 99}])
def test_a_name_and_a_rank_are_taken_once(change: dict[str, int | str]) -> None:
    taken: TierKind = replace(catalog.kinds()[-1], **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'disk' is there already"):
        catalog.register(taken)

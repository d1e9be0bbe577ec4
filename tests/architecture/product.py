"""The product's files, parsed once: what the tests of this folder look at."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDERS: Final = ("hicache", "engine", "tiers", "transfer")


@dataclass(frozen=True)
class SourceFile:
    path: Path

    @property
    def name(self) -> str:
        """Relative to the repository: "engine/core.py"."""
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.name)

    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))


def _read() -> tuple[SourceFile, ...]:
    """Without the links from hicache/ to the folders at the top: each file comes once."""
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents if parent != ROOT):
                found.append(SourceFile(path))
    return tuple(found)


FILES: Final = _read()


def public_methods(cls: ast.ClassDef) -> list[str]:
    """Properties included; an overloaded method or a property with a setter counts once."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = [node.name for node in cls.body if isinstance(node, functions)]
    return list(dict.fromkeys(name for name in names if not name.startswith("_")))


def constructor_parameters(cls: ast.ClassDef) -> list[str]:
    """Of `__init__`, without `self`; empty for a class that declares fields instead."""
    for node in cls.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            return [arg.arg for arg in every][1:]
    return []

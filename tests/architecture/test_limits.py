"""Sizes that keep a file, a class and a call readable, each with its exceptions and their reasons.

A record (dataclass, msgspec struct, config model) is data: its fields are not counted. A call
counts instead: more than eight arguments by position are read wrongly, and are given by name.
"""

import ast
from collections.abc import Iterable

import pytest

from tests.architecture.product import (
    FILES,
    ROOT,
    SourceFile,
    constructor_parameters,
    public_methods,
)

MAX_LINES = 600
MAX_PUBLIC_METHODS = 25
MAX_PARAMETERS = 8
MAX_ENTRIES = 12
MAX_INIT_LINES = 6

LONG_FILES: dict[str, str] = {}
WIDE_CLASSES: dict[str, str] = {
    "HiCacheConnector": "vLLM's interface for connectors has these methods",
}
LONG_CONSTRUCTORS: dict[str, str] = {
    "ClientBase": "the keywords of both clients, which their users write; each stands for itself",
    "DiskTier": "a path, a size and keywords with defaults: most callers need two or three of them",
}
POSITIONAL_CALLS: dict[str, str] = {
    "Header": "unpacked from the record on disk into variables with the names of the fields",
}


def ids(files: Iterable[SourceFile]) -> list[str]:
    return [file.name for file in files]


@pytest.mark.parametrize("file", FILES, ids=ids(FILES))
def test_a_file_is_short_and_says_what_it_owns(file: SourceFile) -> None:
    assert (len(file.text.splitlines()) > MAX_LINES) == (file.name in LONG_FILES)
    assert file.path.stem not in ("utils", "util", "helpers", "misc")
    assert ast.get_docstring(file.tree), "a module opens with what it owns"


def test_a_class_has_few_methods_and_its_constructor_few_parameters() -> None:
    wide, long = set(), set()
    for file in FILES:
        for cls in file.classes():
            if len(public_methods(cls)) > MAX_PUBLIC_METHODS:
                wide.add(cls.name)
            if len(constructor_parameters(cls)) > MAX_PARAMETERS:
                long.add(cls.name)
    assert (wide, long) == (set(WIDE_CLASSES), set(LONG_CONSTRUCTORS))


def test_a_long_call_gives_its_arguments_by_name() -> None:
    """Calls of classes: the name begins with a capital."""
    found = set()
    for file in FILES:
        for call in ast.walk(file.tree):
            if isinstance(call, ast.Call) and len(call.args) > MAX_PARAMETERS:
                name = ast.unparse(call.func).rpartition(".")[2]
                if name.lstrip("_")[:1].isupper():
                    found.add(name)
    assert found == set(POSITIONAL_CALLS)


def test_the_package_has_few_doors() -> None:
    """Entries of hicache/ that are code: the links to the rooms at the top are not counted."""
    entries = [path for path in (ROOT / "hicache").iterdir() if not path.is_symlink()]
    code = [p.name for p in entries if p.suffix == ".py" or (p / "__init__.py").exists()]
    assert len(code) <= MAX_ENTRIES, sorted(code)


PACKAGES = [file for file in FILES if file.path.name == "__init__.py"]


@pytest.mark.parametrize("file", PACKAGES, ids=ids(PACKAGES))
def test_a_package_says_shortly_what_it_is_for(file: SourceFile) -> None:
    docstring = ast.get_docstring(file.tree) or ""
    assert len(docstring.splitlines()) <= MAX_INIT_LINES
    if file.name != "hicache/__init__.py":
        assert "Door: " in docstring or "Doors: " in docstring, "the modules others import"


def test_the_daemon_asks_the_cache_engine_by_named_queries() -> None:
    """What is in `engine/residency` is the cache engine's own: others ask `engine.queries`."""
    reaching = [
        f"{file.name}:{number}"
        for file in FILES
        if file.name.startswith("hicache/")
        for number, line in enumerate(file.text.splitlines(), 1)
        if ".residency" in line
    ]
    assert reaching == []

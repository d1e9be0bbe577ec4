"""Every key of the configuration is read by something in the product.

A read is an attribute of the key's name on something that is known to be its section: reached by
the section's own name (`config.limits.max_leases`), through a variable, parameter or attribute that
is annotated with the section's class or assigned from it, or as `section` in the builder of its
tier. A `getattr` with a computed name reads every key of a section called by its own name. A name
alone would not do: other classes have a `size` or a `path` too.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
from pydantic import BaseModel

from hicache.config import Config
from hicache.config.messages_for_people import section_of, yaml_key
from hicache.tiers import catalog

ROOT = Path(__file__).parents[2]
ROOMS = ("hicache", "engine", "tiers", "transfer")


def sections(
    model: type[BaseModel] = Config, name: str = "config"
) -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section's class with the attribute it is reached by."""
    yield name, model
    for attribute, field in model.model_fields.items():
        inner = section_of(field)
        if inner is not None:
            yield from sections(inner, attribute)


def last_name(node: ast.expr | None) -> str:
    """`x` of `x`, `a.x` and `a.x[0]`; empty for anything else."""
    match node:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value):
            return last_name(value)
    return ""


class Aliases:
    """By which names the sections are known in one file."""

    def __init__(self, tree: ast.AST, classes: Mapping[str, set[type]]) -> None:
        self.known: dict[str, set[type]] = defaultdict(set)
        for name, found in classes.items():
            self.known[name] |= found
        by_class = {cls.__name__: cls for found in classes.values() for cls in found.copy()}
        by_class |= {base.__name__: base for cls in by_class.values() for base in cls.__mro__}
        for node in ast.walk(tree):
            if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
                target = node.arg if isinstance(node, ast.arg) else last_name(node.target)
                words = {n.id for n in ast.walk(node.annotation) if isinstance(n, ast.Name)}
                if isinstance(node.annotation, ast.Constant):
                    words = {str(node.annotation.value)}
                self.known[target] |= {by_class[word] for word in words & by_class.keys()}
        for _ in range(2):  # an alias of an alias
            for node in ast.walk(tree):
                for target, value in assignments(node):
                    self.known[target] |= self.known.get(last_name(value), set())

    def may_be(self, name: str, section: type) -> bool:
        """Whether this name may stand for the section, or for a base class of it."""
        return any(
            issubclass(section, cls) and issubclass(cls, BaseModel) and cls is not BaseModel
            for cls in self.known.get(name, ())
        )


def assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Assign(targets=[ast.Tuple(targets)], value=ast.Tuple(values)):
            yield from ((last_name(t), v) for t, v in zip(targets, values, strict=True))
        case ast.Assign(targets=[target], value=value) | ast.NamedExpr(target=target, value=value):
            yield last_name(target), value
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            yield last_name(target), value


def reads(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """The name of what is read from, and the attribute; None for any attribute."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value, attribute, ast.Load()):
                yield last_name(value), attribute
            case ast.Call(ast.Name("getattr"), [value, ast.Constant(str(attribute)), *_]):
                yield last_name(value), attribute
            case ast.Call(ast.Name("getattr"), [value, *_]):
                yield last_name(value), None


def unread(texts: Iterable[tuple[str, type | None]]) -> set[str]:
    """The keys that none of these files reads. Each comes with the class of what it calls
    `section`."""
    found = list(sections())
    classes: dict[str, set[type]] = defaultdict(set)
    for name, cls in found:
        classes[name].add(cls)
    missing = {
        (cls, attribute): f"{name}.{yaml_key(attribute, field)}"
        for name, cls in found
        for attribute, field in cls.model_fields.items()
        if section_of(field) is None
    }
    for text, built in texts:
        tree = ast.parse(text)
        own = {"section": {built}} if built is not None else {}
        aliases = Aliases(tree, {**classes, **own})
        for base, attribute in reads(tree):
            for key in list(missing):
                is_read = attribute is None and key[0] in classes.get(base, ())
                if attribute == key[1] and base != "self":
                    is_read = aliases.may_be(base, key[0])
                if is_read:
                    del missing[key]
    return set(missing.values())


def product() -> Iterator[tuple[str, type | None]]:
    built = {row.builder.partition(":")[0]: catalog.section_of(row) for row in catalog.kinds()}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            inside = path.relative_to(ROOT).with_suffix("").parts
            module = ".".join(inside if room == "hicache" else ("hicache", *inside))
            yield path.read_text(), built.get(module)


def test_every_key_is_read() -> None:
    assert unread(product()) == set()


@pytest.mark.parametrize(
    ("text", "is_read"),
    [
        ("wait(config.deadlines.fetch_s)", True),
        ("def f(given: DeadlinesConfig): return given.fetch_s", True),
        ("deadlines = self.config.deadlines\nwait(deadlines.fetch_s)", True),
        ("wait(request.fetch_s)", False),
        ("config.deadlines.fetch_s = 3", False),
        ("class X:\n  def f(self): return self.fetch_s", False),
        ("'deadlines.fetch_s'", False),
        ("getattr(self.deadlines, name)", True),
        ("given: DeadlinesConfig = x\ngetattr(given, name)", False),
        ("getattr(config.deadlines, 'put_s')", False),
        ("getattr(model, name)", False),
    ],
)
def test_what_counts_as_a_read(text: str, is_read: bool) -> None:
    assert ("deadlines.fetch" not in unread([(text, None)])) == is_read

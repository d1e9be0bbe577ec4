"""YAML text → plain values, each with the line it stands on.

PyYAML alone keeps the last of two equal keys and forgets lines, so the values are built here
from its node tree. Promises: no tags, no merge keys, no recursion; every mistake of the text is
returned, none raised.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import yaml

from hicache.config.messages_for_people import KeyPath, Mistake

Value = object
MAX_VALUES: Final = 10_000
"""Keys included. A whole configuration has some hundred; a few lines of aliases make billions."""


@dataclass(frozen=True, slots=True)
class Document:
    """Values, the line of each key path, and what is wrong with the text itself."""

    values: Mapping[str, Value]
    lines: Mapping[KeyPath, int]
    mistakes: tuple[Mistake, ...] = ()


def read_yaml(text: str) -> Document:
    """The document's values; empty where the text is no YAML mapping, with a mistake saying so."""
    try:
        return _read(text)
    except RecursionError:
        return Document({}, {}, (Mistake((), "this is nested too deeply"),))
    except _TooManyValues as error:
        return Document({}, {}, (error.mistake,))


def _read(text: str) -> Document:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(part for part in (error.context, error.problem) if part)
        line = mark.line + 1 if mark else None
        return Document({}, {}, (Mistake((), f"this is not YAML: {what}", line=line),))
    except yaml.YAMLError as error:
        return Document({}, {}, (Mistake((), f"this is not YAML: {' '.join(str(error).split())}"),))
    if root is None:
        return Document({}, {})
    if not isinstance(root, yaml.MappingNode):
        found = "the file holds no keys at its top"
        return Document({}, {}, (Mistake((), found, "key: value lines", line=_line_of(root)),))
    builder = _Builder()
    values = builder.mapping(root, ())
    return Document(values, builder.lines, tuple(builder.mistakes))


class _TooManyValues(Exception):
    def __init__(self, path: KeyPath, node: yaml.Node) -> None:
        found = f"with its aliases this text stands for more than {MAX_VALUES} values"
        self.mistake = Mistake(path, found, "fewer aliases", line=_line_of(node))


def _line_of(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


@dataclass(slots=True)
class _Builder:
    lines: dict[KeyPath, int] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    _num_values: int = 0
    _open: list[yaml.Node] = field(default_factory=list)
    _scalars: yaml.constructor.SafeConstructor = field(
        default_factory=yaml.constructor.SafeConstructor
    )

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Value]:
        values: dict[str, Value] = {}
        for key_node, value_node in node.value:
            self._count(path, key_node)
            line = _line_of(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self.mistakes.append(Mistake(path, "a key is not a plain word", line=line))
                continue
            key = str(key_node.value)
            here = (*path, key)
            if key in values:
                first = f"the same key stands on line {self.lines[here]}"
                self.mistakes.append(Mistake(here, first, "one of them", line=line))
            else:
                self.lines[here] = line
                values[key] = self._value(value_node, here)
        return values

    def _value(self, node: yaml.Node, path: KeyPath) -> Value:
        self._count(path, node)
        if node in self._open:
            self.mistakes.append(Mistake(path, "this refers to itself", line=_line_of(node)))
            return None
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self._value(item, (*path, str(i))) for i, item in enumerate(node.value)]
            return self._scalar(node, path)
        finally:
            self._open.pop()

    def _count(self, path: KeyPath, node: yaml.Node) -> None:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise _TooManyValues(path, node)

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Value:
        try:
            value: Value = self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            what = getattr(error, "problem", None) or error
            self.mistakes.append(Mistake(path, f"this value cannot be read: {what}"))
            return None
        return value

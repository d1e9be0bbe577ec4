"""What is wrong with a configuration, in sentences an operator can act on.

    configs/x.yaml:12: tiers.dram.hihg_watermark: unknown key; allowed: high_watermark, ...;
        did you mean high_watermark?

A sentence names the file and line, the key path, what was found, what is allowed, and for an
unknown key or word the nearest known one. One ConfigError carries all mistakes of a file.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from hicache.config.fields import InShort, OneOf
from hicache.config.units import SECONDS_FORM, SIZE_FORM, format_size

KeyPath = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mistake:
    path: KeyPath
    found: str
    allowed: str | None = None
    nearest: str | None = None
    line: int | None = None

    @property
    def key(self) -> str:
        return ".".join(self.path)

    def sentence(self, source: str) -> str:
        where = f"{source}:{self.line}" if self.line else source
        parts = [self.found]
        if self.allowed:
            parts.append(f"allowed: {self.allowed}")
        if self.nearest:
            parts.append(f"did you mean {self.nearest}?")
        return ": ".join(part for part in (where, self.key, "; ".join(parts)) if part)

    def at_line_of(self, lines: Mapping[KeyPath, int]) -> "Mistake":
        """The same mistake with its line, or that of the nearest key around it."""
        if self.line:
            return self
        known = (self.path[:n] for n in range(len(self.path), 0, -1))
        return replace(self, line=next((lines[path] for path in known if path in lines), None))


class ConfigError(Exception):
    """A configuration that cannot be used; nothing of it was applied."""

    def __init__(self, source: str, mistakes: Sequence[Mistake]) -> None:
        self.source = source
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(self.sentences()))

    def sentences(self) -> list[str]:
        return [mistake.sentence(self.source) for mistake in self.mistakes]


def mistakes_of(
    model: type[BaseModel], values: Mapping[str, object], errors: Sequence[ErrorDetails]
) -> list[Mistake]:
    """pydantic's errors as sentences; `values` are the file's values before validation."""
    return [_mistake_of(model, values, error) for error in errors]


def yaml_key(name: str, field: FieldInfo) -> str:
    """The key an operator writes for a model's attribute."""
    return str(field.validation_alias or name)


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model inside a field (`HbmConfig | None` too), None for a plain value."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def describe_allowed(field: FieldInfo) -> str:
    """What a field may hold, as the end of a sentence."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "allowed" in extra:
        return str(extra["allowed"])
    if (section := section_of(field)) is not None:
        short = "".join(f"{word}, " for word in _words_of(field))
        return short + ("or " if short else "") + "the keys " + ", ".join(_keys_of(section))
    form = _form_of(field)
    bounds = " and ".join(_bounds_of(field, form))
    return f"{form}, {bounds}" if bounds else form


_BOUNDS = (("gt", "more than"), ("ge", "at least"), ("lt", "less than"), ("le", "at most"))


def _bounds_of(field: FieldInfo, form: str) -> Iterator[str]:
    for attribute, words in _BOUNDS:
        for bound in (getattr(m, attribute, None) for m in field.metadata):
            is_said = form == SECONDS_FORM and attribute == "ge" and bound == 0
            if bound is not None and not is_said:
                yield f"{words} {format_size(bound) if form == SIZE_FORM else bound}"


def _form_of(field: FieldInfo) -> str:
    kind: Any = field.annotation
    for form in field.metadata:
        schema = getattr(form, "json_schema", None)
        if isinstance(schema, dict) and "description" in schema:
            return str(schema["description"])
    kinds = [k for k in get_args(kind) if k is not type(None)]
    if choices := _choices_of(field):
        return "one of " + ", ".join(choices)
    if kinds and get_origin(kinds[0]) is Annotated:
        return _form_of(FieldInfo.from_annotation(kinds[0]))
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return names.get(kinds[0] if kinds else kind, "a value")


def _choices_of(field: FieldInfo) -> list[str]:
    """The words that a field may hold; none where it holds something else."""
    if get_origin(field.annotation) is Literal:
        return [str(choice) for choice in get_args(field.annotation)]
    return [name for one in field.metadata if isinstance(one, OneOf) for name in one.names()]


def _words_of(field: FieldInfo) -> list[str]:
    """What may stand for a section as a whole."""
    return [word for short in field.metadata if isinstance(short, InShort) for word in short.words]


def _keys_of(model: type[BaseModel]) -> list[str]:
    return [yaml_key(name, field) for name, field in model.model_fields.items()]


def walk(model: type[BaseModel], path: KeyPath = ()) -> Iterator[tuple[KeyPath, str, FieldInfo]]:
    """Every key of a model: its path, attribute and field, sections before what they hold."""
    for name, field in model.model_fields.items():
        here = (*path, yaml_key(name, field))
        yield here, name, field
        if (section := section_of(field)) is not None:
            yield from walk(section, here)


def _field_at(model: type[BaseModel], path: KeyPath) -> FieldInfo | None:
    section: type[BaseModel] | None = model
    field: FieldInfo | None = None
    for key in path:
        fields = section.model_fields if section else {}
        field = next((f for name, f in fields.items() if yaml_key(name, f) == key), None)
        section = section_of(field) if field else None
    return field


def _section_at(model: type[BaseModel], path: KeyPath) -> type[BaseModel]:
    field = _field_at(model, path) if path else None
    return (section_of(field) if field else None) or model


def _mistake_of(
    model: type[BaseModel], values: Mapping[str, object], error: ErrorDetails
) -> Mistake:
    path = tuple(str(part) for part in error["loc"])
    context = error.get("ctx", {})
    if error["type"] == "extra_forbidden":
        known = _keys_of(_section_at(model, path[:-1]))
        near = _nearest(path[-1], known) or _nearest_elsewhere(path[-1], model)
        return Mistake(path, "unknown key", ", ".join(known), near)
    field, written = _field_at(model, path), _written_at(values, path, error["input"])
    allowed = describe_allowed(field) if field else None
    if error["type"] == "missing":
        return Mistake(path, "missing, and there is no default", allowed)
    if error["type"] == "hicache":
        found = str(context["sentence"])
        if not isinstance(written, dict):
            found = f"found {shown(written)}; {found}"
        return Mistake(path, found, str(context["allowed"]))
    near = _nearest_choice(field, written) if field and isinstance(written, str) else None
    return Mistake(path, f"found {shown(written)}", allowed or error["msg"], near)


def _written_at(values: object, path: KeyPath, otherwise: object) -> object:
    for key in path:
        if not (isinstance(values, Mapping) and key in values):
            return otherwise
        values = values[key]
    return values


def shown(value: object) -> str:
    """A value as it would look in YAML, kept short."""
    if isinstance(value, dict):
        return "a group of keys"
    if value is None:
        return "nothing"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _nearest(word: str, known: Sequence[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.5)), None)


def _nearest_elsewhere(word: str, model: type[BaseModel]) -> str | None:
    """The whole path of a key that would be right in another section."""
    paths = {
        path[-1]: ".".join(path) for path, _, field in walk(model) if section_of(field) is None
    }
    near = _nearest(word, list(paths))
    return paths[near] if near else None


def _nearest_choice(field: FieldInfo, word: str) -> str | None:
    return _nearest(word, [*_choices_of(field), *_words_of(field)])

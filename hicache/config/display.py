"""A configuration as people read it: values in an operator's units, and the table of all keys.

`config show` and the table in `docs/configuration.md` are both generated here, so neither can name
a key that does not exist.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hicache.config.messages_for_people import KeyPath, describe_allowed, section_of, walk, yaml_key
from hicache.config.models import config_model
from hicache.config.units import Share, format_flop_rate, format_rate, format_seconds, format_size


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One key of the documentation's table; `default` is empty where a value must be given."""

    key: str
    default: str
    allowed: str
    meaning: str


def shown_values(model: BaseModel, path: KeyPath = ()) -> Iterator[tuple[str, str]]:
    """Every key with its value as YAML would say it; an absent section or value is `none`."""
    for name, field in type(model).model_fields.items():
        here, value = (*path, yaml_key(name, field)), getattr(model, name)
        if isinstance(value, BaseModel):
            yield from shown_values(value, here)
        else:
            yield ".".join(here), shown_value(name, value)


def shown_value(attribute: str, value: object) -> str:
    """By the unit in the attribute's name: bytes as 8GiB, seconds as 250ms."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and (attribute == "size" or attribute.endswith("_bytes")):
        return format_size(value)
    if isinstance(value, int) and attribute.endswith("_bytes_per_day"):
        return format_rate(value)
    if isinstance(value, float) and attribute.endswith("_flop_rate"):
        return format_flop_rate(value)
    if isinstance(value, float) and attribute.endswith("_s"):
        return format_seconds(value)
    return str(value)


def plain_value(value: object) -> object:
    """For JSON: bytes and seconds as numbers, a share that is not resolved as `25%`."""
    return str(value) if isinstance(value, Share) else value


def key_table() -> list[KeyRow]:
    """Every key there is, in the order of the models."""
    return [
        KeyRow(
            ".".join(path),
            _default_of(name, field),
            describe_allowed(field),
            field.description or "",
        )
        for path, name, field in walk(config_model())
        if section_of(field) is None
    ]


def key_table_markdown() -> str:
    """The table of `docs/configuration.md`."""
    lines = ["| key | default | allowed | meaning |", "| --- | --- | --- | --- |"]
    for row in key_table():
        default = f"`{row.default}`" if row.default else "must be given"
        lines.append(f"| `{row.key}` | {default} | {row.allowed} | {row.meaning} |")
    return "\n".join(lines) + "\n"


def _default_of(attribute: str, field: FieldInfo) -> str:
    if field.is_required():
        return ""
    if field.default_factory is not None:
        return "ipc://$XDG_RUNTIME_DIR/hicache/hicache.sock"
    return shown_value(attribute, field.default)

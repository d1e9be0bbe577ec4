"""The table of operations in docs/protocol.md, made from hicache/protocol/operations.py.

python -m tests.docs.protocol_reference       writes it into the page
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import inspect

from hicache.protocol.messages import MULTIPLE, Operation, Reply
from hicache.protocol.operations import OPERATIONS

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"
PRODUCT: Final = {
    name: operation
    for name, operation in OPERATIONS.items()
    if operation.request.__module__.startswith("hicache.")
}
"""Without those that tests declare."""
BEGIN: Final = "<!-- made by python -m tests.docs.protocol_reference -->\n"
END: Final = "<!-- end of the table -->\n"


def table() -> str:
    """One row for each operation, in the order in which they are declared."""
    rows = ["| operation | | request | reply |", "| --- | --- | --- | --- |"]
    rows += [_row(operation) for operation in PRODUCT.values()]
    return "\n".join(rows) + "\n"


def _row(operation: Operation[Any, Any]) -> str:
    traits = [
        "session" if operation.needs_session else "",
        f"capability `{operation.capability}`" if operation.capability else "",
        f"at most `deadlines.{operation.deadline}`" if operation.deadline else "",
        "served though late" if operation.runs_late else "",
        "served while stopping" if operation.is_admin else "",
    ]
    request = _fields(operation.request, operation.fields)
    own = [
        name for name in operation.reply.__struct_fields__ if name not in Reply.__struct_fields__
    ]
    reply = _fields(operation.reply, tuple(own))
    cells = [f"`{operation.name}`", "; ".join(filter(None, traits)), request, reply]
    return f"| {' | '.join(cells)} |"


def _fields(kind: type[msgspec.Struct], names: tuple[str, ...]) -> str:
    found = {field.name: field for field in msgspec.structs.fields(kind)}
    return ", ".join(_field(found[name]) for name in names)


def _field(field: msgspec.structs.FieldInfo) -> str:
    text = f"`{field.name}` {word(inspect.type_info(field.type))}"
    if field.default is msgspec.UNSET:
        return f"{text} or absent"
    if field.default is msgspec.NODEFAULT:
        return text
    match field.default:
        case bool():
            return f"{text} = {str(field.default).lower()}"
        case bytes():
            return f"{text} = empty"
        case str():
            return f'{text} = "{field.default}"'
    return f"{text} = {field.default:,.15g}"


def word(kind: Any) -> str:
    """A type as the page names it."""
    match kind:
        case inspect.Metadata():
            return "u32s" if (kind.extra or {}).get(MULTIPLE) else word(kind.type)
        case inspect.IntType():
            return "int" + _bounds(kind, 2**63 - 1)
        case inspect.FloatType():
            return "float" + _bounds(kind, 2**63)
        case inspect.BytesType(min_length=low, max_length=high):
            return f"bin{_length(low, high)}"
        case inspect.StrType(min_length=low, max_length=high):
            return f"str{_length(low, high)}"
        case inspect.LiteralType():
            return "str"
        case inspect.BoolType():
            return "bool"
        case inspect.NoneType():
            return "nil"
        case inspect.UnionType(types=types):
            return " or ".join(map(word, types))
        case inspect.ListType(item_type=item) if not isinstance(item, inspect.AnyType):
            return f"array of {word(item)}"
        case inspect.TupleType(item_types=items):
            return f"[{', '.join(map(word, items))}]"
        case inspect.ListType():
            return "array"
    assert isinstance(kind, inspect.StructType | inspect.DictType | inspect.RawType), kind
    return "map"


def _bounds(kind: inspect.IntType | inspect.FloatType, largest: int) -> str:
    low, high = kind.ge or 0, kind.le
    if high is None or high == largest:
        return f" ≥ {low:g}" if low else ""
    return f" {low:,.15g} … {high:,.15g}"


def _length(low: int | None, high: int | None) -> str:
    if high is None:
        return ""
    return f" {high:,}" if low == high else f" ≤ {high:,}"


def page_with_table(page: str) -> str:
    """The page, with the table of now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text()))

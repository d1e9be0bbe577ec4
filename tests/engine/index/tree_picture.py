"""All that can be reached from an object, as values to compare: what a question must leave
as it was. Two portraits are equal where no attribute, item or order differs anywhere below.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from itertools import chain, count
from typing import Any, Final

import numpy as np

_PLAIN: Final = (str, bytes, int, float, bool, type(None))
_CODE: Final = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


def portrait(root: object) -> list[Any]:
    """One entry per object, in the order in which they are found: what it is, and its parts, those
    that are objects themselves by their place in the list."""
    found: list[Any] = []
    places: dict[int, int] = {}
    seen: list[object] = []
    kept: list[object] = []  # or a number could be given out twice

    def place_of(value: object) -> object:
        if isinstance(value, _PLAIN):
            return value
        if id(value) not in places:
            places[id(value)] = len(seen)
            seen.append(value)
        return ("at", places[id(value)])

    place_of(root)
    while len(found) < len(seen):
        value = seen[len(found)]
        parts = list(_parts_of(value))
        kept += parts
        found.append((type(value).__name__, [place_of(part) for part in parts]))
    return found


def _parts_of(value: Any) -> Iterator[object]:
    if isinstance(value, np.ndarray):
        yield value.dtype.str
        yield value.shape
        yield value.tobytes()
    elif isinstance(value, dict):
        yield from chain.from_iterable(value.items())
    elif isinstance(value, set | frozenset):
        yield from sorted(value, key=lambda item: getattr(item, "number", hash(item)))
    elif isinstance(value, count):
        yield repr(value)
    elif isinstance(value, types.MethodType):
        yield value.__self__
    elif not isinstance(value, _CODE):
        if hasattr(value, "__iter__") and hasattr(value, "__len__"):
            yield from value
        names = chain(
            getattr(value, "__dict__", ()), *(_slots_of(kind) for kind in type(value).__mro__)
        )
        yield from (getattr(value, name) for name in names if hasattr(value, name))


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = getattr(kind, "__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)

"""The kinds of values in a configuration: sizes, times, paths, each with its bounds and its words.

`hicache.config.models` is made of these. A kind defines three things in one place: how a value is
read, its JSON Schema (for editors), and the error text for a wrong value.
"""

import os
import pwd
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticCustomError

from hicache.config.eviction import PolicyError, UnknownPolicy, policy_named, policy_names
from hicache.config.units import (
    FLOP_FORM,
    RATE_FORM,
    SECONDS_FORM,
    SIZE_FORM,
    SIZE_OR_SHARE_FORM,
    TIB,
    Share,
    parse_flop_rate,
    parse_rate,
    parse_seconds,
    parse_size,
    parse_size_or_share,
)
from hicache.protocol.endpoint import ENDPOINT_VARIABLE, default_endpoint

MAX_TIER_BYTES = 8 * TIB
PATH_FORM = "a path: absolute, ~/..., or relative to this file's folder"


def wrong(sentence: str, allowed: str) -> PydanticCustomError:
    """An error with this sentence, and what is allowed."""
    return PydanticCustomError("hicache", "{sentence}", {"sentence": sentence, "allowed": allowed})


def _bounded_size(size: int | Share) -> int | Share:
    if isinstance(size, Share):
        if not 0 < size.fraction <= 1:
            raise wrong("this share is not possible", "more than 0% and at most 100%")
    elif not 0 < size <= MAX_TIER_BYTES:
        raise wrong("this size is not possible", "more than 0 and at most 8TiB")
    return size


def _number_or(number: dict[str, Any], units: str, form: str) -> WithJsonSchema:
    """What an editor may offer: a bare number, or a quantity whose units match this pattern."""
    quantity = {"type": "string", "pattern": r"^\d+(\.\d+)?\s*" + units}
    return WithJsonSchema({"anyOf": [number, quantity], "description": form})


TierSize = Annotated[
    int | Share,
    BeforeValidator(parse_size_or_share),
    AfterValidator(_bounded_size),
    _number_or({"type": "integer", "minimum": 1}, "([KMGT]i?B|B|%)$", SIZE_OR_SHARE_FORM),
]
Bytes = Annotated[
    int,
    BeforeValidator(parse_size),
    _number_or({"type": "integer"}, "([KMGT]i?B|B)$", SIZE_FORM),
]
Rate = Annotated[
    int,
    BeforeValidator(parse_rate),
    _number_or({"type": "integer", "minimum": 1}, "([KMGT]i?B|B)/(d|day|h|hour)$", RATE_FORM),
]
FlopRate = Annotated[
    float,
    BeforeValidator(parse_flop_rate),
    Field(gt=0, allow_inf_nan=False),
    _number_or({"type": "number", "exclusiveMinimum": 0}, "[GTP]FLOP/s$", FLOP_FORM),
]
Seconds = Annotated[
    float,
    BeforeValidator(parse_seconds),
    Field(ge=0, allow_inf_nan=False),
    _number_or({"type": "number", "minimum": 0}, "(ns|us|ms|s|m|h|d)$", SECONDS_FORM),
]
Deadline = Annotated[Seconds, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class OneOf:
    """A word out of a registry, which is read when it is needed and not when the model is made."""

    names: Callable[[], Sequence[str]]

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "enum": list(self.names())}


def _usable_policy(name: str) -> str:
    try:
        policy_named(name)
    except UnknownPolicy:
        raise
    except PolicyError as error:
        raise wrong(str(error), f"one of {', '.join(policy_names())}") from None
    return name


PolicyName = Annotated[str, AfterValidator(_usable_policy), OneOf(policy_names)]


@dataclass(frozen=True, slots=True)
class InShort:
    """Marks a section that can be written as one of these values instead of its keys. Used in the
    JSON Schema and in error texts; `loading` and the models replace the value by the keys."""

    values: tuple[str | bool, ...]

    @property
    def words(self) -> list[str]:
        """As YAML says them."""
        return [str(v).lower() if isinstance(v, bool) else v for v in self.values]

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [{"enum": list(self.values)}, handler(schema)]}


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a configuration uses of the user's environment; read once, by the command line."""

    home: str
    endpoint: str
    endpoint_from: str = "default"
    base_dir: str | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str], uid: int) -> Self:
        """With an empty `environ`, the user database says where home is."""
        return cls(
            home=environ.get("HOME") or pwd.getpwuid(uid).pw_dir,
            endpoint=default_endpoint(environ, uid),
            endpoint_from=(
                f"environment {ENDPOINT_VARIABLE}" if environ.get(ENDPOINT_VARIABLE) else "default"
            ),
        )


def _resolved_path(path: str, info: ValidationInfo) -> str:
    """`~` is the user's home; a relative path starts at the configuration file's folder."""
    if not path or "\0" in path:
        raise wrong("this is not a path", PATH_FORM)
    around = info.context
    if isinstance(around, Surroundings):
        if path == "~" or path.startswith("~/"):
            path = around.home + path[1:]
        elif path.startswith("~"):
            raise wrong("the home of another user is not looked up", PATH_FORM)
        if around.base_dir is not None:
            path = os.path.join(around.base_dir, path)
    return os.path.normpath(path)


FilePath = Annotated[
    str,
    AfterValidator(_resolved_path),
    WithJsonSchema({"type": "string", "minLength": 1, "description": PATH_FORM}),
]

"""A YAML file → the frozen `Config`, and for every key where its value came from.

Either the whole file is right and a `LoadedConfig` comes back, or one `ConfigError` carries every
mistake and nothing is applied.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from pydantic import BaseModel, ValidationError

from hicache.config.eviction import ignored_policies
from hicache.config.fields import Surroundings
from hicache.config.messages_for_people import ConfigError, KeyPath, Mistake, mistakes_of, yaml_key
from hicache.config.models import Config, config_model
from hicache.config.yaml_source import Document, read_yaml

_ENDPOINT: KeyPath = ("socket", "endpoint")

RETIRED: Final[Mapping[tuple[str, str], str]] = {
    ("deadlines", "match"): "a match never waits in the daemon; its client's deadline limits it",
    ("deadlines", "default"): "each client's own deadlines limit these requests",
}
"""Keys of earlier versions that a file may still hold, with the reason why they do nothing."""


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration, its file, and per key path `file:line`, `default` or `environment NAME`.
    `warnings`: what has no effect, in sentences."""

    config: Config
    source: str
    sources: Mapping[str, str]
    warnings: tuple[str, ...] = ()


def load_config(path: str | os.PathLike[str], around: Surroundings | None = None) -> LoadedConfig:
    """Reads and checks a file. Raises ConfigError, for a file that cannot be read too."""
    name = os.fspath(path)
    try:
        with open(name, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(name, [Mistake((), f"cannot be read: {what}")]) from error
    around = around or Surroundings.of({}, os.getuid())
    base_dir = os.path.dirname(os.path.abspath(name))
    return parse_config(text, name, replace(around, base_dir=base_dir))


def parse_config(text: str, source: str, around: Surroundings | None = None) -> LoadedConfig:
    """Checks a text; `source` is how sentences name it. Raises ConfigError."""
    around = around or Surroundings.of({}, os.getuid())
    document, warnings = _without_retired(_spelled_out(read_yaml(text)), source)
    mistakes = list(document.mistakes)
    if mistakes and not document.values:
        raise ConfigError(source, mistakes)
    config = None
    try:
        config = config_model().model_validate(
            _with_endpoint(document.values, around), by_alias=True, by_name=False, context=around
        )
    except ValidationError as error:
        told = {mistake.path for mistake in mistakes}
        found = mistakes_of(config_model(), document.values, error.errors(include_url=False))
        mistakes += [mistake for mistake in found if mistake.path not in told]
    if config is None or mistakes:
        placed = [mistake.at_line_of(document.lines) for mistake in mistakes]
        raise ConfigError(source, sorted(placed, key=lambda mistake: mistake.line or 0))
    sources = {
        ".".join(path): _origin(path, document.lines, source, around)
        for path, _ in effective_values(config)
    }
    return LoadedConfig(config, source, sources, (*warnings, *ignored_policies()))


def effective_values(model: BaseModel, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """Every key with its value, in the models' order; an absent section is one key with None."""
    for name, field in type(model).model_fields.items():
        here, value = (*path, yaml_key(name, field)), getattr(model, name)
        if isinstance(value, BaseModel):
            yield from effective_values(value, here)
        else:
            yield here, value


def _spelled_out(document: Document) -> Document:
    """`debug: true` is short for `debug: {check: true}`."""
    is_checked = document.values.get("debug")
    if not isinstance(is_checked, bool):
        return document
    values = {**document.values, "debug": {"check": is_checked}}
    lines = {**document.lines, ("debug", "check"): document.lines["debug",]}
    return replace(document, values=values, lines=lines)


def _without_retired(document: Document, source: str) -> tuple[Document, list[str]]:
    """The document without keys that had a meaning once, and a sentence for each of them."""
    values, warnings = dict(document.values), []
    for (section, key), reason in RETIRED.items():
        found = values.get(section)
        if isinstance(found, dict) and key in found:
            values[section] = {name: value for name, value in found.items() if name != key}
            line = document.lines[section, key]
            warnings.append(f"{source}:{line}: {section}.{key} has no effect: {reason}")
    return replace(document, values=values), warnings


def _with_endpoint(values: Mapping[str, object], around: Surroundings) -> dict[str, object]:
    """The values with the user's endpoint, where the file names none."""
    section = values.get("socket", {})
    if not isinstance(section, dict):
        return dict(values)
    return {**values, "socket": {"endpoint": around.endpoint, **section}}


def _origin(path: KeyPath, lines: Mapping[KeyPath, int], source: str, around: Surroundings) -> str:
    if path in lines:
        return f"{source}:{lines[path]}"
    return around.endpoint_from if path == _ENDPOINT else "default"

"""`hicache config`: check a file, show what it means here, and hand it to a running daemon."""

import json
import os
import sys
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from hicache.config import (
    Config,
    ConfigError,
    LoadedConfig,
    Mistake,
    Surroundings,
    check_against_machine,
    effective_values,
    load_config,
    plain_value,
    probe_machine,
    resolve_sizes,
    shown_values,
)
from hicache.endpoint import default_endpoint

RELOAD_TIMEOUT_S = 10.0

_file = click.argument("file", type=click.Path(dir_okay=False))
_as_json = click.option("--json", "as_json", is_flag=True, help="As data.")


@click.group()
def config() -> None:
    """Check, show and reload configurations."""


@config.command()
@_file
@_as_json
@click.option("--no-machine", is_flag=True, help="Only the file: skip memory and disk.")
def check(file: str, as_json: bool, no_machine: bool) -> None:
    """Name every mistake in FILE, and what does not fit on this machine. Exits 2 if any."""
    mistakes: list[dict[str, Any]] = []
    problems: list[dict[str, str]] = []
    sentences: list[str] = []
    try:
        loaded = _load(file)
        if not no_machine:
            found = check_against_machine(loaded.config, probe_machine(loaded.config))
            problems = [{"key": problem.key, "sentence": problem.sentence} for problem in found]
            sentences = [f"{file}: {problem}" for problem in found]
    except ConfigError as error:
        mistakes = [_as_data(mistake, error.source) for mistake in error.mistakes]
        sentences = error.sentences()
    is_ok = not sentences
    if as_json:
        data = {"file": file, "ok": is_ok, "mistakes": mistakes, "problems": problems}
        click.echo(json.dumps(data, indent=2))
    else:
        for sentence in sentences:
            click.echo(sentence, err=True)
        if is_ok:
            click.echo(f"{file}: good")
    sys.exit(0 if is_ok else 2)


@config.command()
@_file
@_as_json
def show(file: str, as_json: bool) -> None:
    """Show every key of FILE with its effective value and where that comes from."""
    loaded = _load(file)
    resolved = resolve_sizes(loaded.config, probe_machine(loaded.config))
    if as_json:
        values = {
            ".".join(path): {"value": plain_value(value), "from": loaded.sources[".".join(path)]}
            for path, value in effective_values(resolved)
        }
        click.echo(json.dumps({"file": file, "values": values}, indent=2))
        return
    rows = zip(shown_values(resolved), shown_values(loaded.config), strict=True)
    table = Table("key", "value", "from", box=None, pad_edge=False)
    for (key, value), (_, written) in rows:
        share = f" ({written})" if written.endswith("%") else ""
        table.add_row(key, value + share, loaded.sources[key])
    # A pipe has no width of its own: one key, one line, for grep.
    width = None if sys.stdout.isatty() else 240
    Console(width=width, highlight=False, markup=False).print(table)


@config.command()
def schema() -> None:
    """Print the JSON Schema of a configuration, for editors."""
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Config.model_json_schema(by_alias=True, mode="validation"),
        "title": "hicache configuration",
    }
    click.echo(json.dumps(document, indent=2))


@config.command()
@click.argument("file", type=click.Path(dir_okay=False), required=False)
@click.option("--endpoint", help="Where the daemon listens; default as for clients.")
@_as_json
def reload(file: str | None, endpoint: str | None, as_json: bool) -> None:
    """Have the running daemon read FILE (or its own file) again.

    What can change live is applied; the rest is named and needs a restart.
    """
    if file is not None:
        file = os.path.abspath(file)
        _load(file)
    endpoint = endpoint or default_endpoint(os.environ, os.getuid())
    reply = reload_daemon(endpoint, file, RELOAD_TIMEOUT_S)
    if as_json:
        click.echo(json.dumps(reply, indent=2))
        return
    for title, keys in (("applied", reply.get("live")), ("needs a restart", reply.get("restart"))):
        if keys:
            click.echo(f"{title}: {', '.join(keys)}")
    if not reply.get("live") and not reply.get("restart"):
        click.echo("nothing changed")


def reload_daemon(endpoint: str, file: str | None, timeout_s: float) -> dict[str, Any]:
    """The daemon's answer: `{"live": [keys], "restart": [keys]}`. Raises where none answers."""
    from hicache.client import admin_call

    reply: dict[str, Any] = admin_call(endpoint, "reload", {"file": file or ""}, timeout_s)
    return reply


def _load(file: str) -> LoadedConfig:
    return load_config(file, Surroundings.of(os.environ, os.getuid()))


def _as_data(mistake: Mistake, source: str) -> dict[str, Any]:
    return {
        "file": source,
        "line": mistake.line,
        "key": mistake.key,
        "found": mistake.found,
        "allowed": mistake.allowed,
        "nearest": mistake.nearest,
        "sentence": mistake.sentence(source),
    }

"""`hicache config`: check a file, show its effective values, and reload a running daemon."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from hicache.commands.curve_option import curve_option
from hicache.config import (
    ConfigError,
    LoadedConfig,
    Mistake,
    Surroundings,
    check_against_machine,
    config_model,
    effective_values,
    load_config,
    plain_value,
    probe_machine,
    resolve_sizes,
    shown_values,
)
from hicache.daemon.curve_auth import check_keys
from hicache.protocol.curve import CurveKeys
from hicache.protocol.endpoint import default_endpoint

RELOAD_TIMEOUT_S = 10.0

_file = click.argument("file", type=click.Path(dir_okay=False))
_as_json = click.option("--json", "as_json", is_flag=True, help="As data.")


@click.group()
def config() -> None:
    """Check, show and reload configurations; make keys for tcp://."""


@config.command()
@_file
@_as_json
@click.option("--no-machine", is_flag=True, help="Only the file: skip memory and disk.")
def check(file: str, as_json: bool, no_machine: bool) -> None:
    """Name every mistake in FILE, and what does not fit on this machine. Exits 2 if any."""
    mistakes: list[dict[str, Any]] = []
    problems: list[dict[str, str]] = []
    sentences: list[str] = []
    warnings: tuple[str, ...] = ()
    try:
        loaded = _load(file)
        warnings = loaded.warnings
        if not no_machine:
            found = check_against_machine(loaded.config, probe_machine(loaded.config))
            found += check_keys(loaded.config.socket)
            problems = [{"key": problem.key, "sentence": problem.sentence} for problem in found]
            sentences = [f"{file}: {problem}" for problem in found]
    except ConfigError as error:
        mistakes = [_as_data(mistake, error.source) for mistake in error.mistakes]
        sentences = error.sentences()
    is_ok = not sentences
    if as_json:
        data = {
            "file": file,
            "ok": is_ok,
            "mistakes": mistakes,
            "problems": problems,
            "warnings": warnings,
        }
        click.echo(json.dumps(data, indent=2))
    else:
        for sentence in (*warnings, *sentences):
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
        **config_model().model_json_schema(by_alias=True, mode="validation"),
        "title": "hicache configuration",
    }
    click.echo(json.dumps(document, indent=2))


@config.command()
@click.argument("file", type=click.Path(dir_okay=False), required=False)
@click.option("--endpoint", help="Where the daemon listens; default as for clients.")
@curve_option
@_as_json
def reload(file: str | None, endpoint: str | None, curve: CurveKeys | None, as_json: bool) -> None:
    """Have the running daemon read FILE (or its own file) again.

    What can change live is applied; the rest is named and needs a restart.
    """
    if file is not None:
        file = os.path.abspath(file)
        _load(file)
    endpoint = endpoint or default_endpoint(os.environ, os.getuid())
    reply = reload_daemon(endpoint, file, RELOAD_TIMEOUT_S, curve)
    if as_json:
        click.echo(json.dumps(reply, indent=2))
        return
    for title, keys in (("applied", reply.get("live")), ("needs a restart", reply.get("restart"))):
        if keys:
            click.echo(f"{title}: {', '.join(keys)}")
    if not reply.get("live") and not reply.get("restart"):
        click.echo("nothing changed")


@config.command()
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.argument("name", metavar="NAME")
def keys(folder: Path, name: str) -> None:
    """Make a CURVE key pair NAME in DIR, for a daemon on tcp:// or for one of its clients."""
    from zmq.auth import create_certificates

    if Path(name).name != name:
        raise click.BadParameter(f"{name!r} is no plain file name", param_hint="NAME")
    for file in (folder / f"{name}.key", folder / f"{name}.key_secret"):
        if file.exists():
            raise click.ClickException(f"{file} is there already, and is left as it is")
    before = os.umask(0o077)  # the secret file must never be readable by others, not even briefly
    try:
        folder.mkdir(parents=True, exist_ok=True)
        public, secret = create_certificates(folder.absolute(), name)
    except OSError as error:
        raise click.ClickException(f"{folder} cannot be written: {error.strerror}") from None
    finally:
        os.umask(before)
    os.chmod(public, 0o644)
    click.echo(_WHERE_KEYS_GO.format(public=public, secret=secret, name=name))


_WHERE_KEYS_GO = """\
{secret}
    secret: stays on this machine (mode 0600). A daemon's goes into
        socket.curve_secret_key_file: {secret}
    a client's into
        CurveKeys.load("{secret}", "the daemon's .key")
{public}
    public: a client's is copied into the daemon's folder of allowed clients,
        socket.curve_allowed_clients_dir; a daemon's to each of its clients"""


def reload_daemon(
    endpoint: str, file: str | None, timeout_s: float, curve: CurveKeys | None = None
) -> dict[str, Any]:
    """The daemon's reply: `{"live": [keys], "restart": [keys]}`. Raises if none answers."""
    from hicache.client import admin_call

    reply: dict[str, Any] = admin_call(endpoint, "reload", {"file": file or ""}, timeout_s, curve)
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

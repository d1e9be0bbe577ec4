"""`hicache warm`, `pin`, `unpin` and `pins`: prepare a daemon for prompts that will come."""

import json
import os
from collections.abc import Callable
from typing import IO, Any, TypeVar

import click

from hicache.client import admin_call
from hicache.client.calls import warm_deadline_s
from hicache.commands.curve_option import curve_option
from hicache.commands.time_options import seconds_option
from hicache.commands.tree_drawing import duration, printable
from hicache.config.units import format_seconds
from hicache.protocol.curve import CurveKeys
from hicache.protocol.endpoint import default_endpoint
from hicache.protocol.messages import encode_tokens
from hicache.protocol.operations import MAX_DEADLINE_S, MAX_PIN_S

Command = TypeVar("Command", bound=Callable[..., Any])
TIMEOUT_S = 5.0


def _text(_: click.Context, parameter: click.Parameter, value: str) -> str:
    """Refuses arguments that are not text: they cannot be sent."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise click.BadParameter("not valid UTF-8", param=parameter) from None
    return value


def _of_a_daemon(command: Command) -> Command:
    """The options that these commands share."""
    command = curve_option(command)
    return click.option("--endpoint", help="Where the daemon listens.")(command)


def _of_a_prompt(command: Command) -> Command:
    command = click.option(
        "--namespace",
        required=True,
        metavar="PREFIX",
        help="The beginning of its digest, or its name, as `hicache stats` shows them.",
    )(command)
    return click.argument("tokens", type=click.File("r"))(command)


@click.command()
@_of_a_prompt
@_of_a_daemon
@seconds_option("--wait", "wait_s", "0s", 0.0, MAX_DEADLINE_S - TIMEOUT_S, "How long to wait.")
def warm(
    tokens: IO[str], namespace: str, endpoint: str | None, curve: CurveKeys | None, wait_s: float
) -> None:
    """Copy a prompt's blocks to memory before they are requested. TOKENS: a file with its token
    ids, a JSON array; - for stdin."""
    endpoint = _endpoint(endpoint)
    prompt = _prompt(endpoint, curve, namespace, tokens)
    body = {**prompt, "wait": wait_s > 0}
    if wait_s > 0:
        body["deadline_s"] = warm_deadline_s(wait_s)
    reply = admin_call(endpoint, "warm", body, timeout_s=wait_s + TIMEOUT_S, curve=curve)
    held, there = reply["held_blocks"], reply["warm_blocks"]
    refused = reply["refused_blocks"]
    click.echo(f"{there} of {held} blocks are in memory")
    if refused:
        click.echo(f"{refused} will not come: there is no room for them")
    elif there < held:
        click.echo(f"{held - there} are on their way")


@click.command()
@_of_a_prompt
@_of_a_daemon
@seconds_option("--for", "ttl_s", "1h", 1.0, MAX_PIN_S, "How long to keep it.")
@click.option("--name", default="", callback=_text, help="Shown by `hicache pins`.")
def pin(
    tokens: IO[str],
    namespace: str,
    endpoint: str | None,
    curve: CurveKeys | None,
    ttl_s: float,
    name: str,
) -> int:
    """Keep the stored blocks of a prompt, and print the pin. TOKENS: a file with its token ids, a
    JSON array; - for stdin. Pins end with the daemon. Exit status: 1 if no block is stored."""
    endpoint = _endpoint(endpoint)
    body = {**_prompt(endpoint, curve, namespace, tokens), "ttl_s": ttl_s, "name": name}
    reply = admin_call(endpoint, "pin", body, timeout_s=TIMEOUT_S, curve=curve)
    if not reply["pin"]:
        click.echo("nothing of this prompt is held", err=True)
        return 1
    click.echo(reply["pin"])
    click.echo(f"{reply['blocks']} blocks are kept for {format_seconds(ttl_s)}", err=True)
    return 0


@click.command()
@click.argument("pin", callback=_text)
@_of_a_daemon
def unpin(pin: str, endpoint: str | None, curve: CurveKeys | None) -> int:
    """Remove a pin, by the id that `hicache pin` printed. Exit status: 1 if there is none."""
    reply = admin_call(_endpoint(endpoint), "unpin", {"pin": pin}, timeout_s=TIMEOUT_S, curve=curve)
    if not reply["unpinned"]:
        click.echo("there is no such pin", err=True)
    return 0 if reply["unpinned"] else 1


@click.command()
@_of_a_daemon
@click.option("--json", "as_json", is_flag=True, help="As data.")
def pins(endpoint: str | None, curve: CurveKeys | None, as_json: bool) -> None:
    """List the pins of a daemon."""
    stats = admin_call(_endpoint(endpoint), "stats", timeout_s=TIMEOUT_S, curve=curve)
    rows = stats.get("pins") or []
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        left, model = duration(max(0, round(row["ends_in_s"]))), row["namespace"][:12]
        name = printable(row["name"])
        click.echo(f"{row['pin']}  {row['blocks']} blocks of {model} for {left}  {name}".rstrip())
    if not rows:
        click.echo("nothing is pinned")


def _endpoint(endpoint: str | None) -> str:
    return endpoint or default_endpoint(os.environ, os.getuid())


def _prompt(
    endpoint: str, curve: CurveKeys | None, namespace: str, tokens: IO[str]
) -> dict[str, Any]:
    """The fields of a request that identify the prompt."""
    try:
        packed = encode_tokens(json.load(tokens))
    except (ValueError, TypeError, RecursionError) as error:
        problem = f"no JSON array of token ids: {error}"
        raise click.BadParameter(problem, param_hint="TOKENS") from None
    stats = admin_call(endpoint, "stats", timeout_s=TIMEOUT_S, curve=curve)
    rows = stats.get("namespaces") or []
    digest = namespace.lower()
    found = [row for row in rows if row["digest"].startswith(digest) or row["name"] == namespace]
    if len(found) != 1:
        titles = [f"{row['digest'][:12]} {printable(row['name'])}".strip() for row in rows]
        there = ", ".join(titles) or "none"
        problem = "names several of" if found else "is none of"
        raise click.BadParameter(f"{namespace!r} {problem} {there}", param_hint="--namespace")
    return {"namespace": bytes.fromhex(found[0]["digest"]), "tokens": packed}

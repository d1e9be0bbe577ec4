"""`hicache health`: is a daemon live, ready and healthy? For people and probes."""

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import click

from hicache.client import DaemonAbsent, DaemonError, admin_call
from hicache.commands.curve_option import curve_option
from hicache.commands.time_options import timeout_option
from hicache.protocol.curve import CurveKeys
from hicache.protocol.endpoint import default_endpoint

PROBES = ("live", "ready", "healthy")


@click.command()
@click.argument("probe", type=click.Choice(PROBES), default="healthy")
@click.option("--endpoint", help="Where the daemon listens.")
@curve_option
@timeout_option("2s")
@click.option("--json", "as_json", is_flag=True, help="As data.")
def health(
    probe: str, endpoint: str | None, curve: CurveKeys | None, timeout_s: float, as_json: bool
) -> None:
    """Exits 0 if PROBE is true of the daemon, 1 if not.

    live: it answers, so a restart would not help. ready: it accepts requests. healthy (the
    default): every tier serves and takes blocks, and every part works.
    """
    endpoint = endpoint or default_endpoint(os.environ, os.getuid())
    try:
        reply = admin_call(endpoint, "health", timeout_s=timeout_s, curve=curve)
    except (DaemonAbsent, DaemonError) as error:
        if as_json:
            click.echo(json.dumps(dict.fromkeys(PROBES, False) | {"error": str(error)}))
        else:
            click.echo(str(error), err=True)
        sys.exit(1)
    if as_json:
        click.echo(json.dumps(reply))
    else:
        click.echo("\n".join(_lines(reply)))
    sys.exit(0 if reply.get(probe) else 1)


def _lines(reply: dict[str, Any]) -> Iterator[str]:
    yield ", ".join(what if reply.get(what) else f"not {what}" for what in PROBES)
    problems = reply.get("problems") or {}
    for name, state in (reply.get("tiers") or {}).items():
        yield f"  {name}: {state}" + (f": {problems[name]}" if name in problems else "")
    for name, part in (reply.get("parts") or {}).items():
        faults = part.get("faults")
        said = part.get("problem") or "goes on"
        yield f"  {name}: {said}" + (f" ({faults} faults so far)" if faults else "")

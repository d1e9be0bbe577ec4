"""`hicache explain`: the last decisions of a daemon's planner, in words or as data."""

import json
import os
import sys

import click

from hicache.client import DaemonAbsent, DaemonError, admin_call
from hicache.commands.curve_option import curve_option
from hicache.commands.time_options import timeout_option
from hicache.protocol.curve import CurveKeys
from hicache.protocol.endpoint import default_endpoint


@click.command()
@click.option("--endpoint", help="Where the daemon listens.")
@curve_option
@click.option(
    "--last",
    type=click.IntRange(1, 256),
    default=10,
    show_default=True,
    help="How many, the youngest last.",
)
@timeout_option("5s")
@click.option("--json", "as_json", is_flag=True, help="As data.")
def explain(
    endpoint: str | None, curve: CurveKeys | None, last: int, timeout_s: float, as_json: bool
) -> None:
    """Say why the last hits were reloaded or recomputed, and how that turned out.

    Exits 1 if no daemon answers.
    """
    endpoint = endpoint or default_endpoint(os.environ, os.getuid())
    try:
        reply = admin_call(endpoint, "explain", {"last": last}, timeout_s, curve)
    except (DaemonAbsent, DaemonError) as error:
        click.echo(str(error), err=True)
        sys.exit(1)
    decisions = reply["decisions"]
    if as_json:
        click.echo(json.dumps(decisions, indent=2))
        return
    if not decisions:
        click.echo("No hit has been decided on yet.")
    for row in reversed(decisions):
        name = row["name"] or row["namespace"][:12]
        click.echo(f"{row['number']}. {row['age_s']:.1f} s ago, {name}: {row['sentence']}")

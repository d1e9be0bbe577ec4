"""`hicache ping`: does a daemon answer, is it ready, and how fast is it?"""

import json
import os
import sys
import time

import click

from hicache.client import DaemonAbsent, DaemonError, admin_call
from hicache.commands.curve_option import curve_option
from hicache.commands.time_options import timeout_option
from hicache.protocol.curve import CurveKeys
from hicache.protocol.endpoint import default_endpoint


@click.command()
@click.option("--endpoint", help="Where the daemon listens.")
@curve_option
@timeout_option("2s")
@click.option("--json", "as_json", is_flag=True, help="As data.")
def ping(endpoint: str | None, curve: CurveKeys | None, timeout_s: float, as_json: bool) -> None:
    """Exits 0 if a daemon answers and is ready, 1 if not."""
    endpoint = endpoint or default_endpoint(os.environ, os.getuid())
    started_s = time.perf_counter()
    try:
        reply = admin_call(endpoint, "ping", timeout_s=timeout_s, curve=curve)
    except (DaemonAbsent, DaemonError) as error:
        if as_json:
            click.echo(json.dumps({"endpoint": endpoint, "ready": False, "error": str(error)}))
        else:
            click.echo(str(error), err=True)
        sys.exit(1)
    taken_ms = (time.perf_counter() - started_s) * 1000
    is_ready = bool(reply.get("ready"))
    if as_json:
        click.echo(json.dumps({"endpoint": endpoint, **reply, "seconds": taken_ms / 1000}))
    else:
        click.echo(_sentence(endpoint, reply, is_ready, taken_ms))
    sys.exit(0 if is_ready else 1)


def _sentence(endpoint: str, reply: dict[str, object], is_ready: bool, taken_ms: float) -> str:
    who = f"hicache {reply.get('version', '?')} (pid {reply.get('pid', '?')}) at {endpoint}"
    tiers = reply.get("tiers")
    states = tiers.items() if isinstance(tiers, dict) else ()
    listed = ", ".join(f"{name} {state}" for name, state in states)
    state = "is ready" if is_ready else "is not ready yet"
    return f"{who} {state}: {listed or 'no tiers'}; answered in {taken_ms:.1f} ms"

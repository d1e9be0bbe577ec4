"""`hicache verify`: read every block on disk and compare it with its checksum."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hicache.client import DaemonAbsent, DaemonError, admin_call
from hicache.commands import disk_tools
from hicache.commands.curve_option import curve_option
from hicache.commands.progress_line import ProgressLine
from hicache.config.units import parse_size
from hicache.protocol.curve import CurveKeys
from hicache.protocol.endpoint import default_endpoint

EXIT_BAD, EXIT_NOT_LOOKED_AT = 1, 2
ASK_EVERY_S = 0.2


@click.command()
@click.argument("path", type=click.Path(path_type=Path), required=False)
@click.option("--endpoint", help="Where the daemon listens, if no PATH is given.")
@curve_option
@click.option(
    "--rate", default="64MB", show_default=True, help="Read at most this much per second."
)
@click.option("--json", "as_json", is_flag=True, help="As data, on stdout.")
def verify(
    path: Path | None, endpoint: str | None, curve: CurveKeys | None, rate: str, as_json: bool
) -> int:
    """Read every block of the disk tier and compare it with its checksum: at PATH, which no daemon
    may have open and where nothing is changed; or, without PATH, through the daemon while it
    serves, which removes what is bad. Exit status: 0 all is well, 1 something is not, 2 it could
    not be looked at."""
    if path is None:
        return _online(endpoint or default_endpoint(os.environ, os.getuid()), curve, rate, as_json)
    with ProgressLine() as line:
        reports = disk_tools.verify(path, lambda slot, done, all_: line(_name(slot), done, all_))
    show_reports(path, reports, as_json)
    return 0 if all(report.is_clean for report in reports) else EXIT_BAD


def _online(endpoint: str, curve: CurveKeys | None, rate: str, as_json: bool) -> int:
    try:
        bytes_per_s = float(parse_size(rate))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--rate") from None
    body: dict[str, Any] = {"start": True, "bytes_per_s": bytes_per_s}
    try:
        with ProgressLine() as line:
            while True:
                disks = admin_call(endpoint, "verify", body, timeout_s=5.0, curve=curve)["devices"]
                if not any(disk["is_running"] for disk in disks):
                    break
                done, total = (sum(disk[f] for disk in disks) for f in ("blocks", "total_blocks"))
                line("reading the disk tier", done, total)
                body = {}
                time.sleep(ASK_EVERY_S)
    except (DaemonAbsent, DaemonError) as error:
        click.echo(str(error), err=True)
        return EXIT_NOT_LOOKED_AT
    if as_json:
        is_clean = not any(disk["num_bad"] or disk["error"] for disk in disks)
        click.echo(json.dumps({"endpoint": endpoint, "ok": is_clean, "devices": disks}, indent=2))
    else:
        _show_online(disks)
    if not disks or any(disk["error"] for disk in disks):
        return EXIT_NOT_LOOKED_AT
    return EXIT_BAD if any(disk["num_bad"] for disk in disks) else 0


def _show_online(disks: list[dict[str, Any]]) -> None:
    for disk in disks:
        said = f"{disk['num_bad']} bad, removed" if disk["num_bad"] else "all well"
        size = f"{disk['bytes'] / 1e9:.2f} GB"
        ended = f"; it ended early: {disk['error']}" if disk["error"] else ""
        click.echo(f"{disk['device']}: {disk['blocks']} blocks, {size}: {said}{ended}")
        for row in disk["bad"][:10]:
            click.echo(f"  {row['key'] or '-'}: {row['problem']}")
    if not disks:
        click.echo("the daemon has no disk tier")


def show_reports(path: Path, reports: list[disk_tools.ClassReport], as_json: bool) -> None:
    """Print the findings, one line per class; in JSON every bad record."""
    if as_json:
        is_clean = all(report.is_clean for report in reports)
        rows = [asdict(report) for report in reports]
        click.echo(json.dumps({"path": str(path), "ok": is_clean, "classes": rows}, indent=2))
        return
    for report in reports:
        said = report.damage or (f"{len(report.bad)} bad" if report.bad else "all well")
        done = f"; {report.done}" if report.done else ""
        size = f"{report.bytes / 1e9:.2f} GB"
        click.echo(f"{_name(report.slot_bytes)}: {report.blocks} blocks, {size}: {said}{done}")
        for row in report.bad[:10]:
            click.echo(f"  {row['key'] or '-'}: {row['problem']}")
    if not reports:
        click.echo("no blocks")


def _name(slot_bytes: int) -> str:
    return f"slots of {slot_bytes:,} bytes"

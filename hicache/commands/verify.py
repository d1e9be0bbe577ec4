"""`hicache verify`: read every block on disk and compare it with its checksum."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from hicache import disk_care
from hicache.bench.report import ProgressLine

EXIT_BAD = 1


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="As data, on stdout.")
def verify(path: Path, as_json: bool) -> int:
    """Read every block of the disk tier at PATH, which no daemon may have open, and compare it with
    its checksum. Changes nothing. Exit status: 0 all is well, 1 something is not, 2 it could not be
    looked at."""
    with ProgressLine() as line:
        reports = disk_care.verify(path, lambda slot, done, all_: line(_name(slot), done, all_))
    tell(path, reports, as_json)
    return 0 if all(report.is_clean for report in reports) else EXIT_BAD


def tell(path: Path, reports: list[disk_care.ClassReport], as_json: bool) -> None:
    """What was found, one line a class; every bad record in JSON."""
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

"""`hicache disk`: maintenance of a disk tier's folder."""

from pathlib import Path

import click

from hicache.commands import disk_tools
from hicache.commands.progress_line import ProgressLine
from hicache.commands.verify import show_reports


@click.group()
def disk() -> None:
    """Look after a disk tier's folder while no daemon has it open."""


@disk.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="As data, on stdout.")
def repair(path: Path, as_json: bool) -> None:
    """Remove bad records at PATH, and rebuild an environment that cannot be read from its whole
    blocks. The old file of a rebuilt environment stays beside it as aside-…, until its room is
    needed."""
    with ProgressLine() as line:
        reports = disk_tools.repair(
            path, lambda slot, done, all_: line(f"{slot:,}-byte slots", done, all_)
        )
    show_reports(path, reports, as_json)

"""`hicache disk`: looking after a disk tier's folder."""

from pathlib import Path

import click

from hicache.bench.report import ProgressLine
from hicache.commands import disk_tools as disk_care
from hicache.commands.verify import tell


@click.group()
def disk() -> None:
    """Look after a disk tier's folder while no daemon has it open."""


@disk.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="As data, on stdout.")
def repair(path: Path, as_json: bool) -> None:
    """Remove bad records at PATH, and rebuild what cannot be read any more from the blocks that are
    whole. A rebuilt environment's old file stays beside it as aside-…, until its room is needed."""
    with ProgressLine() as line:
        reports = disk_care.repair(
            path, lambda slot, done, all_: line(f"{slot:,}-byte slots", done, all_)
        )
    tell(path, reports, as_json)

"""`hicache gpu-check`: correctness and speed of what needs a GPU, on this machine's."""

import sys
from pathlib import Path

import click

from hicache.bench.gpu_check.run import CHECKS, default_folder, run, show


@click.command()
@click.option("--dry", is_flag=True, help="Everything but the device: a stand-in copies bytes.")
@click.option("--json", "json_target", type=click.Path(path_type=Path), help="As data, into FILE.")
@click.option("--only", default=",".join(CHECKS), show_default=True, help="Some of the checks.")
@click.option("--logs", type=click.Path(path_type=Path), help="Folder of the checks' own output.")
@click.option("--budget", "budget_s", default=240.0, show_default=True, help="Seconds in all.")
def gpu_check(
    dry: bool, json_target: Path | None, only: str, logs: Path | None, budget_s: float
) -> None:
    """Check what needs a GPU: copies bit by bit, their speed beside plain pinned copies, the daemon
    with blocks in GPU memory, and a model's outputs with and without the cache.

    Exits 1 if something failed or missed its target.
    """
    names = [name for name in only.split(",") if name]
    strange = [name for name in names if name not in CHECKS]
    if strange:
        raise click.UsageError(f"no check {', '.join(strange)}; there are {', '.join(CHECKS)}")
    folder = logs or default_folder()
    folder.mkdir(parents=True, exist_ok=True)
    rows = run(names, dry, folder, budget_s)
    is_good = show(rows, dry, json_target)
    click.echo(f"the checks' own output: {folder}")
    sys.exit(0 if is_good else 1)

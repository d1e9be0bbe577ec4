"""One check as a process, started by `run.py`."""

import importlib
from pathlib import Path

import click

from hicache.bench.gpu_check.check import Check
from hicache.bench.gpu_check.run import CHECKS


@click.command()
@click.argument("name", type=click.Choice(list(CHECKS)))
@click.option("--report", type=click.Path(path_type=Path), required=True)
@click.option("--folder", type=click.Path(path_type=Path), required=True)
@click.option("--dry", is_flag=True)
@click.option("--small", is_flag=True, help="Less of everything, and no deliberate errors.")
def main(name: str, report: Path, folder: Path, dry: bool, small: bool) -> None:
    module = importlib.import_module(f"hicache.bench.gpu_check.{CHECKS[name][0]}")
    module.run(Check(name, report, folder, dry, small))


if __name__ == "__main__":
    main()

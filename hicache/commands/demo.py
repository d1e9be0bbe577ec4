"""`hicache demo`: a small LLM's conversation with hicache beside the same without."""

import json
import signal
import sys
from pathlib import Path
from types import FrameType

import click

import hicache


def _example_config() -> Path:
    """configs/laptop.yaml of the checkout this runs from, or of the current folder."""
    checkout = Path(hicache.__file__).resolve().parents[1]
    for top in (checkout, Path.cwd()):
        file = top / "configs" / "laptop.yaml"
        if file.is_file():
            return file
    raise click.UsageError(
        "configs/laptop.yaml is part of the repository and not installed: run this in a checkout, "
        "or give --config FILE (three tiers: hbm, dram, disk)"
    )


@click.command()
@click.option(
    "--config",
    "config_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The daemon's YAML file.  [default: configs/laptop.yaml]",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write the results to this file, too.",
)
@click.option("--random-weights", is_flag=True, help="A small model of random weights instead.")
def demo(config_file: Path | None, json_file: Path | None, random_weights: bool) -> None:
    """Serve a small LLM with and without hicache.

    Two coding agents share a system prompt; their turns are served from GPU memory (emulated),
    host memory and disk, and go on after the daemon was restarted. Uses a daemon of its own, in
    temporary folders. Exits 1 if any output differs from the one without hicache.
    """
    from hicache.demo.demo_daemon import DaemonFailed
    from hicache.demo.demo_model import ModelMissing, check_engine, load_random, load_smollm2

    signal.signal(signal.SIGTERM, _exit_in_order)
    try:
        check_engine()
        from hicache.demo.demo_report import DemoReport, as_data
        from hicache.demo.demo_run import run_demo

        load = load_random if random_weights else load_smollm2
        with DemoReport() as report:
            result = run_demo(load, config_file or _example_config(), report)
            report.summary(result)
    except (ModelMissing, DaemonFailed) as error:
        click.echo(str(error), err=True)
        sys.exit(1)
    if json_file is not None:
        json_file.write_text(json.dumps(as_data(result), indent=2) + "\n")
    sys.exit(0 if result.outputs_equal else 1)


def _exit_in_order(signum: int, _: FrameType | None) -> None:
    """SIGTERM ends the daemon and removes the folders, as Ctrl-C does."""
    sys.exit(128 + signum)

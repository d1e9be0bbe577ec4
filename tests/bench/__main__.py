"""Developers' benchmarks, from a checkout: `python -m tests.bench NAME`, or `make bench-NAME`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from hicache.bench.report import show_rows, wide_console
from hicache.commands.progress_line import ProgressLine
from hicache.config.models import PlannerConfig
from hicache.engine.planner.planner import PlannerSettings
from tests.bench import engine as engine_bench
from tests.bench import index as index_bench
from tests.bench import planner as planner_bench
from tests.bench import refit as refit_bench
from tests.bench import restart as restart_bench

_json_option = click.option(
    "--json",
    "json_target",
    is_flag=False,
    flag_value="-",
    default=None,
    metavar="[FILE|-]",
    help="As data, on stdout or into FILE.",
)


def _show_figures(figures: Mapping[str, Any], title: str, json_target: str | None) -> None:
    """Named figures instead of rows; each figure of a group has its own line."""
    data = json.dumps(figures, indent=2)
    if json_target == "-":
        click.echo(data)
        return
    if json_target:
        Path(json_target).write_text(data + "\n")
    table = Table(title=title)
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        group = value if isinstance(value, dict) else {"": value}
        for part, figure in group.items():
            is_share = isinstance(figure, float) and not name.endswith("_us")
            shown = f"{figure:.2%}" if is_share else str(figure)
            table.add_row(f"{name} {part}".strip(), shown)
    wide_console().print(table)


@click.group()
def bench() -> None:
    """Measure parts of hicache by themselves."""


@bench.command()
@click.option("--repeat", default=300, show_default=True, help="Samples per row.")
@click.option("--scale", is_flag=True, help="Also grow the index from 1 M to 100 M tokens.")
@_json_option
def index(repeat: int, scale: bool, json_target: str | None) -> None:
    """The radix index by itself, in thread-CPU time: hits, inserts, evictions."""
    with ProgressLine() as step:
        rows, tree, everything = index_bench.run(step, repeat)
        more = {"bytes_per_token": tree, "bytes_per_token_with_state": everything}
        grown, memory = index_bench.scale(step, repeat) if scale else ([], [])
    extra: dict[str, object] = dict(more)
    if scale:
        extra |= {"scale": [asdict(row) for row in grown], "scale_memory": memory}
    show_rows(rows, "the index by itself", json_target, extra)
    if grown and json_target != "-":
        show_rows(grown, "the index as it grows", None)


@bench.command()
@click.option("--repeat", default=300, show_default=True, help="Samples per row.")
@_json_option
def engine(repeat: int, json_target: str | None) -> None:
    """The whole decision on a request, in thread-CPU time: match, plan, lease, policy."""
    with ProgressLine() as step:
        rows = engine_bench.run(step, repeat)
    show_rows(rows, "the decision on a request", json_target)


@bench.command()
@click.option("--full", "is_full", is_flag=True, help="The whole grid: some minutes.")
@click.option("--seed", default=1, show_default=True, help="Of the sample and of the noise.")
@_json_option
def planner(is_full: bool, seed: int, json_target: str | None) -> None:
    """Reload or recompute on simulated machines, against what would have been best."""
    with ProgressLine() as step:
        settings = PlannerSettings(exploration=PlannerConfig().exploration)
        figures = planner_bench.run(step, settings, None if is_full else planner_bench.SAMPLE, seed)
    _show_figures(figures, "regret, as a share of the best expected time", json_target)


@bench.command()
@click.option("--speeds", default="0.5,1,2,free", show_default=True, help="Of the disk, beside KV.")
@click.option("--prefixes", default="256,1024", show_default=True, help="Tokens on disk.")
@click.option("--rounds", default=5, show_default=True, help="Requests per cell and policy.")
@click.option("--random-weights", is_flag=True, help="A small model of random weights instead.")
@_json_option
def reload(
    speeds: str, prefixes: str, rounds: int, random_weights: bool, json_target: str | None
) -> None:
    """A real model on a throttled disk: the planner beside always reloading and recomputing.

    Speeds are multiples of the model's KV-generation bandwidth; the whole table of docs/planner.md
    has --speeds 0.25,0.5,1,2,10,free and --prefixes 256,512,1024,2048,4096.
    """
    from hicache.demo.demo_model import ModelMissing, check_engine, load_random, load_smollm2

    try:
        check_engine()
        from tests.bench import reload as reload_bench

        demo = load_random() if random_weights else load_smollm2("bfloat16")
    except ModelMissing as error:
        raise click.ClickException(str(error)) from None
    multiples = [float("inf") if s.strip() == "free" else float(s) for s in speeds.split(",")]
    lengths = [int(prefix) for prefix in prefixes.split(",")]
    with ProgressLine() as step:
        rows, generated = reload_bench.run(
            demo, multiples, lengths, rounds, step, lambda row: click.echo(f"\n{row}", err=True)
        )
    bad = sum(not row.is_good for row in rows)
    more: dict[str, object] = {"model": demo.name, "kv_bytes_per_s": generated, "not_good": bad}
    show_rows(rows, f"{demo.name}, {generated / 1e6:.1f} MB of KV per second", json_target, more)


@bench.command()
@click.option("--path", type=click.Path(path_type=Path), help="A folder on the disk to measure.")
@click.option("--blocks", default=1_000_000, show_default=True, help="Blocks that are stored.")
@_json_option
def restart(path: Path | None, blocks: int, json_target: str | None) -> None:
    """A daemon's start on a disk tier full of small blocks: how soon it serves, and all of it."""
    with ProgressLine() as step:
        row = restart_bench.run(path, blocks, step)
    show_rows([row], "a start on a full disk tier", json_target)


@bench.command()
@click.option("--runs", default=10_000, show_default=True, help="Of the ghost index, about.")
@click.option("--refits", default=10, show_default=True, help="That pings are measured during.")
@_json_option
def refit(runs: int, refits: int, json_target: str | None) -> None:
    """Round trips of ping while the eviction model is refitted, beside an idle daemon's."""
    with ProgressLine() as step:
        row = refit_bench.run(runs, refits, step)
    show_rows([row], "ping during refits beside ping between them", json_target)


if __name__ == "__main__":
    bench(prog_name="python -m tests.bench")

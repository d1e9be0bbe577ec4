"""`hicache bench`: measure a daemon against this machine's floor."""

from pathlib import Path

import click

from hicache.bench import disk as disk_bench
from hicache.bench import rpc as rpc_bench
from hicache.bench import store as store_bench
from hicache.bench.daemon_process import Running
from hicache.bench.report import show_rows
from hicache.commands.curve_option import curve_option
from hicache.commands.progress_line import ProgressLine
from hicache.protocol.curve import CurveKeys
from hicache.tiers.disk.disk_tier import Durability

_json_option = click.option(
    "--json",
    "json_target",
    is_flag=False,
    flag_value="-",
    default=None,
    metavar="[FILE|-]",
    help="As data, on stdout or into FILE.",
)
_options = [
    click.option("--endpoint", help="A running daemon; by default one is started and stopped."),
    curve_option,
    click.option(
        "--block-tokens", default=16, show_default=True, help="As in the daemon's configuration."
    ),
    _json_option,
]


@click.group()
def bench() -> None:
    """Measure a daemon against this machine's floor, in the same run."""


@bench.command()
@click.option("--calls", default=2000, show_default=True, help="Calls per row, at least.")
def rpc(
    endpoint: str | None,
    curve: CurveKeys | None,
    block_tokens: int,
    json_target: str | None,
    calls: int,
) -> None:
    """Round trips: ping and match, beside a bare ZeroMQ echo of the same payload."""
    with ProgressLine() as step:
        rows = rpc_bench.run(_daemon(endpoint, curve), block_tokens, calls, step)
    show_rows(rows, "round trips beside a bare echo", json_target)


@bench.command()
@click.option("--calls", default=100, show_default=True, help="Calls per row, at least.")
def store(
    endpoint: str | None,
    curve: CurveKeys | None,
    block_tokens: int,
    json_target: str | None,
    calls: int,
) -> None:
    """Blocks through shared memory: put and fetch, beside a bare copy."""
    with ProgressLine() as step:
        rows = store_bench.run(_daemon(endpoint, curve), block_tokens, calls, step)
    show_rows(rows, "blocks beside a bare copy", json_target)


@bench.command()
@click.option("--path", type=click.Path(path_type=Path), help="A folder on the disk to measure.")
@click.option("--rounds", default=5, show_default=True, help="Rounds per row; the median counts.")
@click.option("--total", default=128, show_default=True, help="MiB of values per size.")
@click.option("--sizes", default="256,1024,2048,4096,8192", show_default=True, help="KiB each.")
@click.option("--readers", default="1,2,4,8", show_default=True, help="Threads that read.")
@click.option(
    "--durability", type=click.Choice(["fast", "batched"]), default="batched", show_default=True
)
@_json_option
def disk(
    path: Path | None,
    rounds: int,
    total: int,
    sizes: str,
    readers: str,
    durability: Durability,
    json_target: str | None,
) -> None:
    """The disk tier by itself: reads and writes beside raw pread and pwrite, and its ageing."""
    sizes_bytes = [int(kib) << 10 for kib in sizes.split(",")]
    threads = [int(number) for number in readers.split(",")]
    plan = disk_bench.DiskBenchPlan(total << 20, rounds, sizes_bytes, threads, durability)
    with ProgressLine() as step:
        rows, churn = disk_bench.run(path, plan, step)
    show_rows(rows, "values beside raw reads and writes", json_target, {"churn": churn})


def _daemon(endpoint: str | None, curve: CurveKeys | None) -> Running | None:
    if endpoint is None and curve is not None:
        raise click.UsageError("--curve is for a running daemon: give its --endpoint too")
    return Running(endpoint, curve) if endpoint is not None else None


def _moved(name: str) -> click.Command:
    """A benchmark for developers, which is not installed: the command says so."""

    def refuse() -> None:
        raise click.ClickException(
            f"this benchmark is for hicache's developers: run `make bench-{name}` in a checkout"
        )

    return click.Command(name, callback=refuse, hidden=True, add_help_option=False)


for _name in ("engine", "index", "planner", "refit", "reload", "restart"):
    bench.add_command(_moved(_name))

for _command in (rpc, store):
    for _option in _options:
        _option(_command)

"""`hicache bench`: measure a daemon against this machine's floor."""

import click

from hicache.bench import rpc as rpc_bench
from hicache.bench import store as store_bench
from hicache.bench.report import ProgressLine, tell

_options = [
    click.option("--endpoint", help="A running daemon; by default one is started and stopped."),
    click.option(
        "--block-tokens", default=16, show_default=True, help="As the daemon's configuration says."
    ),
    click.option(
        "--json",
        "json_target",
        is_flag=False,
        flag_value="-",
        default=None,
        metavar="[FILE|-]",
        help="As data, on stdout or into FILE.",
    ),
]


@click.group()
def bench() -> None:
    """Measure a daemon against this machine's floor, in the same run."""


@bench.command()
@click.option("--calls", default=2000, show_default=True, help="Calls per row, at least.")
def rpc(endpoint: str | None, block_tokens: int, json_target: str | None, calls: int) -> None:
    """Round trips: ping and match, beside a bare ZeroMQ echo of the same payload."""
    with ProgressLine() as step:
        rows = rpc_bench.run(endpoint, block_tokens, calls, step)
    tell(rows, "round trips beside a bare echo", json_target)


@bench.command()
@click.option("--calls", default=100, show_default=True, help="Calls per row, at least.")
def store(endpoint: str | None, block_tokens: int, json_target: str | None, calls: int) -> None:
    """Blocks through shared memory: put and fetch, beside a bare copy."""
    with ProgressLine() as step:
        rows = store_bench.run(endpoint, block_tokens, calls, step)
    tell(rows, "blocks beside a bare copy", json_target)


for _command in (rpc, store):
    for _option in _options:
        _option(_command)

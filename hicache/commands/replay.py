"""`hicache replay`: replay recorded requests through the product's own cache engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from hicache.bench.report import wide_console
from hicache.commands.progress_line import ProgressLine
from hicache.config.eviction import policy_names
from hicache.config.units import Share, UnitError, parse_size_or_share
from hicache.replay.model_profiles import DEFAULT_MODEL, MODELS, ModelProfile
from hicache.replay.plot import DISK_WRITES, Point, write_plot
from hicache.replay.simulate import LRU_STACK, MINIMUM, ReplayTally
from hicache.replay.simulate import replay as replay_once
from hicache.replay.traces import Trace, read_trace
from hicache.tiers.catalog import kinds

Sizes = Mapping[str, int | Share]
PLOTTED_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
PROGRESS_EVERY = 50


class TiersType(click.ParamType[dict[str, int | Share]]):
    """`hbm=2%,dram=64GiB`: shares of the trace's footprint, or bytes."""

    name = "sizes"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, int | Share]:
        sizes = {}
        for part in str(value).split(","):
            tier, _, size = part.partition("=")
            known = _tiers()
            if tier not in known or tier in sizes:
                self.fail(f"{part!r}: expected each of {', '.join(known)} at most once", param, ctx)
            try:
                sizes[tier] = parse_size_or_share(size)
            except UnitError as error:
                self.fail(f"{part!r}: {error}", param, ctx)
        return sizes


@dataclass(frozen=True, slots=True)
class ReplayRun:
    """One trace, policy and choice of sizes, with the result."""

    trace: Trace
    policy: str
    blocks: dict[str, int]
    tally: ReplayTally
    min_return: float = 0.0

    @property
    def hit_share(self) -> float:
        return self.tally.hit_tokens.total() / max(1, self.tally.tokens)

    def row(self, model: ModelProfile) -> dict[str, Any]:
        """As data; bytes are the model's."""
        block_bytes = _block_bytes(self.trace, model)
        tally = self.tally
        return {
            "trace": self.trace.name,
            "policy": self.policy,
            "min_return": self.min_return,
            "tiers": {
                tier: {
                    "blocks": blocks,
                    "share": blocks / self.trace.footprint_blocks,
                    "bytes": blocks * block_bytes,
                }
                for tier, blocks in self.blocks.items()
            },
            "hit_tokens": {tier: tally.hit_tokens[tier] for tier in _tiers()},
            "tokens": tally.tokens,
            "prefill_seconds_saved": round(tally.prefill_seconds_saved, 3),
            "bytes_moved": {
                link: count * block_bytes for link, count in sorted(tally.moved_blocks.items())
            },
            "bytes_written": {
                tier: tally.written_blocks[tier] * block_bytes for tier in self.blocks
            },
            "disk_writes_bytes": block_bytes
            * sum(tally.written_blocks[row.name] for row in kinds() if row.traits.persistent),
            "evictions": tally.evictions.total(),
        }


@click.command()
@click.argument(
    "traces", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--tiers",
    "choices",
    multiple=True,
    type=TiersType(),
    default=("hbm=2%,dram=10%,disk=50%",),
    show_default=True,
    help="Sizes, as shares of the trace's footprint or in bytes; an absent tier is 0. Repeatable.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice([*policy_names(), LRU_STACK, MINIMUM]),
    default=("lru",),
    show_default=True,
    help="Eviction policy; lru-stack is LRU proper over several tiers (lru promotes into free room "
    "only), min the offline bound. Repeatable.",
)
@click.option(
    "--warm",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    help="Report only on the requests after this share.",
)
@click.option("--no-hints", is_flag=True, help="Ignore session and stop in the trace.")
@click.option(
    "--min-return",
    "min_returns",
    multiple=True,
    type=click.FloatRange(0, 1),
    default=(0.0,),
    show_default=True,
    help="Write to disk only what returns with this probability (tiers.disk.min_return). "
    "Repeatable: then --plot draws hits against bytes written to disk.",
)
@click.option(
    "--model",
    type=click.Choice(list(MODELS)),
    default=DEFAULT_MODEL,
    show_default=True,
    help="Profile for bytes per token and prefill seconds saved (modelled).",
)
@click.option("--json", "as_json", is_flag=True, help="As data on stdout.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.html|.png",
    help="Hit ratio against size, policies as curves. One choice of --tiers is also tried at "
    "1/4, 1/2, 2 and 4 times its size.",
)
def replay(
    traces: Sequence[Path],
    choices: Sequence[Sizes],
    policies: Sequence[str],
    warm: float,
    no_hints: bool,
    min_returns: Sequence[float],
    model: str,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Replay request traces (Mooncake JSONL, plain or gzip'd) through the cache engine.

    The clock is the trace's and moves take no time: the result is which blocks policies keep.
    """
    profile = MODELS[model]
    is_gate_plotted = len(min_returns) > 1
    is_scaled = plot is not None and len(choices) == 1 and not is_gate_plotted
    scales = PLOTTED_SCALES if is_scaled else (1.0,)
    runs = []
    with ProgressLine() as progress:
        for path in traces:
            progress(f"reading {path.name}", 0, 1)
            trace = read_trace(path)
            for blocks in _all_sizes(trace, choices, scales, profile):
                for policy, min_return in product(policies, min_returns):

                    def step(
                        done: int, what: str = f"{trace.name} {policy}", of: Trace = trace
                    ) -> None:
                        if done % PROGRESS_EVERY == 0:
                            progress(what, done, len(of.requests))

                    tally = replay_once(
                        trace,
                        blocks,
                        policy,
                        warm=warm,
                        hints=not no_hints,
                        min_return=min_return,
                        saved_s=profile.saved_s,
                        step=step,
                    )
                    runs.append(ReplayRun(trace, policy, blocks, tally, min_return))
    if plot is not None and is_gate_plotted:
        title = "What the tiers would hit, by what may be written to disk"
        write_plot(plot, title, _gate_curves(runs, profile), DISK_WRITES)
    elif plot is not None:
        write_plot(plot, "What the tiers would hit", _curves(runs))
    if as_json:
        click.echo(json.dumps({"runs": [run.row(profile) for run in runs]}, indent=2))
    else:
        wide_console().print(_table(runs, profile))


def _tiers() -> list[str]:
    return [row.name for row in kinds()]


def _block_bytes(trace: Trace, model: ModelProfile) -> int:
    """The size of a block: from a recorded trace, or else from the model."""
    return trace.block_bytes or model.kv_bytes_per_token * trace.block_tokens


def _all_sizes(
    trace: Trace, choices: Sequence[Sizes], scales: Sequence[float], model: ModelProfile
) -> Iterator[dict[str, int]]:
    """Tiers in blocks, for each choice at each scale."""
    block_bytes = _block_bytes(trace, model)
    total_bytes = trace.footprint_blocks * block_bytes
    for sizes in choices:
        for scale in scales:
            yield {
                tier: round(
                    scale
                    * (size.of(total_bytes) if isinstance(size, Share) else size)
                    / block_bytes
                )
                for tier, size in sizes.items()
            }


def _gate_curves(runs: Sequence[ReplayRun], model: ModelProfile) -> dict[str, list[Point]]:
    """By policy (and trace), against GB written to disk."""
    curves: dict[str, list[Point]] = {}
    for run in runs:
        written = round(run.row(model)["disk_writes_bytes"] / 1e9)
        curves.setdefault(_name(run, runs), []).append((written, 100 * run.hit_share))
    return curves


def _name(run: ReplayRun, runs: Sequence[ReplayRun]) -> str:
    several = len({run.trace.name for run in runs}) > 1
    return f"{run.policy}, {run.trace.name}" if several else run.policy


def _curves(runs: Sequence[ReplayRun]) -> dict[str, list[Point]]:
    """By policy (and trace, where there are several), against the size of all tiers together."""
    curves: dict[str, list[Point]] = {}
    for run in runs:
        name = _name(run, runs)
        share = round(100 * sum(run.blocks.values()) / run.trace.footprint_blocks, 2)
        curves.setdefault(name, []).append((share, 100 * run.hit_share))
    return curves


def _table(runs: Sequence[ReplayRun], model: ModelProfile) -> Table:
    table = Table(title=f"hit tokens in % of input tokens; bytes of {model.name} (modelled)")
    table.add_column("trace")
    table.add_column("policy")
    if any(run.min_return for run in runs):
        table.add_column("min return", justify="right")
    tiers = _tiers()
    written_to = [row.name for row in kinds() if row.is_near or row.traits.persistent]
    writes = [f"{tier} writes" for tier in written_to]
    columns = ("tiers, blocks", "hit %", *tiers, "saved s", *writes, "evicted")
    for name in columns:
        table.add_column(name, justify="right")
    for run in runs:
        row = run.row(model)
        shares = [100 * row["hit_tokens"][tier] / max(1, run.tally.tokens) for tier in tiers]
        written = [row["bytes_written"].get(tier, 0) / 1e9 for tier in written_to]
        table.add_row(
            run.trace.name,
            run.policy,
            *([f"{run.min_return:g}"] if any(r.min_return for r in runs) else []),
            "/".join(f"{blocks}" for blocks in run.blocks.values()),
            f"{100 * run.hit_share:.2f}",
            *(f"{share:.2f}" for share in shares),
            f"{row['prefill_seconds_saved']:,.0f}",
            *(f"{size:,.0f} GB" for size in written),
            f"{row['evictions']:,}",
        )
    return table

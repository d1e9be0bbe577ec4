"""The output of the demo: progress while it runs, tables at its end, or the same as data."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from hicache.demo.demo_run import TIERS, Result, Turn

MIN_WIDTH = 116
WORDS_SHOWN = 70
_COUNTERS = {
    "hit_tokens": "hit tokens",
    "promotions": "promoted",
    "demotions": "demoted",
    "evictions": "evicted",
}


class DemoReport:
    """Shows a demo on a console. Use it in a `with`, which ends the spinner."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        if not self._console.is_terminal:  # a pipe has no width of its own
            self._console.width = max(MIN_WIDTH, self._console.width)
        self._status: Status | None = None

    def __enter__(self) -> DemoReport:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_phase()

    def phase(self, what: str) -> None:
        if not self._console.is_terminal:
            self._console.print(f"… {what}", style="dim", highlight=False)
        elif self._status is None:
            self._status = self._console.status(f"{what} …")
            self._status.start()
        else:
            self._status.update(f"{what} …")

    def note(self, what: str) -> None:
        self._console.print(f"[dim]{escape(what)}[/]", highlight=False)

    def turn(self, turn: Turn) -> None:
        show = partial(self._console.print, highlight=False, soft_wrap=True)
        hits = ", ".join(f"{tokens:,} {tier}" for tier, tokens in turn.hit_tokens.items() if tokens)
        show(
            f"[bold]{turn.agent}, turn {turn.turn}[/]  {turn.prompt_tokens:,} tokens, "
            f"{turn.new_share:.0%} new; hit: {hits or 'nothing'}; "
            f"TTFT [bold]{turn.ttft_s:.2f} s[/], without hicache {turn.ttft_without_s:.2f} s "
            f"({turn.speedup:.1f}×); {_equal(turn.outputs_equal)}"
        )
        show(f"    {turn.decision}: {escape(turn.reason)}", style="cyan")
        words = " ".join(turn.reply.split())
        shown = words if len(words) <= WORDS_SHOWN else f"{words[:WORDS_SHOWN]}…"
        show(f"    “{escape(shown)}”", style="dim")

    def summary(self, result: Result) -> None:
        self._end_phase()
        self._console.print()
        self._console.print(_turns(result))
        self._console.print(_tiers(result))
        for line in _conclusions(result):
            self._console.print(line, highlight=False, soft_wrap=True)

    def _end_phase(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def as_data(result: Result) -> dict[str, Any]:
    """What `--json` writes."""
    return {
        "turns": [
            {
                "agent": turn.agent,
                "turn": turn.turn,
                "prompt_tokens": turn.prompt_tokens,
                "hit_tokens": turn.hit_tokens,
                "decision": turn.decision,
                "reason": turn.reason,
                "ttft_s": turn.ttft_s,
                "ttft_without_s": turn.ttft_without_s,
                "outputs_equal": turn.outputs_equal,
            }
            for turn in result.turns
        ],
        "outputs_equal": result.outputs_equal,
        "after_restart_hit_tokens": result.after_restart_hit_tokens,
        "demoted_blocks": result.demoted_blocks,
    }


def _table(title: str, *columns: str, left: Collection[str]) -> Table:
    """Narrow enough for 80 columns."""
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    return table


def _turns(result: Result) -> Table:
    columns = ("turn", "prompt", *TIERS, "decision", "TTFT", "without", "faster", "outputs")
    table = _table(
        "turns (tokens, and seconds to the first one)",
        *columns,
        left=("turn", "decision", "outputs"),
    )
    for turn in result.turns:
        table.add_row(
            f"{turn.agent} {turn.turn}",
            f"{turn.prompt_tokens:,}",
            *(f"{turn.hit_tokens[tier]:,}" if turn.hit_tokens[tier] else "–" for tier in TIERS),
            turn.decision,
            f"{turn.ttft_s:.2f}",
            f"{turn.ttft_without_s:.2f}",
            f"{turn.speedup:.1f}×",
            _equal(turn.outputs_equal),
        )
    return table


def _tiers(result: Result) -> Table:
    """Counters of both runs of the daemon added up; bytes as they are now."""
    columns = ("tier", "medium", "used / MiB", *_COUNTERS.values())
    table = _table("tiers", *columns, left=("tier", "medium"))
    runs = [{row["name"]: row for row in stats["tiers"]} for stats in result.stats]
    for name, row in runs[-1].items():
        table.add_row(
            name,
            row["medium"],
            f"{row['used_bytes'] / 2**20:,.0f} / {row['capacity_bytes'] / 2**20:,.0f}",
            *(f"{sum(run[name][counter] for run in runs):,}" for counter in _COUNTERS),
        )
    return table


def _conclusions(result: Result) -> list[str]:
    hits = [turn for turn in result.turns if turn.reloaded]
    lines = [
        "outputs with and without hicache: "
        + ("[green]all equal, token for token[/]" if result.outputs_equal else "[red]DIFFERENT[/]"),
        f"after the restart: {result.after_restart_hit_tokens:,} tokens reloaded of "
        f"{result.held_tokens:,} held when the daemon was stopped",
        f"demoted to a slower tier: {result.demoted_blocks:,} blocks",
    ]
    if hits:
        speedups = sorted(turn.speedup for turn in hits)
        lines.append(
            f"TTFT of the {len(hits)} turns with hits: {speedups[0]:.1f} to {speedups[-1]:.1f} "
            f"times lower than without hicache, median {speedups[len(speedups) // 2]:.1f}"
        )
    if unused := result.unused_tiers():
        lines.append(f"[yellow]no turn was served from: {', '.join(unused)}[/]")
    return lines


def _equal(is_equal: bool) -> str:
    return "[green]equal[/]" if is_equal else "[red]DIFFERENT[/]"

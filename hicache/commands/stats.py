"""`hicache stats`: a daemon's tiers, traffic and decisions, as tables or as data."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hicache.client import DaemonAbsent, DaemonError, admin_call
from hicache.commands.curve_option import curve_option
from hicache.commands.progress_line import ProgressLine
from hicache.commands.text_format import shown_bytes as _bytes
from hicache.commands.time_options import timeout_option
from hicache.protocol.curve import CurveKeys
from hicache.protocol.endpoint import default_endpoint

MIN_WIDTH = 100
Stats = Mapping[str, Any]


@click.command()
@click.option("--endpoint", help="Where the daemon listens.")
@curve_option
@timeout_option("5s")
@click.option("--json", "as_json", is_flag=True, help="As data; with --watch, one line each time.")
@click.option(
    "--watch",
    "watch_s",
    is_flag=False,
    flag_value=2.0,
    type=click.FloatRange(min=0.05),
    default=None,
    metavar="[SECONDS]",
    help="Repeat at this interval; 2 seconds by default.",
)
@click.option(
    "--what-if",
    "is_what_if",
    is_flag=True,
    help="Estimate each tier's hits at 0.5, 2 and 4 times its size.",
)
@click.option(
    "--warm",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    help="With --what-if: report only on the requests after this share.",
)
def stats(
    endpoint: str | None,
    curve: CurveKeys | None,
    timeout_s: float,
    as_json: bool,
    watch_s: float | None,
    is_what_if: bool,
    warm: float,
) -> None:
    """Show what a daemon holds, does and decides. Exits 1 if none answers."""
    endpoint = endpoint or default_endpoint(os.environ, os.getuid())
    ask = partial(admin_call, endpoint, "stats", timeout_s=timeout_s, curve=curve)
    try:
        if is_what_if:
            _show_what_if(admin_call(endpoint, "what_if", {}, timeout_s, curve), warm, as_json)
        elif watch_s is None:
            _show_once(ask(), as_json)
        else:
            _watch(ask, as_json, watch_s)
    except (DaemonAbsent, DaemonError) as error:
        click.echo(str(error), err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        pass


def _show_what_if(reply: Stats, warm: float, as_json: bool) -> None:
    """Replays the daemon's sample in this process, so that its loop is not blocked."""
    from hicache.replay.whatif import SCALES, Sampled, what_if

    sampled = Sampled.of(reply)
    num_requests = len(sampled.trace.requests)
    if not num_requests:
        click.echo("there were no requests yet", err=True)
        sys.exit(1)
    with ProgressLine() as progress:
        found = what_if(sampled, warm, lambda what, done: progress(what, done, num_requests))
    if as_json:
        rows = [asdict(estimate) for estimate in found]
        about = {
            "requests": num_requests,
            "forgotten": sampled.forgotten,
            "sampled_share": sampled.share,
            "warm": warm,
        }
        click.echo(json.dumps({**about, "estimates": rows}, indent=2))
        return
    table = _table(
        f"hit tokens in % of all tokens, by the tier (by all tiers): {num_requests:,} requests, "
        f"{sampled.share:.3g} of their blocks",
        "with this tier",
        *(f"at {scale:g} ×" for scale in SCALES),
    )
    for tier in dict.fromkeys(estimate.tier for estimate in found):
        cells = (
            f"{100 * estimate.tier_hit:.1f} ({100 * estimate.all_hit:.1f})"
            for estimate in found
            if estimate.tier == tier
        )
        table.add_row(tier, *cells)
    _console().print(table)


def _show_once(reply: Stats, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(reply, indent=2, default=_as_text))
    else:
        _console().print(render(reply))


def _watch(ask: Callable[[], Stats], as_json: bool, watch_s: float) -> None:
    """The first call must succeed; later the daemon may be absent for a while."""
    reply = ask()
    if as_json:
        while True:
            click.echo(json.dumps(reply, default=_as_text))
            time.sleep(watch_s)
            reply = ask()
    with Live(render(reply), console=_console(), auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(watch_s)
            try:
                shown = render(ask())
            except (DaemonAbsent, DaemonError) as error:
                shown = Text(str(error), style="red")
            live.update(shown, refresh=True)


def _console() -> Console:
    """A pipe has no width of its own, and tables must not be cut in it."""
    console = Console()
    return console if console.is_terminal else Console(width=max(MIN_WIDTH, console.width))


def _as_text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


# --- tables -------------------------------------------------------------------------------------


def render(stats: Stats) -> RenderableType:
    """All tables, in 100 columns. A key that an older daemon lacks is shown as a dash."""
    parts: list[RenderableType] = [_headline(stats), _tiers(stats), _traffic(stats)]
    parts += _notes(stats)
    if stats.get("links"):
        parts.append(_links(stats))
    if stats.get("planner"):
        parts.append(_planner(stats["planner"]))
        parts += _judged(stats)
    if stats.get("namespaces"):
        parts.append(_namespaces(stats))
    if stats.get("gate"):
        parts.append(_gate(stats["gate"]))
    if stats.get("memory"):
        parts.append(_memory(stats))
    parts.append(_counts(stats))
    return Group(*parts)


def _headline(stats: Stats) -> Text:
    index = stats.get("index") or {}
    return Text(
        f"hicache {stats.get('version', '?')}, pid {stats.get('pid', '?')}, up "
        f"{_seconds(stats.get('uptime_s'))}; {_number(stats.get('sessions'))} sessions, "
        f"{_number(stats.get('leases'))} leases, {_number(len(stats.get('pins') or ()))} pins; "
        f"{_number(index.get('blocks'))} blocks "
        f"({_number(index.get('tokens'))} tokens) in {_number(index.get('nodes'))} nodes"
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left", overflow="fold")
    return table


def _tiers(stats: Stats) -> Table:
    table = _table(
        "tiers",
        "tier",
        "medium",
        "state",
        "capacity",
        "used",
        "full",
        "held back",
        "blocks",
        "queue",
    )
    for tier in stats.get("tiers") or ():
        queued = _number(tier.get("queue_depth"))
        if tier.get("queue_bytes"):
            queued += f" ({_bytes(tier['queue_bytes'])})"
        table.add_row(
            str(tier.get("name", "–")),
            str(tier.get("medium", "–")),
            str(tier.get("state", "–")),
            _bytes(tier.get("capacity_bytes")),
            _bytes(tier.get("used_bytes")),
            _share(tier.get("used_bytes"), tier.get("capacity_bytes")),
            _bytes(tier.get("quarantined_bytes")),
            _number(tier.get("blocks")),
            queued,
        )
    return table


def _traffic(stats: Stats) -> Table:
    table = _table(
        "what they did",
        "tier",
        "hits",
        "hit tokens",
        "served",
        "saved",
        "promoted",
        "demoted",
        "evicted",
        "removed",
    )
    for tier in stats.get("tiers") or ():
        table.add_row(
            str(tier.get("name", "–")),
            _number(tier.get("hits")),
            _number(tier.get("hit_tokens")),
            _bytes(tier.get("bytes_served")),
            _seconds(tier.get("seconds_saved")),
            *(
                _number(tier.get(key))
                for key in ("promotions", "demotions", "evictions", "removed")
            ),
        )
    return table


def _notes(stats: Stats) -> Iterator[Text]:
    for tier in stats.get("tiers") or ():
        if tier.get("note"):
            yield Text(f"{tier.get('name', '?')}: {tier['note']}", style="yellow")


def _links(stats: Stats) -> Table:
    table = _table("links", "from → to", "speed", "latency", "moves", "failed")
    for link in stats["links"]:
        speed = link.get("bytes_per_s")
        table.add_row(
            f"{link.get('src', '?')} → {link.get('dst', '?')}",
            "–" if speed is None else f"{_bytes(speed)}/s",
            _seconds(link.get("latency_s")),
            _number(link.get("moves")),
            _number(link.get("failed")),
        )
    return table


def _planner(planner: Stats) -> Table:
    table = _table(
        "planner", "mode", "reload", "partial", "recompute", "mean error", "relative", "prefill"
    )
    decisions = planner.get("decisions") or {}
    relative, speed = planner.get("mean_relative_error"), planner.get("prefill_tokens_per_s")
    table.add_row(
        str(planner.get("mode", "–")),
        *(_number(decisions.get(name)) for name in ("reload", "partial", "recompute")),
        _seconds(planner.get("mean_abs_error_s")),
        "–" if relative is None else f"{relative:.1%}",
        "–" if speed is None else f"{speed:,.0f} tokens/s",
    )
    return table


def _judged(stats: Stats) -> Iterator[RenderableType]:
    """How far off the planner's estimates were, and its decisions in hindsight."""
    planner = stats["planner"]
    names = {space.get("digest"): space.get("name") for space in stats.get("namespaces") or ()}
    if planner.get("errors"):
        table = _table(
            "estimates", "namespace", "of", "judged", "mean error", "relative", "bias", "within"
        )
        for row in planner["errors"]:
            digest = row.get("namespace")
            table.add_row(
                str(names.get(digest) or digest)[:24],
                str(row.get("of", "–")),
                _number(row.get("judged")),
                _seconds(row.get("mean_abs_error_s")),
                *(f"{row.get(key, 0.0):.1%}" for key in ("mean_relative_error", "bias")),
                f"{row.get('within_doubt', 0.0):.0%}",
            )
        yield table
    regret, tried = planner.get("regret") or {}, planner.get("tried") or {}
    if regret.get("judged"):
        yield Text(
            f"in hindsight {_number(regret.get('wrong'))} of {_number(regret['judged'])} decisions "
            f"should have been others, which cost {_seconds(regret.get('regret_s'))} "
            f"({regret.get('share') or 0.0:.1%}).\n"
            f"{_number(tried.get('decisions'))} were tries, expected to cost "
            f"{_seconds(tried.get('expected_cost_s'))}; {_number(planner.get('cut_short'))} loads "
            "were cut short"
        )


def _namespaces(stats: Stats) -> Table:
    table = _table("namespaces", "name", "digest", "tokens/block", "bytes/block", "blocks")
    for space in stats["namespaces"]:
        digest = space.get("digest", "")
        table.add_row(
            str(space.get("name") or "–"),
            (digest.hex() if isinstance(digest, bytes) else str(digest))[:16],
            _number(space.get("block_tokens")),
            _bytes(space.get("block_bytes")),
            _number(space.get("blocks")),
        )
    return table


def _gate(gate: Stats) -> Text:
    return Text(
        f"written to disk: what returns with a probability of {gate['demanded_return']:.0%} or "
        f"more; {_number(gate['refused_blocks'])} blocks forgotten instead"
    )


def _memory(stats: Stats) -> Text:
    """The daemon's memory, and how many requests were refused at a limit."""
    memory = stats["memory"]
    arenas, buffers = (sum((memory.get(k) or {}).values()) for k in ("arena_bytes", "buffer_bytes"))
    given = sum(tier.get("given_back_bytes") or 0 for tier in stats.get("tiers") or ())
    met = [
        f"{queue.get('name')} {_number(queue['refused'])} ({queue.get('key')})"
        for queue in stats.get("queues") or ()
        if queue.get("refused")
    ]
    return Text(
        f"memory: arenas {_bytes(arenas)}, given back to the machine {_bytes(given)}, index "
        f"{_bytes(memory.get('index_bytes'))}, buffers {_bytes(buffers)}, all but the arenas "
        f"{_bytes(memory.get('private_bytes'))}\nrefused at a limit: {', '.join(met) or 'nothing'}"
    )


def _counts(stats: Stats) -> Text:
    """Counters by name, those that are not zero."""
    lines = []
    for title in ("puts", "requests", "errors"):
        counts = stats.get(title) or {}
        listed = ", ".join(f"{name} {_number(count)}" for name, count in counts.items() if count)
        lines.append(f"{title}: {listed or 'none'}")
    return Text("\n".join(lines))


def _number(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def _share(part: Any, whole: Any) -> str:
    return f"{part / whole:.0%}" if whole and part is not None else "–"


def _seconds(value: Any) -> str:
    if value is None:
        return "–"
    seconds = float(value)
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    if seconds >= 120:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"

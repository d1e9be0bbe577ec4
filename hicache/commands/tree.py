"""`hicache tree`: which prefixes are in the index, and how much of the tiers they fill."""

import difflib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, cast

import click
from rich.console import Console

from hicache.client import AdminLine, DaemonAbsent, DaemonError
from hicache.commands.curve_option import curve_option
from hicache.commands.index_tree import (
    Order,
    Sum,
    TreeForest,
    TreeNamespace,
    TreeReader,
    Trunk,
    Unreadable,
    sort,
)
from hicache.commands.progress_line import ProgressLine
from hicache.commands.time_options import timeout_option
from hicache.commands.tree_drawing import draw, title_of
from hicache.protocol.curve import CurveKeys
from hicache.protocol.endpoint import default_endpoint
from hicache.protocol.operations import NAMESPACE_BYTES

EXIT_UNKNOWN = 2


@click.command()
@click.option("--endpoint", help="Where the daemon listens.")
@curve_option
@click.option(
    "--namespace",
    "prefix",
    default="",
    metavar="PREFIX",
    help="Only namespaces whose digest (in hex) or name begins with this.",
)
@click.option(
    "--depth",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="How many forks deep.",
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Branches shown of each fork; the others are one line.",
)
@click.option(
    "--by",
    "order",
    type=click.Choice(["bytes", "recent", "branches"]),
    default="bytes",
    show_default=True,
    help="Order: most bytes, last used, or most branches first.",
)
@timeout_option("5s", "How long to wait for each answer.")
@click.option("--json", "as_json", is_flag=True, help="All of it, as data: a flat list.")
def tree(
    endpoint: str | None,
    curve: CurveKeys | None,
    prefix: str,
    depth: int,
    top: int,
    order: str,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Show which prefixes fill the tiers: the branches of the index, the largest first.

    A line is a run of tokens without forks. Its bytes are those of its blocks and of all branches
    below it: each block once, then by tier, where a block in two tiers counts in both. The first
    token ids of the run are at the end of the line.

    With --json: all `namespaces`, and all `branches` as a flat list, parents first, each with the
    `number` of its `parent`; `own` is a branch without the branches below it.

    The index is read page by page while the daemon serves; blocks that change meanwhile may be
    counted twice or not at all. Exits 1 if no daemon answers, 2 if no namespace begins with PREFIX.
    """
    endpoint = endpoint or default_endpoint(os.environ, os.getuid())
    try:
        with AdminLine(endpoint, curve) as line:
            forest = _found(line, prefix, timeout_s)
    except (DaemonAbsent, DaemonError, Unreadable) as error:
        click.echo(str(error), err=True)
        sys.exit(1)
    if as_json:
        click.echo("".join(_json_of(forest)))
        return
    sort(forest, cast(Order, order))
    console = Console()
    for text in draw(forest, depth, top, console.width if console.is_terminal else None):
        click.echo(text)
    if forest.num_loose:
        click.echo(
            "the index changed while it was read, so sums may be a little off; branches whose "
            f"place in it is not known: {forest.num_loose:,}",
            err=True,
        )


def _found(line: AdminLine, prefix: str, timeout_s: float) -> TreeForest:
    """The namespaces with this prefix. The daemon selects by digest, in whole bytes; if it finds
    none, the prefix may be that of a name, and all are read."""
    digest = _digest_of(prefix)
    reading = _read(line, digest, timeout_s)
    if digest and not any(_begins(space, prefix) for space in reading.spaces()):
        reading = _read(line, b"", timeout_s)
    spaces = reading.spaces()
    if prefix and not any(_begins(space, prefix) for space in spaces):
        click.echo(_unknown(prefix, spaces), err=True)
        sys.exit(EXIT_UNKNOWN)
    return reading.forest(lambda space: _begins(space, prefix))


def _digest_of(prefix: str) -> bytes:
    """The whole bytes of a hex prefix; empty if it is not hex."""
    whole = prefix[: len(prefix) // 2 * 2]
    is_hex = len(prefix) <= 2 * NAMESPACE_BYTES and set(prefix.lower()) <= set("0123456789abcdef")
    return bytes.fromhex(whole) if is_hex else b""


def _begins(space: TreeNamespace, prefix: str) -> bool:
    return space.digest.startswith(prefix.lower()) or space.name.startswith(prefix)


def _unknown(prefix: str, spaces: list[TreeNamespace]) -> str:
    """The error message, with the namespaces that exist, the most similar first."""
    if not spaces:
        return f"no namespace begins with {prefix!r}: the daemon knows none yet"
    titles = {title_of(space): (space.name or space.digest, space) for space in spaces}

    def likeness(title: str) -> float:
        name, space = titles[title]
        beginnings = (name[: len(prefix)], space.digest[: len(prefix)])
        return max(difflib.SequenceMatcher(None, prefix, part).ratio() for part in beginnings)

    known = sorted(titles, key=lambda title: (-likeness(title), title))
    shown, num_more = ", ".join(known[:8]), len(known) - 8
    more = f" and {num_more:,} more" if num_more > 0 else ""
    return f"no namespace begins with {prefix!r}; there are {shown}{more}"


def _read(line: AdminLine, digest: bytes, timeout_s: float) -> TreeReader:
    """Read all pages. From the second on, a terminal shows the progress."""
    reading = TreeReader()
    with ExitStack() as stack:
        progress: ProgressLine | None = None
        while (after := reading.after) is not None:
            reading.take(line.call("tree", {"namespace": digest, "after": after}, timeout_s))
            if progress is None and reading.after is not None and sys.stderr.isatty():
                progress = stack.enter_context(ProgressLine())
            if progress is not None:
                progress("reading the index", reading.after or reading.end, reading.end)
    return reading


def _json_of(forest: TreeForest) -> Iterator[str]:
    """One branch per line, parents first, so that an index of any depth can be parsed."""
    tiers = forest.tiers
    head = {
        "tiers": tiers,
        "loose": forest.num_loose,
        "namespaces": [
            {
                "digest": trunk.space.digest,
                "name": trunk.space.name,
                "block_tokens": trunk.space.block_tokens,
                "block_bytes": trunk.space.block_bytes,
                "slot_bytes": trunk.space.slot_bytes,
                **_sums(trunk.all, trunk, tiers),
                "branches": trunk.ends,
                "idle_s": trunk.idle_s,
                "leased": trunk.is_leased,
            }
            for trunk in forest.trunks
        ],
    }
    yield f'{json.dumps(head)[:-1]}, "branches": ['
    separator = "\n"
    for trunk in forest.trunks:
        for row in _rows(trunk, tiers):
            yield separator + json.dumps(row)
            separator = ",\n"
    yield "\n]}"


def _rows(trunk: Trunk, tiers: list[str]) -> Iterator[dict[str, Any]]:
    block_tokens = trunk.space.block_tokens
    for branch in trunk.branches:
        yield {
            "number": branch.number,
            "parent": branch.parent.number if branch.parent is not None else None,
            "namespace": trunk.space.digest,
            "first_token": branch.depth * block_tokens,
            "tokens": branch.blocks * block_tokens,
            "nodes": branch.nodes,
            **_sums(branch.all, trunk, tiers),
            "own": _sums(branch.own, trunk, tiers),
            "branches": branch.ends,
            "idle_s": branch.idle_s,
            "leased": branch.is_leased,
            "token_ids": branch.tokens,
        }


def _sums(total: Sum, trunk: Trunk, tiers: list[str]) -> dict[str, Any]:
    size = trunk.space.slot_bytes
    per_tier = zip(tiers, total.per_tier, strict=True)
    return {"bytes": total.blocks * size, "tiers": {name: n * size for name, n in per_tier}}

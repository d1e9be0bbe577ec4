"""Branches of the index as lines of text. Pure.

    llama (3f0a62…)  9 branches  1.5 GiB  dram 1.0 GiB, disk 1.5 GiB  used 3 s ago
    ├─ 2,048 tokens, then 8 branches  1.2 GiB  dram 1.0 GiB, disk 1.2 GiB  used 3 s ago  [101, …]
    │  ├─ 8,192 tokens  614 MiB  dram 614 MiB, disk 614 MiB  used 3 s ago  [318, 77, …]
    │  └─ … and 7 more branches, 461 MiB
    └─ 4,096 tokens  307 MiB  disk 307 MiB  used 2 days ago  [27, 5, …]

With a width, a line ends after the last part that fits, with an ellipsis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len, set_cell_size

from hicache.commands.index_tree import Branch, Sum, TreeForest, TreeNamespace, Trunk
from hicache.commands.text_format import shown_bytes

Item = Branch | Trunk


def draw(forest: TreeForest, depth: int, top: int, width: int | None) -> Iterator[str]:
    """Lines for `depth` forks, `top` branches each, in the forest's order. `width`: in columns;
    None for no limit."""
    if not any(trunk.children for trunk in forest.trunks):
        known = len(forest.trunks)
        yield "Nothing is held" + (f" of {_count(known, 'namespace')}." if known else " yet.")
        return
    for trunk in forest.trunks[:top]:
        yield _fitted("", _parts(trunk, trunk, forest.tiers), [], width)
        if trunk.children:
            yield from _below(trunk, forest.tiers, depth, top, width)
    rest = forest.trunks[top:]
    if rest:
        size = sum(trunk.all.blocks * trunk.space.slot_bytes for trunk in rest)
        yield f"… and {_count(len(rest), 'more namespace')}, {shown_bytes(size)}"


def printable(name: str) -> str:
    """A name chosen by a client, without characters that control a terminal."""
    return "".join(c for c in name if c.isprintable())


def title_of(space: TreeNamespace) -> str:
    """A namespace's name and the beginning of its digest."""
    name = printable(space.name)
    return f"{name} ({space.digest[:16]})" if name else space.digest[:16]


def _below(
    trunk: Trunk, tiers: Sequence[str], depth: int, top: int, width: int | None
) -> Iterator[str]:
    """The branches of a namespace. `pending` is a stack."""
    pending: list[tuple[str, str, Branch | str, int]] = []

    def fork(item: Item, indent: str, level: int) -> None:
        shown: list[Branch | str] = [*item.children[:top]]
        rest = item.children[top:]
        if rest:
            ends, blocks = (sum(r.ends for r in rest), sum(r.all.blocks for r in rest))
            size = shown_bytes(blocks * trunk.space.slot_bytes)
            shown.append(f"… and {_count(ends, 'more branch')}, {size}")
        marks = ["├─ "] * (len(shown) - 1) + ["└─ "]
        new = [(indent, mark, one, level) for mark, one in zip(marks, shown, strict=True)]
        pending.extend(reversed(new))

    fork(trunk, "", 1)
    while pending:
        indent, mark, item, level = pending.pop()
        if isinstance(item, str):
            yield _fitted(indent + mark, [item], [], width)
            continue
        yield _fitted(indent + mark, _parts(item, trunk, tiers), _tokens(item, trunk), width)
        if item.children and level < depth:
            fork(item, indent + ("│  " if mark == "├─ " else "   "), level + 1)


def _parts(item: Item, trunk: Trunk, tiers: Sequence[str]) -> list[str]:
    """The parts of a line for a branch or a namespace, the most important first."""
    space = trunk.space
    if isinstance(item, Trunk):
        if not item.children:
            return [title_of(space), "nothing"]
        parts = [title_of(space), _count(item.ends, "branch")]
    else:
        run = f"{item.blocks * space.block_tokens:,} tokens"
        if item.parent is None and item.depth:
            run += f" from token {item.depth * space.block_tokens:,} on"
        if item.children:
            run += f", then {_count(item.ends, 'branch')}"
        parts = [run]
    parts += [shown_bytes(item.all.blocks * space.slot_bytes), _by_tier(item.all, space, tiers)]
    used = "not expected again" if item.idle_s is None else f"used {duration(item.idle_s)} ago"
    return [*parts, f"{used}, leased" if item.is_leased else used]


def _by_tier(total: Sum, space: TreeNamespace, tiers: Sequence[str]) -> str:
    held = [
        f"{name} {shown_bytes(blocks * space.slot_bytes)}"
        for name, blocks in zip(tiers, total.per_tier, strict=True)
        if blocks
    ]
    return ", ".join(held) or "in no tier"


def _tokens(branch: Branch, trunk: Trunk) -> list[str]:
    """Ways to show the first tokens of a run, the longest first."""
    ids = [str(token) for token in branch.tokens]
    is_all = len(ids) == branch.blocks * trunk.space.block_tokens
    ways = [f"[{', '.join([*ids[:count], '…'])}]" for count in range(len(ids), 0, -1)]
    return [f"[{', '.join(ids)}]", *ways[1:]] if is_all else ways


def _fitted(lead: str, parts: Sequence[str], tokens: Sequence[str], width: int | None) -> str:
    """The lead and the first part, cropped to the width; then as many of the others as fit, with an
    ellipsis for the rest; then the first of the ways to show tokens that fits."""
    line = lead + parts[0]
    if width is not None and cell_len(line) > width:
        return set_cell_size(line, max(1, width) - 1) + "…"
    for part in parts[1:]:
        if width is not None and cell_len(f"{line}  {part}") > width:
            return f"{line}  …" if cell_len(line) + 3 <= width else line
        line += f"  {part}"
    for ids in tokens:
        if width is None or cell_len(f"{line}  {ids}") <= width:
            return f"{line}  {ids}"
    return line


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def duration(seconds: float) -> str:
    """In the largest unit of which there are at least two."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size:,.0f} {unit}"
    return f"{seconds:.0f} s"

"""Lists the index page by page: runs of blocks, their tiers, and whether they are leased.

A page is a slice of the list of nodes by number, so its cost depends on its length, not on the size
of the index. Numbers of removed nodes are gaps until they are used again:

    numbers    0     1     2     3     4     5     6     7
    nodes     root   A     –    root   B     C     –     D
              └──── page ────┘└──── page ────┘└── page ──┘     `next`: 3, 6, None

A query: it changes nothing and counts as no use. The tree may change between two pages: a node that
is split keeps its number for its lower part, one that is merged takes in its parent, and a number
may stand for another node by then. Owned by the daemon's one loop.
"""

from __future__ import annotations

from typing import Final

import msgspec

from hicache.engine.residency.candidates import DISMISSED_S
from hicache.engine.residency.copies import Residency

MAX_FIRST_TOKENS: Final = 8
"""Of a run: enough to distinguish branches, and little of a prompt."""
TOKEN_BYTES: Final = 4


class TreeRun(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One node. Encoded as an array of its fields in this order; new fields go at the end.

    `parent`: its parent's number, None at the top of a namespace. `namespace`: position in the
    page's list. `depth`, `blocks`: start and length in blocks. `tiers`, `leaving`: bit t for tier
    t: the tiers it can be read from, and those it is leaving. `idle_s`: seconds since its last use
    or store; None where no further use is expected. `is_leased`: some of its blocks are leased.
    `tokens`: the first tokens of its first block, u32 little-endian.
    """

    number: int
    parent: int | None
    namespace: int
    depth: int
    blocks: int
    tiers: int
    leaving: int
    idle_s: float | None
    is_leased: bool
    tokens: bytes


class TreePage(msgspec.Struct, frozen=True):
    """`namespaces`: numbers of the namespaces with a root or node in it; `TreeRun.namespace` is a
    position in this list. `next`: the next page's `after`, None at the end; `end`: the number after
    the last."""

    runs: list[TreeRun]
    namespaces: list[int]
    next: int | None
    end: int


def page(
    residency: Residency,
    after: int,
    most: int,
    now_s: float,
    namespace: bytes = b"",
    *,
    with_tokens: bool = True,
) -> TreePage:
    """The nodes numbered `after … after + most - 1`, of namespaces whose digest begins with
    `namespace`. Any `after` from 0 on is valid, also one that no page returned."""
    blocks, spaces = residency.blocks, residency.namespaces
    nodes = residency.index.nodes
    first_bytes = MAX_FIRST_TOKENS * TOKEN_BYTES if with_tokens else 0
    runs: list[TreeRun] = []
    places: dict[int, int] = {}
    numbers: list[int] = []
    for node in nodes[after : after + most]:
        if node is None:
            continue
        place = places.get(node.namespace)
        if place is None:
            is_wanted = spaces[node.namespace].digest.startswith(namespace)
            place = len(numbers) if is_wanted else -1
            places[node.namespace] = place
            if is_wanted:
                numbers.append(node.namespace)
        parent = node.parent
        if place < 0 or parent is None:
            continue
        stem = node.stem
        step = spaces[node.namespace].step
        begin = (node.depth - stem.nodes[0].depth) * step
        span, touched_s = node.span, node.touched_s
        runs.append(
            TreeRun(
                number=node.number,
                parent=None if parent.parent is None else parent.number,
                namespace=place,
                depth=node.depth,
                blocks=node.num_blocks,
                tiers=node.tiers,
                leaving=node.leaving,
                idle_s=None if touched_s == DISMISSED_S else max(0.0, now_s - touched_s),
                is_leased=bool(blocks.num_pins) and blocks.is_path_pinned(span),
                tokens=stem.symbols[begin : begin + min(step, first_bytes)],
            )
        )
    end = len(nodes)
    return TreePage(runs, numbers, after + most if after + most < end else None, end)

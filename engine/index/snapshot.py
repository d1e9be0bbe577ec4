"""A look into the index, page by page: which runs of blocks are there, and what holds them.

A page is a slice of the list of nodes by their numbers, so what it costs depends on its length and
not on the index. Numbers of nodes that are no more are gaps until they are given out again:

    numbers    0     1     2     3     4     5     6     7
    nodes     root   A     –    root   B     C     –     D
              └──── page ────┘└──── page ────┘└── page ──┘     `next`: 3, 6, None

A question, not an event: nothing is touched by it. The tree may change between two pages: a node
that is split keeps its number for its lower part, one that is merged takes in its parent, and a
number may stand for another node by then. Owned by the daemon's one loop.
"""

from __future__ import annotations

from typing import Final

import msgspec

from hicache.engine.residency.copies import DISMISSED_S, Residency

MAX_FIRST_TOKENS: Final = 8
"""Of a run: enough to tell branches apart, and little of a prompt."""
TOKEN_BYTES: Final = 4


class TreeRun(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One node. It travels as an array of its fields in this order, which may grow at its end.

    `parent`: the number of the node above it, None where it is the first of its namespace's.
    `namespace`: a place in the page's list. `depth`, `blocks`: where it begins and how long it is,
    in blocks. `tiers`, `leaving`: bit t for tier t, where it can be read and what it is leaving.
    `idle_s`: since it was last asked for or stored; None where nobody is expected to ask again.
    `is_leased`: some of it is. `tokens`: the first of its first block, u32 little-endian.
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
    """`namespaces`: numbers of those whose root or nodes are in it, as in `TreeRun.namespace`.
    `next`: where the next page begins, None where there is none; `end`: how far numbers go."""

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
    """The nodes with the numbers `after … after + most - 1`, of namespaces whose digest begins with
    `namespace`. Any `after` from 0 on is right, also one that no page named."""
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
                node.number,
                None if parent.parent is None else parent.number,
                place,
                node.depth,
                node.num_blocks,
                node.tiers,
                node.leaving,
                None if touched_s == DISMISSED_S else max(0.0, now_s - touched_s),
                bool(blocks.num_pins) and blocks.is_path_pinned(span),
                stem.symbols[begin : begin + min(step, first_bytes)],
            )
        )
    end = len(nodes)
    return TreePage(runs, numbers, after + most if after + most < end else None, end)

"""Taking back what a durable tier holds, after a restart or after its worker came back.

Rows come in any order. Each is looked at once: from the root down, rows that follow one another are
hung in together, so that the tree gets long nodes; where several follow one row, the others wait
their turn:

    rows      a  b  c  d  x  y          a ◀ b ◀ c ◀ d,  b ◀ x,  ? ◀ y
    hung in   a ── b ── c ── d   then   x below b;   y is homeless

Blocks that the index knows already (stored since) gain the durable copy. A row without a way up to
the root, of another block size, or without room is returned: it is to be removed from the tier.
Owned by the daemon's one loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from hicache.engine.blocks import State
from hicache.engine.ids import ids_along
from hicache.engine.index import Path
from hicache.engine.plan import StoredBlock
from hicache.engine.residency import Namespace, Residency
from hicache.tiers.block import Ids

ROOT_KEY: Final = bytes(32)
NO_BLOCK: Final = -1


def restore(
    residency: Residency, namespace: Namespace, tier: int, rows: Sequence[StoredBlock], now_s: float
) -> list[bytes]:
    """Hang `rows` into the namespace's tree. Returns the keys that found no place."""
    followers: dict[bytes, list[StoredBlock]] = {}
    homeless: list[bytes] = []
    for row in rows:
        if row.block_bytes == namespace.block_bytes and len(row.tokens) == namespace.step:
            followers.setdefault(row.parent, []).append(row)
        else:
            homeless.append(row.key)
    starts = [(row, NO_BLOCK) for row in followers.pop(ROOT_KEY, [])]
    while starts:
        row, above = starts.pop()
        chain, others = [row], []
        while below := followers.pop(chain[-1].key, None):
            others += [(other, len(chain) - 1) for other in below[1:]]
            chain.append(below[0])
        ids = _hang(residency, namespace, tier, chain, above, now_s).tolist()
        homeless += [row.key for row in chain[len(ids) :]]
        for other, position in others:
            if position < len(ids):
                starts.append((other, ids[position]))
            else:
                followers[other.parent] = [*followers.get(other.parent, ()), other]
    return homeless + [row.key for waiting in followers.values() for row in waiting]


def _hang(
    residency: Residency,
    namespace: Namespace,
    tier: int,
    chain: Sequence[StoredBlock],
    above: int,
    now_s: float,
) -> Ids:
    """Hang rows that follow one another below a block. Returns the ids of those that found room,
    the first ones of the chain."""
    index, step = residency.index, namespace.step
    parent, depth = namespace.root, 0
    if above != NO_BLOCK:
        parent = index.node_of(above)
        depth = int(residency.blocks.depth[above]) + 1
        if depth < parent.depth + len(parent):
            parent = index.split(parent, depth - parent.depth, step)
    tokens = b"".join([row.tokens for row in chain])
    found = index.match(parent, tokens, step)
    num_known = found.num_blocks
    path = Path(index.path_to(parent) + found.nodes, found.partial, depth + num_known)
    known = ids_along(path.spans(depth, depth + num_known))
    is_absent = residency.blocks.state[tier][known] == State.ABSENT
    wanted = int(np.count_nonzero(is_absent)) + len(chain) - num_known
    slots = residency.pools[tier].allocate(namespace.slot_bytes, wanted)
    lacking = np.concatenate((is_absent, np.ones(len(chain) - num_known, bool)))
    fitting = int(np.searchsorted(np.cumsum(lacking), len(slots), side="right"))
    lacking = lacking[:fitting]
    ids = known[:fitting]
    if fitting > num_known:
        symbols = tokens[num_known * step : fitting * step]
        node = index.extend(namespace.root, path, symbols, step)
        node.touched_s = now_s
        ids = np.concatenate((ids, node.block_ids()))
    gaining = ids[lacking]
    residency.blocks.hits[gaining] = [chain[i].hits for i in np.flatnonzero(lacking).tolist()]
    residency.blocks.fill(tier, gaining, slots)
    residency.blocks.change(tier, gaining, State.READY)
    residency.settle(gaining)
    return ids

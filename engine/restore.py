"""Taking back what a durable tier holds, after a restart or after its worker came back.

Rows come parents first. A row whose parent is known hangs below it; rows are joined into whole
paths so that the tree gets long nodes. Blocks that the index knows already (stored since) gain the
durable copy. A row without a parent, of another block size, or without room is returned: it is to
be removed from the tier. Owned by the daemon's one loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hicache.engine.blocks import State
from hicache.engine.plan import StoredBlock
from hicache.engine.residency import Namespace, Residency
from hicache.tiers.block import Ids

ROOT_KEY = bytes(32)


def restore(
    residency: Residency, namespace: Namespace, tier: int, rows: Sequence[StoredBlock], now_s: float
) -> list[bytes]:
    """Hang `rows` into the namespace's tree. Returns the keys that found no place."""
    known: dict[bytes, StoredBlock] = {}
    has_child: set[bytes] = set()
    homeless: list[bytes] = []
    for row in rows:
        fits = row.block_bytes == namespace.block_bytes and len(row.tokens) == namespace.step
        if not fits or (row.parent != ROOT_KEY and row.parent not in known):
            homeless.append(row.key)
            continue
        known[row.key] = row
        has_child.add(row.parent)
    for key in known:
        if key not in has_child:
            homeless.extend(_hang(residency, namespace, tier, _path(known, key), now_s))
    return homeless


def _path(known: dict[bytes, StoredBlock], key: bytes) -> list[StoredBlock]:
    path = []
    while key != ROOT_KEY:
        row = known[key]
        path.append(row)
        key = row.parent
    path.reverse()
    return path


def _hang(
    residency: Residency,
    namespace: Namespace,
    tier: int,
    path: list[StoredBlock],
    now_s: float,
) -> list[bytes]:
    tokens = b"".join([row.tokens for row in path])
    index = residency.index
    found = index.match(namespace.root, tokens, namespace.step)
    known = found.num_blocks
    room = len(path)
    absent = residency.where(found.ids(), tier, State.ABSENT)
    wanted = len(absent) + len(path) - known
    if wanted == 0:
        return []
    slots = residency.pools[tier].allocate(namespace.slot_bytes, wanted)
    room = len(slots)
    refused: list[bytes] = []
    new = min(len(path) - known, max(0, room - len(absent)))
    if room < wanted:
        refused = [row.key for row in path[known + new :]]
    ids: Ids = absent[:room]
    if new:
        node = index.extend(namespace.root, found, tokens, namespace.step, new)
        node.touched_s = now_s
        ids = np.concatenate([ids, node.block_ids()])
    depths = residency.blocks.depth[ids]
    residency.blocks.hits[ids] = [path[depth].hits for depth in depths.tolist()]
    residency.blocks.fill(tier, ids, slots[: len(ids)])
    residency.blocks.change(tier, ids, State.READY)
    residency.settle(ids)
    return refused

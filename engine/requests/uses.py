"""How often and when blocks were used, written back to the durable tier now and then.

A use costs nothing here: what was used since its hits were noted is found by comparing two arrays.
Keys are derived for those alone, some at a time. Owned by the daemon's one loop.
"""

from __future__ import annotations

import numpy as np

from hicache.engine import plan as p
from hicache.engine.requests.block_keys import Identities
from hicache.engine.residency.blocks import CopyState
from hicache.engine.residency.copies import Residency
from hicache.tiers.block import Ids


class Uses:
    """What of the tier's blocks the tier does not know the uses of. `tier`: the durable one."""

    def __init__(self, residency: Residency, identities: Identities, tier: int | None) -> None:
        self.residency = residency
        self.identities = identities
        self.tier = tier
        self._due: Ids = np.empty(0, np.int32)

    def take(self, event: p.TakeUses) -> list[p.Use]:
        """See TakeUses. What is told counts as noted."""
        tier, residency = self.tier, self.residency
        if tier is None or not residency.takes(tier):
            return []
        blocks = residency.blocks
        if event.again:
            is_due = (blocks.hits != blocks.noted_hits) & (blocks.state[tier] == CopyState.READY)
            self._due = np.flatnonzero(is_due).astype(np.int32)
        some, self._due = self._due[: event.limit], self._due[event.limit :]
        some = some[(blocks.state[tier][some] == CopyState.READY) & (blocks.node[some] >= 0)]
        uses = []
        for block in some.tolist():
            node = residency.index.node_of(block)
            slot_bytes = residency.namespace_of(node).slot_bytes[tier]
            key, hits = self.identities.key_of(block), int(blocks.hits[block])
            uses.append(p.Use(slot_bytes, key, hits, node.touched_s))
        blocks.noted_hits[some] = blocks.hits[some]
        return uses

"""Collects blocks' uses, to be written to the persistent tier now and then.

A use costs nothing here: blocks used since the last write are found by comparing two arrays, and
keys are computed only for these, in parts. Owned by the daemon's one loop.
"""

from __future__ import annotations

import numpy as np

from hicache.engine import plan as p
from hicache.engine.requests.block_keys import Identities
from hicache.engine.residency.blocks import CopyState
from hicache.engine.residency.copies import Residency
from hicache.tiers.block import Ids

_NO_IDS = np.empty(0, np.int32)


class Uses:
    """Uses not yet written, of each persistent tier."""

    def __init__(self, residency: Residency, identities: Identities) -> None:
        self.residency = residency
        self.identities = identities
        self._due: dict[int, Ids] = {}

    def take(self, event: p.TakeUses) -> list[p.Use]:
        """See TakeUses. Returned uses count as written."""
        residency = self.residency
        tier = residency.number_of(event.tier)
        if not residency.takes(tier):
            return []
        blocks = residency.blocks
        noted_hits = blocks.noted_hits[tier]
        due = self._due.get(tier, _NO_IDS)
        if event.again:
            is_due = (blocks.hits != noted_hits) & (blocks.state[tier] == CopyState.READY)
            due = np.flatnonzero(is_due).astype(np.int32)
        some, self._due[tier] = due[: event.limit], due[event.limit :]
        some = some[(blocks.state[tier][some] == CopyState.READY) & (blocks.node[some] >= 0)]
        uses = []
        for block in some.tolist():
            node = residency.index.node_of(block)
            slot_bytes = residency.namespace_of(node).slot_bytes[tier]
            key, hits = self.identities.key_of(block), int(blocks.hits[block])
            uses.append(p.Use(slot_bytes, key, hits, node.touched_s))
        noted_hits[some] = blocks.hits[some]
        return uses

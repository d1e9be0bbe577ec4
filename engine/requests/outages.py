"""Tiers that go down, come up again and list their blocks, and the clearings that they miss.

    down ──TierUp──▶ up, restoring (Restore, Restore, …) ──Restored──▶ up, takes blocks
     ▲                                                                       │
     └───────────────────────────────TierDown────────────────────────────────┘

A namespace that is cleared while a persistent tier is down or restoring is cleared there later: its
rows are deleted as they are listed. Owned by the daemon's one loop.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from hicache.engine import plan as p
from hicache.engine.requests.clear import Clearing
from hicache.engine.requests.outcomes import Leases, Outcomes
from hicache.engine.requests.restore import Restoration
from hicache.engine.residency.blocks import CopyState
from hicache.engine.residency.copies import Residency


class Outages:
    """Handles TierUp, TierDown, Restore, Restored, Spoiled and Clear. `clearings`: the running
    ones, by namespace."""

    def __init__(self, residency: Residency, outcomes: Outcomes) -> None:
        self.residency = residency
        self.outcomes = outcomes
        self.clearings: dict[int, Clearing] = {}
        self._restorations: dict[int, Restoration] = {}
        self._cleared_unseen: defaultdict[int, set[bytes]] = defaultdict(set)

    def up(self, event: p.TierUp) -> None:
        """See TierUp."""
        tier = self.residency.number_of(event.tier)
        self.residency.up |= 1 << tier
        self._restorations.pop(tier, None)
        if event.is_restoring:
            self.residency.restoring |= 1 << tier
            self._begin_restoring(tier)
        self.residency.backoff.took(tier)

    def down(self, event: p.TierDown) -> Leases:
        """Fail the tier's moves (later outcomes are ignored), and remove its copies: the next
        worker of a persistent tier restores them row by row. Returns the leases to report."""
        residency = self.residency
        tier = residency.number_of(event.tier)
        residency.up &= ~(1 << tier)
        residency.restoring &= ~(1 << tier)
        self._restorations.pop(tier, None)
        if residency.tiers[tier].persistent:
            for clearing in self.clearings.values():  # records not deleted yet will be listed
                self._cleared_unseen[tier].add(clearing.namespace.digest)
                clearing.misses_records = True
        mine = [m.id for m in residency.moves.values() if event.tier in (m.src, m.dst)]
        failed = [p.Outcome(move, False, error="tier down") for move in mine]
        leases, _, _ = self.outcomes.apply(failed, event.now_s)
        ids = residency.blocks.live_ids()
        held = ids[residency.blocks.tags[ids] >> tier & 1 == 1]
        for namespace in residency.namespaces:
            nodes = [n for n in residency.index.subtree(namespace.root) if n.tiers >> tier & 1]
            if nodes:
                residency.vacate(np.concatenate([node.block_ids() for node in nodes]), tier)
        residency.settle(held)
        for lease in residency.leases.leases.values():
            gone = np.flatnonzero(residency.blocks.tags[lease.ids] == 0)
            if len(gone):
                lease.failed_at = min(lease.failed_at, int(gone[0]))
                if lease.fetching:
                    leases[lease.id] = lease
        residency.candidates.unpark()
        return leases

    def restore(self, event: p.Restore) -> list[bytes]:
        """See Restore."""
        tier = self.residency.number_of(event.tier)
        namespace = self.residency.namespaces[event.namespace]
        restoration = self._restorations.get(tier) or self._begin_restoring(tier)
        return restoration.add(namespace, event.rows, event.now_s, event.zero_s)

    def restored(self, event: p.Restored) -> None:
        """See Restored."""
        tier = self.residency.number_of(event.tier)
        self._restorations.pop(tier, None)
        self.residency.restoring &= ~(1 << tier)

    def spoiled(self, event: p.Spoiled, number: int) -> Leases:
        """Remove the copy, as after a corrupt read. A read in flight will find it corrupt itself.
        `number`: the namespace's. Returns the leases to report."""
        residency = self.residency
        tier = residency.number_of(event.tier)
        namespace = residency.namespaces[number]
        path = residency.index.match(namespace.root, event.tokens, namespace.step)
        leases: Leases = {}
        if path.num_blocks * namespace.step == len(event.tokens):
            ids = path.ids()[-1:]
            block = int(ids[0])
            is_stored = residency.blocks.state[tier][block] == CopyState.READY
            if is_stored and not residency.moves.is_read(block, tier):
                residency.vacate(ids, tier)
                residency.corrupt[tier] += 1
                leases = self.outcomes.lose(ids)
                residency.settle(ids)
        return leases

    def clear(self, event: p.Clear) -> p.Cleared:
        """See Clear."""
        residency = self.residency
        namespace = residency.namespaces[event.namespace]
        if event.begins:
            self.clearings[event.namespace] = Clearing(residency, namespace)
        clearing = self.clearings.get(event.namespace)
        if clearing is None:
            return p.Cleared(0, is_over=True, is_waiting=False, is_complete=True)
        for restoration in self._restorations.values():
            restoration.cleared.add(namespace.digest)
            clearing.misses_records = True
        for tier, spec in enumerate(residency.tiers):
            if spec.persistent and not residency.is_up(tier):
                self._cleared_unseen[tier].add(namespace.digest)
                clearing.misses_records = True
        cleared = clearing.step(event.most_blocks)
        if cleared.is_over:
            del self.clearings[event.namespace]
        return cleared

    def _begin_restoring(self, tier: int) -> Restoration:
        restoration = self._restorations[tier] = Restoration(self.residency, tier)
        restoration.cleared |= self._cleared_unseen.pop(tier, set())
        return restoration

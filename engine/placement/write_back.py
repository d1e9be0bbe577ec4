"""Writes blocks that leave memory to the persistent tiers, fastest first.

Each persistent tier that lacks a block, takes blocks now and admits it by its gate gets a copy from
memory; none is read to fill another. Memory waits for one copy, never for a second:

    no other copy stays     the block drains until the first tier has it; the others write
                            meanwhile, and do not get blocks that they have not started by then
    another copy stays      it is freed at once, except for moves that a queue has room for now

So a slow tier does not delay puts. It gets a block that it missed when that is in memory again and
leaves it again. Blocks that a persistent tier evicts are dropped there. Owned by the daemon's one
loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from hicache.engine.index.node import Node
from hicache.engine.placement.evictor import Evictor
from hicache.engine.placement.path_writer import PathWriter
from hicache.engine.placement.write_gate import WriteGate
from hicache.engine.policies.hazard.history import History
from hicache.engine.residency.block_ids import Span
from hicache.engine.residency.copies import Residency
from hicache.engine.settings import EngineSettings
from hicache.tiers.block import Ids

_NO_IDS: Final = np.empty(0, np.int32)


class WriteBack:
    """The writers of all persistent tiers. `min_hits`: the least hits of a block to be written; 0
    unless the policy writes only selected blocks."""

    def __init__(
        self,
        residency: Residency,
        evictor: Evictor,
        settings: EngineSettings,
        history: History | None = None,
    ) -> None:
        self.residency = residency
        self.evictor = evictor
        self.writers = tuple(
            PathWriter(residency, evictor, tier, WriteGate(history))
            for tier, spec in enumerate(residency.tiers)
            if spec.persistent
        )
        for writer in self.writers:
            writer.others = [other for other in self.writers if other is not writer]
        self.min_hits = 0
        self.configure(settings)

    def configure(self, settings: EngineSettings) -> None:
        """Apply changed settings."""
        is_selective = settings.write_policy == "write_through_selective"
        self.min_hits = settings.selective_hits if is_selective else 0
        for writer in self.writers:
            spec = self.residency.tiers[writer.tier]
            writer.gate.configure(spec.min_return, spec.write_bytes_per_s)

    def pass_time(self, now_s: float) -> None:
        """Fill the write budgets."""
        for writer in self.writers:
            writer.gate.pass_time(now_s)

    # --- which blocks are written ---------------------------------------------------------------

    def unselected(self, ids: Ids) -> Ids:
        """The blocks with too few hits to be written."""
        if not self.min_hits:
            return _NO_IDS
        few: Ids = ids[self.residency.blocks.hits[ids] < self.min_hits]
        return few

    def num_unselected(self, ids: Ids) -> int:
        """The number of unselected blocks at the end of a node's `ids`: hits never rise along a
        path."""
        if not self.min_hits:
            return 0
        selected = np.flatnonzero(self.residency.blocks.hits[ids] >= self.min_hits)
        return len(ids) - (int(selected[-1]) + 1 if len(selected) else 0)

    def is_due(self, node: Node) -> bool:
        """Whether the node is still to be written when it leaves memory."""
        is_admitted = any(w.lacks(node) and w.gate.admits(node) for w in self.writers)
        return is_admitted and self._is_selected(node)

    def is_refused(self, node: Node) -> bool:
        """Whether no gate admits the node."""
        return bool(self.writers) and not any(w.gate.admits(node) for w in self.writers)

    def refusing(self, node: Node) -> list[WriteGate]:
        """The gates that do not admit the node."""
        return [writer.gate for writer in self.writers if not writer.gate.admits(node)]

    def hopeful(self, node: Node) -> list[int]:
        """The persistent tiers that the path to this node can be written to."""
        return [writer.tier for writer in self._takers(node) if not writer.is_hopeless(node)]

    def room_is_coming(self, node: Node) -> bool:
        """Whether a persistent tier may take the node soon."""
        return self._is_selected(node) and any(
            w.takes and w.gate.admits(node) and self.evictor.room_is_coming(w.tier)
            for w in self.writers
        )

    def _takers(self, node: Node) -> list[PathWriter]:
        """The writers whose tier takes blocks, lacks this node and admits it."""
        if not self._is_selected(node):
            return []
        return [w for w in self.writers if w.takes and w.lacks(node) and w.gate.admits(node)]

    def _is_selected(self, node: Node) -> bool:
        """Whether any of its blocks is to be written."""
        return not self.min_hits or self.num_unselected(node.block_ids()) < len(node)

    # --- writing --------------------------------------------------------------------------------

    def want(self, node: Node, tiers: Iterable[int]) -> None:
        """Write the path to this node to these tiers, as queues allow."""
        for writer in self.writers:
            if writer.tier in tiers:
                writer.want(node)

    def write_through(self, node: Node) -> bool:
        """Write the path to this node to all tiers that lack and admit it. Returns whether there is
        one."""
        takers = self._takers(node)
        for writer in takers:
            writer.want(node)
        return bool(takers)

    def write_now(self, node: Node) -> bool:
        """As `write_through`, limited to the room of queues. Returns whether anything is
        written."""
        num_moves = len(self.residency.moves)
        for writer in self._takers(node):
            writer.write_now(node)
        return len(self.residency.moves) > num_moves

    def evacuate(self, node: Node, tier: int) -> None:
        """Write the path to this node through, and to `tier` even if its gate refuses."""
        self.want(node, [tier])
        self.write_through(node)

    def first(self) -> PathWriter | None:
        """The writer of the fastest persistent tier that takes blocks now."""
        return next((writer for writer in self.writers if writer.takes), None)

    def paths(self, tier: int) -> list[Span]:
        """The blocks of all paths being written to this tier."""
        return [path for w in self.writers if w.tier == tier for path in w.paths()]

    def advance(self) -> None:
        """Submit the moves that are possible now. Called after every event that may have made
        room."""
        for writer in self.writers:
            writer.advance()

    def flush(self) -> None:
        """Write all blocks in memory that a persistent tier lacks (a clean stop); repeat until
        `num_pending` is 0."""
        nodes = self._ends_in_memory() if self.writers else []
        for writer in self.writers:
            writer.flush(nodes)

    @property
    def num_pending(self) -> int:
        """The number of paths still to be written."""
        return sum(len(writer.pending) for writer in self.writers)

    def _ends_in_memory(self) -> list[Node]:
        """The last node in memory that is selected, of every path, each once."""
        memory = ~self.residency.persistent
        ends: dict[Node, None] = {}
        for namespace in self.residency.namespaces:
            for leaf in self.residency.index.subtree(namespace.root):
                node: Node | None = leaf if not leaf.children else None
                while node is not None and not node.is_root:
                    if node.tiers & memory and self._is_selected(node):
                        ends[node] = None
                        break
                    node = node.parent
        return list(ends)

"""Removes a namespace's blocks in steps, while requests are served.

Starts at the leaves. A node is removed when it is not held and everything below it was removed or
is being removed; then its parent is checked:

    a ─ b ─ c        c and d have no children: they are removed
        └── d        b: c and d are being removed, so it is removed; then a

Memory is freed at once. A persistent copy drains until its record is deleted; until then its node
stays in the tree, but does not keep its ancestors. Records are deleted in this order, a node's last
block first, so that after a crash whole prefixes are left.

Nodes are scanned by their numbers (`Index.nodes`), a part at a time. A clearing is complete when
all records are deleted: before that a crash could bring blocks back.

Races, and who wins:
1. *Held.* Blocks that are leased, pinned or being written stay, with all their ancestors.
2. *Being copied.* The block stays for now; the next pass checks it again.
3. *Stored meanwhile.* It is removed if the pass has not reached it yet. Blocks stored below a block
   being removed cannot be found, and are evicted as unused leaves.
4. *Deleting a record fails.* The copy is ready again, and the next pass tries once more. If that
   fails, too, and an ancestor is gone, it cannot be found, and is evicted as in 3.
5. *Requested meanwhile.* A block being deleted is no hit; one that the pass has not reached is a
   hit, and its lease keeps it.
6. *The disk's worker dies meanwhile.* After its restart it lists records that were to be deleted:
   they are removed then (`misses_records`).

Owned by the daemon's one loop.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from hicache.engine import plan as p
from hicache.engine.index.node import Node
from hicache.engine.residency.blocks import CopyState
from hicache.engine.residency.copies import Namespace, Residency

MAX_LOOKED_AT: Final = 4096
"""Nodes scanned in one step, of all namespaces: half a millisecond."""
MAX_MOVES: Final = 4096
"""With more moves in flight, of any kind, no more records are deleted for now."""
MAX_PASSES: Final = 20


class Clearing:
    """One namespace being cleared. `misses_records`: a persistent tier was down or restoring
    meanwhile, so its records are removed later, when they are listed."""

    def __init__(self, residency: Residency, namespace: Namespace) -> None:
        self.namespace = namespace
        self._residency = residency
        self._front: list[Node] = []
        self._next = 0
        self._num_passes = 0
        self._is_walked = False
        self._is_incomplete = False
        self._gone: set[Node] = set()
        self._deleting: dict[int, tuple[int, int]] = {}  # move: the block and its tier
        self.misses_records = False

    def step(self, most_blocks: int) -> p.Cleared:
        """Remove about `most_blocks` more blocks, at most twice as many: a longer node is split,
        and its end is removed."""
        residency = self._residency
        if len(self._deleting) > MAX_MOVES:
            self._is_deleting()
        if len(residency.moves) >= MAX_MOVES or (self._is_walked and self._is_deleting()):
            return p.Cleared(0, is_over=False, is_waiting=True)
        if self._is_walked:
            return self._end_pass(0)
        num_blocks = 0
        nodes = residency.index.nodes
        look_until = self._next + MAX_LOOKED_AT
        while num_blocks < most_blocks:
            front, size = [], 0
            while self._front and num_blocks + size < most_blocks:
                front.append(self._front.pop())
                size += len(front[-1])
            while self._next < min(look_until, len(nodes)) and num_blocks + size < most_blocks:
                node = nodes[self._next]
                self._next += 1
                if node is not None and node.namespace == self.namespace.number:
                    front.append(node)
                    size += len(node)
            if not front:
                break
            going = [node for node in dict.fromkeys(front) if self._may_go(node)]
            for node in going:
                kept = max(residency.blocks.num_held(node.span), len(node) - most_blocks)
                if kept > 0:  # remove only its end
                    residency.candidates.queue(
                        residency.index.split(node, kept, self.namespace.step)
                    )
            if going:
                num_blocks += sum(map(len, going))
                self._give_up(going)
        self._is_walked = not self._front and self._next >= len(nodes)
        if not self._is_walked or self._is_deleting():
            return p.Cleared(num_blocks, is_over=False, is_waiting=self._is_walked)
        return self._end_pass(num_blocks)

    def _end_pass(self, num_blocks: int) -> p.Cleared:
        """Another pass follows later, if blocks stayed that should be removed."""
        self._num_passes += 1
        is_all = not self._is_incomplete
        is_over = is_all or self._num_passes == MAX_PASSES
        self._next, self._is_incomplete, self._is_walked = 0, False, False
        is_complete = is_all and not self.misses_records
        return p.Cleared(num_blocks, is_over, is_waiting=not is_over, is_complete=is_complete)

    def _is_deleting(self) -> bool:
        """Whether records are still being deleted. Notes failed deletions."""
        residency = self._residency
        ended = self._deleting.keys() - residency.moves.keys()
        for move in ended:
            block, tier = self._deleting.pop(move)
            if residency.blocks.state[tier][block] != CopyState.ABSENT:
                self._is_incomplete = True
                self._gone.discard(residency.index.node_of(block))
        return bool(self._deleting)

    def _may_go(self, node: Node) -> bool:
        """Whether a node's end is not held and nothing stays below it. Notes blocks that are only
        being copied."""
        if node.parent is None or not node.tiers or any(node.holding):
            return False
        if not all(self._is_going(child) for child in node.children.values()):
            return False
        blocks, moves_of = self._residency.blocks, self._residency.moves.of_block
        if moves_of and any(block in moves_of for block in node.block_ids().tolist()):
            self._is_incomplete = self._is_incomplete or not self._is_going(node)
            return False
        return blocks.num_held(node.span) < len(node)

    def _is_going(self, node: Node) -> bool:
        if node in self._gone:
            return True
        return bool(node.tiers) and all(map(self._residency.is_going, node.block_ids().tolist()))

    def _give_up(self, nodes: list[Node]) -> None:
        """Remove the nodes' copies, and check their parents next."""
        residency = self._residency
        above = [node.parent for node in nodes if node.parent is not None]
        ids = np.concatenate([node.block_ids()[::-1] for node in nodes])
        for tier, spec in enumerate(residency.tiers):
            held = ids[residency.blocks.tags[ids] >> tier & 1 == 1]
            if spec.traits.deletion_is_io and residency.is_up(tier):
                residency.start_giving_up(self.namespace, held, tier)
                for block in held.tolist():
                    self._deleting[residency.moves.of_block[block][-1].id] = (block, tier)
            else:
                residency.vacate(held, tier)
        residency.settle(ids)
        self._gone.update(nodes)
        self._front += [node for node in dict.fromkeys(above) if node.parent is not None]

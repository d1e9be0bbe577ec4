"""Forgetting a namespace, so many blocks at a time, while requests are served.

From the leaves on. A node goes when nobody holds it and everything below it has gone or is about
to; then the one above it is looked at:

    a ─ b ─ c        c and d have nothing below them: they go
        └── d        b: c and d go, so it goes; then a

Memory is free at once. A durable copy drains until its record is deleted, and so long its node
stays, but it keeps none of those above. Records are deleted in this order, a node's last block
first, so that what a crash leaves of them are whole prefixes.

Nodes are looked through by their numbers, some at a time (`Index.nodes`). It is over when all
records are deleted: until then whoever dies could bring them back.

Races, told once:
1. *Held.* What is leased, pinned or being written stays, with all above it.
2. *On its way.* A block that is being copied stays for now; the next pass looks again.
3. *Stored meanwhile.* It goes if the pass has not come by yet. What is written below a block that
   goes is not found: it leaves as a leaf, as anything does that nobody asks for.
4. *Deleting a record fails.* The copy is ready again, and the next pass tries once more. If that
   is of no use it is found no more where one above it is gone, and leaves as in 3.
5. *Asked for while it goes.* What is being deleted is no hit; what has not had its turn is one, and
   its lease keeps it.
6. *The disk dies while it goes.* Whoever starts again tells records that were to be deleted: they
   come too late and are removed (`misses_records`).

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
"""Nodes in one step, whoever's they are: half a millisecond."""
MAX_MOVES: Final = 4096
"""Moves under way, of whatever kind, with which no more records are deleted for now."""
MAX_PASSES: Final = 20


class Clearing:
    """One namespace being cleared. `misses_records`: a durable tier was away or telling what it
    holds meanwhile, so that records are removed later, as they are told."""

    def __init__(self, residency: Residency, namespace: Namespace) -> None:
        self.namespace = namespace
        self._house = residency
        self._front: list[Node] = []
        self._next = 0
        self._num_passes = 0
        self._is_walked = False
        self._is_incomplete = False
        self._gone: set[Node] = set()
        self._deleting: dict[int, tuple[int, int]] = {}  # move: the block and its tier
        self.misses_records = False

    def step(self, most_blocks: int) -> p.Cleared:
        """So many blocks more, or twice as many: a longer node is split, and its end goes."""
        residency = self._house
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
                if kept > 0:  # only its end goes
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
        """Another one follows, after a while, if something stayed that should not."""
        self._num_passes += 1
        is_all = not self._is_incomplete
        is_over = is_all or self._num_passes == MAX_PASSES
        self._next, self._is_incomplete, self._is_walked = 0, False, False
        is_complete = is_all and not self.misses_records
        return p.Cleared(num_blocks, is_over, is_waiting=not is_over, is_complete=is_complete)

    def _is_deleting(self) -> bool:
        """Whether records are still being deleted. Notes those that could not be."""
        residency = self._house
        ended = self._deleting.keys() - residency.moves.keys()
        for move in ended:
            block, tier = self._deleting.pop(move)
            if residency.blocks.state[tier][block] != CopyState.ABSENT:
                self._is_incomplete = True
                self._gone.discard(residency.index.node_of(block))
        return bool(self._deleting)

    def _may_go(self, node: Node) -> bool:
        """Whether nobody holds its end and nothing stays below it. Notes what is only on its
        way."""
        if node.parent is None or not node.tiers or any(node.holding):
            return False
        if not all(self._is_going(child) for child in node.children.values()):
            return False
        blocks, moves_of = self._house.blocks, self._house.moves.of_block
        if moves_of and any(block in moves_of for block in node.block_ids().tolist()):
            self._is_incomplete = self._is_incomplete or not self._is_going(node)
            return False
        return blocks.num_held(node.span) < len(node)

    def _is_going(self, node: Node) -> bool:
        if node in self._gone:
            return True
        return bool(node.tiers) and all(map(self._house.is_going, node.block_ids().tolist()))

    def _give_up(self, nodes: list[Node]) -> None:
        """Their copies; and what is above them is looked at next."""
        residency = self._house
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

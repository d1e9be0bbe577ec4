"""Writes paths to one persistent tier: ancestors before their children, wherever possible.

The tier holds whole prefixes, so that all its blocks can be found after a restart. A node to be
written waits here until every block of its path is written or being written; blocks held only in
memory without a link to the tier are first copied to memory that has one.

    hbm   [ A ]                      1. A is copied to dram (it stays in hbm too)
    dram        [ B ][ C ]           2. A, B, C are written to disk in this order
    disk

A path may block itself: its front in hbm waits for room in dram, its end in dram waits for its
front to be written. Then the end is written first; where even that is impossible, it is dropped.

A persistent tier is never read to fill another one: blocks that have left memory are not written.
Moves of one link and priority keep their order, so an ancestor submitted first is written first.
Owned by the daemon's one loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np

from hicache.engine.index.node import Node
from hicache.engine.placement.evictor import MIN_VICTIMS, Evictor
from hicache.engine.placement.write_gate import WriteGate
from hicache.engine.plan import Priority
from hicache.engine.residency.block_ids import Span, ids_along
from hicache.engine.residency.blocks import CopyState
from hicache.engine.residency.copies import NO_TIER, Namespace, Residency
from hicache.engine.residency.leases import NO_OWNER
from hicache.tiers.block import Ids


class _WriteProgress(Enum):
    DONE = "all moves submitted"
    WAITING = "for room or for a copy in flight"
    HOPELESS = "a missing ancestor, or no room possible"


class PathWriter:
    """The paths to be written to one persistent tier that are not all there yet.

    `pending`: the last node of each, with the ids of its blocks from the root on, checked after
    every batch. Nodes are split and merged meanwhile, but a node keeps its last block, and blocks
    above others stay. If blocks at its end were evicted, the path is shorter. `others`: the writers
    of the other persistent tiers.
    """

    def __init__(self, residency: Residency, evictor: Evictor, tier: int, gate: WriteGate) -> None:
        self.residency = residency
        self.evictor = evictor
        self.tier = tier
        self.gate = gate
        self.others: Sequence[PathWriter] = ()
        self.pending: dict[Node, Ids] = {}
        self._is_flushing = False
        self._keeps_whole_prefixes = residency.tiers[tier].traits.keeps_whole_prefixes

    @property
    def takes(self) -> bool:
        """Whether the tier takes blocks now."""
        return self.residency.takes(self.tier)

    def lacks(self, node: Node) -> bool:
        """Whether no copy of the node is readable in the tier."""
        return not node.tiers >> self.tier & 1

    def want(self, node: Node) -> None:
        """Write the path to this node, as queues allow."""
        if node not in self.pending:
            path = self.residency.index.path_to(node)
            self.pending[node] = ids_along([piece.span for piece in path])

    def write_now(self, node: Node) -> None:
        """Write only as much of the path to this node as the queue has room for now."""
        if node not in self.pending and not self._is_saturated():
            self.want(node)
            # Called while room is made in memory: no copy may be started there meanwhile, or the
            # caller would start the same one again.
            self._advance(node, may_bring=False)
            self.pending.pop(node, None)

    def is_hopeless(self, node: Node) -> bool:
        """Whether the path to this node cannot be written: its missing ancestors and one of its
        blocks find no room, even by evicting others, or have left memory."""
        tier, residency = self.tier, self.residency
        path = residency.index.path_to(node)
        memory = ~residency.persistent
        slot_bytes = residency.namespace_of(node).slot_bytes[tier]
        count = 1
        for piece in path[:-1] if self._keeps_whole_prefixes else ():
            absent = len(residency.where(piece.block_ids(), tier, CopyState.ABSENT))
            if absent and piece.tiers and not piece.tiers & memory:
                return True
            count += absent
        if residency.pools[tier].available(slot_bytes) >= count:
            return False
        with residency.pinned([piece.span for piece in path]):
            room = self.evictor.make_room(tier, slot_bytes, count)
        return room < count and not self.evictor.room_is_coming(tier)

    def paths(self) -> list[Span]:
        """The blocks of all pending paths with blocks not written yet."""
        state = self.residency.blocks.state[self.tier]
        paths = [self._ids_to(node) for node in self.pending]
        return [path for path in paths if (state[path] == CopyState.ABSENT).any()]

    def flush(self, nodes: Sequence[Node]) -> int:
        """Write the paths to these nodes (a clean stop). Returns the number of pending paths;
        repeat until it is 0. Each path is written once: where the tier is too small for all,
        evicted ones are not written again."""
        if not self._is_flushing:
            for node in nodes:
                self.want(node)
        self._is_flushing = True
        self.advance()
        if not self.pending and not self.residency.moves:
            self._is_flushing = False
        return len(self.pending)

    def advance(self) -> None:
        """Submit the moves that are possible now. Called after every event that may have made
        room."""
        if not self.pending:
            return
        if not self.takes:
            for node in list(self.pending):
                self._give_up_on(node)
            return
        self._advance_all()
        while self.pending and not self.residency.moves:
            if self._write_out_of_turn() or not self._is_stuck():
                return
            self._sacrifice(self._least_held())
            self._advance_all()

    def _follow_merges(self) -> None:
        """If a path's last node was merged into the node below it, continue with that node."""
        residency = self.residency
        for node in [node for node in self.pending if node.parent is None]:
            path = self.pending.pop(node)
            gone = np.flatnonzero(residency.blocks.node[path] < 0)
            path = path[: int(gone[0])] if len(gone) else path
            if not len(path):
                continue
            now = residency.index.node_of(int(path[-1]))
            held = ids_along([piece.span for piece in residency.index.path_to(now)])[: len(path)]
            if np.array_equal(held, path):  # else an id was freed, and is another block's now
                self.pending.setdefault(now, path)

    def _advance_all(self) -> None:
        self._follow_merges()
        for node in list(self.pending):
            if node not in self.pending:
                continue
            progress = self._advance(node)
            if progress is _WriteProgress.DONE:
                self.pending.pop(node, None)
            elif progress is _WriteProgress.HOPELESS:
                self._give_up_on(node)
            elif self._is_saturated():
                return

    def _write_out_of_turn(self) -> bool:
        """No move is in flight: the front of a path waits for room that its end takes. So write the
        end first. Not while a commit waits until its blocks are persistent: the end cannot be found
        after a crash until its front is written, too."""
        residency = self.residency
        if any(lease.decision.reason == "durable" for lease in residency.leases.leases.values()):
            return False
        for node in list(reversed(self.pending)):
            if node.parent is not None:
                self._advance(node, out_of_turn=True)
            if residency.moves:
                return True
        return False

    def _is_stuck(self) -> bool:
        """No move is in flight and no request holds a lease, so no event will make room (warmings
        wait for room themselves, and pins do not end)."""
        residency = self.residency
        book = residency.leases
        is_held = any(lease.owner != NO_OWNER for lease in book.leases.values())
        return not (residency.moves or is_held or book.tickets)

    def _least_held(self) -> Node:
        """The path added last, if possible one without pinned blocks."""
        blocks = self.residency.blocks
        free = (node for node in reversed(self.pending) if not blocks.is_pinned(node.span))
        return next(free, next(reversed(self.pending)))

    def _sacrifice(self, node: Node) -> None:
        """Drop the last blocks of a path that is larger than the memory it has to pass through. A
        path that was only to be written early, or that another persistent tier holds, keeps its
        blocks, and is not written now."""
        residency = self.residency
        if node.parent is None or not (self._is_flushing or any(residency.draining_bytes)):
            self.pending.pop(node, None)
            return
        leaf = node
        while leaf.children:
            leaf = next(iter(leaf.children.values()))
        is_elsewhere = leaf.tiers & residency.persistent & ~(1 << self.tier)
        if residency.blocks.is_pinned(node.span) or is_elsewhere:  # these blocks are not dropped
            self._give_up_on(node)
            return
        self.evictor.forget(leaf, MIN_VICTIMS)
        if not leaf.parent and leaf is node:
            self.pending.pop(node, None)

    def _advance(
        self, node: Node, out_of_turn: bool = False, may_bring: bool = True
    ) -> _WriteProgress:
        if node.parent is None:  # merged or removed: see _follow_merges
            return _WriteProgress.WAITING
        tier, residency = self.tier, self.residency
        namespace = residency.namespace_of(node)
        path = self._ids_to(node)
        state = residency.blocks.state[tier]
        seen = 0 if self._keeps_whole_prefixes else node.depth
        if (state[path[seen:]] == CopyState.DRAINING).any():
            return _WriteProgress.WAITING  # first wait for a deletion, then write it again
        while len(ahead := np.flatnonzero(state[path[seen:]] == CopyState.ABSENT)):
            piece = residency.index.node_of(int(path[seen + int(ahead[0])]))
            seen = piece.depth + len(piece)
            absent = residency.where(piece.block_ids(), tier, CopyState.ABSENT)
            src = self._source(piece)
            if src is None:
                if out_of_turn:
                    continue
                if not may_bring:
                    return _WriteProgress.WAITING
                progress = self._bring_closer(path, piece)
                if progress is not _WriteProgress.DONE:
                    return progress
                continue
            # If they made room out of turn, paths would evict each other for ever.
            kept = self.paths() if out_of_turn else [path]
            room = self._room(namespace, kept, src, tier, len(absent))
            if not room:
                coming = self._is_saturated() or self.evictor.room_is_coming(tier)
                return _WriteProgress.WAITING if coming else _WriteProgress.HOPELESS
            ids = absent[:room]
            slots = residency.pools[tier].allocate(namespace.slot_bytes[tier], len(ids))
            residency.start(namespace, ids, src, tier, slots, Priority.DEMOTION)
            self.gate.written(len(ids) * namespace.stored_bytes(tier))
            if room < len(absent):
                return _WriteProgress.WAITING
        return _WriteProgress.DONE

    def _ids_to(self, node: Node) -> Ids:
        """The blocks of a pending path; none where its last node was removed."""
        return self.pending[node][: node.depth + len(node) if node.parent is not None else 0]

    def _source(self, piece: Node) -> int | None:
        """A memory tier with a link to the tier that holds the piece."""
        residency = self.residency
        in_memory = piece.tiers & residency.up & ~residency.persistent
        for src in range(len(residency.tiers)):
            if in_memory >> src & 1 and (src, self.tier) in residency.links:
                return src
        return None

    def _bring_closer(self, path: Ids, piece: Node) -> _WriteProgress:
        """Copy a piece to a memory tier that it can be written from."""
        tier, residency = self.tier, self.residency
        namespace = residency.namespace_of(piece)
        src = residency.fastest(piece.tiers & ~residency.persistent)
        if src == NO_TIER:
            return _WriteProgress.HOPELESS
        # Copies of blocks already written may be evicted to make room.
        unwritten = path[residency.blocks.state[tier][path] != CopyState.READY]
        for middle in range(len(residency.tiers)):
            if not ((src, middle) in residency.links and (middle, tier) in residency.links):
                continue
            absent = residency.where(piece.block_ids(), middle, CopyState.ABSENT)
            room = (
                self._room(namespace, [unwritten], src, middle, len(absent)) if len(absent) else 0
            )
            if room:
                slots = residency.pools[middle].allocate(namespace.slot_bytes[middle], room)
                residency.start(namespace, absent[:room], src, middle, slots, Priority.DEMOTION)
            on_its_way = room or len(absent) < len(piece)
            if on_its_way or self.evictor.room_is_coming(middle) or residency.moves:
                return _WriteProgress.WAITING
        return _WriteProgress.HOPELESS

    def _room(
        self, namespace: Namespace, kept: Sequence[Span], src: int, dst: int, count: int
    ) -> int:
        """Make room for up to `count` blocks by evicting others than those `kept`."""
        residency = self.residency
        queued = residency.moves.bytes_over((src, dst), Priority.DEMOTION)
        may_move = max(0, self.evictor.max_moving_bytes - queued) // namespace.block_bytes
        if dst in residency.backoff.trials:
            may_move = 0 if queued else 1
        count = min(count, may_move)
        if residency.pools[dst].available(namespace.slot_bytes[dst]) >= count:
            return count
        with residency.pinned(kept):
            return self.evictor.make_room(dst, namespace.slot_bytes[dst], count)

    def _is_saturated(self) -> bool:
        residency = self.residency
        limit = self.evictor.max_moving_bytes // 2
        return any(
            residency.moves.bytes_over(link, Priority.DEMOTION) >= limit
            for link in residency.links
            if link[1] == self.tier
        )

    def _give_up_on(self, node: Node) -> None:
        """The path cannot be written: drop its draining blocks, and make it the coldest, unless
        another persistent tier has it or will have it."""
        self.pending.pop(node, None)
        residency = self.residency
        for tier in range(len(residency.tiers)):
            if node.parent is None or self._is_for_another(node):
                return
            if residency.persistent >> tier & 1 or not node.leaving >> tier & 1:
                continue
            draining = node.block_ids()
            if node.staying & residency.up:
                residency.free_drained(draining)
                residency.settle(draining)
            elif node.children or node.holding[tier] or self.evictor.is_held(node):
                residency.rescue(draining, tier)
                residency.settle(draining)
            else:  # at once: after a rescue it might be merged with held blocks above
                self.evictor.drop(node, tier)

    def _is_for_another(self, node: Node) -> bool:
        """Whether this node is still to be written to another persistent tier."""
        state, ids = self.residency.blocks.state, node.block_ids()
        return any(
            node in other.pending or bool((state[other.tier][ids] == CopyState.FILLING).any())
            for other in self.others
        )

"""Writing paths down to the durable tier: ancestors before their children, wherever that can be.

The durable tier holds whole prefixes, so that what it gives back after a restart is reachable.
A node that is wanted there waits here until every block of its path is written or on its way;
blocks held only in a tier without a link to the durable one are first copied to one that has it.

    hbm   [ A ]                      1. A is copied to dram (it stays in hbm too)
    dram        [ B ][ C ]           2. A, B, C go to disk in this order
    disk

A path may wait for itself: its front in hbm for room in dram, its end in dram for its front to be
written. Then the end is written out of turn; where even that cannot be, it is forgotten.

Moves of one link and priority keep their order, so an ancestor handed over first is written first.
Owned by the daemon's one loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np

from hicache.engine.index.node import Node
from hicache.engine.placement.evictor import MIN_VICTIMS, Evictor
from hicache.engine.plan import Priority
from hicache.engine.residency.block_ids import Span, ids_along
from hicache.engine.residency.blocks import CopyState
from hicache.engine.residency.copies import Namespace, Residency
from hicache.engine.residency.leases import NOBODY
from hicache.tiers.block import Ids


class _WriteProgress(Enum):
    DONE = "nothing left to hand over"
    WAITING = "for room or for a copy on its way"
    HOPELESS = "a hole above, or no room to be had"


class WriteDown:
    """The paths that are wanted in the durable tier and not all there yet.

    `pending`: the end of each, with the ids of its blocks from the root on. They are looked at
    after every batch, in one go: nodes come and go meanwhile, but a node keeps its end, and blocks
    above others stay. An end that was given up is shorter than it was.
    """

    def __init__(self, residency: Residency, evictor: Evictor) -> None:
        self.residency = residency
        self.evictor = evictor
        self.pending: dict[Node, Ids] = {}
        self.is_flushing = False
        durable = [number for number, tier in enumerate(residency.tiers) if tier.persistent]
        self.tier = durable[0] if durable else None

    def want(self, node: Node) -> None:
        """Write the path to this node down, as queues allow."""
        if self.tier is not None and node not in self.pending:
            path = self.residency.index.path_to(node)
            self.pending[node] = ids_along([piece.span for piece in path])

    def is_hopeless(self, node: Node) -> bool:
        """Whether the path to this node cannot get there: what lacks above it and one block of its
        own find no room, even at the expense of others."""
        tier = self.tier
        if tier is None:
            return True
        residency = self.residency
        path = residency.index.path_to(node)
        slot_bytes = residency.namespace_of(node).slot_bytes[tier]
        count = 1 + sum(
            len(residency.where(piece.block_ids(), tier, CopyState.ABSENT)) for piece in path[:-1]
        )
        if residency.pools[tier].available(slot_bytes) >= count:
            return False
        with residency.pinned([piece.span for piece in path]):
            room = self.evictor.make_room(tier, slot_bytes, count)
        return room < count and not self.evictor.room_is_coming(tier)

    def paths(self) -> list[Span]:
        """The blocks of all paths that are pending and lack something: the others may go."""
        if self.tier is None:
            return []
        state = self.residency.blocks.state[self.tier]
        paths = [self._ids_to(node) for node in self.pending]
        return [path for path in paths if (state[path] == CopyState.ABSENT).any()]

    def flush(self) -> int:
        """Write everything that the durable tier lacks (a clean stop). Returns how many paths are
        pending; wanted once, until it is 0: where the tier is too small for all, what it gives up
        for others is not wanted again."""
        if self.tier is None:
            return 0
        if not self.is_flushing:
            self._want_all()
        self.is_flushing = True
        self.advance()
        if not self.pending and not self.residency.moves:
            self.is_flushing = False
        return len(self.pending)

    def _want_all(self) -> None:
        for namespace in self.residency.namespaces:
            for node in self.residency.index.subtree(namespace.root):
                if not node.children and not node.is_root:
                    self.want(node)

    def advance(self) -> None:
        """Hand over what can go now. Called after every event that may have made room."""
        if self.tier is None or not self.pending:
            return
        if not self.residency.takes(self.tier):
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
        """An end that was merged into the node below it is that node's by now."""
        residency = self.residency
        for node in [node for node in self.pending if node.parent is None]:
            path = self.pending.pop(node)
            gone = np.flatnonzero(residency.blocks.node[path] < 0)
            path = path[: int(gone[0])] if len(gone) else path
            if not len(path):
                continue
            now = residency.index.node_of(int(path[-1]))
            held = ids_along([piece.span for piece in residency.index.path_to(now)])[: len(path)]
            if np.array_equal(held, path):  # else an id was given up, and is another block's now
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
        """Nothing moves: the front of a path waits for room that its own end has. So the end is
        written first. Not while somebody waits to hear that blocks are durable: until its front
        is written too, nobody could find the end after a crash."""
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
        """Nothing moves and nobody holds anything, so no news will ever come: what is warmed waits
        for room itself, and pins for nothing."""
        residency = self.residency
        book = residency.leases
        is_held = any(lease.owner != NOBODY for lease in book.leases.values())
        return not (residency.moves or is_held or book.tickets)

    def _least_held(self) -> Node:
        """The path that was wanted last, of those of which nothing is pinned if there are any."""
        blocks = self.residency.blocks
        free = (node for node in reversed(self.pending) if not blocks.is_pinned(node.span))
        return next(free, next(reversed(self.pending)))

    def _sacrifice(self, node: Node) -> None:
        """Forget the last blocks of a path that is larger than the memory it has to pass through.
        A path that only was to be written early loses nothing: it is not written now."""
        residency = self.residency
        if node.parent is None or not (self.is_flushing or any(residency.draining_bytes)):
            self.pending.pop(node, None)
            return
        if residency.blocks.is_pinned(node.span):  # it stays where it is
            self._give_up_on(node)
            return
        leaf = node
        while leaf.children:
            leaf = next(iter(leaf.children.values()))
        self.evictor.forget(leaf, MIN_VICTIMS)
        if not leaf.parent and leaf is node:
            self.pending.pop(node, None)

    def _advance(self, node: Node, out_of_turn: bool = False) -> _WriteProgress:
        tier = self.tier
        assert tier is not None
        if node.parent is None:  # merged away or gone: see _follow_merges
            return _WriteProgress.WAITING
        residency = self.residency
        namespace = residency.namespace_of(node)
        path = self._ids_to(node)
        if (residency.blocks.state[tier][path] == CopyState.DRAINING).any():
            return (
                _WriteProgress.WAITING
            )  # a record above is being deleted: it is written anew first
        seen = 0
        while len(
            ahead := np.flatnonzero(residency.blocks.state[tier][path[seen:]] == CopyState.ABSENT)
        ):
            piece = residency.index.node_of(int(path[seen + int(ahead[0])]))
            seen = piece.depth + len(piece)
            absent = residency.where(piece.block_ids(), tier, CopyState.ABSENT)
            src = self._source(piece, tier)
            if src is None:
                if out_of_turn:
                    continue
                progress = self._bring_closer(path, piece, tier)
                if progress is not _WriteProgress.DONE:
                    return progress
                continue
            # Out of turn, paths would only take the room from each other, for ever.
            kept = self.paths() if out_of_turn else [path]
            room = self._room(namespace, kept, src, tier, len(absent))
            if not room:
                coming = self._is_saturated() or self.evictor.room_is_coming(tier)
                return _WriteProgress.WAITING if coming else _WriteProgress.HOPELESS
            ids = absent[:room]
            slots = residency.pools[tier].allocate(namespace.slot_bytes[tier], len(ids))
            residency.start(namespace, ids, src, tier, slots, Priority.DEMOTION)
            self.evictor.gate.written(len(ids) * namespace.stored_bytes(tier))
            if room < len(absent):
                return _WriteProgress.WAITING
        return _WriteProgress.DONE

    def _ids_to(self, node: Node) -> Ids:
        """The blocks of a pending path; none where its end has gone."""
        return self.pending[node][: node.depth + len(node) if node.parent is not None else 0]

    def _source(self, piece: Node, tier: int) -> int | None:
        """A tier with a link to the durable one that holds the piece."""
        residency = self.residency
        for src in range(len(residency.tiers)):
            if piece.tiers >> src & 1 and residency.is_up(src) and (src, tier) in residency.links:
                return src
        return None

    def _bring_closer(self, path: Ids, piece: Node, tier: int) -> _WriteProgress:
        """Copy a piece to a tier from which it can be written; it waits for that copy."""
        residency = self.residency
        namespace = residency.namespace_of(piece)
        src = residency.fastest(piece.tiers)
        # Copies of what is written already may go to make room for what is not.
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
        """Slots for up to `count` blocks, made at the expense of all others than those `kept`."""
        residency = self.residency
        queued = residency.bytes_moving((src, dst), Priority.DEMOTION)
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
            residency.bytes_moving(link, Priority.DEMOTION) >= limit
            for link in residency.links
            if link[1] == self.tier
        )

    def _give_up_on(self, node: Node) -> None:
        """It will not get there: what was draining into it is dropped, the coldest first to go."""
        self.pending.pop(node, None)
        if node.parent is None:
            return
        residency = self.residency
        for tier in range(len(residency.tiers)):
            if node.parent is None or tier == self.tier or not node.leaving >> tier & 1:
                continue
            if node.children or node.holding[tier] or self.evictor.is_held(node):
                draining = node.block_ids()
                residency.rescue(draining, tier)
                residency.settle(draining)
            else:  # at once: rescued, it could be merged with blocks above that are held
                self.evictor.drop(node, tier)

"""Writing paths down to the durable tier: ancestors before their children, always.

The durable tier holds whole prefixes, so that what it gives back after a restart is reachable.
A node that is wanted there waits here until every block of its path is written or on its way;
blocks held only in a tier without a link to the durable one are first copied to one that has it.

    hbm   [ A ]                      1. A is copied to dram (it stays in hbm too)
    dram        [ B ][ C ]           2. A, B, C go to disk in this order
    disk

A path larger than the memory it has to pass through would wait for itself: its front for room in
dram, its end in dram for its front to be written. Then the end is forgotten, leaves first.

Moves of one link and priority keep their order, so an ancestor handed over first is written first.
Owned by the daemon's one loop.
"""

from __future__ import annotations

from enum import Enum

from hicache.engine.blocks import State
from hicache.engine.evictor import MIN_VICTIMS, Evictor
from hicache.engine.node import Node
from hicache.engine.plan import Priority
from hicache.engine.residency import Residency


class _Progress(Enum):
    DONE = "nothing left to hand over"
    WAITING = "for room or for a copy on its way"
    HOPELESS = "a hole above, or no room to be had"


class WriteDown:
    """The paths that are wanted in the durable tier and not all there yet."""

    def __init__(self, residency: Residency, evictor: Evictor) -> None:
        self.residency = residency
        self.evictor = evictor
        self.pending: dict[Node, None] = {}
        self.is_flushing = False
        durable = [number for number, tier in enumerate(residency.tiers) if tier.durable]
        self.tier = durable[0] if durable else None

    def want(self, node: Node) -> None:
        """Write the path to this node down, as queues allow."""
        if self.tier is not None:
            self.pending[node] = None

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
                    self.pending[node] = None

    def advance(self) -> None:
        """Hand over what can go now. Called after every event that may have made room."""
        if self.tier is None or not self.pending:
            return
        if not self.residency.is_up(self.tier):
            for node in list(self.pending):
                self._give_up_on(node)
            return
        self._advance_all()
        while self.pending and self._is_stuck():
            self._sacrifice(next(reversed(self.pending)))
            self._advance_all()

    def _advance_all(self) -> None:
        for node in list(self.pending):
            if node not in self.pending:
                continue
            progress = self._advance(node)
            if progress is _Progress.DONE:
                self.pending.pop(node, None)
            elif progress is _Progress.HOPELESS:
                self._give_up_on(node)
            elif self._is_saturated():
                return

    def _is_stuck(self) -> bool:
        """Nothing moves and nobody holds anything, so no news will ever come: the front of a path
        waits for room that its own end has, and its end may not be written before the front."""
        house = self.residency
        return not (house.moves or house.leases.leases or house.leases.tickets)

    def _sacrifice(self, node: Node) -> None:
        """Forget the last blocks of a path that is larger than the memory it has to pass through.
        A path that only was to be written early loses nothing: it is not written now."""
        house = self.residency
        if node.parent is None or not (self.is_flushing or any(house.draining_bytes)):
            self.pending.pop(node, None)
            return
        leaf = node
        while leaf.children:
            leaf = next(iter(leaf.children.values()))
        self.evictor.forget(leaf, MIN_VICTIMS)
        if not leaf.parent and leaf is node:
            self.pending.pop(node, None)

    def _advance(self, node: Node) -> _Progress:
        tier = self.tier
        assert tier is not None
        if node.parent is None:  # merged away: its blocks are in a node below, or gone
            return _Progress.DONE
        house = self.residency
        namespace = house.namespace_of(node)
        path = house.index.path_to(node)
        for piece in path:
            absent = house.where(piece.block_ids(), tier, State.ABSENT)
            if len(absent) == 0:
                continue
            src = self._source(piece, tier)
            if src is None:
                progress = self._bring_closer(path, piece, tier)
                if progress is not _Progress.DONE:
                    return progress
                continue
            room = self._room(path, src, tier, len(absent))
            if not room:
                coming = self._is_saturated() or self.evictor.room_is_coming(tier)
                return _Progress.WAITING if coming else _Progress.HOPELESS
            ids = absent[:room]
            slots = house.pools[tier].allocate(namespace.slot_bytes, len(ids))
            house.start(namespace, ids, src, tier, slots, Priority.DEMOTION)
            if room < len(absent):
                return _Progress.WAITING
        return _Progress.DONE

    def _source(self, piece: Node, tier: int) -> int | None:
        """A tier with a link to the durable one that holds the piece."""
        house = self.residency
        for src in range(len(house.tiers)):
            if piece.tiers >> src & 1 and house.is_up(src) and (src, tier) in house.links:
                return src
        return None

    def _bring_closer(self, path: list[Node], piece: Node, tier: int) -> _Progress:
        """Copy a piece to a tier from which it can be written; it waits for that copy."""
        house = self.residency
        namespace = house.namespace_of(piece)
        src = house.fastest(piece.tiers)
        for middle in range(len(house.tiers)):
            if not ((src, middle) in house.links and (middle, tier) in house.links):
                continue
            absent = house.where(piece.block_ids(), middle, State.ABSENT)
            room = self._room(path, src, middle, len(absent)) if len(absent) else 0
            if room:
                slots = house.pools[middle].allocate(namespace.slot_bytes, room)
                house.start(namespace, absent[:room], src, middle, slots, Priority.DEMOTION)
            on_its_way = room or len(absent) < len(piece)
            if on_its_way or self.evictor.room_is_coming(middle) or house.moves:
                return _Progress.WAITING
        return _Progress.HOPELESS

    def _room(self, path: list[Node], src: int, dst: int, count: int) -> int:
        """Slots for up to `count` blocks of the path, made at the expense of others."""
        house = self.residency
        namespace = house.namespace_of(path[0])
        queued = house.bytes_moving((src, dst), Priority.DEMOTION)
        may_move = max(0, self.evictor.max_moving_bytes - queued) // namespace.block_bytes
        count = min(count, may_move)
        if house.pools[dst].available(namespace.slot_bytes) >= count:
            return count
        with house.pinned([piece.span for piece in path]):
            return self.evictor.make_room(dst, namespace.slot_bytes, count)

    def _is_saturated(self) -> bool:
        house = self.residency
        limit = self.evictor.max_moving_bytes // 2
        return any(
            house.bytes_moving(link, Priority.DEMOTION) >= limit
            for link in house.links
            if link[1] == self.tier
        )

    def _give_up_on(self, node: Node) -> None:
        """It will not get there: what was draining into it is dropped, the coldest first to go."""
        self.pending.pop(node, None)
        if node.parent is None:
            return
        house = self.residency
        ids = node.block_ids()
        for tier in range(len(house.tiers)):
            if node.leaving >> tier & 1 and tier != self.tier:
                draining = house.where(ids, tier, State.DRAINING)
                house.rescue(draining, tier)
                house.settle(draining)
                is_read = any(house.is_read(block, tier) for block in draining.tolist())
                if node.parent is not None and not node.holding[tier] and not is_read:
                    self.evictor.drop(node, tier)

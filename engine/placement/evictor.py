"""Evicts copies to make room, and decides what happens to their blocks.

The victim is the coldest leaf of its tier by the tier's policy. One of three things happens:

    another copy stays elsewhere       ──▶ its copy is freed at once
    a slower tier can take it          ──▶ demoted: copied there while draining, then freed
    no slower tier, no room there for
    a block of its worth, or too
    unlikely to be reused (WriteGate)  ──▶ dropped: the block is removed, leaves first

Into a persistent tier the whole path is written, ancestors first (`WriteBack`). A persistent copy's
record is deleted before its room counts as free. Where evictions by age make no room for a size of
slots, slabs are emptied for it (`Evacuations`). Leased and pinned copies and copies being read are
parked: they are no candidates until a lease or a move has ended.

Races, and who wins:
1. *Requested while draining.* A match touches the path, which rescues it: draining → ready. The
   copy to the slower tier completes, and both stay.
2. *Demoted while being promoted.* The slower copy is the source of a move in flight: `is_read`
   keeps its slot until the outcome.
3. *The slower tier's worker dies.* The outcome fails, and the draining copy is ready and a
   candidate again; without a slower tier it is later dropped, if room is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

import numpy as np

from hicache.engine.index.node import Node
from hicache.engine.placement.slab_evacuation import Evacuations
from hicache.engine.placement.write_gate import WriteGate
from hicache.engine.plan import Priority
from hicache.engine.policies.base import ALWAYS
from hicache.engine.residency.block_ids import Span
from hicache.engine.residency.blocks import CopyState
from hicache.engine.residency.copies import Residency
from hicache.tiers.block import Ids

MIN_VICTIMS: Final = 8
"""Blocks evicted together where a leaf has them: single blocks would split the tree too finely."""


class Writers(Protocol):
    """What the evictor needs of WriteBack."""

    def num_unselected(self, ids: Ids) -> int:
        """How many blocks at the end of a node's `ids` are not to be written."""

    def is_due(self, node: Node) -> bool:
        """Whether the node is still to be written when it leaves memory."""

    def is_refused(self, node: Node) -> bool:
        """Whether no persistent tier admits the node."""

    def refusing(self, node: Node) -> list[WriteGate]:
        """The gates that do not admit it."""

    def unselected(self, ids: Ids) -> Ids:
        """The blocks that are not to be written."""

    def evacuate(self, node: Node, tier: int) -> None:
        """Write the path to this node to persistent tiers, this one among them."""

    def hopeful(self, node: Node) -> list[int]:
        """The persistent tiers that the path to this node can get to."""

    def want(self, node: Node, tiers: Iterable[int]) -> None:
        """Write the path to this node to these tiers."""

    def write_now(self, node: Node) -> bool:
        """Write the path to this node as far as queues have room now. Whether that is anything."""

    def room_is_coming(self, node: Node) -> bool:
        """Whether a persistent tier may take the node soon."""

    def paths(self, tier: int) -> list[Span]:
        """The blocks of all paths being written to a tier."""


class Evictor:
    """Makes room in any tier. Owned by the daemon's one loop."""

    write_back: Writers
    """Set once both are there: each needs the other."""

    def __init__(self, residency: Residency, max_moving_bytes: int) -> None:
        self.residency = residency
        self.max_moving_bytes = max_moving_bytes
        self.dropped = 0
        self._making_room_in = 0
        self._may_drop = True
        self._spared: Node | None = None
        self.evacuations = Evacuations(residency, self)

    def make_room(self, tier: int, slot_bytes: int, count: int, worth: float = ALWAYS) -> int:
        """Evict blocks worth less than `worth` until `count` slots of a class are free. Returns how
        many are free now; more may follow (`room_is_coming`)."""
        residency = self.residency
        pool, evacuations = residency.pools[tier], self.evacuations
        if evacuations.under_way:
            evacuations.watch()
        available = pool.available(slot_bytes)
        if available >= count or self._making_room_in >> tier & 1 or not residency.up >> tier & 1:
            return min(available, count)
        if evacuations.under_way and evacuations.is_for(tier, slot_bytes):
            return available
        wanted = 0
        if pool.num_used(slot_bytes):
            wanted = (count - available) * slot_bytes - residency.draining_bytes[tier]
            if pool.clearing is not None:
                wanted += pool.clearing_bytes
            wanted -= self._forget_plain(tier, wanted, worth)
            available = pool.available(slot_bytes)
            if available >= count:
                return count
        elif not pool.can_hold(slot_bytes):
            return 0  # evict nothing for a block that the tier can never hold
        self._making_room_in |= 1 << tier
        may_drop, self._may_drop = self._may_drop, True
        try:
            self._take_victims(tier, slot_bytes, count, wanted, worth)
            available = pool.available(slot_bytes)
            # Blocks of more worth are not moved for blocks of less.
            may_empty = worth == ALWAYS or not pool.num_used(slot_bytes)
            if not available and may_empty and not residency.num_draining[tier][slot_bytes]:
                evacuations.begin(tier, slot_bytes)
                available = pool.available(slot_bytes)
        finally:
            self._making_room_in &= ~(1 << tier)
            self._may_drop = may_drop
        return min(available, count)

    def _take_victims(
        self, tier: int, slot_bytes: int, count: int, wanted_bytes: int, worth: float
    ) -> None:
        """Evict the coldest blocks of any size, until their bytes suffice for `count` slots."""
        residency = self.residency
        pool = residency.pools[tier]
        while wanted_bytes > 0 and pool.available(slot_bytes) < count:
            node = residency.candidates.coldest(tier, worth)
            if node is None:
                break
            wanted_bytes -= self._give_up(node, tier, wanted_bytes)

    def may_displace(self, tier: int, num_bytes: int, worth: float) -> bool:
        """Whether `num_bytes` fit in by evicting only blocks worth less than `worth`."""
        residency = self.residency
        pool = residency.pools[tier]
        staying = pool.used_bytes - residency.draining_bytes[tier]
        if staying + num_bytes <= residency.tiers[tier].high_watermark * pool.capacity_bytes:
            return True
        node = residency.candidates.coldest(tier, worth)
        if node is not None and node.parent is not None:
            residency.candidates.queue(node)
        return node is not None

    def room_is_coming(self, tier: int) -> bool:
        """Whether copies of the tier are draining or are being copied elsewhere: a copy that a
        match rescued while it was written can be freed once that is done."""
        residency = self.residency
        return residency.draining_bytes[tier] > 0 or any(
            src == tier and residency.moves.bytes_over((src, dst), Priority.DEMOTION) > 0
            for src, dst in residency.links
        )

    def keep_watermarks(self) -> None:
        """Above a tier's high watermark, evict cold copies down to the low one. Only a tier whose
        deletions are moves drops blocks before their room is needed; others wait until a slower
        tier can take them. A tier with a ranking policy is kept full above a mapped tier, which
        takes the blocks that it refuses: room kept free there would be filled and emptied again at
        every hit."""
        residency = self.residency
        self.evacuations.watch()
        for tier, spec in enumerate(residency.tiers):
            pool = residency.pools[tier]
            staying = pool.used_bytes - residency.draining_bytes[tier]
            if staying <= spec.high_watermark * pool.capacity_bytes or not residency.takes(tier):
                continue
            if residency.candidates.ranks(tier) and self._is_above_a_mapped_one(tier):
                continue
            excess = int(staying - spec.low_watermark * pool.capacity_bytes)
            if spec.traits.deletion_is_io:
                with residency.pinned(self.write_back.paths(tier)):  # being written, path by path
                    self._give_up_excess(tier, excess)
            elif residency.below(tier) is not None:
                self._may_drop = False
                self._give_up_excess(tier, excess)
                self._may_drop = True

    def _is_above_a_mapped_one(self, tier: int) -> bool:
        residency = self.residency
        below = residency.below(tier)
        return below is not None and residency.tiers[below].mapped

    def _is_above_a_persistent_one(self, tier: int) -> bool:
        below = self.residency.below(tier)
        return below is not None and bool(self.residency.persistent >> below & 1)

    def _give_up_excess(self, tier: int, excess_bytes: int) -> None:
        residency = self.residency
        while excess_bytes > 0:
            node = residency.candidates.coldest(tier)
            if node is None:
                break
            excess_bytes -= self._give_up(node, tier, excess_bytes)
            if node is self._spared:
                residency.candidates.queue(node)  # not parked: it may be dropped to make room
                break
        self._spared = None

    def _give_up(self, node: Node, tier: int, wanted_bytes: int) -> int:
        """Evict about `wanted_bytes` of a popped candidate. Returns bytes freed or draining."""
        residency = self.residency
        if node.parent is None or not node.staying >> tier & 1 or node.holding[tier]:
            return 0  # no longer a candidate; it is queued again when it becomes one
        namespace = residency.namespace_of(node)
        count = max(MIN_VICTIMS, -(-wanted_bytes // namespace.slot_bytes[tier]))
        ids = self._takeable_tail(node, tier, count)
        unselected = self.write_back.num_unselected(ids)
        if unselected and self._is_above_a_persistent_one(tier):  # what is to be written goes later
            ids = ids[-unselected:]
        if len(ids) == 0:
            residency.candidates.park(node, tier)
            return 0
        if len(ids) < len(node):
            residency.candidates.queue(
                residency.index.split(node, len(node) - len(ids), namespace.step)
            )
        freed = self._send_away(node, tier, ids)
        if node is self._spared:
            return 0
        if not freed:  # a candidate again when a lease or a move has ended
            residency.candidates.park(node, tier)
            return 0
        residency.candidates.queue(node)
        if node.parent is not None and node.parent.parent is not None:
            residency.candidates.queue(node.parent)
        return freed * namespace.slot_bytes[tier]

    def _forget_plain(self, tier: int, wanted_bytes: int, worth: float) -> int:
        """The fast path for the slowest tier in memory: drops victims together that are only in
        this tier, cannot be demoted, and are not leased or read. Stops at the first other victim.
        Returns the bytes freed."""
        residency = self.residency
        if residency.deletes_by_move >> tier & 1 or residency.moves:
            return 0
        if residency.below(tier) is not None:
            return 0
        if residency.candidates.dismissed[tier]:
            return 0
        policy, blocks, only = residency.candidates.policies[tier], residency.blocks, 1 << tier
        has_pins = blocks.num_pins
        number = slot_bytes = -1
        leaves: list[Node] = []  # of one namespace, dropped whole: removed from the tree together
        spans: list[Span] = []  # of one slot size
        missing = wanted_bytes
        while missing > 0:
            node = policy.pop(worth)
            if node is None:
                break
            if node.tiers != only or node.leaving or node.children:
                if node.staying & only and not node.holding[tier]:
                    policy.add(node)
                    break
                continue  # no longer a candidate; it is queued again when it becomes one
            if node.namespace != number:
                if leaves:
                    residency.unhang(leaves, tier)
                number = node.namespace
                namespace = residency.namespaces[number]
                if namespace.slot_bytes[tier] != slot_bytes:
                    if spans:
                        self._forget_spans(tier, spans, slot_bytes)
                    slot_bytes = namespace.slot_bytes[tier]
            count = node.num_blocks
            if count * slot_bytes > missing:
                wanted = -(-missing // slot_bytes)
                if wanted < MIN_VICTIMS:
                    wanted = MIN_VICTIMS
                if wanted < count:
                    count = wanted
            if has_pins and blocks.is_tail_pinned(node.span, node.num_blocks - count):
                if blocks.is_tail_pinned(node.span, node.num_blocks - 1):
                    residency.candidates.park(node, tier)  # nothing of it can go
                    continue
                policy.add(node)
                break
            missing -= count * slot_bytes
            if count < node.num_blocks:
                spans.append(residency.index.trim(node, count, namespace.step))
                policy.add(node)
                break
            spans.append(node.span)
            leaves.append(node)
            parent = node.parent
            assert parent is not None
            left = parent.holding[tier] = parent.holding[tier] - 1
            if not left:  # its parent may be the next victim
                residency.unhang(leaves, tier)
        if leaves:
            residency.unhang(leaves, tier)
        if spans:
            self._forget_spans(tier, spans, slot_bytes)
        return wanted_bytes - missing

    def _forget_spans(self, tier: int, spans: list[Span], slot_bytes: int) -> None:
        num_blocks = self.residency.blocks.forget(tier, spans, slot_bytes)
        spans.clear()
        self.dropped += num_blocks
        self.residency.evicted[tier] += num_blocks

    def _takeable_tail(self, node: Node, tier: int, count: int) -> Ids:
        """The last blocks of the node, up to `count`, that are not leased or read."""
        residency = self.residency
        ids = node.block_ids()[-count:]
        leased = np.flatnonzero(residency.blocks.leases[ids])
        if len(leased):
            ids = ids[int(leased[-1]) + 1 :]
        if residency.moves:
            for position in range(len(ids) - 1, -1, -1):
                if residency.moves.is_read(int(ids[position]), tier):
                    return ids[position + 1 :]
        return ids

    def _send_away(self, node: Node, tier: int, ids: Ids) -> int:
        """Free, demote or drop these blocks of a victim. Returns how many are freed or draining."""
        residency = self.residency
        below = residency.below(tier)
        elsewhere = node.staying & ~(1 << tier) & residency.up
        is_coming = False
        if below is not None and not residency.persistent >> below & 1:
            if not node.tiers >> below & 1:
                moved = self._demote(node, tier, below, self._worth_below(node, below))
                if moved:
                    return moved
            is_coming = self.room_is_coming(below) and not self.write_back.is_refused(node)
        elif below is not None and elsewhere:
            # The last copy in memory: other persistent tiers are written from it now or never.
            is_last = not elsewhere & ~residency.persistent
            if is_last and self.write_back.write_now(node):
                residency.drain(ids, tier)
                residency.free_drained(ids)  # but for those that are read now
                residency.settle(ids)
                return len(ids)
        elif below is not None:
            hopeful = self.write_back.hopeful(node)
            if hopeful:
                residency.drain(ids, tier)
                residency.settle(ids)
                self.write_back.want(node, hopeful)
                return len(ids)
            is_coming = self.write_back.room_is_coming(node)
        if elsewhere:
            return self._give_up_copy(ids, tier)
        if is_coming:
            return 0
        if not self._may_drop:
            self._spared = node
            return 0
        refusing = self.write_back.refusing(node)
        dropped = self.drop(node, tier)
        for gate in refusing:
            gate.refused_blocks += dropped
        return dropped

    def _worth_below(self, node: Node, below: int) -> float:
        """A block's worth in the tier below: unlimited, if it is to be written to a persistent tier
        through it; else by the policy there, so that it skips that tier, or is dropped, where all
        blocks held are worth more."""
        if self.write_back.is_due(node):
            return ALWAYS
        return self.residency.candidates.policies[below].worth(node.kind, node.touched_s)

    def _demote(self, node: Node, tier: int, below: int, worth: float) -> int:
        """Copy the node's tail to the tier below, as far as there is room for its worth. Returns
        the number of blocks draining."""
        residency = self.residency
        namespace = residency.namespace_of(node)
        queued = residency.moves.bytes_over((tier, below), Priority.DEMOTION)
        may_move = max(0, self.max_moving_bytes - queued) // namespace.block_bytes
        ids = node.block_ids()
        absent = residency.where(ids, below, CopyState.ABSENT)
        count = min(len(absent), may_move)
        with residency.pinned([node.span]):
            room = self.make_room(below, namespace.slot_bytes[below], count, worth) if count else 0
        if len(absent) and not room:
            return 0
        first = ids[0] if room == len(absent) else absent[len(absent) - room]
        cut = int(residency.blocks.depth[first]) - node.depth  # its parent may have been merged in
        if cut:
            residency.candidates.queue(residency.index.split(node, cut, namespace.step))
        absent = absent[len(absent) - room :]
        slots = residency.pools[below].allocate(namespace.slot_bytes[below], len(absent))
        ids = node.block_ids()
        residency.drain(ids, tier)
        residency.start(namespace, absent, tier, below, slots, Priority.DEMOTION)
        residency.settle(ids)
        return len(ids)

    def _give_up_copy(self, ids: Ids, tier: int) -> int:
        """Another copy stays: a record is deleted first, other copies go at once."""
        residency = self.residency
        if residency.tiers[tier].traits.deletion_is_io:
            namespace = residency.namespace_of(residency.index.node_of(int(ids[0])))
            residency.start_giving_up(namespace, ids, tier)
        else:
            residency.vacate(ids, tier)
            residency.evicted[tier] += len(ids)
        residency.settle(ids)
        return len(ids)

    def drop(self, node: Node, tier: int) -> int:
        """Drop the blocks of a tier's leaf that have no other copy. Their descendants in faster
        tiers, useless without them, are dropped first, unless they are held."""
        while node.children:
            leaf = node
            while leaf.children:
                leaf = next(iter(leaf.children.values()))
            if self.is_held(leaf):
                return 0
            self.forget(leaf, len(leaf))
            if leaf.parent is not None:  # it still has a record, which must be deleted first
                return 0
        ids = node.block_ids()
        self.dropped += len(ids)
        return self._give_up_copy(ids, tier)

    def is_held(self, leaf: Node) -> bool:
        """Whether blocks of the node are leased, moved or being written."""
        residency = self.residency
        ids = leaf.block_ids()
        moving = any(block in residency.moves.of_block for block in ids.tolist())
        return moving or not leaf.tiers or bool(residency.blocks.leases[ids].any())

    def forget(self, leaf: Node, count: int) -> None:
        """Remove the last blocks of a childless node from all tiers. They must not be leased or
        moved."""
        residency = self.residency
        namespace = residency.namespace_of(leaf)
        if count < len(leaf):
            residency.candidates.queue(
                residency.index.split(leaf, len(leaf) - count, namespace.step)
            )
        ids = leaf.block_ids()
        self.dropped += len(ids)
        for tier, spec in enumerate(residency.tiers):
            copies = ids[residency.blocks.tags[ids] >> tier & 1 == 1]
            if spec.traits.deletion_is_io and residency.is_up(tier) and len(copies):
                residency.start_giving_up(
                    namespace, residency.where(copies, tier, CopyState.READY), tier
                )
            else:
                residency.vacate(copies, tier)
                residency.evicted[tier] += len(copies)
        residency.settle(ids)

    # --- for evacuations ------------------------------------------------------------------------

    def evacuate(self, node: Node, tier: int) -> None:
        self.write_back.evacuate(node, tier)

    def unselected(self, ids: Ids) -> Ids:
        return self.write_back.unselected(ids)

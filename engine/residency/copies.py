"""The tiers that each block is in, and the moves that change them.

Combines the struct of arrays (states, slots), the index (tags on nodes) and the moves in flight.
The rest of the cache engine changes copies only through this module.

Invariants, checked by `validate()`:
1. a ready block is in at least one tier at every instant: a draining copy is freed only when
   another copy stays, or when the block is to be removed;
2. a leased copy is never freed (a lease rescues a draining copy);
3. at most one move is in flight per (block, destination tier): filling happens once;
4. a slot that a move still reads is not freed (`reading`).

Owned by the daemon's one loop; does no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from hicache.engine.index.node import Node
from hicache.engine.index.radix import Index, Path
from hicache.engine.placement.backoff import Backoff
from hicache.engine.plan import Move, Outcome, Priority, Reshaped
from hicache.engine.policies.base import EvictionPolicy
from hicache.engine.residency.block_ids import Span
from hicache.engine.residency.blocks import BlockTable, CopyState
from hicache.engine.residency.candidates import Candidates
from hicache.engine.residency.leases import LeaseBook
from hicache.engine.residency.moves import MovesInFlight
from hicache.tiers.block import Ids, SlotAllocator, TierSpec

NO_TIER = 255


@dataclass(frozen=True, slots=True)
class Namespace:
    """One namespace's tree. `step`: bytes of a block's symbol. `slot_bytes`: size of a block's
    slot, by tier."""

    number: int
    digest: bytes
    block_tokens: int
    block_bytes: int
    slot_bytes: tuple[int, ...]
    root: Node
    step: int

    def stored_bytes(self, tier: int) -> int:
        """The most bytes that writing a block to the tier writes."""
        return min(self.block_bytes, self.slot_bytes[tier])


class Residency:
    """All copies of all blocks. Tiers are numbered fastest first; `links` are (from, to)."""

    def __init__(
        self,
        tiers: Sequence[TierSpec],
        pools: Sequence[SlotAllocator],
        links: Sequence[tuple[int, int]],
        new_policy: Callable[[int], EvictionPolicy],
    ) -> None:
        self.tiers = tuple(tiers)
        self.pools = tuple(pools)
        self.links = frozenset(links)
        self.promotions = [  # links up from memory that clients map: demand brings up the rest
            (min(sources), dst)
            for dst in range(len(tiers))
            if (sources := [a for a, b in self.links if b == dst < a and tiers[a].mapped])
        ]
        self.persistent = sum(1 << number for number, tier in enumerate(tiers) if tier.persistent)
        self.deletes_by_move = sum(
            1 << number for number, tier in enumerate(tiers) if tier.traits.deletion_is_io
        )
        self._lower = [  # those linked from each tier in memory, the fastest first
            tuple(sorted(dst for src, dst in self.links if src == tier < dst))
            if not self.persistent >> tier & 1
            else ()
            for tier in range(len(tiers))
        ]
        self.blocks = BlockTable(tiers, pools)
        self.index = Index(self.blocks)
        self.leases = LeaseBook(self.blocks)
        self.candidates = Candidates([new_policy(number) for number in range(len(tiers))])
        self.namespaces: list[Namespace] = []
        self.up = 0
        self.restoring = 0
        self.backoff = Backoff()
        self.moves = MovesInFlight([tier.name for tier in tiers], self.links)
        self.draining_bytes = [0] * len(tiers)
        self.num_draining: list[Counter[int]] = [Counter() for _ in tiers]  # by slot size
        self.promoted = [0] * len(tiers)
        self.demoted = [0] * len(tiers)
        self.evicted = [0] * len(tiers)
        self.corrupt = [0] * len(tiers)
        self._numbers = {tier.name: number for number, tier in enumerate(tiers)}
        self.landing = tuple(self._landing_of(src) for src in range(len(tiers)))

    # --- queries ------------------------------------------------------------------------------

    def number_of(self, tier: str) -> int:
        """A tier's number by its name."""
        return self._numbers[tier]

    def take_reshaped(self) -> Sequence[Reshaped]:
        """The pages divided into slots of another size since the last call."""
        for pool in self.pools:
            if pool.reshaped:
                break
        else:
            return ()  # nearly always: 0.1 µs for an event, where the loop below takes 0.4
        found: list[Reshaped] = []
        for tier, pool in zip(self.tiers, self.pools, strict=True):
            found += [Reshaped(tier.name, *pages) for pages in pool.reshaped]
            pool.reshaped.clear()
        return found

    def namespace_of(self, node: Node) -> Namespace:
        """The node's namespace."""
        return self.namespaces[node.namespace]

    def is_up(self, tier: int) -> bool:
        """Whether the tier is up."""
        return bool(self.up >> tier & 1)

    def takes(self, tier: int) -> bool:
        """Whether the tier is up and takes new blocks. While it is being restored it takes none,
        since its room is not known yet."""
        is_known = self.is_up(tier) and not self.restoring >> tier & 1
        return is_known and self.backoff.takes(tier)

    def fastest(self, bits: int) -> int:
        """The fastest tier of a bit set that is up, NO_TIER if there is none."""
        bits &= self.up
        return (bits & -bits).bit_length() - 1 if bits else NO_TIER

    def below(self, tier: int) -> int | None:
        """The next slower tier that takes blocks and is linked from this one. None for a persistent
        tier: blocks that it evicts are dropped there."""
        for lower in self._lower[tier]:
            if self.takes(lower):
                return lower
        return None

    def is_readable(self, tier: int, *, by_worker: bool) -> bool:
        """Whether blocks can be read directly from this tier: by clients if they map it, by the
        GPU's worker if it is memory."""
        spec = self.tiers[tier]
        return spec.mapped or (by_worker and not spec.persistent)

    def num_held(self, tier: int) -> int:
        """The number of ready copies in this tier and in those above it."""
        return int(self.blocks.counts[: tier + 1, CopyState.READY].sum())

    def where(self, ids: Ids, tier: int, state: CopyState) -> Ids:
        """The blocks of `ids` whose copy in `tier` is in `state`."""
        found: Ids = ids[self.blocks.state[tier][ids] == state]
        return found

    def _landing_of(self, src: int) -> int:
        """The mapped tier that blocks of `src` are copied to for reading."""
        for dst, tier in enumerate(self.tiers):
            if tier.mapped and (src, dst) in self.links:
                return dst
        return NO_TIER

    # --- moves --------------------------------------------------------------------------------

    def start(
        self,
        namespace: Namespace,
        ids: Ids,
        src: int,
        dst: int,
        slots: Ids,
        priority: Priority,
        deadline_s: float | None = None,
    ) -> None:
        """Copy blocks from `src` (readable there) into newly allocated slots of `dst`."""
        src_slots = self.blocks.slot[src][ids]
        self.blocks.fill(dst, ids, slots)
        names = self.tiers[src].name, self.tiers[dst].name
        for block, src_slot, dst_slot in zip(
            ids.tolist(), src_slots.tolist(), slots.tolist(), strict=True
        ):
            self.moves.issue(
                Move(
                    id=self.moves.next_id(),
                    block=block,
                    src=names[0],
                    src_slot=src_slot,
                    dst=names[1],
                    dst_slot=dst_slot,
                    block_bytes=namespace.block_bytes,
                    src_slot_bytes=namespace.slot_bytes[src],
                    dst_slot_bytes=namespace.slot_bytes[dst],
                    priority=priority,
                    identity=None,
                    deadline_s=deadline_s,
                )
            )
        self.moves.num_bytes[src, dst][priority] += len(ids) * namespace.block_bytes

    def start_giving_up(self, namespace: Namespace, ids: Ids, tier: int) -> None:
        """Drain persistent copies, and delete their records: only then is their room free."""
        self.drain(self.where(ids, tier, CopyState.READY), tier)
        name = self.tiers[tier].name
        for block, slot in zip(ids.tolist(), self.blocks.slot[tier][ids].tolist(), strict=True):
            self.moves.issue(
                Move(
                    id=self.moves.next_id(),
                    block=block,
                    src=name,
                    src_slot=slot,
                    dst=None,
                    dst_slot=-1,
                    block_bytes=namespace.block_bytes,
                    src_slot_bytes=namespace.slot_bytes[tier],
                    dst_slot_bytes=0,
                    priority=Priority.DEMOTION,
                )
            )

    def finish(
        self, outcome: Outcome, now_s: float, arrived: dict[int, list[int]] | None = None
    ) -> Move | None:
        """Apply one outcome to its copies; the caller settles the blocks. Returns the move, None if
        it is unknown.

        With `arrived`, blocks that came into a tier are only noted there, by tier: `arrive` makes
        all of a batch ready at once."""
        move = self.moves.end(outcome.move)
        if move is None:
            return None
        src = self._numbers[move.src]
        changed = self._numbers[move.dst] if move.dst is not None else src
        if outcome.rejected:
            self.backoff.rejected(changed, outcome.error, now_s)
        elif outcome.ok:
            self.backoff.took(changed)
        ids = np.array([move.block], np.int32)
        if move.dst is None:
            if outcome.ok:
                self.vacate(ids, src)
                self.evicted[src] += 1
            elif self.blocks.state[src][move.block] == CopyState.DRAINING:
                self.rescue(ids, src)
            return move
        dst = self._numbers[move.dst]
        self.moves.arrived((src, dst), move, now_s)
        if outcome.ok:
            if arrived is None:
                self.blocks.change(dst, ids, CopyState.READY)
            else:
                arrived.setdefault(dst, []).append(move.block)
            (self.demoted if dst > src else self.promoted)[dst] += 1
        else:
            self.blocks.vacate(dst, ids, move.dst_slot_bytes)
            if outcome.corrupt:
                self.vacate(ids, src)
                self.corrupt[src] += 1
            elif self._has_nowhere_to_go(move.block, src):
                self.rescue(ids, src)
        return move

    def _has_nowhere_to_go(self, block: int, tier: int) -> bool:
        """Whether a draining copy has lost its last destination."""
        is_draining = self.blocks.state[tier][block] == CopyState.DRAINING
        return bool(is_draining) and not self.moves.is_read(block, tier)

    def arrive(self, arrived: Mapping[int, Sequence[int]]) -> None:
        """filling → ready for blocks that have come, by tier."""
        for dst, blocks in arrived.items():
            self.blocks.change(dst, np.array(blocks, np.int32), CopyState.READY)

    def is_going(self, block: int) -> bool:
        """Whether every readable copy of the block is a record that is being deleted."""
        tag = int(self.blocks.tags[block])
        readable = [tier for tier in range(len(self.tiers)) if tag >> tier & 1]
        return all(self.moves.is_deleted(block, tier) for tier in readable)

    def drain(self, ids: Ids, tier: int) -> None:
        """ready → draining: freed once another copy stays and no move reads it."""
        if len(ids):
            self.blocks.change(tier, ids, CopyState.DRAINING)
            self._count_draining(tier, ids, 1)

    def rescue(self, ids: Ids, tier: int) -> None:
        """draining → ready: requested before it was freed."""
        if len(ids):
            self._count_draining(tier, ids, -1)
            self.blocks.change(tier, ids, CopyState.READY)

    def vacate(self, ids: Ids, tier: int) -> None:
        """Free copies now. The caller has checked that they are not read or leased."""
        if len(ids) == 0:
            return
        draining = self.where(ids, tier, CopyState.DRAINING)
        self._count_draining(tier, draining, -1)
        self.blocks.vacate(tier, ids, self._namespace_of_block(int(ids[0])).slot_bytes[tier])

    def free_drained(self, ids: Ids) -> bool:
        """Free draining copies of blocks with another copy that stays. Returns whether any was."""
        tags = self.blocks.tags[ids]
        if not (tags >> 8).any():
            return False
        freed = False
        for tier in range(len(self.tiers)):
            drained: dict[int, list[int]] = {}
            for block in self.where(ids, tier, CopyState.DRAINING).tolist():
                tag = int(self.blocks.tags[block])
                staying = tag & 0xFF & ~(tag >> 8)
                if staying & self.up and not self.moves.is_read(block, tier):
                    slot_bytes = self._namespace_of_block(block).slot_bytes[tier]
                    drained.setdefault(slot_bytes, []).append(block)
            for blocks in drained.values():
                self.vacate(np.array(blocks, np.int32), tier)
                self.evicted[tier] += len(blocks)
                freed = True
        return freed

    # --- the tree -----------------------------------------------------------------------------

    def touch(self, path: Path, now_s: float) -> bool:
        """Set the path's time of last use, and rescue its draining copies. Returns whether any was
        rescued: then nodes may have merged and the path is stale."""
        leaving = []
        for node in path.nodes:
            node.touched_s = now_s
            if node.leaving:
                leaving.append(node)
        for node in leaving:
            self._rescue_node(node)
        is_stale = bool(leaving)
        if len(path.nodes) > 1:
            if not is_stale:
                self.index.join(path.nodes)
            for node in path.nodes:  # turns that were stored one by one may be equal from now on
                parent = node.parent
                if parent is not None and len(parent.children) == 1:
                    step = self.namespaces[node.namespace].step
                    is_stale |= self.index.try_merge(node, step) is not None
        return is_stale

    def settle(self, ids: Ids) -> None:
        """After copies changed: retag the nodes, remove empty ones, merge, queue candidates."""
        # All tags first: a neighbour not retagged yet might look equal, and be merged wrongly.
        settled = [
            self.index.retag(node, self.namespaces[node.namespace].step)
            for node in self.index.nodes_of(ids)
            if node.parent is not None
        ]
        for pieces in settled:
            step = self.namespaces[pieces[0].namespace].step
            above = pieces[0].parent
            for piece in reversed(pieces):
                if not piece.tiers:
                    self._forget_if_empty(piece, step)
            for piece in pieces:
                if piece.parent is not None:
                    while self.index.try_merge(piece, step):
                        pass
                    self.candidates.queue(piece)
            if above is not None and above.parent is not None:
                self.candidates.queue(above)

    @contextmanager
    def pinned(self, spans: Sequence[Span]) -> Iterator[None]:
        """Within the context these blocks are not evicted: room is being made for them."""
        for span in spans:
            self.blocks.pin(span)
        try:
            yield
        finally:
            for span in spans:
                self.blocks.unpin(span)

    def unhang(self, leaves: list[Node], tier: int) -> None:
        """Remove leaves of one namespace, whose only copies are ready in `tier`, from the tree and
        from the list.

        Updates their parents' `holding`; only the last leaf's parent may become a leaf by it. The
        caller passes their ids to `BlockTable.forget` next."""
        parent = leaves[-1].parent
        assert parent is not None
        step = self.namespaces[parent.namespace].step
        self.index.unlink(leaves, step)
        if not parent.holding[tier] and parent.parent is not None:
            if parent.tiers:
                self.candidates.queue(parent)
            else:
                self._forget_if_empty(parent, step)

    def forget(self, node: Node) -> None:
        """Remove a node whose blocks have no copy, and which has no children."""
        self._forget_if_empty(node, self.namespaces[node.namespace].step)

    def _forget_if_empty(self, node: Node, step: int) -> None:
        """Remove a node without copies and children, and empty ancestors that held only it."""
        while node.parent is not None and not node.tiers and not node.children:
            ids = node.block_ids()
            if self.blocks.is_pinned(ids) or self._is_filling(ids):
                return
            parent = self.index.remove(node, step)
            node = parent
        if node.parent is not None:
            self.candidates.queue(node)

    def _is_filling(self, ids: Ids) -> bool:
        return any((state[ids] != CopyState.ABSENT).any() for state in self.blocks.state)

    def _rescue_node(self, node: Node) -> None:
        ids = node.block_ids()
        for tier in range(len(self.tiers)):
            if node.leaving >> tier & 1:
                kept = [block for block in ids.tolist() if not self.moves.is_deleted(block, tier)]
                self.rescue(np.array(kept, np.int32), tier)
        self.settle(ids)

    def _namespace_of_block(self, block: int) -> Namespace:
        return self.namespaces[self.index.node_of(block).namespace]

    def _count_draining(self, tier: int, ids: Ids, sign: int) -> None:
        if len(ids):
            slot_bytes = self._namespace_of_block(int(ids[0])).slot_bytes[tier]
            self.num_draining[tier][slot_bytes] += sign * len(ids)
            self.draining_bytes[tier] += sign * len(ids) * slot_bytes

    def validate(self) -> None:
        """Check all invariants."""
        self.blocks.validate()
        self.leases.validate()
        num_blocks = sum(
            self.index.validate(namespace.root, namespace.step) for namespace in self.namespaces
        )
        assert num_blocks == len(self.blocks), (num_blocks, len(self.blocks))
        for tier, pool in enumerate(self.pools):
            pool.validate()
            used = draining = 0
            for namespace in self.namespaces:
                for node in self.index.subtree(namespace.root):
                    if node.parent is not None:
                        states = self.blocks.state[tier][node.block_ids()]
                        size = namespace.slot_bytes[tier]
                        used += int((states != CopyState.ABSENT).sum()) * size
                        draining += int((states == CopyState.DRAINING).sum()) * size
            assert used == pool.used_bytes, (self.tiers[tier].name, used, pool.used_bytes)
            assert draining == self.draining_bytes[tier]
            by_size = self.num_draining[tier]
            assert draining == sum(size * count for size, count in by_size.items())
            assert min(by_size.values(), default=0) >= 0
        moving = {link: [0, 0, 0] for link in self.links}
        filling = set()
        for move in self.moves.values():
            src = self._numbers[move.src]
            assert self.blocks.tags[move.block] >> src & 1, "a move reads a copy that is not ready"
            if move.dst is None:
                continue
            dst = self._numbers[move.dst]
            assert (move.block, dst) not in filling, "two moves into one place"
            filling.add((move.block, dst))
            moving[src, dst][move.priority] += move.block_bytes
        assert moving == self.moves.num_bytes

"""Empties slabs of one slot-size class for another, where evictions by age would never free one.

Each slab of a tier belongs to one slot size. Where a slab holds many slots, the coldest blocks are
scattered over all slabs: no slab becomes free as a whole, and a class without slabs (or whose
blocks are all recent) gets no slot. Then one slab, or as many adjacent ones as a slot of that class
needs, is closed and emptied:

    slab   | a a . a |  →  closed: | d . . d |  →  free, kept for b:  | b . . . |
             class a        d draining, none allocated

Of the least used slabs, the one is chosen that costs the fewest dropped blocks, then the fewest
copies, then the coldest. Its copies are evicted as by the evictor: freed at once where another copy
stays; demoted, draining, where a slower tier takes them; without one, the block is dropped together
with all its descendants. A persistent tier keeps whole prefixes, so there the descendants' records
are deleted too.

Races, and who wins:
1. *Held.* A slab with a block that is leased, read or being written is not chosen, nor one that
   would drop such a block: the next cheapest is, or none this time.
2. *Requested while draining.* A match rescues: draining → ready. The evacuation has failed and the
   slab is opened again, emptier than before; the next request for room starts another one.
3. *A demotion fails, or the slower tier's worker dies.* The copy is ready again: as 2.
4. *The old class continues to store.* It gets no slot of the closed slab, and blocks draining there
   do not count as its room: it evicts its other cold blocks.
5. *Empty and not used.* The slab is kept for its class for `KEEP_S`, then any class may take it.

At most one evacuation per tier. Owned by the daemon's one loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from hicache.engine.index.node import Node
from hicache.engine.plan import Priority
from hicache.engine.residency.blocks import CopyState
from hicache.engine.residency.copies import Namespace, Residency
from hicache.tiers.block import Ids, SlabClearing

MAX_LOOKED_AT: Final = 16
KEEP_S: Final = 30.0
_NO_IDS: Final = np.empty(0, np.int32)


class Room(Protocol):
    """The part of the evictor that an evacuation uses."""

    dropped: int

    def make_room(self, tier: int, slot_bytes: int, count: int) -> int:
        """See Evictor.make_room."""

    def room_is_coming(self, tier: int) -> bool:
        """See Evictor.room_is_coming."""

    def evacuate(self, node: Node, tier: int) -> None:
        """Write the path to this node to persistent tiers, this one among them."""

    def unselected(self, ids: Ids) -> Ids:
        """The blocks that are not to be written to persistent tiers."""


@dataclass(frozen=True, slots=True)
class _Departures:
    """The blocks that have to leave a clearing: `spare` have another copy, `down` are demoted,
    `lost` are dropped. `inside`: all blocks with a slot there, including those leaving already."""

    clearing: SlabClearing
    inside: Ids
    spare: Ids
    down: Ids
    lost: Ids
    age_s: float

    @property
    def cost(self) -> tuple[int, int, float]:
        return len(self.lost), len(self.spare) + len(self.down), self.age_s


@dataclass(slots=True)
class _Evacuation:
    clearing: SlabClearing
    inside: Ids
    ends_s: float | None = None


class Evacuations:
    """The slabs being emptied."""

    def __init__(self, residency: Residency, room: Room) -> None:
        self.residency = residency
        self.room = room
        self.under_way: dict[int, _Evacuation] = {}

    def is_for(self, tier: int, slot_bytes: int) -> bool:
        """Whether slabs of the tier are being emptied, or are kept, for this class."""
        evacuation = self.under_way.get(tier)
        return evacuation is not None and evacuation.clearing.slot_bytes == slot_bytes

    def begin(self, tier: int, slot_bytes: int) -> None:
        """Start emptying slabs for this class, if some can be emptied."""
        self._begin(tier, slot_bytes, self.residency.below(tier))

    def begin_in_haste(self, tier: int, slot_bytes: int) -> None:
        """As `begin`, at once: blocks without another copy are dropped, not demoted."""
        self._begin(tier, slot_bytes, None)

    def _begin(self, tier: int, slot_bytes: int, below: int | None) -> None:
        residency = self.residency
        departures = self._cheapest(tier, slot_bytes, below)
        if departures is None:
            return
        if below is not None and not residency.persistent >> below & 1:
            if not self._make_room_below(departures.down, below):
                if self.room.room_is_coming(below):
                    return  # the request for this room will be repeated
                below = None
            departures = self._departures(tier, departures.clearing, below)
            if departures is None:  # making room has changed the slab
                return
        residency.pools[tier].close(departures.clearing)
        self.under_way[tier] = _Evacuation(departures.clearing, departures.inside)
        self._send_away(tier, departures, below)

    def watch(self) -> None:
        """Open slabs again in which a block stays after all."""
        if not self.under_way:
            return
        residency = self.residency
        for tier, evacuation in list(self.under_way.items()):
            if residency.pools[tier].clearing is not evacuation.clearing:  # its class uses it now
                del self.under_way[tier]
            elif len(residency.where(self._left_inside(tier, evacuation), tier, CopyState.READY)):
                self._end(tier)

    def tick(self, now_s: float) -> None:
        """End evacuations that take too long, and free slabs that their class has not used."""
        self.watch()
        for tier, evacuation in list(self.under_way.items()):
            if evacuation.ends_s is None:
                evacuation.ends_s = now_s + KEEP_S
            elif now_s >= evacuation.ends_s:
                self._end(tier)

    def _end(self, tier: int) -> None:
        del self.under_way[tier]
        self.residency.pools[tier].reopen()

    # --- the cost of a slab -------------------------------------------------------------------

    def _cheapest(self, tier: int, slot_bytes: int, below: int | None) -> _Departures | None:
        best: _Departures | None = None
        for clearing in self.residency.pools[tier].clearings(slot_bytes, MAX_LOOKED_AT):
            limit = len(best.lost) if best is not None else None
            found = self._departures(tier, clearing, below, limit)
            if found is not None and (best is None or found.cost < best.cost):
                best = found
        return best

    def _departures(
        self, tier: int, clearing: SlabClearing, below: int | None, limit: int | None = None
    ) -> _Departures | None:
        """The blocks that would have to leave; None if one cannot, or if more than `limit` would be
        dropped."""
        residency = self.residency
        tags, state = residency.blocks.tags, residency.blocks.state
        inside = self._inside(tier, clearing)
        going = residency.where(inside, tier, CopyState.READY)
        if len(residency.where(inside, tier, CopyState.DRAINING)) + len(going) < len(inside):
            return None
        if residency.tiers[tier].traits.keeps_whole_prefixes:
            under = self._with_all_below(going)
            if _is_being_written(state[tier][under]):
                return None
            going = residency.where(under, tier, CopyState.READY)
        others = residency.up & ~(1 << tier) & 0xFF
        has_other = (tags[going] & ~(tags[going] >> 8) & others) != 0
        spare, down, lost = going[has_other], going[~has_other], _NO_IDS
        doomed = down
        if below is not None:
            is_persistent = residency.persistent >> below & 1
            doomed = self.room.unselected(down) if is_persistent else _NO_IDS
        if len(doomed):
            lost = self._with_all_below(doomed, limit)
            spare = np.setdiff1d(spare, lost, assume_unique=True)
            down = np.setdiff1d(down, lost, assume_unique=True)
            if (limit is not None and len(lost) > limit) or self._is_held(lost):
                return None
        if below is not None and (state[below][down] != CopyState.ABSENT).any():
            return None  # it is being copied there, or draining there, too: not now
        staying = np.concatenate((spare, down))
        if residency.blocks.leases[staying].any():
            return None
        if residency.moves and any(
            residency.moves.is_read(block, tier) for block in staying.tolist()
        ):
            return None
        nodes = residency.index.nodes_of(going)
        age_s = sum(node.touched_s for node in nodes) / max(1, len(nodes))
        return _Departures(clearing, inside, spare, down, lost, age_s)

    def _inside(self, tier: int, clearing: SlabClearing) -> Ids:
        """The blocks with a slot in these pages."""
        slots, state = self.residency.blocks.slot[tier], self.residency.blocks.state[tier]
        is_inside = (slots >= clearing.first_page) & (slots < clearing.end_page)
        return np.flatnonzero(is_inside & (state != CopyState.ABSENT)).astype(np.int32)

    def _left_inside(self, tier: int, evacuation: _Evacuation) -> Ids:
        slots = self.residency.blocks.slot[tier][evacuation.inside]
        clearing = evacuation.clearing
        is_inside = (slots >= clearing.first_page) & (slots < clearing.end_page)
        left: Ids = evacuation.inside[is_inside]
        return left

    def _with_all_below(self, ids: Ids, limit: int | None = None) -> Ids:
        """These blocks and all their descendants. Stops beyond `limit` blocks."""
        residency = self.residency
        numbers = residency.blocks.node[ids]
        parts: list[Ids] = []
        num_found = 0
        seen: set[Node] = set()
        for node in sorted(residency.index.nodes_of(ids), key=lambda node: node.depth):
            if node in seen:
                continue
            first = int(residency.blocks.depth[ids[numbers == node.number]].min())
            parts.append(node.block_ids()[first - node.depth :])
            for lower in self._strictly_below(node):
                seen.add(lower)
                parts.append(lower.block_ids())
                num_found += len(lower)
                if limit is not None and num_found > limit:
                    return np.concatenate(parts)
        return np.concatenate(parts) if parts else _NO_IDS

    def _strictly_below(self, node: Node) -> Iterator[Node]:
        for child in node.children.values():
            yield from self.residency.index.subtree(child)

    def _is_held(self, ids: Ids) -> bool:
        """Whether any of the blocks is leased, read or being written, in any tier."""
        residency = self.residency
        return (
            bool(residency.blocks.leases[ids].any())
            or any(_is_being_written(state[ids]) for state in residency.blocks.state)
            or (
                bool(residency.moves)
                and any(block in residency.moves.of_block for block in ids.tolist())
            )
        )

    # --- emptying it --------------------------------------------------------------------------

    def _make_room_below(self, ids: Ids, below: int) -> bool:
        residency = self.residency
        needed: Counter[int] = Counter()
        for namespace, group in self._by_namespace(ids):
            needed[namespace.slot_bytes[below]] += len(group)
        for slot_bytes, count in needed.items():
            self.room.make_room(below, slot_bytes, count)
        pool = residency.pools[below]
        return all(pool.available(size) >= count for size, count in needed.items())

    def _send_away(self, tier: int, departures: _Departures, below: int | None) -> None:
        residency = self.residency
        for namespace, ids in self._by_namespace(departures.spare):
            self._give_up(namespace, ids, [tier])
        for namespace, ids in self._by_namespace(departures.lost):
            self.room.dropped += len(ids)
            self._give_up(namespace, ids, range(len(residency.tiers)))
        for namespace, ids in self._by_namespace(departures.down):
            assert below is not None
            if residency.persistent >> below & 1:
                residency.drain(ids, tier)
                continue
            slots = residency.pools[below].allocate(namespace.slot_bytes[below], len(ids))
            leaving = ids[: len(slots)]  # if not all: `watch` opens the slab again
            residency.drain(leaving, tier)
            residency.start(namespace, leaving, tier, below, slots, Priority.DEMOTION)
        residency.settle(np.concatenate((departures.spare, departures.lost, departures.down)))
        if below is not None and residency.persistent >> below & 1:
            for node in residency.index.nodes_of(departures.down):
                self.room.evacuate(node, below)

    def _give_up(self, namespace: Namespace, ids: Ids, tiers: Iterable[int]) -> None:
        """Free copies in these tiers: at once, or after deleting their records, the deepest
        first."""
        residency = self.residency
        ids = ids[np.argsort(-residency.blocks.depth[ids], kind="stable")]
        for tier in tiers:
            copies = ids[residency.blocks.state[tier][ids] != CopyState.ABSENT]
            if residency.tiers[tier].traits.deletion_is_io and residency.is_up(tier):
                residency.start_giving_up(namespace, copies, tier)
            else:
                residency.vacate(copies, tier)
                residency.evicted[tier] += len(copies)

    def _by_namespace(self, ids: Ids) -> Sequence[tuple[Namespace, Ids]]:
        if not len(ids):
            return []
        residency = self.residency
        numbers, of_block = np.unique(residency.blocks.node[ids], return_inverse=True)
        nodes = [residency.index.nodes[number] for number in numbers.tolist()]
        spaces = np.array([node.namespace for node in nodes if node is not None])[of_block]
        return [(residency.namespaces[n], ids[spaces == n]) for n in np.unique(spaces).tolist()]

    def validate(self) -> None:
        """Check that every closed slab has an evacuation, and that all its blocks are leaving."""
        for tier, pool in enumerate(self.residency.pools):
            evacuation = self.under_way.get(tier)
            if pool.clearing is None:
                continue
            assert evacuation is not None, "a closed slab has no evacuation"
            assert evacuation.clearing is pool.clearing, "another slab is closed"
            assert np.isin(self._inside(tier, pool.clearing), evacuation.inside).all(), "a newcomer"


def _is_being_written(states: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bool:
    return bool(((states == CopyState.FILLING) | (states == CopyState.CANCELLED)).any())

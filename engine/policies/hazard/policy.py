"""What is least likely to return soon goes first: the hazard model's Gittins index (`model.py`).

rank(class, age) = max over T of P(reuse ≤ T) / E[min(reuse, T)], looked up in a table that is
fitted now and then; classes and counts are the history's. Candidates wait in one line per class,
the longest unused first; only the heads of the lines are compared, so a victim costs as much as
there are classes once per request, and O(log) after that. A new block is let in only at the expense
of blocks that rank lower.

While there is no model, or while a tier of this size would have hit no more in its order than in
LRU's of late (`evaluation.py`), the order is LRU's and everything is let in.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from hicache.engine.index.node import Node
from hicache.engine.policies.base import ALWAYS, Entry, EvictionPolicy
from hicache.engine.policies.hazard.history import History
from hicache.engine.policies.hazard.model import Model

_Place = tuple[float, int, int]
"""When the node was last used, a serial number, its kind: as it joined its line."""


class Hazard(EvictionPolicy):
    """The smallest rank goes first."""

    def __init__(self, tier: int, history: History) -> None:
        super().__init__(tier, history)
        self._judged: Model | None = None
        self._judged_at_s = -1.0
        self._trusted_model: Model | None = None
        history.wants_fits = True
        self._lines: dict[int, list[tuple[float, int, Node]]] = {}
        self._places: dict[Node, _Place] = {}
        self._heads: list[tuple[float, float, int, int]] = []  # rank, last use, serial, kind
        self._ranked_at: tuple[float, Model | None] = (-1.0, None)
        self._serial = 0

    def add(self, node: Node) -> None:
        """See EvictionPolicy. A node that is queued joins again if its kind has changed, since it
        belongs in another line."""
        place = self._places.get(node)
        if place is not None and (place[0] != node.touched_s or place[2] != node.kind):
            node.queued &= ~self._bit
        super().add(node)

    def join(self, node: Node) -> None:
        """See EvictionPolicy. An earlier entry of the node counts no more."""
        self._serial += 1
        kind, touched_s = node.kind, node.touched_s
        self._places[node] = (touched_s, self._serial, kind)
        line = self._lines.setdefault(kind, [])
        heappush(line, (touched_s, self._serial, node))
        if line[0][1] == self._serial:
            rank = self._rank(kind, touched_s)
            heappush(self._heads, (rank, touched_s, self._serial, kind))

    def take(self, worth: float) -> Entry | None:
        """See EvictionPolicy."""
        now = (self.history.now_s, self._trusted())
        if now != self._ranked_at:
            self._ranked_at = now
            self._heads.clear()
            for kind in list(self._lines):
                self._show_head(kind)
        heads = self._heads
        while heads:
            rank, _, serial, kind = heads[0]
            node = self._head(kind)
            if node is None or self._places[node][1] != serial:
                heappop(heads)
                self._show_head(kind)
                continue
            if rank >= worth:
                return None
            heappop(heads)
            entry = heappop(self._lines[kind])
            del self._places[node]
            self._num_entries += 1  # entries count until the sweep here: it ranks the heads anew
            self._show_head(kind)
            return entry
        return None

    def spares(self, entry: Entry) -> bool:
        """See EvictionPolicy. `take` has looked already."""
        return False

    def worth(self, kind: int, touched_s: float) -> float:
        """See EvictionPolicy."""
        return ALWAYS if self._trusted() is None else self._rank(kind, touched_s)

    def _trusted(self) -> Model | None:
        """The model, where this tier's order is its own; looked at once for each request."""
        model, now_s = self.history.model, self.history.now_s
        if model is not self._judged or now_s != self._judged_at_s:
            self._judged, self._judged_at_s = model, now_s
            is_better = model is not None and model.beats_age(self.history.num_held(self.tier))
            self._trusted_model = model if is_better else None
        return self._trusted_model

    def _rank(self, kind: int, touched_s: float) -> float:
        model = self._trusted()
        if model is None:
            return touched_s
        return model.rank(kind, self.history.now_s - touched_s)

    def _head(self, kind: int) -> Node | None:
        """The node of the line's first entry that is up to date; those before it leave the line."""
        line = self._lines[kind]
        while line:
            _, serial, node = line[0]
            place = self._places.get(node)
            if place is not None and place[1] == serial:
                if node.parent is None:  # merged away or removed
                    del self._places[node]
                elif place[0] != node.touched_s or kind != node.kind:
                    self._num_entries += 1
                    self.join(node)
                else:
                    return node
            heappop(line)
        return None

    def _show_head(self, kind: int) -> None:
        node = self._head(kind)
        if node is not None:
            touched_s, serial, _ = self._places[node]
            heappush(self._heads, (self._rank(kind, touched_s), touched_s, serial, kind))

    def sweep(self) -> None:
        """See EvictionPolicy. Entries whose nodes have joined again go too."""
        places = {node: place for node, place in self._places.items() if node.parent is not None}
        self._places = places
        for line in self._lines.values():
            line[:] = [
                entry for entry in line if entry[2] in places and places[entry[2]][1] == entry[1]
            ]
            heapify(line)
        self.swept(len(places))
        self._ranked_at = (-1.0, None)  # the heads may be others now

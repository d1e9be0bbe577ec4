"""The ghost index: recently requested prefixes, whether or not their blocks are still held.

A path-compressed tree per namespace over 8-byte symbols, like the radix index but without blocks:
a run stores its last use, its number of uses, and its class since then (`kind`, see `history.py`).
Blocks with equal values form one run. Beyond `max_blocks`, the runs unused for longest are deleted.
Only used for ranking: a wrong or lost run costs hits. Owned by the daemon's one loop.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hicache.engine.policies.hazard.history import Context

SYMBOL: Final = 8


class GhostRun:
    """Consecutive blocks with the same uses.

    `context`: of the request that last ended here, None where none did. `weight`: the run's weight
    in the fit. `is_partial`: it is one block that is not full.
    """

    __slots__ = (
        "children",
        "context",
        "is_partial",
        "kind",
        "last_s",
        "parent",
        "symbols",
        "touches",
        "weight",
    )

    def __init__(self, parent: GhostRun | None, symbols: bytes, last_s: float) -> None:
        self.parent = parent
        self.symbols = symbols
        self.children: dict[bytes, GhostRun] = {}
        self.last_s = last_s
        self.kind = -1
        self.touches = 0
        self.context: Context | None = None
        self.weight = 1.0
        self.is_partial = False

    def __len__(self) -> int:
        return len(self.symbols) // SYMBOL

    @property
    def is_trunk(self) -> bool:
        """Whether requests have continued from it in several ways."""
        full = (child for child in self.children.values() if not child.is_partial)
        return next(full, None) is not None and next(full, None) is not None

    def leads_elsewhere(self, below: GhostRun | None) -> bool:
        """Whether requests have continued from here with another run than `below`."""
        return any(child is not below and not child.is_partial for child in self.children.values())


Mark = tuple[int, int, int, GhostRun]
"""(block that a run ends at, its kind, its uses, the run)."""


@dataclass(slots=True)
class Walk:
    """A request's path: the runs it found, then the runs it added."""

    found: list[GhostRun]
    added: list[GhostRun]
    found_blocks: int


class Ghost:
    """The trees of all namespaces, `max_blocks` in all. `forgotten(run)` is called for each run
    that is deleted."""

    def __init__(self, max_blocks: int, forgotten: Callable[[GhostRun], None]) -> None:
        self.max_blocks = max_blocks
        self.num_blocks = 0
        self._forgotten = forgotten
        self._roots: dict[int, GhostRun] = {}
        self._oldest: list[tuple[float, int, GhostRun]] = []
        self._serial = 0

    def walk(self, namespace: int, symbols: bytes, num_full: int, now_s: float) -> Walk:
        """Follow the request's symbols and add the new ones: the blocks up to `num_full` as one
        run, those after them (a partial block) as another. The caller updates the runs' uses."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = GhostRun(None, b"", now_s)
        node, position = root, 0
        found: list[GhostRun] = []
        while True:
            child = node.children.get(symbols[position : position + SYMBOL])
            if child is None:
                break
            if not symbols.startswith(child.symbols, position):
                child = self._split(child, _common(child.symbols, symbols, position))
            found.append(child)
            position += len(child.symbols)
            node = child
        walk = Walk(found, [], position // SYMBOL)
        for end in (num_full * SYMBOL, len(symbols)):
            if end > position:
                run = GhostRun(node, symbols[position:end], now_s)
                node.children[run.symbols[:SYMBOL]] = run
                walk.added.append(run)
                self.num_blocks += len(run)
                node, position = run, end
        if walk.added:
            self._watch(node)
        return walk

    def find(self, namespace: int, symbols: bytes) -> list[GhostRun]:
        """The runs along the symbols, as far as whole runs match. Changes nothing."""
        node = self._roots.get(namespace)
        found: list[GhostRun] = []
        position = 0
        while node is not None:
            node = node.children.get(symbols[position : position + SYMBOL])
            if node is None or not symbols.startswith(node.symbols, position):
                break
            found.append(node)
            position += len(node.symbols)
        return found

    def trim(self) -> None:
        """Delete the leaves unused for longest until at most `max_blocks` are left."""
        while self.num_blocks > self.max_blocks and self._oldest:
            last_s, _, run = heapq.heappop(self._oldest)
            if run.parent is None or run.children:
                continue
            if run.last_s > last_s:
                self._watch(run)
                continue
            parent = run.parent
            del parent.children[run.symbols[:SYMBOL]]
            run.parent = None
            self.num_blocks -= len(run)
            self._forgotten(run)
            if parent.parent is not None and not parent.children:
                self._watch(parent)

    def runs(self) -> list[GhostRun]:
        """All runs."""
        return list(self.each())

    def each(self) -> Iterator[GhostRun]:
        """All runs, one by one. The tree may change meanwhile: runs added, deleted or split then
        may or may not be included."""
        stack = list(self._roots.values())
        while stack:
            run = stack.pop()
            stack.extend(run.children.values())
            if run.parent is not None:
                yield run

    def _split(self, run: GhostRun, count: int) -> GhostRun:
        """Move the first `count` blocks into another run above, which is returned."""
        above = run.parent
        assert above is not None
        upper = GhostRun(above, run.symbols[: count * SYMBOL], run.last_s)
        upper.kind, upper.touches, upper.weight = run.kind, run.touches, run.weight
        above.children[upper.symbols[:SYMBOL]] = upper
        run.symbols = run.symbols[count * SYMBOL :]
        run.parent = upper
        upper.children[run.symbols[:SYMBOL]] = run
        return upper

    def _watch(self, run: GhostRun) -> None:
        self._serial += 1
        heapq.heappush(self._oldest, (run.last_s, self._serial, run))


def _common(edge: bytes, symbols: bytes, position: int) -> int:
    """How many blocks `edge` and `symbols` from `position` have in common: at least 1, not all."""
    low, high = 1, min(len(edge), len(symbols) - position) // SYMBOL
    while low < high:
        middle = (low + high + 1) // 2
        if symbols.startswith(edge[low * SYMBOL : middle * SYMBOL], position + low * SYMBOL):
            low = middle
        else:
            high = middle - 1
    return low

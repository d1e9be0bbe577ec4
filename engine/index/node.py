"""The parts of the trees: nodes, which are runs of blocks, and stems, which hold their symbols.

A stem is a chain of nodes, each the child of the one before, with all their symbols in one `bytes`:

    stem A   [ b0 … b63 | b64 … b71 | b72 … b90 ]       one comparison matches all three nodes
                        └─ stem B  [ b72'… b75' ]       another child of A's second node

Matching takes one comparison per stem, not per node: a conversation stored turn by turn, with a
second answer at every turn, is found as fast as one prompt. Splitting a node copies no bytes.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Final

from hicache.engine.residency.block_ids import Span, ids_of
from hicache.engine.residency.blocks import MAX_TIERS
from hicache.tiers.block import Ids

if TYPE_CHECKING:
    from hicache.engine.policies.hazard.ghost import GhostRun

depth_of: Final = attrgetter("depth")

SPARE_SHARE: Final = 0.75
"""A stem is compacted once more than this share of its bytes is unused."""
_NO_CHILDREN: Final[dict[bytes, Node]] = {}
_HOLDING_NONE: Final = [0] * MAX_TIERS


class Stem:
    """`symbols` of all `nodes`, in order, followed by `spare_bytes` of removed blocks: removing
    blocks from its end does not copy the stem every time. Owned by the index."""

    __slots__ = ("nodes", "spare_bytes", "symbols")

    def __init__(self, symbols: bytes, nodes: list[Node], spare_bytes: int = 0) -> None:
        self.symbols = symbols
        self.nodes = nodes
        self.spare_bytes = spare_bytes

    @property
    def num_bytes(self) -> int:
        """The bytes of `symbols` in use."""
        return len(self.symbols) - self.spare_bytes

    def shorten(self, num_bytes: int) -> None:
        """Mark the last `num_bytes` in use as spare."""
        self.spare_bytes += num_bytes
        if self.spare_bytes > SPARE_SHARE * len(self.symbols):
            self.compact()

    def compact(self) -> None:
        """Drop the spare bytes."""
        if self.spare_bytes:
            self.symbols = self.symbols[: -self.spare_bytes]
            self.spare_bytes = 0


class Node:
    """A run of blocks. `span`: their ids, as an index into the arrays. A root is an empty run.

    `tiers`, `leaving`: bit sets, as in BlockTable.tags; `staying` is tiers without leaving.
    `holding[t]` counts the children that stay in tier t: a node is a leaf of t when it stays in t
    and no child does. `queued`: bit set of the policies that have it as a candidate. `kind`,
    `uses`, `run`: its class, uses and ghost run (`History.marks`); -1, 0 and None until set, and
    where no policy uses the history.
    Leaves share their empty `children` and `holding`: most nodes are leaves, and they are created
    and removed all the time.
    """

    __slots__ = (
        "children",
        "depth",
        "holding",
        "kind",
        "leaving",
        "namespace",
        "num_blocks",
        "number",
        "parent",
        "queued",
        "run",
        "span",
        "staying",
        "stem",
        "tiers",
        "touched_s",
        "uses",
    )

    def __init__(
        self, number: int, namespace: int, parent: Node | None, span: Span, size: int, depth: int
    ) -> None:
        self.number = number
        self.namespace = namespace
        self.parent = parent
        self.span = span
        self.num_blocks = size
        self.depth = depth
        self.children = _NO_CHILDREN
        self.tiers = self.leaving = self.staying = 0
        self.holding = _HOLDING_NONE
        self.queued = 0
        self.touched_s = 0.0
        self.kind = -1
        self.uses = 0
        self.run: GhostRun | None = None
        self.stem: Stem

    def __len__(self) -> int:
        return self.num_blocks

    def add_child(self, symbol: bytes, child: Node) -> None:
        """Add a child under the symbol of its first block."""
        if self.children is _NO_CHILDREN:
            self.children = {}
        self.children[symbol] = child

    def count_holding(self, tier: int, count: int) -> None:
        """Add `count` to the number of children that stay in this tier."""
        if self.holding is _HOLDING_NONE:
            self.holding = [0] * MAX_TIERS
        self.holding[tier] += count

    def block_ids(self) -> Ids:
        """The node's block ids, shape [len(self)]."""
        return ids_of(self.span)

    def symbols(self, step: int, first: int, last: int) -> bytes:
        """The symbols of the node's blocks first … last-1, `step` bytes each. The first block's
        symbol is the node's key among its parent's children."""
        above = self.depth - self.stem.nodes[0].depth
        return self.stem.symbols[(above + first) * step : (above + last) * step]

    @property
    def is_root(self) -> bool:
        return self.parent is None

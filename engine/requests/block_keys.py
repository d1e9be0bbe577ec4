"""Computes block keys when a block is written to a persistent tier; they are not kept per block.

A key is a hash of the whole prefix, so a node's keys start from its parent's last. The keys of the
nodes moved most recently are cached. A node whose blocks are being moved is split at its front
repeatedly, as they arrive; it keeps its end, so the keys computed for the whole node remain valid.

    computed   [ k0 k1 k2 k3 k4 k5 k6 k7 ]
    node now               [ b4 b5 b6 b7 ]      its keys: the last four

Owned by the daemon's loop.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from hicache.engine.index.node import Node
from hicache.engine.plan import BlockIdentity, Move
from hicache.engine.residency.copies import Namespace, Residency

ROOT_KEY: Final = bytes(32)
MAX_CHAINS: Final = 256
_FEW_CHAINS: Final = 16


@dataclass(slots=True)
class _Chain:
    """Keys up to the end of a node: the key before the first, and the keys from block `first` of
    the path on."""

    node: Node
    first: int
    before: bytes
    keys: list[bytes]

    def fits(self) -> bool:
        """Whether the node has the same end and has not grown at its front. A node's block at a
        depth never changes."""
        depth = self.node.depth
        return depth >= self.first and depth + len(self.node) == self.first + len(self.keys)

    def key(self, depth: int) -> bytes:
        """The key of the block at this depth; one before the first block is allowed."""
        return self.keys[depth - self.first] if depth >= self.first else self.before


class Identities:
    """Sets the identity of moves. `chains` caches keys by node number."""

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self.chains: OrderedDict[int, _Chain] = OrderedDict()
        self._num_new = 0
        self._persistent = {t.name: n for n, t in enumerate(residency.tiers) if t.persistent}

    def fill(self, moves: Iterable[Move]) -> None:
        """Set `identity` where the source or the destination is persistent."""
        residency = self.residency
        for move in moves:
            if move.identity is not None:
                continue
            if move.src not in self._persistent and move.dst not in self._persistent:
                continue
            node = residency.index.node_of(move.block)
            namespace = residency.namespace_of(node)
            chain = self._chain(node, namespace)
            depth = int(residency.blocks.depth[move.block])
            position = depth - node.depth
            hits = int(residency.blocks.hits[move.block])
            if move.dst in self._persistent:
                residency.blocks.noted_hits[self._persistent[move.dst]][move.block] = hits
            move.identity = BlockIdentity(
                namespace.digest,
                chain.key(depth),
                chain.key(depth - 1),
                node.symbols(namespace.step, position, position + 1),
                depth,
                hits,
            )

    def key_of(self, block: int) -> bytes:
        """The key of a block in the tree."""
        residency = self.residency
        node = residency.index.node_of(block)
        chain = self._chain(node, residency.namespace_of(node))
        return chain.key(int(residency.blocks.depth[block]))

    def _chain(self, node: Node, namespace: Namespace) -> _Chain:
        missing = []
        parent = ROOT_KEY
        above: Node | None = node
        while above is not None and above.parent is not None:
            cached = self.chains.get(above.number)
            if cached is not None and cached.node is above and cached.fits():
                if above is node:
                    self.chains.move_to_end(node.number)
                    return cached
                parent = cached.keys[-1]
                break
            missing.append(above)
            above = above.parent
        for below in reversed(missing):
            edge = below.symbols(namespace.step, 0, len(below))
            keys = keys_along(namespace.digest, parent, edge, namespace.step)
            chain = _Chain(below, below.depth, parent, keys)
            self.chains[below.number] = chain
            parent = keys[-1]
        self._num_new += len(missing)
        if self._num_new > max(_FEW_CHAINS, len(self.chains) // 4):
            self._tidy()
        while len(self.chains) > max(MAX_CHAINS, len(missing)):
            self.chains.popitem(last=False)
        return chain

    def _tidy(self) -> None:
        """Remove the cached keys of removed nodes."""
        self._num_new = 0
        nodes = self.residency.index.nodes
        gone = [number for number, chain in self.chains.items() if nodes[number] is not chain.node]
        for number in gone:
            del self.chains[number]


def keys_along(namespace: bytes, parent: bytes, edge: bytes, step: int) -> list[bytes]:
    """BLAKE2b-256(namespace ‖ parent key ‖ tokens), block by block, as protocol/keys.py does."""
    keys = []
    for start in range(0, len(edge), step):
        data = namespace + parent + edge[start : start + step]
        parent = hashlib.blake2b(data, digest_size=32).digest()
        keys.append(parent)
    return keys

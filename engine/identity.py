"""Block keys, computed when a block leaves for a durable tier and not kept per block.

A key commits to the whole prefix, so a node's keys start from its parent's last. The chains of the
nodes moved most recently are kept, as long as those nodes stay whole. Owned by the daemon's loop.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from hicache.engine.node import Node
from hicache.engine.plan import BlockIdentity, Move
from hicache.engine.residency import Namespace, Residency

ROOT_KEY: Final = bytes(32)
MAX_CHAINS: Final = 256


class Identities:
    """Fills in the identity of moves. `chains` caches keys by node number; a node that covers the
    same depths as before holds the same blocks."""

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self.chains: OrderedDict[int, tuple[Node, int, bytes, list[bytes]]] = OrderedDict()
        self._durable = {tier.name for tier in residency.tiers if tier.durable}

    def fill(self, moves: Iterable[Move]) -> None:
        """Set `identity` where the source or the destination is durable."""
        house = self.residency
        for move in moves:
            if move.identity is not None:
                continue
            if move.src not in self._durable and move.dst not in self._durable:
                continue
            node = house.index.node_of(move.block)
            namespace = house.namespace_of(node)
            parent, keys = self._keys(node, namespace)
            depth = int(house.blocks.depth[move.block])
            position = depth - node.depth
            move.identity = BlockIdentity(
                namespace.digest,
                keys[position],
                keys[position - 1] if position else parent,
                node.symbols(namespace.step, position, position + 1),
                depth,
                int(house.blocks.hits[move.block]),
            )

    def _keys(self, node: Node, namespace: Namespace) -> tuple[bytes, list[bytes]]:
        """The key before the node's first block, and the keys of its blocks."""
        missing = []
        parent = ROOT_KEY
        above: Node | None = node
        while above is not None and above.parent is not None:
            cached = self.chains.get(above.number)
            if (
                cached is not None
                and cached[0] is above
                and (cached[1], len(cached[3])) == (above.depth, above.num_blocks)
            ):
                if above is node:
                    self.chains.move_to_end(node.number)
                    return cached[2], cached[3]
                parent = cached[3][-1]
                break
            missing.append(above)
            above = above.parent
        for below in reversed(missing):
            edge = below.symbols(namespace.step, 0, below.num_blocks)
            keys = _chain(namespace.digest, parent, edge, namespace.step)
            self.chains[below.number] = (below, below.depth, parent, keys)
            before, parent = parent, keys[-1]
        while len(self.chains) > max(MAX_CHAINS, len(missing)):
            self.chains.popitem(last=False)
        return before, keys


def _chain(namespace: bytes, parent: bytes, edge: bytes, step: int) -> list[bytes]:
    """BLAKE2b-256(namespace ‖ parent key ‖ tokens), block after block (as hicache.keys)."""
    keys = []
    for start in range(0, len(edge), step):
        data = namespace + parent + edge[start : start + step]
        parent = hashlib.blake2b(data, digest_size=32).digest()
        keys.append(parent)
    return keys

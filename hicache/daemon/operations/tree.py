"""`tree`: a page of the index's nodes (engine/index/snapshot.py), and their namespaces."""

from __future__ import annotations

from hicache.daemon.gate import Asked, Gate, handles
from hicache.protocol.operations import TREE, TreeReply, TreeRequest
from hicache.tiers.block import slot_bytes_for


@handles(TREE)
def tree(gate: Gate, asked: Asked[TreeRequest]) -> None:
    """Clients that connect without authentication (TCP without keys) get no tokens."""
    request, queries = asked.request, gate.engine.queries
    is_private = gate.upkeep.is_private
    found = queries.tree_page(
        request.after, request.most, asked.now_s, request.namespace, with_tokens=is_private
    )
    spaces = [queries.namespace(number) for number in found.namespaces]
    names = [gate.namespaces.get(space.digest) for space in spaces]
    reply = TreeReply(
        epoch=gate.epoch,
        next=found.next,
        end=found.end,
        tiers=[tier.name for tier in queries.tiers()],
        namespaces=[
            {
                "digest": space.digest.hex(),
                "name": spec.name if spec is not None else "",
                "block_tokens": space.block_tokens,
                "block_bytes": space.block_bytes,
                "slot_bytes": slot_bytes_for(space.block_bytes),
            }
            for space, spec in zip(spaces, names, strict=True)
        ],
        nodes=found.runs,
    )
    gate.reply(asked.peer, reply)

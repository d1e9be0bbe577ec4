"""Hints of inference engines: whether and when a prompt will be extended.

Hints affect ranking only. Where a policy ranks by the hazard model, a hint is one more feature of a
prompt's class, and the fit decides its weight; elsewhere a conversation reported as ended is
evicted first. Only blocks with `keep=False` that were not requested since they were stored are
evicted at once. Leased blocks, and blocks being read or written, are not affected, and a later
request for a block is a hit or a miss as usual. Owned by the daemon's one loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from hicache.engine import plan as p
from hicache.engine.index.node import Node
from hicache.engine.placement.evictor import Evictor
from hicache.engine.policies.hazard.history import MAX_STOP, History, symbols_of
from hicache.engine.residency.copies import Residency

_SAYS_NOTHING: Final = ("", "stop")


class Hints:
    """Takes Hint events."""

    def __init__(self, residency: Residency, evictor: Evictor, history: History | None) -> None:
        self.residency = residency
        self.evictor = evictor
        self.history = history
        self._stops: dict[tuple[str, str], int] = {}

    def take(self, event: p.Hint) -> None:
        """Apply the hint to the prompt's known blocks, and to blocks that only it led to."""
        residency = self.residency
        namespace = residency.namespaces[event.namespace]
        path = residency.index.match(namespace.root, event.tokens, namespace.step)
        nodes = path.nodes[:-1] if path.partial else path.nodes
        if self.history is not None:
            symbols = symbols_of(event.tokens, namespace.step)
            stop = self._number_of(event)
            runs = self.history.hinted(
                event.namespace, symbols, stop, event.return_s, event.answer_tokens
            )
            residency.index.mark(nodes, list(self.history.marks(runs)), namespace.step)
            for node in nodes:
                residency.candidates.queue(node)
        if not nodes:
            return
        own = _own_part(nodes[-1])
        is_learnt = any(map(residency.candidates.ranks, range(len(residency.tiers))))
        if event.ended == "conversation" and not is_learnt:
            residency.candidates.dismiss(own)
        if not event.keep:
            self._give_up_unasked(own)

    def _number_of(self, event: p.Hint) -> int:
        """A number for each reason, while there are few; 0 for an uninformative one: an inference
        engine's "stop" may mean a turn or a tool call, and the answer's length says more."""
        if not event.ended and event.finish_reason in _SAYS_NOTHING:
            return 0
        reason = (event.ended, event.finish_reason)
        number = self._stops.get(reason, len(self._stops) + 1)
        if number < MAX_STOP:
            self._stops[reason] = number
        return min(number, MAX_STOP)

    def _give_up_unasked(self, nodes: Sequence[Node]) -> None:
        """Remove the last blocks that were never requested and are not held."""
        for node in reversed(nodes):
            if node.parent is None or node.children or self.evictor.is_held(node):
                return
            asked = np.flatnonzero(self.residency.blocks.hits[node.block_ids()])
            kept = int(asked[-1]) + 1 if len(asked) else 0
            if kept == len(node):
                return
            self.evictor.forget(node, len(node) - kept)
            if kept:
                return


def _own_part(node: Node) -> list[Node]:
    """The nodes, top first, that lead only to this node and to what was stored below it, and were
    not used since. Empty where the path branches below it."""
    while len(node.children) == 1:
        node = next(iter(node.children.values()))
    own: list[Node] = []
    used_s = node.touched_s
    while node.parent is not None and len(node.children) < 2 and node.touched_s <= used_s:
        own.append(node)
        node = node.parent
    own.reverse()
    return own

"""What inference engines say about prompts to come: when, and whether, one will go on.

Advice only, and taken as such: where a policy ranks by the model of reuse, what was said is one
more feature of a prompt's class, and weighs what it has proved worth; elsewhere a conversation that
is said to have ended goes first. Only blocks that are not to be kept, and that
nobody has asked for since they were stored, are given up at once. Nothing that anybody leases,
reads or writes is touched, and a block that is asked for after all is a hit or a miss like any
other. Owned by the daemon's one loop.
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
        """Apply what was said to the prompt, as far as it is known, and to what only it led to."""
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
        """The same number for the same reason, as long as there are few; 0 for what says nothing:
        an inference engine's plain "stop" stands for turns and tool calls alike, and the answer's
        length tells more of which it was."""
        if not event.ended and event.finish_reason in _SAYS_NOTHING:
            return 0
        reason = (event.ended, event.finish_reason)
        number = self._stops.get(reason, len(self._stops) + 1)
        if number < MAX_STOP:
            self._stops[reason] = number
        return min(number, MAX_STOP)

    def _give_up_unasked(self, nodes: Sequence[Node]) -> None:
        """Forget the last blocks that nobody has asked for, as far as nobody holds them."""
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
    """The nodes, top first, that lead to this one and what was stored behind it and to nothing
    else, and that nobody has used since: none where several ways lead on from it."""
    while len(node.children) == 1:
        node = next(iter(node.children.values()))
    own: list[Node] = []
    used_s = node.touched_s
    while node.parent is not None and len(node.children) < 2 and node.touched_s <= used_s:
        own.append(node)
        node = node.parent
    own.reverse()
    return own

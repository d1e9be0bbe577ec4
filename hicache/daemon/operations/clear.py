"""`clear`: removes namespaces' blocks, a step at a time between other requests.

    requested ──▶ stepping ◀──▶ paused until the next tick    (many records are being deleted, or a
                     │                                         block is being copied)
                     └──▶ complete: all its requests are answered

A request during a clearing joins it, and it starts once more, since new blocks may have been stored
in the part done. At its deadline a request is answered with the number of blocks removed so far;
the clearing continues. At most one entry per namespace. Used from the daemon's loop only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from hicache.daemon.gate import Asked, Gate, handles
from hicache.daemon.pending import Peer
from hicache.engine import plan as p
from hicache.protocol.messages import WireError
from hicache.protocol.operations import CLEAR, ClearReply, ClearRequest

STEP_BLOCKS: Final = 512
"""Blocks per step: about 4 ms, in which no other request is served."""
MAX_PEERS: Final = 64
"""Requests that may wait for one namespace."""


@handles(CLEAR)
def clear(gate: Gate, asked: Asked[ClearRequest]) -> None:
    """Clear the session's namespace."""
    clearances, deadline_s = gate.state(Clearances), gate.deadline_s(asked)
    clearances.ask(asked.peer, asked.session.namespace, deadline_s, asked.now_s)


@dataclass(slots=True)
class _Clearance:
    digest: bytes
    peers: list[tuple[Peer, float]] = field(default_factory=list)
    blocks: int = 0
    begins: bool = True
    begins_again: bool = False
    is_paused: bool = False


class Clearances:
    """All running clearings."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._under_way: dict[int, _Clearance] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def is_stepping(self) -> bool:
        """Whether a step is to be done before the next tick."""
        return any(not clearance.is_paused for clearance in self._under_way.values())

    def ask(self, peer: Peer, namespace: int, deadline_s: float, now_s: float) -> None:
        """Clear a namespace; the reply is sent when it is complete, or at the deadline. Raises
        WireError('refused') where too many requests wait for it already."""
        digest = self._gate.engine.queries.namespace(namespace).digest
        known = self._under_way.get(namespace)
        if known is None or known.digest != digest:
            known = self._under_way[namespace] = _Clearance(digest)
        elif len(known.peers) >= MAX_PEERS:
            raise WireError("refused", f"{MAX_PEERS} others wait for this namespace to be cleared")
        else:
            known.begins_again = True
        known.peers.append((peer, deadline_s))
        self.go_on(now_s)

    def go_on(self, now_s: float) -> bool:
        """Do a step of the clearing that has waited longest. Returns whether blocks were
        removed."""
        for number, clearance in self._under_way.items():
            if not clearance.is_paused:
                del self._under_way[number]
                if self._gate.engine.queries.namespace(number).digest != clearance.digest:
                    self._reply_to_all(
                        clearance, is_complete=True
                    )  # the number is another namespace's now
                    return False
                return self._step(number, clearance, now_s)
        return False

    def tick(self, now_s: float) -> None:
        """Continue paused clearings, and answer requests whose deadline has passed."""
        for clearance in self._under_way.values():
            clearance.is_paused = False
            late = [(peer, due_s) for peer, due_s in clearance.peers if due_s <= now_s]
            clearance.peers = [(peer, due_s) for peer, due_s in clearance.peers if due_s > now_s]
            for peer, _ in late:
                self._gate.reply(peer, ClearReply(cleared=clearance.blocks, complete=False))

    def _step(self, number: int, clearance: _Clearance, now_s: float) -> bool:
        """Do a step; unless it is complete, queue it behind the others."""
        done = self._gate.do(p.Clear(number, now_s, STEP_BLOCKS, clearance.begins))
        clearance.blocks += done.blocks
        clearance.begins, clearance.is_paused = False, done.is_waiting
        if done.is_over and not clearance.begins_again:
            self._reply_to_all(clearance, is_complete=done.is_complete)
            return done.blocks > 0
        if done.is_over:
            clearance.begins, clearance.begins_again = True, False
        self._under_way[number] = clearance
        return done.blocks > 0

    def _reply_to_all(self, clearance: _Clearance, *, is_complete: bool) -> None:
        for peer, _ in clearance.peers:
            self._gate.reply(peer, ClearReply(cleared=clearance.blocks, complete=is_complete))

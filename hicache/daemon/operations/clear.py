"""`clear`: namespaces being forgotten, a step at a time between other requests.

    asked ──▶ stepping ◀──▶ paused until the next tick        (records are being deleted: enough
                 │                                             for now; or a copy is on its way)
                 └──▶ over: everybody who asked is told

Whoever asks while it is under way joins it, and it begins once more, since what has been passed by
may hold new blocks. Who has waited long enough is told what was forgotten by then; it goes on. One
entry for each namespace at most. Used from the daemon's loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hicache.daemon.pending import Peer
from hicache.engine import plan as p
from hicache.engine.core import CacheEngine
from hicache.protocol.messages import WireError

STEP_BLOCKS: Final = 512
"""Some 4 ms, in which nobody else is served."""
MAX_PEERS: Final = 64
"""Who wait for one namespace."""


@dataclass(slots=True)
class _Clearance:
    digest: bytes
    peers: list[tuple[Peer, float]] = field(default_factory=list)
    blocks: int = 0
    begins: bool = True
    begins_again: bool = False
    is_paused: bool = False


class Clearances:
    """`do` is the front door's, for events with their moves; `reply` answers a peer."""

    def __init__(
        self,
        engine: CacheEngine,
        do: Callable[[p.Clear], p.Cleared],
        reply: Callable[[Peer, Mapping[str, Any]], None],
    ) -> None:
        self._engine, self._do, self._reply = engine, do, reply
        self._under_way: dict[int, _Clearance] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def is_stepping(self) -> bool:
        """Whether there is something to do before the next tick."""
        return any(not clearance.is_paused for clearance in self._under_way.values())

    def ask(self, peer: Peer, namespace: int, deadline_s: float, now_s: float) -> None:
        """Clear a namespace; the answer comes when it is done, or at the deadline. Raises
        WireError('refused') where too many wait for that already."""
        digest = self._engine.residency.namespaces[namespace].digest
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
        """A step of the one that waited longest. Whether anything was forgotten."""
        for number, clearance in self._under_way.items():
            if not clearance.is_paused:
                del self._under_way[number]
                if self._engine.residency.namespaces[number].digest != clearance.digest:
                    self._tell_all(clearance, is_complete=True)  # others have its number by now
                    return False
                return self._step(number, clearance, now_s)
        return False

    def tick(self, now_s: float) -> None:
        """Who paused goes on; who waited long enough is told."""
        for clearance in self._under_way.values():
            clearance.is_paused = False
            late = [(peer, due_s) for peer, due_s in clearance.peers if due_s <= now_s]
            clearance.peers = [(peer, due_s) for peer, due_s in clearance.peers if due_s > now_s]
            for peer, _ in late:
                self._reply(peer, {"cleared": clearance.blocks, "complete": False})

    def _step(self, number: int, clearance: _Clearance, now_s: float) -> bool:
        """It is put back, behind the others, unless it is over."""
        done = self._do(p.Clear(number, now_s, STEP_BLOCKS, clearance.begins))
        clearance.blocks += done.blocks
        clearance.begins, clearance.is_paused = False, done.is_waiting
        if done.is_over and not clearance.begins_again:
            self._tell_all(clearance, is_complete=done.is_complete)
            return done.blocks > 0
        if done.is_over:
            clearance.begins, clearance.begins_again = True, False
        self._under_way[number] = clearance
        return done.blocks > 0

    def _tell_all(self, clearance: _Clearance, *, is_complete: bool) -> None:
        for peer, _ in clearance.peers:
            self._reply(peer, {"cleared": clearance.blocks, "complete": is_complete})

"""The answers of a fetch: blocks readable now are named (arena) or sent (frames), piece by piece.

Frames are copies that stay in this process until the client has read them, and a client may be slow
or never read at all. So at most `max_unread_bytes` of them are on their way to a session; the rest
stays where it is, leased, and follows as the client reads. What has not been sent by the fetch's
deadline is a miss. Used from the daemon's loop only.

    told   [ sent, read ][ sent, unread ][ unsent            ]
             ZeroMQ let go  in ZeroMQ      in its slots, leased
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hicache.daemon.pending import Peer, WaitingFetch
from hicache.daemon.sessions import Session, Tracker
from hicache.engine import plan as p
from hicache.engine.core import CacheEngine
from hicache.protocol.operations import MatchReply
from hicache.tiers.arena import Arena

Part = bytes | memoryview
Send = Callable[[Peer, Mapping[str, Any] | MatchReply, Sequence[Part]], Tracker | None]
"""Sends one message. With parts it returns what tells when ZeroMQ has let go of them, or None if
they could not be sent at all."""


class Delivery:
    """Sends what fetches wait for."""

    def __init__(
        self,
        engine: CacheEngine,
        arenas: Mapping[str, Arena],
        send: Send,
        max_unread_bytes: int,
    ) -> None:
        self.engine = engine
        self.arenas = arenas
        self.max_unread_bytes = max_unread_bytes
        self._send = send

    def tell(
        self, fetch: WaitingFetch, session: Session, runs: Sequence[p.ReadyRun], is_last: bool
    ) -> bool:
        """More can be read; after the last, nothing more will come. Returns whether the fetch has
        its final reply."""
        fetch.unsent.extend(runs)
        fetch.is_complete |= is_last
        return self.go_on(fetch, session)

    def go_on(self, fetch: WaitingFetch, session: Session) -> bool:
        """Send what can be sent now. Returns whether the fetch has its final reply."""
        while True:
            parts: list[Part] = []
            if fetch.by_worker:
                ready = self._counted(fetch)
            elif session.transport == "arena":
                ready = self._named(fetch)
            else:
                ready, parts = self._copied(fetch, session)
            is_last = fetch.is_complete and not fetch.unsent
            if not ready and not is_last:
                return False
            self._reply(fetch, session, ready, parts, is_last)
            if is_last:
                return True

    def give_up(self, fetch: WaitingFetch, session: Session) -> None:
        """The final reply, now: what has been sent is all there is."""
        fetch.unsent.clear()
        fetch.is_complete = True
        self.go_on(fetch, session)

    def _counted(self, fetch: WaitingFetch) -> list[list[Any]]:
        ready: list[list[Any]] = []
        while fetch.unsent:
            run = fetch.unsent.popleft()
            fetch.mark(run)
            ready.append([run.first, run.tier, b"", b"", len(run.slots)])
        return ready

    def _named(self, fetch: WaitingFetch) -> list[list[Any]]:
        ready: list[list[Any]] = []
        while fetch.unsent:
            run = fetch.unsent.popleft()
            fetch.mark(run)
            generations = self.arenas[run.tier].generations(run.slots)
            slots = run.slots.astype("<u4").tobytes()
            ready.append(
                [run.first, run.tier, slots, generations.astype("<u4").tobytes(), len(run.slots)]
            )
        return ready

    def _copied(self, fetch: WaitingFetch, session: Session) -> tuple[list[list[Any]], list[Part]]:
        """One message's blocks: half of what may be unread, since the newest is not counted."""
        ready: list[list[Any]] = []
        parts: list[Part] = []
        size = session.spec.block_bytes
        unread_bytes = session.unread.num_bytes()
        room = (self.max_unread_bytes // 2 - unread_bytes) // size
        if not unread_bytes:
            room = max(room, 1)
        while fetch.unsent and room > 0:
            run = fetch.unsent.popleft()
            now = p.ReadyRun(run.first, run.tier, run.slots[:room])
            if not self.engine.is_still_at(fetch.lease, now):  # the lease or the tier has gone
                fetch.unsent.clear()
                break
            if room < len(run.slots):
                rest = p.ReadyRun(run.first + room, run.tier, run.slots[room:])
                fetch.unsent.appendleft(rest)
            room -= len(now.slots)
            fetch.mark(now)
            ready.append([now.first, now.tier, b"", b"", len(now.slots)])
            arena = self.arenas[now.tier]
            # A copy: the slot may be given to somebody else before ZeroMQ has sent it.
            parts.extend(arena.view(slot, size).tobytes() for slot in now.slots.tolist())
        return ready, parts

    def _reply(
        self,
        fetch: WaitingFetch,
        session: Session,
        ready: list[list[Any]],
        parts: list[Part],
        is_last: bool,
    ) -> None:
        message: dict[str, Any] = {"id": fetch.peer.request_id, "ok": True, "ready": ready}
        if is_last:
            message |= {"blocks": fetch.prefix_blocks(), "waiting": 0}
        else:
            message["more"] = True
        tracker = self._send(fetch.peer, message, parts)
        if tracker is not None:
            session.unread.add(tracker, sum(len(part) for part in parts))

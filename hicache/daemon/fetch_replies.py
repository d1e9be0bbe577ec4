"""Sends a fetch's replies: readable blocks are named (arena) or sent (frames), piece by piece.

Frames are copies that stay in this process until the client has read them, and a client may be slow
or never read at all. So at most `max_unread_bytes` of them are in flight to a session; the rest
stays in its slots, leased, and is sent as the client reads. Blocks that were not sent by the
fetch's deadline are misses. Used from the daemon's loop only.

    blocks  [ sent, read ][ sent, unread ][ unsent            ]
              freed         in ZeroMQ       in its slots, leased
"""

from __future__ import annotations

from collections.abc import Sequence

from hicache.daemon.gate import Gate
from hicache.daemon.pending import Part, WaitingFetch
from hicache.daemon.sessions import Session
from hicache.engine import plan as p
from hicache.protocol.operations import FetchReply, ReadyRun


class FetchReplies:
    """Sends the replies of fetches."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def add(
        self, fetch: WaitingFetch, session: Session, runs: Sequence[p.ReadyRun], is_last: bool
    ) -> bool:
        """These runs can be read now; `is_last`: no more will come. Returns whether the final reply
        was sent."""
        fetch.unsent.extend(runs)
        fetch.is_complete |= is_last
        return self.send(fetch, session)

    def send(self, fetch: WaitingFetch, session: Session) -> bool:
        """Send what can be sent now. Returns whether the final reply was sent."""
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

    def end(self, fetch: WaitingFetch, session: Session) -> None:
        """Send the final reply now, without the blocks that have not been sent."""
        fetch.unsent.clear()
        fetch.is_complete = True
        self.send(fetch, session)

    def _counted(self, fetch: WaitingFetch) -> list[ReadyRun]:
        ready: list[ReadyRun] = []
        while fetch.unsent:
            run = fetch.unsent.popleft()
            fetch.mark(run)
            ready.append((run.first, run.tier, b"", b"", len(run.slots)))
        return ready

    def _named(self, fetch: WaitingFetch) -> list[ReadyRun]:
        ready: list[ReadyRun] = []
        while fetch.unsent:
            run = fetch.unsent.popleft()
            fetch.mark(run)
            generations = self._gate.arenas[run.tier].generations(run.slots)
            slots = run.slots.astype("<u4").tobytes()
            ready.append(
                (run.first, run.tier, slots, generations.astype("<u4").tobytes(), len(run.slots))
            )
        return ready

    def _copied(self, fetch: WaitingFetch, session: Session) -> tuple[list[ReadyRun], list[Part]]:
        """One message's blocks: half of the limit, since the newest message is not counted."""
        ready: list[ReadyRun] = []
        parts: list[Part] = []
        size = session.spec.block_bytes
        unread_bytes = session.unread.num_bytes()
        room = (self._gate.limits.max_unread_bytes // 2 - unread_bytes) // size
        if not unread_bytes:
            room = max(room, 1)
        while fetch.unsent and room > 0:
            run = fetch.unsent.popleft()
            now = p.ReadyRun(run.first, run.tier, run.slots[:room])
            if not self._gate.engine.is_still_at(
                fetch.lease, now
            ):  # the lease has ended, or the tier is down
                fetch.unsent.clear()
                break
            if room < len(run.slots):
                rest = p.ReadyRun(run.first + room, run.tier, run.slots[room:])
                fetch.unsent.appendleft(rest)
            room -= len(now.slots)
            fetch.mark(now)
            ready.append((now.first, now.tier, b"", b"", len(now.slots)))
            arena = self._gate.arenas[now.tier]
            # Copied: the slot may get another block before ZeroMQ has sent this one.
            parts.extend(arena.view(slot, size).tobytes() for slot in now.slots.tolist())
        return ready, parts

    def _reply(
        self,
        fetch: WaitingFetch,
        session: Session,
        ready: list[ReadyRun],
        parts: list[Part],
        is_last: bool,
    ) -> None:
        reply = FetchReply(ready=ready)
        if is_last:
            reply.blocks, reply.waiting = fetch.prefix_blocks(), 0
        else:
            reply.more = True
        tracker = self._gate.reply(fetch.peer, reply, parts)
        if tracker is not None:
            session.unread.add(tracker, sum(len(part) for part in parts))

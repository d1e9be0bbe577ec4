"""Connected clients: sessions, their groups, and their processes.

A session belongs to a group (one instance of an inference engine: its scheduler and ranks share the
group's token). Leases and tickets belong to the group. Sessions are named by tokens, not by ZeroMQ
routing ids, which change when a socket reconnects.

Liveness: on `ipc` the peer's pid comes from the socket, never from the message, and a pidfd reports
its death within milliseconds. Where the pid is not visible (tcp, another pid namespace), a session
that is silent for `session_ttl_s` is taken as dead. A living process may have dropped a client
without `bye`: when sessions run out, `idle` ones that hold nothing are ended, too. Slots that their
process may still write stay quarantined until it is dead (`_Process.owners`).
Used from the daemon's loop only.
"""

from __future__ import annotations

import os
import secrets
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from hicache.protocol.keys import NamespaceSpec
from hicache.protocol.messages import SESSION_BYTES, WireError
from hicache.protocol.operations import MatchReply

MAX_REMEMBERED_MATCHES: Final = 1024
"""Per session. A client repeats a request soon, not thousands of requests later."""


@dataclass(slots=True)
class RememberedMatch:
    """A match's answer, which a repeated request with the same id gets again. `tokens` is a digest:
    a long prompt has half a megabyte."""

    tokens: bytes
    skip_blocks: int
    lease: int
    reply: MatchReply


@dataclass(slots=True)
class Group:
    """One instance of an inference engine. `number` owns its leases in the cache engine."""

    number: int
    token: bytes
    num_sessions: int = 0


class Tracker(Protocol):
    """Tracks whether ZeroMQ has freed a message's parts."""

    @property
    def done(self) -> bool: ...


@dataclass(slots=True)
class Unread:
    """Block bytes sent to one client that ZeroMQ still holds. The newest message is not counted:
    ZeroMQ frees a message's end only when it sends the next one."""

    _sent: deque[tuple[Tracker, int]] = field(default_factory=deque)
    _num_bytes: int = 0

    def add(self, tracker: Tracker, num_bytes: int) -> None:
        """A message was sent."""
        if self._sent:
            self._num_bytes += self._sent[-1][1]
        self._sent.append((tracker, num_bytes))

    def num_bytes(self) -> int:
        """The unread bytes now."""
        while len(self._sent) > 1 and self._sent[0][0].done:
            self._num_bytes -= self._sent.popleft()[1]
        return self._num_bytes


@dataclass(slots=True)
class Session:
    """One client. `pid` is 0 where it is not visible."""

    token: bytes
    group: Group
    namespace: int
    spec: NamespaceSpec
    transport: str
    client: str
    pid: int
    last_seen_s: float
    matches: OrderedDict[str, RememberedMatch] = field(default_factory=OrderedDict)
    unread: Unread = field(default_factory=Unread)

    def remember(self, request: str, match: RememberedMatch) -> None:
        """Keep a match's answer by its request id; the oldest are dropped."""
        self.matches[request] = match
        self.matches.move_to_end(request)
        while len(self.matches) > MAX_REMEMBERED_MATCHES:
            self.matches.popitem(last=False)


@dataclass(slots=True)
class _Process:
    """A peer's process, watched by its pidfd. `owners`: groups whose slots it may still write
    although its session has ended."""

    pidfd: int
    tokens: set[bytes] = field(default_factory=set)
    owners: set[int] = field(default_factory=set)


class Sessions:
    """All sessions of this daemon."""

    def __init__(self, max_sessions: int, session_ttl_s: float) -> None:
        self.max_sessions = max_sessions
        self.session_ttl_s = session_ttl_s
        self.by_token: dict[bytes, Session] = {}
        self.groups: dict[bytes, Group] = {}
        self._processes: dict[int, _Process] = {}
        self._pid_of: dict[int, int] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self.by_token)

    def __iter__(self) -> Iterator[Session]:
        return iter(self.by_token.values())

    def check_room(self) -> None:
        """Raises WireError('refused') when the number of sessions has reached its limit."""
        if len(self.by_token) >= self.max_sessions:
            raise WireError(
                "refused",
                f"{self.max_sessions} sessions are open, which is limits.max_sessions; "
                "close some clients or raise it",
            )

    def open(
        self,
        namespace: int,
        spec: NamespaceSpec,
        transport: str,
        client: str,
        group_token: bytes,
        pid: int,
        now_s: float,
    ) -> Session:
        """Open a session. An unknown or empty group token starts another group."""
        group = self.groups.get(group_token)
        if group is None:
            self._serial += 1
            group = Group(self._serial, secrets.token_bytes(SESSION_BYTES))
            self.groups[group.token] = group
        group.num_sessions += 1
        token = secrets.token_bytes(SESSION_BYTES)
        watched = pid if self._watch(pid) else 0
        if watched:
            self._processes[watched].tokens.add(token)
        session = Session(token, group, namespace, spec, transport, client, watched, now_s)
        self.by_token[token] = session
        return session

    def get(self, token: bytes, now_s: float) -> Session:
        """The session of a request. Raises WireError('unknown_session')."""
        session = self.by_token.get(token)
        if session is None:
            raise WireError("unknown_session", "this session is unknown: send hello again")
        session.last_seen_s = now_s
        return session

    def close(self, session: Session, *, may_write: bool = False) -> Group | None:
        """Remove a session. Returns its group if it was the last one of it. `may_write`: its
        process is alive and may still write the group's slots."""
        if self.by_token.pop(session.token, None) is None:
            return None
        process = self._processes.get(session.pid)
        if process is not None:
            process.tokens.discard(session.token)
            if may_write:
                process.owners.add(session.group.number)
            elif not process.tokens and not process.owners:
                self._unwatch(session.pid)
        session.group.num_sessions -= 1
        if session.group.num_sessions:
            return None
        del self.groups[session.group.token]
        return session.group

    def has_writer_left(self, owner: int) -> bool:
        """Whether a living process whose session has ended may still write this group's slots."""
        return any(owner in process.owners for process in self._processes.values())

    def process_died(self, pidfd: int) -> list[int]:
        """A process is dead and its sessions are closed. Returns the groups that have ended and
        whose slots no process can write any more."""
        pid = self._pid_of.get(pidfd)
        if pid is None:
            return []
        owners = self._processes[pid].owners
        self._unwatch(pid)
        alive = {group.number for group in self.groups.values()}
        return [owner for owner in sorted(owners - alive) if not self.has_writer_left(owner)]

    def writer_of(self, session: Session) -> int:
        """The pid of the process that writes this session's slots; 0 where it may be one of
        several, or is not visible."""
        group = session.group
        if group.num_sessions == 1:
            return session.pid
        pids = {other.pid for other in self.by_token.values() if other.group is group}
        return session.pid if len(pids) == 1 else 0

    def inherit(self, pids: Collection[int]) -> int:
        """An owner for slots that these processes may write since before this daemon; 0 where none
        of them lives."""
        self._serial += 1
        watched = [self._processes[pid] for pid in pids if self._watch(pid)]
        for process in watched:
            process.owners.add(self._serial)
        return self._serial if watched else 0

    def pidfds(self) -> list[int]:
        """To be polled for reading: readable means dead."""
        return list(self._pid_of)

    def of_dead(self, pidfd: int) -> list[Session]:
        """The sessions of the process whose pidfd became readable."""
        process = self._processes[self._pid_of[pidfd]]
        return [self.by_token[token] for token in process.tokens]

    def silent(self, now_s: float) -> list[Session]:
        """Sessions without a visible process that have said nothing for `session_ttl_s`."""
        return [
            session
            for session in self.by_token.values()
            if not session.pid and now_s - session.last_seen_s > self.session_ttl_s
        ]

    def idle(self, now_s: float) -> list[Session]:
        """Sessions whose process lives and that have said nothing for `session_ttl_s`."""
        return [
            session
            for session in self.by_token.values()
            if session.pid and now_s - session.last_seen_s > self.session_ttl_s
        ]

    def close_all(self) -> None:
        """At the daemon's end."""
        for pid in list(self._processes):
            self._unwatch(pid)
        self.by_token.clear()
        self.groups.clear()

    def _watch(self, pid: int) -> bool:
        if not pid:
            return False
        process = self._processes.get(pid)
        if process is None:
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:  # gone already, or of another pid namespace: heartbeats decide
                return False
            process = self._processes[pid] = _Process(pidfd)
            self._pid_of[pidfd] = pid
        return True

    def _unwatch(self, pid: int) -> None:
        process = self._processes.pop(pid)
        del self._pid_of[process.pidfd]
        os.close(process.pidfd)

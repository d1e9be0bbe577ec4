"""Whose process may still write, when sessions of one group end in different ways."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hicache.daemon.sessions import Session, Sessions
from hicache.protocol.keys import LayerGroup, NamespaceSpec
from hicache.protocol.messages import WireError

SPEC = NamespaceSpec(
    model_digest="m",
    weights_digest="w",
    dtype="float16",
    groups=(LayerGroup(1, 1, 1, "layer"),),
    block_tokens=4,
    block_bytes=4096,
)


@contextmanager
def process() -> Iterator[int]:
    with subprocess.Popen(["sleep", "1000"]) as running:
        yield running.pid
        running.kill()


def opened(sessions: Sessions, pid: int, group: bytes = b"", now_s: float = 0.0) -> Session:
    return sessions.open(0, SPEC, "arena", "a test", group, pid, now_s)


def test_slots_are_set_aside_until_the_process_that_may_write_them_is_dead() -> None:
    """1. One of a group's two processes falls silent in the middle of a put; its session is ended.
    2. The other says goodbye, and the group is over: the first may still write. 3. It dies."""
    sessions = Sessions(8, 30.0)
    with process() as first, process() as second:
        silent = opened(sessions, first)
        other = opened(sessions, second, silent.group.token)
        assert other.group is silent.group
        assert sessions.close(silent, may_write=True) is None
        ended = sessions.close(other)
        assert ended is silent.group
        assert sessions.has_writer_left(ended.number)
        (pidfd,) = sessions.pidfds()
        assert sessions.of_dead(pidfd) == []
        assert sessions.process_died(pidfd) == [ended.number]
        assert not sessions.has_writer_left(ended.number)
        assert sessions.pidfds() == sessions.process_died(pidfd) == []


def test_a_living_group_keeps_what_a_dead_process_left() -> None:
    sessions = Sessions(8, 30.0)
    with process() as first, process() as second:
        silent = opened(sessions, first)
        other = opened(sessions, second, silent.group.token)
        sessions.close(silent, may_write=True)
        dead = next(fd for fd in sessions.pidfds() if not sessions.of_dead(fd))
        assert sessions.process_died(dead) == []
        assert not sessions.has_writer_left(other.group.number)
        assert sessions.close(other) is other.group
        sessions.close_all()


def test_idle_is_who_lives_and_says_nothing() -> None:
    sessions = Sessions(2, 30.0)
    with process() as pid:
        watched, speaking = opened(sessions, pid), opened(sessions, pid)
        with pytest.raises(WireError, match=r"limits\.max_sessions"):
            sessions.check_room()
        unseen = opened(sessions, 0)
        sessions.get(speaking.token, 20.0)
        assert sessions.idle(31.0) == [watched]
        assert sessions.silent(31.0) == [unseen]
        sessions.close_all()

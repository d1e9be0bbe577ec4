"""Freed memory goes back once a minute."""

from __future__ import annotations

from hicache.freed import EVERY_S, FreedMemory


def test_once_a_minute() -> None:
    freed = FreedMemory(100.0)
    calls: list[int] = []
    freed._trim = calls.append
    for now_s in (
        100.0,
        100.0 + EVERY_S - 1,
        100.0 + EVERY_S,
        101.0 + EVERY_S,
        100.0 + 2 * EVERY_S,
    ):
        freed.tick(now_s)
    assert calls == [0, 0]

"""Clearing namespaces between other requests: who is told what, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from hicache.config import DeadlinesConfig, LimitsConfig
from hicache.daemon.gate import Gate
from hicache.daemon.operations.clear import MAX_PEERS, STEP_BLOCKS, Clearances
from hicache.daemon.pending import Part, Peer
from hicache.daemon.sessions import Sessions
from hicache.engine import plan as p
from hicache.engine.requests import clear as clearing
from hicache.protocol.keys import NamespaceSpec
from hicache.protocol.messages import WireError
from hicache.protocol.operations import ClearReply, Reply
from tests.engine.world import MAPPED, ON_DISK, World, tokens_of

TIERS = (("dram", 4 * STEP_BLOCKS, MAPPED), ("disk", 4 * STEP_BLOCKS, ON_DISK))
LONG = tokens_of(*range(1, 2 * STEP_BLOCKS + 1))
OTHER = b"o" * 32


class Desk:
    """`told`: (request, cleared, complete), in the order in which they were answered."""

    def __init__(self) -> None:
        self.world = World(TIERS)
        self.told: list[tuple[int, int, bool]] = []
        limits = LimitsConfig()
        sessions = Sessions(limits.max_sessions, limits.session_ttl_s)
        engine, deadlines = self.world.engine, DeadlinesConfig()
        gate = Gate(engine, sessions, {}, "epoch", deadlines, limits, self)
        self.clearances = Clearances(gate)

    def send(
        self, peer: Peer, message: Mapping[str, Any] | Reply, parts: Sequence[Part] = ()
    ) -> None:
        assert isinstance(message, ClearReply)
        self.told.append((message.id, message.cleared, message.complete))

    def dispatch(self, plan: p.Plan[Any]) -> None:
        self.world.engine.identify(plan.moves)
        self.world.in_flight.update({move.id: move for move in plan.moves})
        self.world.engine.validate()

    def describe(self, spec: NamespaceSpec) -> None:
        pass

    def ask(self, request: int, namespace: int = 0, patience_s: float = 60.0) -> None:
        now_s = self.world.now_s
        self.clearances.ask(Peer(b"peer", request), namespace, now_s + patience_s, now_s)

    def go_on(self) -> None:
        """Until nothing is left to do before a tick."""
        while self.clearances.is_stepping:
            self.clearances.go_on(self.world.now_s)


def test_a_long_prompt_is_forgotten_in_steps() -> None:
    desk = Desk()
    desk.world.store(LONG)
    desk.ask(1)
    assert len(desk.world.engine.residency.blocks) == STEP_BLOCKS
    assert desk.told == []
    desk.go_on()
    assert desk.told == [(1, 2 * STEP_BLOCKS, True)]
    assert len(desk.clearances) == 0


def test_who_asks_while_it_is_under_way_joins_it_and_it_begins_once_more() -> None:
    """1. Somebody clears. 2. Where it has been, somebody stores, and clears. 3. Both are told when
    that is gone, too."""
    desk = Desk()
    desk.world.store(LONG)
    desk.ask(1)
    desk.world.store(tokens_of(7_000))
    desk.ask(2)
    assert len(desk.clearances) == 1
    desk.go_on()
    assert desk.told == [(1, 2 * STEP_BLOCKS + 1, True), (2, 2 * STEP_BLOCKS + 1, True)]
    assert len(desk.world.engine.residency.blocks) == 0


def test_who_has_waited_long_enough_is_told_what_was_forgotten_by_then() -> None:
    """1. What is cleared is on its way to disk. 2. One gives up waiting. 3. It has arrived, and is
    deleted: the other one is told that it is gone."""
    desk = Desk()
    desk.world.store(tokens_of(1, 2), durable=True)
    desk.ask(1, patience_s=5.0)
    desk.ask(2)
    assert not desk.clearances.is_stepping
    desk.world.now_s += 6
    desk.clearances.tick(desk.world.now_s)
    assert desk.told == [(1, 0, False)]
    desk.world.finish_all()
    desk.clearances.tick(desk.world.now_s)
    desk.go_on()
    assert desk.told == [(1, 0, False)]
    desk.world.finish_all()
    desk.clearances.tick(desk.world.now_s)
    desk.go_on()
    assert desk.told == [(1, 0, False), (2, 2, True)]


def test_who_is_told_that_it_is_over_is_told_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on its way for ever is not waited for, and not said to be gone."""
    monkeypatch.setattr(clearing, "MAX_PASSES", 2)
    desk = Desk()
    desk.world.store(tokens_of(1, 2), durable=True)
    desk.ask(1)
    desk.clearances.tick(desk.world.now_s)
    desk.go_on()
    assert desk.told == [(1, 0, False)]
    assert len(desk.clearances) == 0


def test_two_namespaces_take_turns() -> None:
    desk = Desk()
    other = desk.world.open(OTHER, 4096)
    desk.world.store(LONG)
    desk.world.store(tokens_of(1, 2), namespace=other)
    desk.ask(1)
    desk.ask(2, other)
    desk.go_on()
    assert sorted(desk.told) == [(1, 2 * STEP_BLOCKS, True), (2, 2, True)]


def test_a_disk_that_has_enough_to_do_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It pauses until a tick, instead of keeping the loop busy."""
    monkeypatch.setattr(clearing, "MAX_MOVES", 1)
    desk = Desk()
    for number in (1, 2, 3):
        desk.world.store(tokens_of(number), durable=True)
    desk.world.finish_all()
    monkeypatch.setattr("hicache.daemon.operations.clear.STEP_BLOCKS", 1)
    desk.ask(1)
    desk.go_on()
    assert len(desk.world.in_flight) == 1
    for _ in range(3):
        desk.world.finish_all()
        desk.clearances.tick(desk.world.now_s)
        desk.go_on()
    assert desk.told == [(1, 3, True)]


def test_another_namespace_has_its_number_by_now() -> None:
    """1. It is being cleared, empty, and forgotten for another one. 2. What goes on is over: the
    new one keeps what it has."""
    desk = Desk()
    w = desk.world
    w.store(LONG)
    desk.ask(1)
    w.do(p.Clear(0, w.now_s))
    number = w.do(p.OpenNamespace(OTHER, 2, 4096, instead_of=0))
    w.digests[number] = OTHER
    w.store(tokens_of(1, 2))
    desk.go_on()
    assert desk.told == [(1, STEP_BLOCKS, True)]
    assert len(w.engine.residency.blocks) == 2


def test_only_so_many_may_wait() -> None:
    desk = Desk()
    desk.world.store(tokens_of(1), durable=True)
    for request in range(MAX_PEERS):
        desk.ask(request)
    with pytest.raises(WireError, match=f"{MAX_PEERS} others") as caught:
        desk.ask(MAX_PEERS)
    assert caught.value.code == "refused"

"""Random histories of a CacheEngine against a dict that is right, every invariant after each step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hicache.engine import plan as p
from hicache.engine.planner import PlannerSettings
from hicache.engine.settings import EngineSettings
from tests.engine.world import STEP, THREE_TIERS, TWO_TIERS, World, keys_of, tokens_of

# Few symbols and short prompts: prefixes are shared, tiers overflow, races happen.
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(lambda b: tokens_of(*b))


class EngineMachine(RuleBasedStateMachine):
    tiers = THREE_TIERS
    policy = "write_back"

    def __init__(self) -> None:
        super().__init__()
        reload = PlannerSettings(mode="always_reload")
        self.world = World(
            self.tiers,
            EngineSettings(write_policy=self.policy, planner=reload),  # type: ignore[arg-type]
        )
        self.committed: set[bytes] = set()
        self.tickets: dict[int, tuple[bytes, p.Placed]] = {}
        self.leases: dict[int, tuple[bytes, int]] = {}
        self.got: dict[int, set[int]] = {}
        self.down: set[str] = set()

    @rule(tokens=prompts, data=st.data())
    def put(self, tokens: bytes, data: st.DataObject) -> None:
        first = data.draw(st.integers(0, len(tokens) // STEP - 1))
        placed = self.world.put(tokens, first)
        keys = keys_of(tokens)
        busy = {keys_of(t)[i] for t, pl in self.tickets.values() for i in pl.indices.tolist()}
        assert not busy & {keys[i] for i in placed.indices.tolist()}, "two writers of one block"
        if placed.ticket:
            self.world.write(tokens, placed)
            self.tickets[placed.ticket] = (tokens, placed)
        assert len(placed.indices) == len(placed.slots)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.tickets)))
        tokens, placed = self.tickets.pop(ticket)
        size = len(placed.indices)
        mask = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)), bool)
        indices = placed.indices[mask]
        durable = data.draw(st.booleans())
        done = self.world.do(p.Commit(ticket, indices, self.world.now_s, durable))
        assert done == len(indices)
        self.committed.update(keys_of(tokens)[i] for i in indices.tolist())

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), gone=st.booleans())
    def abort(self, data: st.DataObject, gone: bool) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.tickets)))
        del self.tickets[ticket]
        self.world.do(p.Abort(ticket, self.world.now_s, gone))
        if not gone and data.draw(st.booleans()):
            self.world.do(p.Abort(ticket, self.world.now_s, False))

    @rule(tokens=prompts)
    def match(self, tokens: bytes) -> None:
        matched = self.world.match(tokens)
        keys = keys_of(tokens)
        assert all(key in self.committed for key in keys[: matched.hit_blocks]), "a false hit"
        assert sum(run.num_blocks for run in matched.runs) == matched.hit_blocks
        if matched.lease:
            self.leases[matched.lease] = (tokens, matched.decision.reload_blocks)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def fetch(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        if lease in self.got:
            return
        tokens, _ = self.leases[lease]
        fetched = self.world.do(p.Fetch(lease, self.world.now_s, self.world.now_s + 10))
        self.got[lease] = set()
        self.take(lease, tokens, fetched.ready)

    def take(self, lease: int, tokens: bytes, runs: object) -> None:
        assert isinstance(runs, list | tuple)
        self.world.read(0, runs, tokens)
        for run in runs:
            positions = set(range(run.first, run.first + len(run.slots)))
            assert not positions & self.got[lease], "told twice"
            self.got[lease] |= positions

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        del self.leases[lease]
        self.got.pop(lease, None)
        assert self.world.do(p.Release(lease, self.world.now_s))
        assert not self.world.do(p.Release(lease, self.world.now_s))

    @precondition(lambda self: self.world.in_flight)
    @rule(data=st.data(), how=st.sampled_from(["ok", "ok", "ok", "failed", "corrupt"]))
    def outcome(self, data: st.DataObject, how: str) -> None:
        some = data.draw(
            st.lists(st.sampled_from(sorted(self.world.in_flight)), min_size=1, unique=True)
        )
        if how == "corrupt":
            some = [n for n in some if self.world.in_flight[n].src == "disk"]
            some = [n for n in some if self.world.in_flight[n].dst is not None]
            for number in some:
                identity = self.world.in_flight[number].identity
                assert identity is not None
                self.world.rows.pop(identity.key, None)
        if some:
            self.world.finish(*some, ok=how == "ok", corrupt=how == "corrupt")

    @invariant()
    def arrivals_are_right(self) -> None:
        for lease, runs in self.world.arrived.items():
            if lease in self.leases:
                self.take(lease, self.leases[lease][0], runs)
        self.world.arrived.clear()
        for lease in self.world.finished & set(self.leases) & set(self.got):
            leased = self.world.engine.residency.leases.leases[lease]
            whole = set(range(min(leased.failed_at, len(leased.ids))))
            assert whole <= self.got[lease], "said to be finished, and blocks are missing"
        self.world.finished.clear()

    @rule()
    def tick(self) -> None:
        self.world.now_s += 30
        self.world.do(p.Tick(self.world.now_s))
        book = self.world.engine.residency.leases
        self.leases = {k: v for k, v in self.leases.items() if k in book.leases}
        self.tickets = {k: v for k, v in self.tickets.items() if k in book.tickets}

    @rule()
    def writer_gone(self) -> None:
        self.world.do(p.WriterGone(1, self.world.now_s))
        self.leases.clear()
        self.tickets.clear()
        assert sum(pool.quarantined_bytes for pool in self.world.engine.residency.pools) == 0

    @rule(tier=st.sampled_from(["hbm", "dram", "disk"]))
    def lose(self, tier: str) -> None:
        names = [t.name for t in self.world.engine.residency.tiers]
        if tier in names and tier != "dram" and tier not in self.down:
            self.down.add(tier)
            self.world.lose(tier)
            self.tickets = {
                k: v
                for k, v in self.tickets.items()
                if k in self.world.engine.residency.leases.tickets
            }

    @precondition(lambda self: self.down)
    @rule()
    def recover(self) -> None:
        for tier in sorted(self.down):
            self.world.recover(tier)
        self.down.clear()

    @rule()
    def clear(self) -> None:
        self.world.do(p.Clear(self.world.namespace, self.world.now_s))

    @rule()
    def flush(self) -> None:
        for _ in range(200):
            if not self.world.do(p.Flush(self.world.now_s)):
                break
            if self.world.in_flight:
                self.world.finish(*self.world.in_flight)
        else:
            raise AssertionError("flush never ends")

    def teardown(self) -> None:
        """Quiet at the end: nothing leaks once everybody has gone."""
        self.world.do(p.WriterGone(1, self.world.now_s))
        self.world.finish_all()
        house = self.world.engine.residency
        assert not house.moves
        assert not house.moves_of
        assert not house.leases.leases
        assert not self.world.engine.fetching.waiters
        assert not self.world.engine.fetching.unplaced
        assert sum(house.draining_bytes) == 0


class WriteThroughMachine(EngineMachine):
    policy = "write_through"


class SelectiveMachine(EngineMachine):
    policy = "write_through_selective"


class UnmappedHbmMachine(EngineMachine):
    """HBM as on a GPU without a way in for clients, and nothing durable below."""

    tiers = TWO_TIERS


@pytest.mark.parametrize(
    "machine", [EngineMachine, WriteThroughMachine, SelectiveMachine, UnmappedHbmMachine]
)
def test_random_histories(machine: type[EngineMachine]) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        machine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None)
    )

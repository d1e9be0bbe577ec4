"""Random histories of a CacheEngine against a dict that is right; all invariants at every step.

Two namespaces with blocks of one and of two pages share the tiers, and two owners ask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hicache.engine import plan as p
from hicache.engine.planner.planner import PlannerSettings
from hicache.engine.policies.hazard.evaluation import unjudged
from hicache.engine.policies.hazard.model import NUM_BINS, Model
from hicache.engine.residency.pinned import pinned_bytes
from hicache.engine.settings import EngineSettings
from hicache.tiers.block import TierTraits
from tests.engine.policies.registry import every_policy
from tests.engine.world import (
    BLOCK_BYTES,
    FOUR_TIERS,
    MAPPED,
    ON_DISK,
    ONE_TIER,
    STEP,
    THREE_TIERS,
    TWO_TIERS,
    UNMAPPED,
    World,
    keys_of,
    tokens_of,
)

OTHER_DIGEST = b"o" * 32

# Few symbols and short prompts: prefixes are shared, tiers overflow, races happen.
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(lambda b: tokens_of(*b))
owners = st.integers(1, 2)
namespaces = st.sampled_from([0, 0, 1])


class EngineMachine(RuleBasedStateMachine):
    tiers: Sequence[tuple[str, int, TierTraits]] = THREE_TIERS
    policy = "write_back"
    eviction = "lru"
    min_return = 0.0
    write_bytes_per_s = math.inf
    num_namespaces = 1
    slot_bytes: tuple[int, ...] = ()
    slab_bytes = BLOCK_BYTES
    prompts_at_start = 0
    num_histories = 30
    max_pinned = 0.5

    def __init__(self) -> None:
        super().__init__()
        reload = PlannerSettings(mode="always_reload")
        self.world = World(
            self.tiers,
            EngineSettings(
                write_policy=self.policy,  # type: ignore[arg-type]
                planner=reload,
                max_pinned=self.max_pinned,
            ),
            self.slab_bytes,
            self.eviction,
            self.min_return,
            self.write_bytes_per_s,
        )
        if self.num_namespaces > 1:
            self.world.open(OTHER_DIGEST, 2 * BLOCK_BYTES, self.slot_bytes)
        self.committed: set[bytes] = set()
        self.tickets: dict[int, tuple[list[bytes], p.Placed, int]] = {}
        self.leases: dict[int, tuple[bytes, int, int]] = {}
        self.got: dict[int, set[int]] = {}
        self.pins: dict[int, tuple[bytes, int, int, float]] = {}
        self.has_lost = False
        self.offered: list[tuple[bytes, int]] = []
        self.down: set[str] = set()
        for number in range(self.prompts_at_start):
            tokens = tokens_of(number % 3, number // 3 % 3, 2, number // 9)
            self.world.store(tokens)
            self.world.finish_all()
            self.committed.update(self.keys(tokens, 0))
            self.offered.append((tokens, 0))

    def keys(self, tokens: bytes, namespace: int) -> list[bytes]:
        return keys_of(tokens, self.world.digests[namespace])

    @rule(tokens=prompts, owner=owners, namespace=namespaces, data=st.data())
    def put(self, tokens: bytes, owner: int, namespace: int, data: st.DataObject) -> None:
        namespace %= self.num_namespaces
        first = data.draw(st.integers(0, len(tokens) // STEP - 1))
        placed = self.world.put(tokens, first, None, owner, namespace)
        keys = self.keys(tokens, namespace)
        busy = {theirs[i] for theirs, pl, _ in self.tickets.values() for i in pl.indices.tolist()}
        assert not busy & {keys[i] for i in placed.indices.tolist()}, "two writers of one block"
        asked = len(tokens) // STEP - first
        assert len(placed.indices) + placed.present + placed.busy + placed.refused == asked
        if placed.ticket:
            self.world.write(tokens, placed, namespace)
            self.tickets[placed.ticket] = (keys, placed, owner)
            self.offered.append((tokens, namespace))
        assert len(placed.indices) == len(placed.slots)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.tickets)))
        keys, placed, _ = self.tickets.pop(ticket)
        size = len(placed.indices)
        mask = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)), bool)
        indices = placed.indices[mask]
        durable = data.draw(st.booleans())
        done = self.world.do(p.Commit(ticket, indices, self.world.now_s, durable))
        assert done == len(indices)
        self.committed.update(keys[i] for i in indices.tolist())

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), gone=st.booleans())
    def abort(self, data: st.DataObject, gone: bool) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.tickets)))
        del self.tickets[ticket]
        self.world.do(p.Abort(ticket, self.world.now_s, gone))
        if not gone and data.draw(st.booleans()):
            self.world.do(p.Abort(ticket, self.world.now_s, False))

    @rule(tokens=prompts, owner=owners, namespace=namespaces, by_worker=st.booleans())
    def match(self, tokens: bytes, owner: int, namespace: int, by_worker: bool) -> None:
        namespace %= self.num_namespaces
        matched = self.world.match(tokens, owner, namespace, by_worker=by_worker)
        keys = self.keys(tokens, namespace)
        assert all(key in self.committed for key in keys[: matched.hit_blocks]), "a false hit"
        assert sum(run.num_blocks for run in matched.runs) == matched.hit_blocks
        if matched.lease:
            self.leases[matched.lease] = (tokens, namespace, owner)

    @precondition(lambda self: self.offered)
    @rule(data=st.data(), ttl_s=st.sampled_from([10.0, 100.0]), by_worker=st.booleans())
    def warm(self, data: st.DataObject, ttl_s: float, by_worker: bool) -> None:
        """What is leased stays, and nothing is forgotten for it."""
        tokens, namespace = data.draw(st.sampled_from(self.offered))
        self.world.engine.matching.settle()
        residency = self.world.engine.residency
        leased = np.flatnonzero(residency.blocks.leases)
        held = leased[residency.blocks.tags[leased] != 0]
        now_s = self.world.now_s
        warmed = self.world.do(p.Warm(namespace, tokens, now_s, ttl_s, by_worker))
        keys = self.keys(tokens, namespace)
        assert all(key in self.committed for key in keys[: warmed.held]), "a false hit"
        assert 0 <= warmed.warm + warmed.refused <= warmed.held
        assert bool(warmed.warming) == (warmed.warm + warmed.refused < warmed.held)
        assert (residency.blocks.tags[held] != 0).all(), "a leased block is gone"

    @precondition(lambda self: self.offered)
    @rule(data=st.data(), ttl_s=st.sampled_from([50.0, 1e6]))
    def pin(self, data: st.DataObject, ttl_s: float) -> None:
        tokens, namespace = data.draw(st.sampled_from(self.offered))
        now_s = self.world.now_s
        pinned = self.world.do(p.PinPrompt(namespace, tokens, "", now_s, ttl_s))
        keys = self.keys(tokens, namespace)
        assert all(key in self.committed for key in keys[: pinned.blocks]), "a false hit"
        if pinned.pin:
            assert pinned.blocks
            self.pins[pinned.pin] = (tokens, namespace, pinned.blocks, now_s + ttl_s)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin = data.draw(st.sampled_from(sorted(self.pins)))
        del self.pins[pin]
        assert self.world.do(p.Unpin(pin))
        assert not self.world.do(p.Unpin(pin))

    @invariant()
    def what_is_pinned_is_held(self) -> None:
        """Whatever happens, but for a copy that is corrupt and a tier that dies."""
        residency = self.world.engine.residency
        assert residency.leases.pins.keys() == self.pins.keys()
        self.world.engine.matching.settle()
        for pin, (tokens, namespace, blocks, _) in self.pins.items():
            assert self.hit_blocks(tokens, namespace) >= blocks, f"pin {pin} has lost blocks"
        for tier, spec in enumerate(residency.tiers):
            most = self.max_pinned * spec.capacity_bytes
            assert self.has_lost or pinned_bytes(residency, tier) <= most

    def hit_blocks(self, tokens: bytes, namespace: int) -> int:
        question = p.MatchPrompt(namespace, tokens, 1, self.world.now_s, 1.0)
        return self.world.engine.score(question).hit_blocks

    def forgive(self) -> None:
        """Copies may be gone: pins hold what is left."""
        self.has_lost = True
        self.world.engine.matching.settle()
        for pin, (tokens, namespace, blocks, until_s) in self.pins.items():
            held = min(blocks, self.hit_blocks(tokens, namespace))
            self.pins[pin] = (tokens, namespace, held, until_s)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def fetch(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        if lease in self.got:
            return
        fetched = self.world.fetch(lease, by_worker=data.draw(st.booleans()))
        self.got[lease] = set()
        self.take(lease, fetched.ready)

    def take(self, lease: int, runs: Sequence[p.ReadyRun]) -> None:
        tokens, namespace, _ = self.leases[lease]
        self.world.read(0, runs, tokens, namespace)
        for run in runs:
            positions = set(range(run.first, run.first + len(run.slots)))
            assert not positions & self.got[lease], "told twice"
            self.got[lease] |= positions

    @precondition(lambda self: self.got.keys() & self.leases.keys())
    @rule(data=st.data(), seconds=st.floats(0.0, 10.0))
    def loaded(self, data: st.DataObject, seconds: float) -> None:
        lease = data.draw(st.sampled_from(sorted(self.got.keys() & self.leases.keys())))
        self.world.do(p.Loading(lease, 0))
        if data.draw(st.booleans()):
            return  # it fails, or nobody waits for it
        runs = self.world.engine.readable_now(lease, 0, len(self.got[lease]))
        self.world.do(p.Loaded(lease, runs, seconds, self.world.now_s))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        del self.leases[lease]
        self.got.pop(lease, None)
        assert self.world.do(p.Release(lease, self.world.now_s))
        assert not self.world.do(p.Release(lease, self.world.now_s))

    @precondition(lambda self: self.world.in_flight)
    @rule(
        data=st.data(), how=st.sampled_from(["ok", "ok", "ok", "ok", "failed", "corrupt", "full"])
    )
    def outcome(self, data: st.DataObject, how: str) -> None:
        some = data.draw(
            st.lists(st.sampled_from(sorted(self.world.in_flight)), min_size=1, unique=True)
        )
        if how == "corrupt":
            some = [n for n in some if self.world.in_flight[n].src in self.world.records]
            some = [n for n in some if self.world.in_flight[n].dst is not None]
            for number in some:
                move = self.world.in_flight[number]
                assert move.identity is not None
                self.world.records[move.src].pop(move.identity.key, None)
        if how == "full":
            moves = self.world.in_flight
            some = [n for n in some if (moves[n].dst or moves[n].src) in self.world.records]
        if some:
            self.world.finish(
                *some, ok=how == "ok", corrupt=how == "corrupt", rejected=how == "full"
            )
        if how == "corrupt":
            self.forgive()

    @invariant()
    def arrivals_are_right(self) -> None:
        for lease, runs in self.world.arrived.items():
            if lease in self.leases:
                self.take(lease, runs)
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
        self.pins = {k: v for k, v in self.pins.items() if v[3] > self.world.now_s}

    @rule(owner=owners)
    def writer_gone(self, owner: int) -> None:
        self.world.do(p.WriterGone(owner, self.world.now_s))
        self.leases = {k: v for k, v in self.leases.items() if v[2] != owner}
        self.tickets = {k: v for k, v in self.tickets.items() if v[2] != owner}
        held = self.world.engine.residency.leases
        assert all(item.owner != owner for item in held.quarantine.values())
        ours = "durable", "foreseen"
        asked = {k for k, lease in held.leases.items() if lease.decision.reason not in ours}
        assert asked == set(self.leases)

    @rule(tier=st.sampled_from(["hbm", "dram", "disk", "shelf"]))
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
            self.forgive()

    @precondition(lambda self: self.down)
    @rule()
    def recover(self) -> None:
        for tier in sorted(self.down):
            self.world.begin_recovery(tier)
        self.down.clear()

    @rule(times=st.integers(1, 5))
    def tell_more(self, times: int) -> None:
        """A durable tier that is back tells some of what it holds, while others store and read."""
        for _ in range(times):
            if self.world.untold:
                self.world.tell_more(min(self.world.untold))

    @rule(tokens=prompts, namespace=namespaces, data=st.data())
    def reshape(self, tokens: bytes, namespace: int, data: st.DataObject) -> None:
        """A node is split, or merged with its parent, under leases and moves in flight."""
        residency = self.world.engine.residency
        self.world.engine.matching.settle()
        space = residency.namespaces[namespace % self.num_namespaces]
        path = residency.index.match(space.root, tokens, space.step)
        if not path.nodes:
            return
        node = data.draw(st.sampled_from(path.nodes))
        if len(node) > 1 and data.draw(st.booleans()):
            residency.candidates.queue(
                residency.index.split(node, data.draw(st.integers(1, len(node) - 1)), STEP)
            )
        else:
            residency.index.try_merge(node, space.step)
        self.world.engine.validate()

    @rule(most_blocks=st.integers(1, 20), begins=st.booleans())
    def clear(self, most_blocks: int, begins: bool) -> None:
        self.world.do(p.Clear(0, self.world.now_s, most_blocks, begins))

    @rule(num_bytes=st.integers(1, 10**9), seconds=st.floats(1e-6, 10.0), data=st.data())
    def measured(self, num_bytes: int, seconds: float, data: st.DataObject) -> None:
        if len(self.tiers) > 1:
            first, second = self.tiers[0][0], self.tiers[1][0]
            self.world.do(p.LinkMeasured(first, second, num_bytes, seconds))
        self.world.do(p.Observe(0, 1, num_bytes % 4096, num_bytes, seconds))
        if self.leases:
            lease = data.draw(st.sampled_from(sorted(self.leases)))
            self.world.do(p.ObserveReload(lease, num_bytes, seconds, seconds))

    @rule(num_slabs=st.integers(1, 3), in_haste=st.booleans())
    def shed(self, num_slabs: int, in_haste: bool) -> None:
        """The machine is short of memory. What is leased stays."""
        residency = self.world.engine.residency
        self.world.engine.matching.settle()
        leased = np.flatnonzero(residency.blocks.leases)
        held = leased[residency.blocks.tags[leased] != 0]
        self.world.do(p.Shed("dram", num_slabs, in_haste))
        assert (residency.blocks.tags[held] != 0).all(), "a leased block is gone"

    @rule()
    def regain(self) -> None:
        residency = self.world.engine.residency
        for page in sorted(residency.pools[residency.number_of("dram")].withheld):
            self.world.do(p.Regain("dram", page))

    @rule()
    def flush(self) -> None:
        for _ in range(200):
            if not self.world.do(p.Flush(self.world.now_s)):
                break
            if self.world.in_flight:
                self.world.finish(*self.world.in_flight)
        else:
            raise AssertionError("flush never ends")

    @rule(
        tokens=prompts,
        namespace=namespaces,
        ended=st.sampled_from(["", "turn", "tool_call", "conversation"]),
        finish_reason=st.sampled_from(["", "stop", "length"]),
        return_s=st.sampled_from([0.0, 1.0, 1e9]),
        keep=st.booleans(),
        answer_tokens=st.sampled_from([0, 7, 1 << 40]),
    )
    def hint(
        self,
        tokens: bytes,
        namespace: int,
        ended: p.Ended,
        finish_reason: str,
        return_s: float,
        keep: bool,
        answer_tokens: int,
    ) -> None:
        """Whatever is said, true or not, nothing may break: what is leased stays, what is found is
        right, what is held has room."""
        namespace %= self.num_namespaces
        now_s = self.world.now_s
        said = p.Hint(namespace, tokens, now_s, ended, finish_reason, return_s, keep, answer_tokens)
        self.world.engine.matching.settle()
        residency = self.world.engine.residency
        ids = [block for lease in residency.leases.leases.values() for block in lease.ids.tolist()]
        held = [block for block in ids if residency.blocks.tags[block]]
        self.world.do(said)
        assert all(residency.blocks.tags[block] for block in held), "a leased block is gone"

    @precondition(lambda self: self.world.engine.history is not None)
    @rule(seed=st.integers(0, 99), num_kinds=st.integers(0, 20))
    def refit(self, seed: int, num_kinds: int) -> None:
        """A model that knows nothing, trusted or not: nothing may break."""
        history = self.world.engine.history
        assert history is not None
        rng = np.random.default_rng(seed)
        ranks = rng.random((num_kinds + 1, NUM_BINS)).tolist()
        hits = rng.random(unjudged().shape)
        history.adopt(Model(ranks[1:], ranks[0], ranks[1:], ranks[0], hits))

    def teardown(self) -> None:
        """Quiet at the end: nothing leaks once everybody has gone."""
        self.regain()
        for pin in self.pins:
            assert self.world.do(p.Unpin(pin))
        for owner in (1, 2):
            self.world.do(p.WriterGone(owner, self.world.now_s))
        self.world.finish_all()
        residency = self.world.engine.residency
        for _ in range(20):  # what was begun at the last outcome goes on at the next tick
            if not (residency.leases.leases or sum(residency.draining_bytes)):
                break
            self.world.do(p.Tick(self.world.now_s))
            self.world.finish_all()
        assert not residency.moves
        assert not residency.moves.of_block
        assert not residency.leases.leases
        assert not self.world.engine.fetching.waiters
        assert not self.world.engine.fetching.unplaced
        assert sum(residency.draining_bytes) == 0
        for tier, spec in enumerate(residency.tiers):
            if spec.mapped and residency.is_up(tier):
                self.make_room(tier)

    def make_room(self, tier: int) -> None:
        """The free list never starves: what nobody holds makes room for one block more."""
        residency, evictor = self.world.engine.residency, self.world.engine.evictor
        for _ in range(50):
            if evictor.make_room(tier, BLOCK_BYTES, 1):
                return
            self.world.do(p.Tick(self.world.now_s))
            self.world.finish_all()
        raise AssertionError(f"{residency.tiers[tier].name} is full and nothing goes")


class WriteThroughMachine(EngineMachine):
    policy = "write_through"


class SelectiveMachine(EngineMachine):
    policy = "write_through_selective"


class GatedMachine(EngineMachine):
    """What memory gives up is written or forgotten, as a model says that knows nothing and a budget
    that is soon spent allows."""

    eviction = "hazard"
    min_return = 0.3
    write_bytes_per_s = BLOCK_BYTES / 600


class TwoPersistentMachine(EngineMachine):
    """A slow tier that hosts share beside the disk: both are written, read, lost and restored."""

    tiers = FOUR_TIERS


class SelectiveTwoPersistentMachine(TwoPersistentMachine):
    policy = "write_through_selective"


class ThroughTwoPersistentMachine(TwoPersistentMachine):
    """A budget for each of two persistent tiers, and sizes of slots that differ in all of them."""

    policy = "write_through"
    write_bytes_per_s = BLOCK_BYTES / 600
    num_namespaces = 2
    slot_bytes = (3 * BLOCK_BYTES, 2 * BLOCK_BYTES, BLOCK_BYTES, 2 * BLOCK_BYTES)


class UnmappedHbmMachine(EngineMachine):
    """HBM as on a GPU without a way in for clients, and nothing durable below."""

    tiers = TWO_TIERS


class PinnedMachine(EngineMachine):
    """Full at the start, and pins may hold everything: what finds no room is refused, and nothing
    waits for ever."""

    prompts_at_start = 9
    num_histories = 10
    max_pinned = 1.0


class OneTierMachine(EngineMachine):
    """Nothing below: what goes is forgotten, by the short way where nobody holds it."""

    tiers = ONE_TIER


class TwoSizesMachine(EngineMachine):
    """Two namespaces with blocks of one and of two pages in the same tiers."""

    num_namespaces = 2


class SizesByTierMachine(TwoSizesMachine):
    """As before, and a block of the second takes another size in each tier."""

    slot_bytes = (3 * BLOCK_BYTES, 2 * BLOCK_BYTES, BLOCK_BYTES)


class TwoSizesInSlabsMachine(EngineMachine):
    """As before, several slots to a slab, and full of the first size at the start: the second gets
    room by evacuations only."""

    num_namespaces = 2
    prompts_at_start = 24
    num_histories = 12  # a full one takes its time; the campaign has more of them
    slab_bytes = 4 * BLOCK_BYTES
    tiers = (("dram", 12, MAPPED), ("disk", 64, ON_DISK))


class TwoSizesInMemoryMachine(TwoSizesInSlabsMachine):
    """Nothing durable below: evacuated blocks are forgotten with all that hangs below them."""

    tiers = (("hbm", 8, UNMAPPED), ("dram", 12, MAPPED))


POLICIES_WITH_HISTORY = sorted(every_policy().keys() - {"lru"})


def of_policies(machine: type[EngineMachine]) -> list[type[EngineMachine]]:
    """The machine once for each policy but LRU."""
    return [
        type(f"{name.title()}{machine.__name__}", (machine,), {"eviction": name})
        for name in POLICIES_WITH_HISTORY
    ]


MACHINES = [
    EngineMachine,
    WriteThroughMachine,
    SelectiveMachine,
    GatedMachine,
    TwoPersistentMachine,
    SelectiveTwoPersistentMachine,
    ThroughTwoPersistentMachine,
    UnmappedHbmMachine,
    PinnedMachine,
    OneTierMachine,
    TwoSizesMachine,
    SizesByTierMachine,
    TwoSizesInSlabsMachine,
    TwoSizesInMemoryMachine,
    *of_policies(EngineMachine),
    *of_policies(OneTierMachine),
    *of_policies(TwoSizesInSlabsMachine),
]


QUICK = (EngineMachine, TwoPersistentMachine, OneTierMachine, WriteThroughMachine, PinnedMachine)


@pytest.mark.parametrize(
    "machine",
    [m if m in QUICK else pytest.param(m, marks=pytest.mark.thorough) for m in MACHINES],
)
def test_random_histories(machine: type[EngineMachine]) -> None:
    num_histories = machine.num_histories
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=num_histories, stateful_step_count=40),
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", MACHINES)
def test_long_random_histories(machine: type[EngineMachine]) -> None:
    """Some 5,000 steps each, more than 100,000 in all."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=120,
            stateful_step_count=50,
            suppress_health_check=list(HealthCheck),
        ),
    )

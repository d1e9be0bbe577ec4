"""A scripted world around a CacheEngine: slots with contents, moves that end when told to.

`World` carries out plans against a dict from (tier, slot) to the key of what stands there, so that
a slot reused too early, a copy of the wrong block, or a miss of a stored one is seen at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from hicache.engine import plan as p
from hicache.engine.core import CacheEngine
from hicache.engine.policies.catalog import policies_of
from hicache.engine.settings import EngineSettings
from hicache.protocol.keys import chain_keys
from hicache.tiers.block import PAGE_BYTES, TierSpec, TierTraits
from hicache.tiers.pool import SlotPool
from hicache.tiers.restore_order import StoredForest
from tests.engine.policies.registry import every_policy
from tests.tiers.blocks import Row, scanned

A = TypeVar("A")

BLOCK_TOKENS = 2
STEP = BLOCK_TOKENS * 4
BLOCK_BYTES = 4096
DIGEST = b"n" * 32
ROOT = bytes(32)
ZERO_S = 1_700_000_000
"""When the world's clock stood at 0, in seconds since 1970."""
MAX_TOLD = 3

MAPPED = TierTraits(mapped=True)
UNMAPPED = TierTraits()
ON_DISK = TierTraits(persistent=True, deletion_is_io=True, keeps_whole_prefixes=True)
SHELF = TierTraits(
    persistent=True, deletion_is_io=True, keeps_whole_prefixes=True, shared_between_hosts=True
)
"""A tier that exists only in tests."""
THREE_TIERS = (("hbm", 6, MAPPED), ("dram", 8, MAPPED), ("disk", 12, ON_DISK))
FOUR_TIERS = (*THREE_TIERS, ("shelf", 16, SHELF))
ONE_TIER = (("dram", 8, MAPPED),)
TWO_TIERS = (("hbm", 6, UNMAPPED), ("dram", 8, MAPPED))


def tokens_of(*blocks: int) -> bytes:
    """A prompt whose i-th block holds the token blocks[i] twice."""
    return np.repeat(np.array(blocks, "<u4"), BLOCK_TOKENS).tobytes()


def keys_of(tokens: bytes, digest: bytes = DIGEST) -> list[bytes]:
    return chain_keys(digest, ROOT, tokens, STEP)


class World:
    """An engine, the contents of all slots, and the moves in flight."""

    def __init__(
        self,
        tiers: Sequence[tuple[str, int, TierTraits]] = THREE_TIERS,
        settings: EngineSettings | None = None,
        slab_bytes: int = BLOCK_BYTES,
        eviction: str = "lru",
        min_return: float = 0.0,
        write_bytes_per_s: float = math.inf,
    ) -> None:
        gate: dict[str, float] = {"min_return": min_return, "write_bytes_per_s": write_bytes_per_s}
        specs = [
            TierSpec(name, slots * BLOCK_BYTES, traits, **(gate if traits.persistent else {}))
            for name, slots, traits in tiers
        ]
        pools = [SlotPool(spec.capacity_bytes, slab_bytes) for spec in specs]
        links = _links(specs)
        new_policy, history = policies_of([every_policy()[eviction]] * len(specs))
        self.engine = CacheEngine(
            specs, pools, links, settings or EngineSettings(), lambda: 0.99, new_policy, history
        )
        self.now_s = 1.0
        self.contents: dict[tuple[str, int], bytes] = {}
        self.slot_sizes: dict[tuple[str, int], int] = {}
        self.records: dict[str, dict[bytes, Row]] = {s.name: {} for s in specs if s.persistent}
        self.orphans: list[bytes] = []
        self.untold: dict[str, Iterator[list[bytes]]] = {}
        self.digests: dict[int, bytes] = {}
        self.in_flight: dict[int, p.Move] = {}
        self.arrived: dict[int, list[p.ReadyRun]] = {}
        self.finished: set[int] = set()
        self.durable: set[int] = set()
        self.namespace = self.open(DIGEST, BLOCK_BYTES)
        for spec in specs:
            self.do(p.TierUp(spec.name, self.now_s))

    def do(self, event: p.Event[A]) -> A:
        """Handle an event, take its moves, check every invariant."""
        plan = self.engine.handle(event)
        self._check_reshaped(plan)
        later = self.engine.catch_up()
        if later is not None:
            self._check_reshaped(later)
        moves = plan.moves + (later.moves if later else [])
        self.engine.identify(moves)
        for move in moves:
            assert not (move.src in self.records and move.dst in self.records), "disk to disk"
            self.in_flight[move.id] = move
        if isinstance(plan.answer, p.Arrivals):
            for lease, runs in plan.answer.arrived.items():
                self.arrived.setdefault(lease, []).extend(runs)
            self.finished.update(plan.answer.finished)
            self.durable.update(plan.answer.durable)
        self.engine.validate()
        return plan.answer

    def _check_reshaped(self, plan: p.Plan[Any]) -> None:
        """A plan names the pages it cuts into slots of another size, before it uses them."""
        for pages in plan.reshaped:
            for page in range(pages.first_page, pages.first_page + pages.num_pages):
                self.slot_sizes.pop((pages.tier, page), None)
        named = [(m.dst, m.dst_slot, m.dst_slot_bytes) for m in plan.moves if m.dst is not None]
        if isinstance(plan.answer, p.Placed) and plan.answer.ticket:
            ticket = self.engine.residency.leases.tickets[plan.answer.ticket]
            slot_bytes = self.slot_bytes(plan.answer.tier, ticket.namespace)
            named += [(plan.answer.tier, slot, slot_bytes) for slot in plan.answer.slots.tolist()]
        for tier, slot, slot_bytes in named:
            for page in range(slot, slot + slot_bytes // PAGE_BYTES):
                known = self.slot_sizes.setdefault((tier, page), slot_bytes)
                assert known == slot_bytes, f"{tier}: page {page} was reshaped without a word"

    @property
    def rows(self) -> dict[bytes, Row]:
        """What the disk holds."""
        return self.records["disk"]

    # --- shorthands ---------------------------------------------------------------------------

    def open(self, digest: bytes, block_bytes: int, slot_bytes: tuple[int, ...] = ()) -> int:
        """A namespace. The first one, `namespace`, is meant wherever none is named."""
        event = p.OpenNamespace(digest, BLOCK_TOKENS, block_bytes, slot_bytes=slot_bytes)
        number = self.do(event)
        self.digests[number] = digest
        return number

    def match(
        self, tokens: bytes, owner: int = 1, namespace: int = 0, *, by_worker: bool = False
    ) -> p.Matched:
        self.now_s += 1
        return self.do(
            p.MatchPrompt(namespace, tokens, owner, self.now_s, 100.0, by_worker=by_worker)
        )

    def fetch(
        self, lease: int, *, by_worker: bool = False, patience_s: float = 10.0
    ) -> p.FetchStarted:
        return self.do(p.Fetch(lease, self.now_s, self.now_s + patience_s, by_worker))

    def release(self, lease: int) -> bool:
        return self.do(p.Release(lease, self.now_s))

    def put(
        self,
        tokens: bytes,
        first: int = 0,
        last: int | None = None,
        owner: int = 1,
        namespace: int = 0,
    ) -> p.Placed:
        self.now_s += 1
        last = len(tokens) // STEP if last is None else last
        return self.do(p.Put(namespace, tokens, first, last, owner, self.now_s, 100.0))

    def write(self, tokens: bytes, placed: p.Placed, namespace: int = 0) -> None:
        """What a client does between put and commit."""
        keys = keys_of(tokens, self.digests[namespace])
        slot_bytes = self.slot_bytes(placed.tier, namespace)
        for index, slot in zip(placed.indices.tolist(), placed.slots.tolist(), strict=True):
            self._write_slot(placed.tier, slot, slot_bytes, keys[index])

    def commit(self, placed: p.Placed, durable: bool = False) -> int:
        return self.do(p.Commit(placed.ticket, placed.indices, self.now_s, durable))

    def store(
        self, tokens: bytes, durable: bool = False, owner: int = 1, namespace: int = 0
    ) -> p.Placed:
        """put, write, commit: as much as finds room at once."""
        placed = self.put(tokens, owner=owner, namespace=namespace)
        if placed.ticket:
            self.write(tokens, placed, namespace)
            self.commit(placed, durable)
        return placed

    def tiers_of(self, tokens: bytes, namespace: int = 0) -> list[str]:
        """Per known block of the prompt, the tiers it can be read from, as in "hbm+disk"; "-" where
        there is none. Asks the index, so that nothing is touched."""
        residency = self.engine.residency
        root = residency.namespaces[namespace].root
        ids = residency.index.match(root, tokens, STEP).ids()
        names = [tier.name for tier in residency.tiers]
        return [
            "+".join(name for n, name in enumerate(names) if tag >> n & 1) or "-"
            for tag in residency.blocks.tags[ids].tolist()
        ]

    def moving(self, src: str, dst: str | None) -> list[int]:
        """Moves in flight over a link, in the order they were handed out."""
        return [n for n, m in self.in_flight.items() if (m.src, m.dst) == (src, dst)]

    def finish(
        self, *moves: int, ok: bool = True, corrupt: bool = False, rejected: bool = False
    ) -> p.Arrivals:
        """End these moves. A successful one copies what its source slot holds by now."""
        outcomes = []
        for number in moves:
            move = self.in_flight.pop(number)
            if ok:
                self._carry_out(move)
            error = "" if ok else "told to fail"
            outcomes.append(p.Outcome(number, ok, 0.001, error, corrupt, rejected))
        self.now_s += 1
        return self.do(p.MovesDone(outcomes, self.now_s))

    def finish_all(self) -> None:
        """End moves until there are none left."""
        for _ in range(1000):
            if not self.in_flight:
                return
            self.finish(*self.in_flight)
        raise AssertionError("the engine keeps moving blocks for ever")

    def read(
        self, ids_first: int, runs: Sequence[p.ReadyRun], tokens: bytes, namespace: int = 0
    ) -> int:
        """Check that ready runs hold the right blocks. Returns how many."""
        keys = keys_of(tokens, self.digests[namespace])
        count = 0
        for run in runs:
            slot_bytes = self.slot_bytes(run.tier, namespace)
            for offset, slot in enumerate(run.slots.tolist()):
                found = self._read_slot(run.tier, slot, slot_bytes)
                assert found == keys[ids_first + run.first + offset], "wrong bytes"
                count += 1
        return count

    def _carry_out(self, move: p.Move) -> None:
        identity = move.identity
        if move.dst is None:
            assert identity is not None
            self.records[move.src].pop(identity.key, None)
            return
        if move.src in self.records:
            assert identity is not None
            content = identity.key
            assert content in self.records[move.src], "a read of a record that is not there"
        else:
            content = self._read_slot(move.src, move.src_slot, move.src_slot_bytes)
            if identity is not None:
                assert content == identity.key, "another block stands in the source slot"
        if move.dst in self.records:
            assert identity is not None
            rows = self.records[move.dst]
            rows[identity.key] = row(
                identity.key,
                identity.parent,
                identity.tokens,
                move.block_bytes,
                identity.hits,
                int(self.now_s) + ZERO_S,
                identity.namespace,
            )
            if identity.parent != ROOT and identity.parent not in rows:
                self.orphans.append(identity.key)
        else:
            self._write_slot(move.dst, move.dst_slot, move.dst_slot_bytes, content)

    def slot_bytes(self, tier: str, namespace: int) -> int:
        """What a block of the namespace takes in this tier."""
        residency = self.engine.residency
        return residency.namespaces[namespace].slot_bytes[residency.number_of(tier)]

    def _write_slot(self, tier: str, slot: int, slot_bytes: int, content: bytes) -> None:
        for page in range(slot, slot + slot_bytes // PAGE_BYTES):
            self.contents[tier, page] = content

    def _read_slot(self, tier: str, slot: int, slot_bytes: int) -> bytes:
        pages = range(slot, slot + slot_bytes // PAGE_BYTES)
        found = {self.contents[tier, page] for page in pages}
        assert len(found) == 1, "a slot that another one was written over"
        return found.pop()

    def lose(self, tier: str) -> None:
        """The tier's worker dies: its moves fail, then the engine hears of it."""
        self.untold.pop(tier, None)
        mine = [n for n, move in self.in_flight.items() if tier in (move.src, move.dst)]
        for number in mine:
            del self.in_flight[number]
        self.do(p.TierDown(tier, self.now_s))
        assert not any(tier in (m.src, m.dst) for m in self.in_flight.values())

    def recover(self, tier: str) -> None:
        """The worker is back; a persistent tier tells all it holds."""
        self.begin_recovery(tier)
        while tier in self.untold:
            self.tell_more(tier)

    def begin_recovery(self, tier: str) -> None:
        """The worker is back; what a persistent tier holds is still to be told."""
        is_persistent = tier in self.records
        self.do(p.TierUp(tier, self.now_s, is_restoring=is_persistent))
        if is_persistent:
            self.untold[tier] = self._tell(list(self.records[tier].values()), tier)

    def tell_more(self, tier: str = "disk") -> bool:
        """Some rows more. False when there were none left: the tier is restored."""
        homeless = next(self.untold[tier], None)
        for key in homeless or ():
            self.records[tier].pop(key, None)
        if homeless is None:
            del self.untold[tier]
            self.do(p.Restored(tier, self.now_s))
        return homeless is not None

    def restore(self, rows: Iterable[Row], tier: str = "disk") -> list[bytes]:
        """Tell the engine of rows of a persistent tier. Returns the keys of the homeless and of the
        orphans."""
        return [key for homeless in self._tell(list(rows), tier) for key in homeless]

    def _tell(self, rows: list[Row], tier: str) -> Iterator[list[bytes]]:
        """As a worker does it: a few rows at a time. Yields those that are to be removed."""
        forests: dict[tuple[bytes, int, int], StoredForest] = {}
        for row in rows:
            kind = row.namespace, row.block_bytes, len(row.tokens)
            forests.setdefault(kind, StoredForest(*kind)).add(scanned([row]))
        numbers = {digest: number for number, digest in self.digests.items()}
        first = 0
        for forest in forests.values():
            for told in forest.in_order(first, len(rows), MAX_TOLD):
                number = numbers[told.namespace]
                yield self.do(p.Restore(tier, number, told, self.now_s, float(ZERO_S)))
            first += len(forest)
            yield forest.orphans


def _links(specs: Sequence[TierSpec]) -> list[tuple[int, int]]:
    """As in a daemon: memory side by side, and each persistent tier with the slowest memory."""
    near = max(number for number, spec in enumerate(specs) if not spec.persistent)
    links = []
    for number, spec in enumerate(specs):
        if number != near:
            other = near if spec.persistent else number + 1
            links += [(number, other), (other, number)]
    return links


def row(
    key: bytes,
    parent: bytes,
    tokens: bytes,
    block_bytes: int = BLOCK_BYTES,
    hits: int = 0,
    used_s: int = ZERO_S,
    namespace: bytes = DIGEST,
) -> Row:
    """A block as a durable tier's scan finds it."""
    return Row(namespace, key, parent, tokens, block_bytes, hits, used_s)

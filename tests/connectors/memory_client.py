"""The client's API over a dict: what a connector sees of a daemon that always works, or does not.

`tier` names where blocks are said to lie; `reload` caps the advice; `spoil`, `lose`, `fail` make
things go wrong on purpose.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hicache.client import Decision, Match, PutResult
from hicache.client.results import FetchedRun
from hicache.protocol.keys import NamespaceSpec
from hicache.protocol.messages import TOKEN_BYTES, encode_tokens
from hicache.protocol.operations import DecisionName

Block = npt.NDArray[np.uint8]


class MemoryRun(FetchedRun):
    __slots__ = ("_good", "_views")

    def __init__(self, first: int, tier: str, views: list[Block], good: bool) -> None:
        super().__init__(first, tier, len(views))
        self._views, self._good = views, good

    @property
    def views(self) -> list[Block]:
        return self._views

    def verify(self) -> bool:
        return self._good


@dataclass
class Memory:
    """What a daemon would hold, shared by the clients made from it with `connect`."""

    blocks: dict[tuple[bytes, bytes], Block] = field(default_factory=dict)
    tiers: Callable[[int], str] = lambda block: "dram"
    reload: int = 1 << 30
    run_blocks: int = 3
    spoil: Callable[[int], bool] = lambda block: False
    lose: Callable[[int], bool] = lambda block: False
    fail: frozenset[str] = frozenset()
    backwards: bool = False
    leases: int = 0
    observed: list[tuple[float, float, float]] = field(default_factory=list)
    hinted: list[tuple[int | None, str, str, int]] = field(default_factory=list)
    released: list[tuple[float, float, float]] = field(default_factory=list)

    def connect(self, spec: NamespaceSpec) -> "MemoryClient":
        return MemoryClient(self, spec)


class MemoryClient:
    def __init__(self, memory: Memory, spec: NamespaceSpec) -> None:
        self.memory, self.spec = memory, spec
        self._namespace = spec.digest()
        self._prompt = b""

    def match(
        self, tokens: Sequence[int], *, explain: bool = False, conversation: str = ""
    ) -> Match:
        self._check("match")
        self._prompt = encode_tokens(tokens)
        hit = 0
        while self._key(hit) in self.memory.blocks:
            hit += 1
        reload = min(hit, self.memory.reload)
        name: DecisionName = "recompute" if not reload else "reload" if reload == hit else "partial"
        self.memory.leases += reload > 0
        decision = Decision(name, reload, "test", "a test decides")
        runs = tuple((self.memory.tiers(block), 1) for block in range(hit))
        return Match(int(reload > 0), hit, runs, decision)

    def fetch_runs(self, match: Match) -> Iterator[FetchedRun]:
        self._check("fetch")
        memory, last = self.memory, match.decision.reload_blocks
        starts = range(0, last, memory.run_blocks)
        for start in reversed(starts) if memory.backwards else starts:
            run = range(start, min(start + memory.run_blocks, last))
            if any(memory.lose(block) for block in run):
                self._check("fetch midway")
                continue
            spoilt = any(memory.spoil(block) for block in run)
            views = [memory.blocks[self._key(block)].copy() for block in run]
            if spoilt:
                for view in views:
                    view[:] = 0x55
            yield MemoryRun(start, memory.tiers(start), views, not spoilt)

    def release(
        self, match: Match, *, hop_bytes: float = 0.0, hop_s: float = 0.0, total_s: float = 0.0
    ) -> None:
        self._check("release")
        self.memory.leases -= 1
        self.memory.released.append((hop_bytes, hop_s, total_s))

    def put(
        self,
        tokens: Sequence[int],
        blocks: Callable[[int, Block], object],
        *,
        first: int = 0,
        last: int | None = None,
    ) -> PutResult:
        self._check("put")
        self._prompt = encode_tokens(tokens)
        assert last is not None
        stored = 0
        for block in range(first, last):
            if self._key(block) not in self.memory.blocks:
                view = np.zeros(self.spec.block_bytes, np.uint8)
                blocks(block, view)
                self.memory.blocks[self._key(block)] = view
                stored += 1
        return PutResult(stored=stored, present=last - first - stored)

    def observe(self, *, sum_n: float, sum_nc: float, seconds: float) -> None:
        self._check("observe")
        self.memory.observed.append((sum_n, sum_nc, seconds))

    def hint(
        self,
        tokens: Sequence[int] | None = None,
        *,
        conversation: str = "",
        finish_reason: str = "",
        answer_tokens: int = 0,
    ) -> None:
        self._check("hint")
        said = None if tokens is None else len(tokens)
        self.memory.hinted.append((said, conversation, finish_reason, answer_tokens))

    def close(self) -> None:
        pass

    def _key(self, block: int) -> tuple[bytes, bytes]:
        """Beyond the prompt: a key that no block has."""
        stop = (block + 1) * self.spec.block_tokens * TOKEN_BYTES
        return self._namespace, self._prompt[:stop] if stop <= len(self._prompt) else b""

    def _check(self, what: str) -> None:
        if what in self.memory.fail:
            raise RuntimeError(f"{what} was made to fail")

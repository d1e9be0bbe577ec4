"""The asyncio client's API over a dict, for what a real daemon cannot be told to do on cue: answer
late, lose this block, be another one between two calls."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace

import numpy as np

from hicache.client.gpu_pages import LoadedPart, PageShare, PageTable, SharedPages
from hicache.client.results import Decision, FetchedRun, Greeting, Match, PutResult
from hicache.protocol.keys import NamespaceSpec
from tests.connectors.memory_client import Block, MemoryRun

_serial = itertools.count(1)


@dataclass
class AsyncMemory:
    """What a daemon would hold. `gates`: an operation by this name waits for its event. `failing`:
    operations that raise. `absent`: nobody answers. `advice`: reload at most so many blocks."""

    blocks: dict[tuple[bytes, bytes], Block] = field(default_factory=dict)
    tier: str = "dram"
    advice: int = 1 << 30
    room: int = 1 << 30
    epoch: str = "first"
    absent: bool = False
    failing: set[str] = field(default_factory=set)
    gates: dict[str, threading.Event] = field(default_factory=dict)
    spoil: Callable[[int], bool] = lambda block: False
    lose: Callable[[int], bool] = lambda block: False
    leases: dict[int, tuple[bytes, str, bytes, int, int]] = field(default_factory=dict)
    groups: dict[bytes, str] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    observed: list[tuple[int, float, float, int]] = field(default_factory=list)
    hints: list[tuple[int, str, str, int]] = field(default_factory=list)
    specs: set[NamespaceSpec] = field(default_factory=set)

    def asker(self, spec: NamespaceSpec) -> AsyncMemoryClient:
        return self.mover(spec, b"")

    def mover(self, spec: NamespaceSpec, group: bytes) -> AsyncMemoryClient:
        self.specs.add(spec)
        return AsyncMemoryClient(self, spec, group)

    def start_anew(self, epoch: str) -> None:
        """As a daemon that was killed and came back with what it had on disk."""
        self.epoch = epoch
        self.leases.clear()
        self.groups.clear()

    def count(self, op: str) -> int:
        return sum(1 for name, _ in self.calls if name == op)


class AsyncMemoryClient:
    def __init__(self, memory: AsyncMemory, spec: NamespaceSpec, group: bytes) -> None:
        self.memory, self.spec = memory, spec
        self.last_error = ""
        self.greeting: Greeting | None = None
        self._wished = group
        self._namespace = spec.digest()

    async def match(
        self, tokens: bytes, *, request: str = "", skip_blocks: int = 0, conversation: str = ""
    ) -> Match:
        if not await self._begin("match", request):
            return Match.miss("nobody answers")
        hit = 0
        while self._key(tokens, hit) in self.memory.blocks:
            hit += 1
        limit = (len(tokens) // 4 - 1) // self.spec.block_tokens
        reload = max(0, min(hit - skip_blocks, self.memory.advice, limit - skip_blocks))
        assert self.greeting is not None
        lease = 0
        if reload:
            lease = next(_serial)
            held = (self.greeting.group, self.memory.epoch, tokens, skip_blocks, reload)
            self.memory.leases[lease] = held
        runs = ((self.memory.tier, hit),) if hit else ()
        decision = Decision("reload" if reload else "recompute", reload, "test")
        return Match(lease, hit, runs, decision, True, self.greeting.session)

    async def adopt(self, lease: int, blocks: int, group: bytes, epoch: str) -> Match:
        if not await self._begin("adopt", ""):
            return Match.miss("nobody answers")
        assert self.greeting is not None
        if self.greeting.epoch != epoch or self.greeting.group != group:
            return Match.miss("of another group or epoch")
        decision = Decision("reload", blocks, "adopted")
        return Match(lease, blocks, (), decision, True, self.greeting.session)

    async def fetch_runs(self, match: Match) -> AsyncGenerator[FetchedRun, None]:
        if not await self._begin("fetch", ""):
            return
        assert self.greeting is not None
        held = self.memory.leases.get(match.lease)
        if held is None or held[:2] != (self.greeting.group, self.memory.epoch):
            return
        _, _, tokens, skip, reload = held
        for index in range(reload):
            block = skip + index
            view = self.memory.blocks.get(self._key(tokens, block))
            if view is None or self.memory.lose(block):
                continue
            is_good = not self.memory.spoil(block)
            yield MemoryRun(
                index,
                self.memory.tier,
                [view.copy() if is_good else np.full_like(view, 0x55)],
                is_good,
            )
            if not await self._begin("fetch more", ""):
                return

    async def release(
        self, match: Match, *, hop_bytes: float = 0.0, hop_s: float = 0.0, total_s: float = 0.0
    ) -> None:
        self.memory.calls.append(("release", ""))
        self.memory.leases.pop(match.lease, None)

    async def put(
        self, tokens: bytes, blocks: Callable[[int, Block], object], *, first: int, last: int
    ) -> PutResult:
        if not await self._begin("put", ""):
            return PutResult(refused=last - first)
        result = PutResult()
        for block in range(first, last):
            key = self._key(tokens, block)
            if key in self.memory.blocks:
                result = replace(result, present=result.present + 1)
            elif len(self.memory.blocks) >= self.memory.room:
                result = replace(result, refused=result.refused + 1)
            else:
                view = np.zeros(self.spec.block_bytes, np.uint8)
                await asyncio.to_thread(blocks, block, view)
                self.memory.blocks[key] = view
                result = replace(result, stored=result.stored + 1)
        return result

    async def share_pages(self, pages: SharedPages) -> PageShare | None:
        await self._begin("share pages", "")
        self.last_error = "no GPU worker here"
        return None

    def load_pages_by_part(
        self, match: Match, share: PageShare, pages: PageTable, *, planes_per_part: int
    ) -> AsyncGenerator[LoadedPart, None]:
        raise NotImplementedError

    async def save_pages(
        self, tokens: bytes, share: PageShare, pages: PageTable, *, first: int
    ) -> PutResult:
        raise NotImplementedError

    async def unshare_pages(self, share: PageShare) -> bool:
        raise NotImplementedError

    async def observe(
        self, *, num_requests: int, sum_n: float, sum_nc: float, seconds: float, decode_tokens: int
    ) -> None:
        self.memory.observed.append((num_requests, sum_n, sum_nc, decode_tokens))

    async def hint(
        self,
        tokens: bytes,
        *,
        conversation: str = "",
        finish_reason: str = "",
        answer_tokens: int = 0,
    ) -> None:
        said = len(tokens) // 4, conversation, finish_reason, answer_tokens
        self.memory.hints.append(said)

    async def heartbeat(self) -> bool:
        return not self.memory.absent

    async def close(self) -> None:
        """The last session of a group gives back what the group holds."""
        if self.greeting is not None and not self._wished:
            group, leases = self.greeting.group, self.memory.leases
            for lease in [lease for lease, held in leases.items() if held[0] == group]:
                del leases[lease]
        self.greeting = None

    async def _begin(self, op: str, request: str) -> bool:
        memory = self.memory
        memory.calls.append((op, request))
        gate = memory.gates.get(op)
        if gate is not None:
            await asyncio.to_thread(gate.wait, 30.0)
        if op in memory.failing:
            raise RuntimeError(f"{op} was made to fail")
        if memory.absent:
            self.last_error = "the daemon is absent"
            return False
        if self.greeting is None or self.greeting.epoch != memory.epoch:
            is_known = memory.groups.get(self._wished) == memory.epoch
            group = self._wished if is_known else next(_serial).to_bytes(16, "big")
            memory.groups[group] = memory.epoch
            self.greeting = Greeting(
                session=next(_serial).to_bytes(16, "big"),
                epoch=memory.epoch,
                version="test",
                pid=1,
                block_tokens=self.spec.block_tokens,
                block_bytes=self.spec.block_bytes,
                transport="arena",
                arenas=(),
                lease_ttl_s=60.0,
                heartbeat_s=60.0,
                max_message_bytes=1 << 30,
                max_prompt_tokens=1 << 20,
                group=group,
            )
        return True

    def _key(self, tokens: bytes, block: int) -> tuple[bytes, bytes]:
        """Beyond the prompt: a key that no block has."""
        stop = (block + 1) * self.spec.block_tokens * 4
        return self._namespace, tokens[:stop] if stop <= len(tokens) else b""

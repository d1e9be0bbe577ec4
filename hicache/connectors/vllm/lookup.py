"""Looks up in the daemon how much of a request's prompt it has, without blocking the scheduler.

    ask ──▶ question ──▶ [match in every rank's namespace] ──▶ answer: the smallest match, leased
             │ the scheduler checks for it in later steps
             └ withdraw: the answer is not needed; its leases are released once it is there

Every rank stores its slice of a block in its own namespace; one answer holds for all ranks.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from hicache.client.results import Greeting, Match
from hicache.connectors.vllm.background import Background
from hicache.connectors.vllm.step_messages import GrantedLease, NamespaceIdentity
from hicache.connectors.vllm.weights import digest_adapter
from hicache.protocol.keys import NamespaceSpec

MAX_IDENTITIES: Final = 32
"""Combinations of LoRA and salt, each with a session per rank. The least recently used beyond this
number are closed."""


class MatchClient(Protocol):
    """The part of `hicache.client.AsyncClient` that is used here."""

    @property
    def greeting(self) -> Greeting | None: ...
    @property
    def last_error(self) -> str: ...
    async def match(
        self, tokens: bytes, *, request: str = "", skip_blocks: int = 0, conversation: str = ""
    ) -> Match: ...
    async def hint(
        self,
        tokens: bytes,
        *,
        conversation: str = "",
        finish_reason: str = "",
        answer_tokens: int = 0,
    ) -> None: ...
    async def release(self, match: Match) -> None: ...
    async def heartbeat(self) -> bool: ...
    async def close(self) -> None: ...


Connect = Callable[[NamespaceSpec], MatchClient]


@dataclass(frozen=True, slots=True)
class FinishedAnswer:
    """An answer is complete. `tokens`: prompt and answer; its last `answer_tokens` are the
    answer."""

    tokens: bytes
    conversation: str
    reason: str
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """`blocks` blocks after the skipped ones are worth loading. They are leased for every rank, for
    `lease_s` from the question on.

    `runs`: all blocks in the tiers, from the first one on, as (tier, number), of the first rank.
    """

    blocks: int
    leases: tuple[GrantedLease, ...] = ()
    lease_s: float = 0.0
    runs: tuple[tuple[str, int], ...] = ()
    is_answered: bool = True


@dataclass(slots=True, eq=False)
class Question:
    """`conversation`: of the request, "" if unknown. `answer`: None until it is there; `is_seen`:
    the scheduler has read it; `is_published`: its blocks were passed to `PublishedHashes`."""

    request: str
    identity: NamespaceIdentity
    tokens: bytes
    skip_blocks: int
    asked_s: float
    conversation: str = ""
    answer: LookupAnswer | None = None
    is_seen: bool = False
    is_unwanted: bool = False
    is_published: bool = False
    matches: list[tuple[MatchClient, Match]] = field(default_factory=list)


def spec_of(spec: NamespaceSpec, identity: NamespaceIdentity) -> NamespaceSpec:
    """A rank's namespace for requests of this identity."""
    return replace(
        spec,
        lora_digest=identity.lora_digest,
        cache_salt=identity.cache_salt,
        weights_version=identity.weights_version,
    )


class PromptLookup:
    """`specs`: every rank's namespace. Called from the scheduler's thread."""

    def __init__(
        self, specs: Sequence[NamespaceSpec], connect: Connect, background: Background
    ) -> None:
        self.background = background
        self._specs = specs
        self._connect = connect
        self._clients: OrderedDict[NamespaceIdentity, list[MatchClient]] = OrderedDict()
        self._adapters: dict[tuple[int, str], str | None] = {}
        self._open: set[Question] = set()
        self._news = threading.Condition()

    def ask(self, question: Question) -> None:
        """Start a lookup. An answer is always set; `is_answered` is false if the daemon gave
        none."""
        self._open.add(question)
        self.background.submit(partial(self._ask, question))

    def withdraw(self, question: Question) -> None:
        """The answer is not needed: its leases are released."""
        self.background.submit(partial(self._release, question))

    def ended(self, identity: NamespaceIdentity, ending: FinishedAnswer) -> None:
        """Send the daemon a hint, if a session is open."""
        self.background.submit(partial(self._hint, identity, ending))

    def wait_for_answer(self, seconds: float) -> None:
        """Called when the scheduler has nothing to compute: waits until an answer comes. Without it
        an inference engine in this process would poll, and keep the GIL from the thread that
        receives the answer."""
        with self._news:
            if self._open:
                self._news.wait(seconds)

    def adapter_digest(self, number: int, path: str) -> str | None:
        """Of a LoRA adapter; None while its files are being read, "" if they cannot be read."""
        key = (number, path)
        if key not in self._adapters:
            self._adapters[key] = None
            self.background.submit(partial(self._read_adapter, key))
        return self._adapters[key]

    def close(self, patience_s: float) -> None:
        self.background.close(self._close, patience_s)

    async def _ask(self, question: Question) -> None:
        answer = LookupAnswer(0, is_answered=False)
        try:
            clients = self._clients_of(question.identity)
            matches = await asyncio.gather(*(self._match(client, question) for client in clients))
            question.matches = list(zip(clients, matches, strict=True))
            answer = self._least(question)
        finally:
            question.answer = answer
            with self._news:
                self._open.discard(question)
                self._news.notify_all()
        if question.is_unwanted or not answer.blocks:
            await self._release(question)

    async def _match(self, client: MatchClient, question: Question) -> Match:
        return await client.match(
            question.tokens,
            request=question.request[-200:],
            skip_blocks=question.skip_blocks,
            conversation=question.conversation[-200:],
        )

    def _least(self, question: Question) -> LookupAnswer:
        """What all ranks can load. A session that was reopened meanwhile holds no lease."""
        trouble = self.background.trouble
        blocks = min(match.decision.reload_blocks for _, match in question.matches)
        leases: list[GrantedLease] = []
        lease_s = float("inf")
        for client, match in question.matches:
            if not match.is_answered:
                trouble.note(client.last_error or match.decision.sentence, is_away=True)
                return LookupAnswer(0, is_answered=False)
            greeting = client.greeting
            if greeting is None or greeting.session != match.session:
                return LookupAnswer(0, is_answered=False)
            leases.append(GrantedLease(match.lease, greeting.group, greeting.epoch))
            lease_s = min(lease_s, greeting.lease_ttl_s)
        trouble.over()
        return LookupAnswer(blocks, tuple(leases), lease_s, question.matches[0][1].runs)

    async def _release(self, question: Question) -> None:
        question.is_unwanted = True
        if question.answer is None:  # `_ask` comes back to it
            return
        matches, question.matches = question.matches, []
        for client, match in matches:
            if match.lease:
                await client.release(match)

    async def _hint(self, identity: NamespaceIdentity, ending: FinishedAnswer) -> None:
        for client in self._clients_of(identity):
            if client.greeting is not None:
                await client.hint(
                    ending.tokens,
                    conversation=ending.conversation[-200:],
                    finish_reason=ending.reason,
                    answer_tokens=ending.answer_tokens,
                )

    async def _read_adapter(self, key: tuple[int, str]) -> None:
        digest = ""
        try:
            digest = await asyncio.to_thread(digest_adapter, Path(key[1]))
        finally:
            self._adapters[key] = digest

    def _clients_of(self, identity: NamespaceIdentity) -> list[MatchClient]:
        clients = self._clients.get(identity)
        if clients is None:
            clients = [self._connect(spec_of(spec, identity)) for spec in self._specs]
            if not self._clients:
                self.background.submit(partial(keep_alive, self._all_clients))
            self._clients[identity] = clients
            if len(self._clients) > MAX_IDENTITIES:
                _, forgotten = self._clients.popitem(last=False)
                self.background.submit(partial(_close_all, forgotten))
        self._clients.move_to_end(identity)
        return clients

    async def _close(self) -> None:
        await _close_all(self._all_clients())

    def _all_clients(self) -> list[MatchClient]:
        return [client for group in self._clients.values() for client in group]


async def _close_all(clients: Iterable[MatchClient]) -> None:
    for client in clients:
        await client.close()


class HeartbeatClient(Protocol):
    """A client that sends heartbeats."""

    @property
    def greeting(self) -> Greeting | None: ...
    async def heartbeat(self) -> bool: ...


async def keep_alive(clients: Callable[[], Sequence[HeartbeatClient]]) -> None:
    """Sends heartbeats to a daemon that cannot watch this process. Never ends."""
    while True:
        due_s = [client.greeting.heartbeat_s for client in clients() if client.greeting]
        await asyncio.sleep(max(1.0, min(due_s, default=1.0)))
        for client in clients():
            if client.greeting is not None:
                await client.heartbeat()


def salted(salt: str | None) -> str:
    """A salt may be a secret; its digest identifies it as well."""
    return hashlib.blake2b(salt.encode(), digest_size=32).hexdigest() if salt else ""

"""What the daemon holds of a request's prompt, asked from the scheduler's side without waiting.

    ask ──▶ question ──▶ [every rank's namespace: match] ──▶ answer: the least of them, leased
             │ the scheduler looks now and then
             └ give_back: taken up by nobody, released as soon as it is there

Every rank keeps its slice of a block in a namespace of its own; one answer counts for all of them.
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
"""LoRAs and salts at once, each a session per rank; of more, the least used are forgotten."""


class MatchClient(Protocol):
    """What is asked of `hicache.client.AsyncClient`."""

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
class Ending:
    """An answer is complete. `tokens`: the prompt and the answer, whose last so many it is."""

    tokens: bytes
    conversation: str
    reason: str
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """`blocks` blocks behind the skipped ones are worth loading and are leased, for every rank and
    for `lease_s` from the question on.

    `runs`: all blocks held, from the first one on, as (tier, number), as the first rank's are.
    """

    blocks: int
    leases: tuple[GrantedLease, ...] = ()
    lease_s: float = 0.0
    runs: tuple[tuple[str, int], ...] = ()
    is_answered: bool = True


@dataclass(slots=True, eq=False)
class Question:
    """`conversation`: what the request is part of, "" if unknown. `answer`: None until it comes;
    `is_seen`: the scheduler has looked at it."""

    request: str
    identity: NamespaceIdentity
    tokens: bytes
    skip_blocks: int
    asked_s: float
    conversation: str = ""
    answer: LookupAnswer | None = None
    is_seen: bool = False
    is_unwanted: bool = False
    is_told: bool = False
    matches: list[tuple[MatchClient, Match]] = field(default_factory=list)


def spec_of(spec: NamespaceSpec, identity: NamespaceIdentity) -> NamespaceSpec:
    """A rank's namespace for requests of this identity."""
    return replace(
        spec,
        lora_digest=identity.lora_digest,
        cache_salt=identity.cache_salt,
        weights_version=identity.weights_version,
    )


class Asking:
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
        """Begin. Its answer comes in any case: `is_answered` is false if the daemon did not."""
        self._open.add(question)
        self.background.submit(partial(self._ask, question))

    def give_back(self, question: Question) -> None:
        """Nobody takes up this answer."""
        self.background.submit(partial(self._release, question))

    def ended(self, identity: NamespaceIdentity, ending: Ending) -> None:
        """Advice to the daemon, if it can be asked."""
        self.background.submit(partial(self._hint, identity, ending))

    def wait_a_little(self, seconds: float) -> None:
        """Where the scheduler has nothing else to do: until an answer comes. Otherwise an engine in
        this very process would ask again and again and keep the GIL from who brings the answer."""
        with self._news:
            if self._open:
                self._news.wait(seconds)

    def adapter_digest(self, number: int, path: str) -> str | None:
        """Of a LoRA adapter; None while its files are being read, "" if it cannot be told."""
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
        """What all ranks can load. A session that was opened anew meanwhile holds no lease."""
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

    async def _hint(self, identity: NamespaceIdentity, ending: Ending) -> None:
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


class Living(Protocol):
    """A client that may have to show that it lives."""

    @property
    def greeting(self) -> Greeting | None: ...
    async def heartbeat(self) -> bool: ...


async def keep_alive(clients: Callable[[], Sequence[Living]]) -> None:
    """For a daemon that cannot see this process: a sign of life from time to time. Never ends."""
    while True:
        due_s = [client.greeting.heartbeat_s for client in clients() if client.greeting]
        await asyncio.sleep(max(1.0, min(due_s, default=1.0)))
        for client in clients():
            if client.greeting is not None:
                await client.heartbeat()


def salted(salt: str | None) -> str:
    """A salt may be a secret; its digest tells as much."""
    return hashlib.blake2b(salt.encode(), digest_size=32).hexdigest() if salt else ""

"""A worker's clients of the daemon: for each namespace one that loads and one that stores.

Loads use leases of the scheduler's side, so their client joins its group, and is replaced when a
restart of the daemon changes the group. Stores have their own clients, which are closed between two
stores only: closing a session declares that it writes no more.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from hicache.client.gpu_pages import LoadedPart, PageShare, PageTable, SharedPages
from hicache.client.results import FetchedRun, Greeting, Match, PutResult
from hicache.connectors.common.page_sharing import PageSharing
from hicache.connectors.vllm.background import Background
from hicache.connectors.vllm.lookup import MAX_IDENTITIES, keep_alive, spec_of
from hicache.connectors.vllm.step_messages import GrantedLease, NamespaceIdentity
from hicache.connectors.vllm.vllm_pages import Bytes
from hicache.protocol.keys import NamespaceSpec


class BlockClient(Protocol):
    """The part of `hicache.client.AsyncClient` that is used here."""

    @property
    def greeting(self) -> Greeting | None: ...
    @property
    def last_error(self) -> str: ...
    async def adopt(self, lease: int, blocks: int, group: bytes, epoch: str) -> Match: ...
    def fetch_runs(self, match: Match) -> AsyncGenerator[FetchedRun, None]: ...
    async def release(
        self, match: Match, *, hop_bytes: float = 0.0, hop_s: float = 0.0, total_s: float = 0.0
    ) -> None: ...
    async def put(
        self, tokens: bytes, blocks: Callable[[int, Bytes], object], *, first: int, last: int
    ) -> PutResult: ...
    async def share_pages(self, pages: SharedPages) -> PageShare | None: ...
    def load_pages_by_part(
        self, match: Match, share: PageShare, pages: PageTable, *, planes_per_part: int
    ) -> AsyncGenerator[LoadedPart, None]: ...
    async def save_pages(
        self, tokens: bytes, share: PageShare, pages: PageTable, *, first: int
    ) -> PutResult: ...
    async def unshare_pages(self, share: PageShare) -> bool: ...
    async def observe(
        self,
        *,
        num_requests: int,
        sum_n: float,
        sum_nc: float,
        seconds: float,
        decode_tokens: int,
    ) -> None: ...
    async def heartbeat(self) -> bool: ...
    async def close(self) -> None: ...


Connect = Callable[[NamespaceSpec, bytes], BlockClient]
"""A client for a namespace, in the group with this token (empty: a group of its own)."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedClient:
    """A client and its sharing of pages; `sharing` is None where pages cannot be shared."""

    client: BlockClient
    group: bytes
    sharing: PageSharing | None

    async def close(self) -> None:
        """Unshares the pages before the session ends, if the daemon answers."""
        if self.sharing is not None:
            await self.sharing.close()
        await self.client.close()


class RankClients:
    """Used in the background's thread only. `pages`: of this rank, None if not shareable."""

    def __init__(
        self,
        spec: NamespaceSpec,
        connect: Connect,
        background: Background,
        pages: SharedPages | None,
    ) -> None:
        self._spec, self._connect = spec, connect
        self._background, self._pages = background, pages
        self._loaders: OrderedDict[NamespaceIdentity, PagedClient] = OrderedDict()
        self._storers: OrderedDict[NamespaceIdentity, PagedClient] = OrderedDict()

    def loader(self, identity: NamespaceIdentity, lease: GrantedLease) -> PagedClient:
        known = self._loaders.get(identity)
        if known is None or known.group != lease.group:
            if known is not None:
                self._background.submit(known.close)
            known = self._loaders[identity] = self._connected(identity, lease.group)
            if len(self._loaders) > MAX_IDENTITIES:
                _, forgotten = self._loaders.popitem(last=False)
                self._background.submit(forgotten.close)
        self._loaders.move_to_end(identity)
        return known

    def storer(self, identity: NamespaceIdentity) -> PagedClient:
        paged = self._storers.get(identity)
        if paged is None:
            paged = self._storers[identity] = self._connected(identity, b"")
        self._storers.move_to_end(identity)
        return paged

    async def forget_storers(self) -> None:
        """Called between two stores, by the one task that stores."""
        while len(self._storers) > MAX_IDENTITIES:
            _, forgotten = self._storers.popitem(last=False)
            await forgotten.close()

    async def close(self) -> None:
        """Closes all at the same time: a client whose pages are not released must not delay the
        others."""
        paged_clients = [*self._loaders.values(), *self._storers.values()]
        await asyncio.gather(*(self._close(paged) for paged in paged_clients))

    async def _close(self, paged: PagedClient) -> None:
        with self._background.trouble.harmless("closing"):
            await paged.close()

    def _connected(self, identity: NamespaceIdentity, group: bytes) -> PagedClient:
        if not self._loaders and not self._storers:
            self._background.submit(partial(keep_alive, self._all))
        client = self._connect(spec_of(self._spec, identity), group)
        sharing = None if self._pages is None else PageSharing(client, self._pages)
        return PagedClient(client, group, sharing)

    def _all(self) -> list[BlockClient]:
        return [paged.client for paged in [*self._loaders.values(), *self._storers.values()]]

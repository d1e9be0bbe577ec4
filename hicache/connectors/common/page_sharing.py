"""An inference engine's pages, shared with the daemon's GPU worker while that is possible.

    usable ──▶ [register] ──▶ share ──▶ loads and saves ──▶ leave ──▶ released, and usable again
                  └ None for RETRY_S: the connector copies

For a connector that can copy without the daemon. Used in one event loop, or without one by a
blocking client, whose coroutines never wait.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final, Protocol

from hicache.client.gpu_pages import PageShare, SharedPages
from hicache.client.results import Greeting

RETRY_S: Final = 10.0
"""After the daemon has refused to share, the next attempt is made after this time."""


class Sharer(Protocol):
    """The part of `hicache.client.AsyncClient` that is used here."""

    @property
    def greeting(self) -> Greeting | None: ...
    @property
    def last_error(self) -> str: ...
    async def share_pages(self, pages: SharedPages) -> PageShare | None: ...
    async def unshare_pages(self, share: PageShare) -> bool: ...


class PageSharing:
    """Pages shared with the daemon's GPU worker by one client. They are shared again after a
    restart of the daemon or the worker, and RETRY_S after a refusal. `how` says which process
    copies, and the reason if it is not the worker.

    A share that is left is not used again, and no other replaces it before the worker has released
    it. So only the copies of one share can be in doubt at a time.
    """

    def __init__(self, client: Sharer, pages: SharedPages) -> None:
        self.how = ""
        self._client, self._pages = client, pages
        self._share: PageShare | None = None
        self._left: PageShare | None = None
        self._retry_s = 0.0
        self._sharing_lock = asyncio.Lock()

    async def usable(self) -> PageShare | None:
        """Returns None if the connector has to copy. At once if another call is waiting already."""
        if self._sharing_lock.locked():
            return None
        async with self._sharing_lock:
            if self._left is not None and not self._left.is_over:
                return None
            share, greeting = self._share, self._client.greeting
            if share is not None and not share.is_in_doubt:
                is_of_before = greeting is not None and greeting.session != share.session
                if is_of_before or share.is_over:
                    await self._client.unshare_pages(share)
                    share.close()  # also where the daemon does not know it any more
                    self._share, self._retry_s = None, 0.0
            if self._share is None and time.monotonic() >= self._retry_s:
                await self._share_again()
            return self._share

    @property
    def is_in_doubt(self) -> bool:
        """Whether a copy is, or may be, under way."""
        return any(share is not None and share.is_in_doubt for share in (self._share, self._left))

    def leave(self, share: PageShare) -> None:
        """Stop using it: a request for it had no answer."""
        if self._share is share:
            self._share, self._left, self._retry_s = None, share, 0.0

    async def close(self) -> bool:
        """Leave it. Returns whether the worker has released the pages, so that the tensors may be
        freed; if not, call again."""
        if self._share is not None:
            self.leave(self._share)
        left = self._left
        return left is None or left.is_over or await self._client.unshare_pages(left)

    async def _share_again(self) -> None:
        self._retry_s = time.monotonic() + RETRY_S
        self._share = await self._client.share_pages(self._pages)
        if self._share is None:
            self.how = f"copied by this process itself: {self._client.last_error}"
        else:
            self.how = "copied by the daemon's GPU worker"

"""An inference engine's pages, shared with the daemon's GPU worker for as long as that can be.

    usable ──▶ [register] ──▶ share ──▶ loads and saves ──▶ leave ──▶ let go, and usable again
                  └ None, for a while: copy yourself

For a connector that has a way of its own to copy. Used in one event loop, or in none by a blocking
client, whose coroutines never wait.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final, Protocol

from hicache.client.gpu_pages import PageShare, SharedPages
from hicache.client.results import Greeting

RETRY_S: Final = 10.0
"""Until the daemon is asked again to copy, where it would not or could not."""


class Sharer(Protocol):
    """What is asked of `hicache.client.AsyncClient`."""

    @property
    def greeting(self) -> Greeting | None: ...
    @property
    def last_error(self) -> str: ...
    async def share_pages(self, pages: SharedPages) -> PageShare | None: ...
    async def unshare_pages(self, share: PageShare) -> bool: ...


class PageSharing:
    """Pages shared with the daemon's GPU worker by one client: anew where the daemon or the worker
    is another by now, and after a while where it was refused. `how` says who copies, and why if it
    is not the worker.

    A share that is left is used no more, and no other takes its place before the worker has let go
    of it: so no more than what one share had under way is ever in doubt.
    """

    def __init__(self, client: Sharer, pages: SharedPages) -> None:
        self.how = ""
        self._client, self._pages = client, pages
        self._share: PageShare | None = None
        self._left: PageShare | None = None
        self._retry_s = 0.0
        self._asking = asyncio.Lock()

    async def usable(self) -> PageShare | None:
        """None: copy yourself. At once where somebody else is asking already."""
        if self._asking.locked():
            return None
        async with self._asking:
            if self._left is not None and not self._left.is_over:
                return None
            share, greeting = self._share, self._client.greeting
            if share is not None and not share.is_in_doubt:
                is_of_before = greeting is not None and greeting.session != share.session
                if is_of_before or share.is_over:
                    await self._client.unshare_pages(share)
                    share.close()  # also where nobody knows it any more
                    self._share, self._retry_s = None, 0.0
            if self._share is None and time.monotonic() >= self._retry_s:
                await self._share_again()
            return self._share

    @property
    def is_in_doubt(self) -> bool:
        """Whether something is, or may be, on its way."""
        return any(share is not None and share.is_in_doubt for share in (self._share, self._left))

    def leave(self, share: PageShare) -> None:
        """Use it no more, since something of it was not answered."""
        if self._share is share:
            self._share, self._left, self._retry_s = None, share, 0.0

    async def close(self) -> bool:
        """Leave it; whether the worker has let go, so that the tensors may be freed. False: ask
        again."""
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

"""The worker's conversation about inference engines' pages: which thread does what, what is told.

    map, unmap   hicache-pages      one after the other; may take as long as the driver likes
    load         hicache-load       slots → pages
    save         hicache-save       pages → slots

The daemon keeps the order where there must be one: it copies after `mapped`, and unmaps after the
last `copied`. So the threads share nothing but the table of registrations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from hicache.transfer.gpu_pages.engine_pages import EnginePages
from hicache.transfer.gpu_pages.page_messages import (
    Claim,
    PageCopy,
    PageTold,
    pack_told,
    unpack_claim,
    unpack_copy,
)
from hicache.transfer.worker_messages import MalformedMessage, Message, pack

_WAY_OF: Final = {"map": "pages", "unmap": "pages", "load": "load", "save": "save"}
PAGE_JOBS: Final = frozenset(_WAY_OF)


class PageWork:
    """`send` takes a message for the daemon."""

    def __init__(self, pages: EnginePages, send: Callable[[bytes], None]) -> None:
        self._pages, self._send = pages, send
        self._noted = ""  # of two threads that tell the same, both are right

    def job_of(self, message: Message) -> tuple[str, Callable[[], None]]:
        """The way that a message belongs to, and what is to be done there. Raises
        MalformedMessage."""
        kind = message["t"]
        way = _WAY_OF[kind]
        if kind == "map":
            claim = unpack_claim(message)
            return way, lambda: self._map(claim)
        if kind == "unmap":
            number = message.get("n")
            if type(number) is not int:
                raise MalformedMessage("unmap: which?")
            return way, lambda: self._unmap(number)
        copy = unpack_copy(message)
        return way, lambda: self._copy(copy)

    def _map(self, claim: Claim) -> None:
        error = ""
        try:
            self._pages.map(claim)
        except self._pages.refusals as refusal:
            error = str(refusal)
        self._tell(PageTold("mapped", claim.number, error))

    def _unmap(self, number: int) -> None:
        self._pages.unmap(number)
        self._tell(PageTold("unmapped", number))

    def _copy(self, copy: PageCopy) -> None:
        start_s = time.perf_counter()
        error = ""
        try:
            self._pages.copy(
                copy, lambda planes: self._tell(PageTold("part", copy.number, "", planes))
            )
        except self._pages.refusals as refusal:
            error = str(refusal)
        seconds = time.perf_counter() - start_s
        self._tell(PageTold("copied", copy.number, error, seconds=seconds))
        if self._pages.trouble != self._noted:
            self._noted = self._pages.trouble
            self._send(pack("noted", note=self._noted))

    def _tell(self, told: PageTold) -> None:
        self._send(pack_told(told))

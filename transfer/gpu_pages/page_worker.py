"""The worker's jobs for inference engines' pages, and the threads that run them.

    map, unmap   hicache-pages      one after the other; may take long in the driver
    load         hicache-load       slots → pages
    save         hicache-save       pages → slots

The daemon orders jobs where that matters: it copies after `mapped`, and unmaps after the last
`copied`. So the threads share only the table of registrations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from hicache.transfer.gpu_pages.engine_pages import EnginePages
from hicache.transfer.gpu_pages.page_messages import (
    Claim,
    PageCopy,
    PageReport,
    pack_report,
    unpack_claim,
    unpack_copy,
)
from hicache.transfer.worker_messages import MalformedMessage, Message, pack

_QUEUE_OF: Final = {"map": "pages", "unmap": "pages", "load": "load", "save": "save"}
PAGE_JOBS: Final = frozenset(_QUEUE_OF)


class PageWork:
    """`send` sends a message to the daemon."""

    def __init__(self, pages: EnginePages, send: Callable[[bytes], None]) -> None:
        self._pages, self._send = pages, send
        self._noted = ""  # without a lock: at worst two threads send the same note

    def job_of(self, message: Message) -> tuple[str, Callable[[], None]]:
        """The queue of a message, and the job to run there. Raises MalformedMessage."""
        kind = message["t"]
        queue = _QUEUE_OF[kind]
        if kind == "map":
            claim = unpack_claim(message)
            return queue, lambda: self._map(claim)
        if kind == "unmap":
            number = message.get("n")
            if type(number) is not int:
                raise MalformedMessage("unmap: the number is missing")
            return queue, lambda: self._unmap(number)
        copy = unpack_copy(message)
        return queue, lambda: self._copy(copy)

    def _map(self, claim: Claim) -> None:
        error = ""
        try:
            self._pages.map(claim)
        except self._pages.refusals as refusal:
            error = str(refusal)
        self._report(PageReport("mapped", claim.number, error))

    def _unmap(self, number: int) -> None:
        self._pages.unmap(number)
        self._report(PageReport("unmapped", number))

    def _copy(self, copy: PageCopy) -> None:
        start_s = time.perf_counter()
        error = ""
        try:
            self._pages.copy(
                copy, lambda planes: self._report(PageReport("part", copy.number, "", planes))
            )
        except self._pages.refusals as refusal:
            error = str(refusal)
        seconds = time.perf_counter() - start_s
        self._report(PageReport("copied", copy.number, error, seconds=seconds))
        if self._pages.trouble != self._noted:
            self._noted = self._pages.trouble
            self._send(pack("noted", note=self._noted))

    def _report(self, report: PageReport) -> None:
        self._send(pack_report(report))

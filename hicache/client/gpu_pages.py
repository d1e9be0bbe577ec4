"""An inference engine's own pages in GPU memory, which the daemon's GPU worker copies from and to.

    share    register the KV tensors, once: CUDA IPC handles, and where the pages lie
    load     blocks of a match into pages, whole or layer by layer
    save     pages into the cache
    unshare  nothing is on its way any more, and the worker has let go

Where this cannot work (no GPU worker, another GPU, another user or container, memory that CUDA does
not share) `share` says so in a sentence, and the inference engine copies itself: `fetch`, `put`.

While a load is under way its pages belong to the worker. An answer gives them back, whatever it
says. Without one they are in doubt, and must not be used again before `is_at_rest` says so.
Before a save, and before a load, what the inference engine's kernels still do with those pages has
to be over (an event of its own): another process cannot see its streams.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hicache.client.put import PutCall
from hicache.client.results import (
    Greeting,
    Match,
    Placement,
    PutResult,
    read_count,
    read_runs_named,
    read_seconds,
)
from hicache.client.session import TROUBLE, Connection, DaemonError
from hicache.client.transport import Part
from hicache.protocol.keys import TOKEN_BYTES, Tokens, encode_tokens

PageTable = npt.NDArray[np.int32]
"""Page numbers, [blocks, pages per block]."""


@dataclass(frozen=True, slots=True)
class SharedPages:
    """KV tensors as another process can find them. `handles` are CUDA IPC handles of allocations
    (64 bytes each); `planes` rows of (allocation, offset of page 0, bytes between pages, pages), in
    the order of a block's planes: a layer is one plane, or one of K and one of V. `bus_id`: the
    PCI bus id of their GPU."""

    bus_id: str
    handles: tuple[bytes, ...]
    planes: npt.NDArray[np.uint64]
    page_bytes: int
    pages_per_block: int


@dataclass(slots=True)
class PageShare:
    """Pages that are shared, in one session of one run of the daemon (`epoch`). `worker_pid`: who
    copies. The tensors may be freed when it `is_over`."""

    number: int
    session: bytes
    epoch: str
    num_planes: int
    pages_per_block: int
    worker_pid: int
    _worker: int = -1
    _unanswered: dict[object, PageTable] = field(default_factory=dict)
    _is_let_go: bool = False

    def __post_init__(self) -> None:
        with suppress(OSError):  # gone already, or not to be seen from here
            self._worker = os.pidfd_open(self.worker_pid)

    @property
    def can_see_worker(self) -> bool:
        return self._worker >= 0

    @property
    def is_in_doubt(self) -> bool:
        """Whether something may still be on its way."""
        return bool(self._unanswered) and not self.is_over

    @property
    def pages_in_doubt(self) -> frozenset[int]:
        """Pages that a load without an answer, or under way, may still write."""
        if self.is_over:
            return frozenset()
        tables = list(self._unanswered.values())
        return frozenset(page for table in tables for page in table.reshape(-1).tolist())

    @property
    def is_over(self) -> bool:
        """Whether the worker has let go, or ended: nothing is on its way; share the pages anew."""
        if self._is_worker_dead():
            self.close()
        return self._is_let_go

    def close(self) -> None:
        """The worker has let go, or ended, or there is nothing that it should let go of."""
        self._is_let_go = True
        if self._worker >= 0:
            os.close(self._worker)
            self._worker = -1

    def _is_worker_dead(self) -> bool:
        if self._worker < 0:
            return False
        poller = select.poll()
        poller.register(self._worker, select.POLLIN)
        return bool(poller.poll(0))


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """The first `planes` planes of blocks `first … first + blocks - 1` of the match have come.
    `copied_s`: what the worker's copies of all their planes took, told with the last part."""

    first: int
    blocks: int
    planes: int
    copied_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadedPages:
    """`blocks` blocks from the front are in their pages. `is_at_rest`: nothing is on its way, and
    the other pages hold nothing of value; otherwise see `PageShare.is_in_doubt`."""

    blocks: int
    seconds: float
    is_at_rest: bool = True


class Paged:
    """The conversation about pages, over one client's connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._storing = PutCall(connection)

    async def share(self, pages: SharedPages) -> PageShare | None:
        """None where it cannot be: the connection's `last_error` says why in one sentence."""
        started_s = time.monotonic()
        body = {
            "bus_id": pages.bus_id,
            "handles": b"".join(pages.handles),
            "planes": pages.planes.astype("<u8").tobytes(),
            "page_bytes": pages.page_bytes,
            "pages_per_block": pages.pages_per_block,
        }
        try:
            self._connection.begin(started_s)
            deadline_s = started_s + self._connection.timeouts.fetch_s
            greeting, reply, _ = await self._connection.ask("register", body, deadline_s)
            number, pid = read_count(reply, "registration"), read_count(reply, "pid")
        except TROUBLE as trouble:
            self._connection.failed(trouble, started_s)
            return None
        self._connection.succeeded()
        shape = len(pages.planes), pages.pages_per_block
        share = PageShare(number, greeting.session, greeting.epoch, *shape, pid)
        if not share.can_see_worker:
            await self.unshare(share)
            self._connection.last_error = (
                "the GPU worker's process cannot be seen from here, so nobody could tell when its "
                "copies have ended: copy through the arena"
            )
            return None
        return share

    async def load(self, match: Match, share: PageShare, pages: PageTable) -> LoadedPages:
        """The blocks worth reloading into `pages`, as many as there are rows for."""
        started_s = time.monotonic()
        came: dict[int, int] = {}
        async for part in self.parts(match, share, pages, 0):
            came[part.first] = part.blocks
        seconds = time.monotonic() - started_s
        return LoadedPages(reach(came, 0), seconds, is_at_rest=not share.is_in_doubt)

    async def parts(
        self, match: Match, share: PageShare, pages: PageTable, planes_per_part: int
    ) -> AsyncGenerator[LoadedPart, None]:
        """What has come, as it comes: after every `planes_per_part` planes (0: all at once), for
        each run of blocks that becomes readable. Ends early on any trouble."""
        self._check(share, pages)
        started_s = time.monotonic()
        deadline_s = started_s + self._connection.timeouts.fetch_s
        wanted = min(match.decision.reload_blocks, len(pages))
        try:
            self._connection.begin(started_s)
            greeting = self._connection.session_of(match)
            if greeting is None or greeting.session != share.session or not wanted:
                return
            async with aclosing(self._readable(match, deadline_s, greeting)) as runs:
                async for first, num in runs:
                    rows = pages[first : min(first + num, wanted)]
                    if not len(rows):
                        continue
                    body = {
                        "registration": share.number,
                        "lease": match.lease,
                        "first": first,
                        "pages": rows.astype("<i4").tobytes(),
                        "planes_per_part": planes_per_part,
                    }
                    copied = self.copied("load", body, share, rows, deadline_s, greeting)
                    async with aclosing(copied) as parts:
                        async for blocks, planes, seconds in parts:
                            yield LoadedPart(first, min(blocks, len(rows)), planes, seconds)
        except TROUBLE as trouble:
            self._connection.failed(trouble, started_s)
        else:
            self._connection.succeeded()

    async def save(
        self, tokens: Tokens, share: PageShare, pages: PageTable, first: int, durable: bool
    ) -> PutResult:
        """Store blocks `first …` of this prompt, as many as `pages` has rows for."""
        self._check(share, pages)
        packed = encode_tokens(tokens)
        last = first + len(pages)
        whole = len(packed) // (TOKEN_BYTES * self._connection.spec.block_tokens)
        if not 0 <= first <= last <= whole:
            raise ValueError(f"blocks {first} … {last} of a prompt of {whole} whole blocks")
        source = _PageSource(self, share, pages, first)
        return await self._storing.put(packed, first, last, source, durable)

    async def unshare(self, share: PageShare) -> bool:
        """Whether nothing is on its way any more, and the worker has let go. False: ask again."""
        started_s = time.monotonic()
        deadline_s = started_s + self._connection.timeouts.fetch_s
        try:
            self._connection.begin(started_s)
            greeting = await self._connection.greeted(deadline_s)
            if greeting.epoch == share.epoch:  # in another run the number may be another share's
                body = {"registration": share.number}
                await self._connection.ask("unregister", body, deadline_s)
                share.close()
        except DaemonError as error:
            if error.code == "unknown_registration":
                share.close()
            self._connection.failed(error, started_s)
        except TROUBLE as trouble:
            self._connection.failed(trouble, started_s)
        return share.is_over

    async def _readable(
        self, match: Match, deadline_s: float, greeting: Greeting
    ) -> AsyncGenerator[tuple[int, int], None]:
        """Runs of the lease's blocks that the worker can read, as (first, blocks)."""
        body = {"lease": match.lease, "pages": True}
        request_id = await self._connection.send("fetch", body, deadline_s, greeting)
        try:
            is_last = False
            while not is_last:
                reply, _ = await self._connection.answer(request_id, deadline_s, greeting)
                for first, num in _joined(read_runs_named(reply)):
                    yield first, num
                is_last = not reply.get("more")
        finally:
            self._connection.mailbox.done(request_id)

    async def copied(
        self,
        op: str,
        body: dict[str, object],
        share: PageShare,
        written: PageTable,
        deadline_s: float,
        greeting: Greeting,
    ) -> AsyncGenerator[tuple[int, int, float], None]:
        """(blocks, planes, at the end the worker's seconds) after each part. What was sent and not
        answered leaves pages in doubt, whatever ended the waiting."""
        copy = object()
        share._unanswered[copy] = written
        request_id = await self._connection.send(op, body, deadline_s, greeting)
        try:
            is_last = False
            while not is_last:
                try:
                    reply, _ = await self._connection.answer(request_id, deadline_s, greeting)
                except DaemonError:  # an answer: whatever was on its way has ended
                    del share._unanswered[copy]
                    raise
                is_last = not reply.get("more")
                if is_last:
                    del share._unanswered[copy]
                blocks = read_count(reply, "blocks")
                if is_last:
                    yield blocks, share.num_planes, read_seconds(reply, "seconds")
                else:
                    yield blocks, read_count(reply, "planes"), 0.0
        finally:
            self._connection.mailbox.done(request_id)

    def _check(self, share: PageShare, pages: PageTable) -> None:
        if pages.ndim != 2 or pages.shape[1] != share.pages_per_block or pages.dtype != np.int32:
            raise ValueError(
                f"pages must be int32 [blocks, {share.pages_per_block}], not {pages.dtype} "
                f"{pages.shape}"
            )


class _PageSource:
    """The blocks of a put that the worker copies from pages, of blocks `first …` of the prompt."""

    def __init__(self, paged: Paged, share: PageShare, pages: PageTable, first: int) -> None:
        self._paged, self._share, self._pages, self._first = paged, share, pages, first

    async def hand_over(
        self, connection: Connection, placement: Placement, greeting: Greeting, deadline_s: float
    ) -> list[Part]:
        """Raises TROUBLE; what is on its way then is the daemon's business: the ticket is aborted,
        and its slots are nobody's before that has ended."""
        if greeting.session != self._share.session:
            raise DaemonError("unknown_registration", "the pages were shared in another session")
        rows = self._pages[placement.indices.astype(np.intp) - self._first]
        body = {
            "registration": self._share.number,
            "ticket": placement.ticket,
            "indices": placement.indices.tobytes(),
            "pages": rows.astype("<i4").tobytes(),
        }
        written = rows[:0]  # a save only reads
        copied = self._paged.copied("save", body, self._share, written, deadline_s, greeting)
        async with aclosing(copied) as parts:
            async for _ in parts:
                pass
        return []


def reach(came: Mapping[int, int], blocks: int) -> int:
    """How far it goes without a gap from the front, of which so many blocks are known to have come;
    `came`: runs by their first block."""
    while more := came.get(blocks, 0):
        blocks += more
    return blocks


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours of different tiers are one load."""
    joined: list[tuple[int, int]] = []
    for first, num in sorted(runs):
        if joined and sum(joined[-1]) == first:
            joined[-1] = joined[-1][0], joined[-1][1] + num
        else:
            joined.append((first, num))
    return joined

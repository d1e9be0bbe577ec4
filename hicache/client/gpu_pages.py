"""Operations on an inference engine's own pages in GPU memory, copied by the daemon's GPU worker.

    share    register the KV tensors, once: CUDA IPC handles, and the layout of the pages
    load     blocks of a match into pages, whole or layer by layer
    save     pages into the cache
    unshare  unregister: no copy is running, and the worker has unmapped the tensors

Where this cannot work (no GPU worker, another GPU, another user or container, memory that CUDA does
not share), `share` fails with a sentence, and the inference engine uses `fetch` and `put`.

During a load its pages belong to the worker. Any reply returns them, also an error. Without a reply
they are in doubt: do not use them again before `is_in_doubt` is False. Before a load or a save, the
inference engine's kernels must have finished with those pages (wait for a CUDA event): another
process cannot see its streams.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from hicache.client.calls import Calls, give
from hicache.client.put import PutCall
from hicache.client.replies import Placement, read_reply
from hicache.client.results import Greeting, Match, PutResult
from hicache.client.session import Connection, DaemonError
from hicache.client.steps import Part, Steps, Stream, operation, stream
from hicache.protocol.messages import TOKEN_BYTES, Tokens, WireError, encode_tokens
from hicache.protocol.operations import (
    FetchReply,
    FetchRequest,
    LoadReply,
    LoadRequest,
    ReadyRun,
    RegisterReply,
    RegisterRequest,
    SaveRequest,
    UnregisterRequest,
)

PageTable = npt.NDArray[np.int32]
"""Page numbers, [blocks, pages per block]."""


@dataclass(frozen=True, slots=True)
class SharedPages:
    """A description of KV tensors for another process. `handles` are CUDA IPC handles of
    allocations (64 bytes each); `planes` rows of (allocation, offset of page 0, bytes between
    pages, pages), in the order of a block's planes: a layer is one plane, or one of K and one of V.
    `bus_id`: the PCI bus id of their GPU."""

    bus_id: str
    handles: tuple[bytes, ...]
    planes: npt.NDArray[np.uint64]
    page_bytes: int
    pages_per_block: int


@dataclass(slots=True)
class PageShare:
    """A registration of pages, in one session of one run of the daemon (`epoch`). `worker_pid`: the
    process that copies. The tensors may be freed when it `is_over`."""

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
        with suppress(OSError):  # it has ended, or is not visible here
            self._worker = os.pidfd_open(self.worker_pid)

    @property
    def can_see_worker(self) -> bool:
        return self._worker >= 0

    @property
    def is_in_doubt(self) -> bool:
        """Whether a copy may still be running."""
        return bool(self._unanswered) and not self.is_over

    @property
    def pages_in_doubt(self) -> frozenset[int]:
        """Pages that a running load, or one without a reply, may still write."""
        if self.is_over:
            return frozenset()
        tables = list(self._unanswered.values())
        return frozenset(page for table in tables for page in table.reshape(-1).tolist())

    @property
    def is_over(self) -> bool:
        """Whether the worker has unmapped the pages, or ended: no copy is running. Share them
        again to continue."""
        if self._is_worker_dead():
            self.close()
        return self._is_let_go

    def close(self) -> None:
        """The worker has unmapped the pages, or ended, or never mapped them."""
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
    """The first `planes` planes of blocks `first … first + blocks - 1` of the match have arrived.
    `copied_s`: the time of the worker's copies of all planes, set in the last part."""

    first: int
    blocks: int
    planes: int
    copied_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadedPages:
    """`blocks` blocks from the front are in their pages; the other pages are undefined.
    `is_at_rest`: no copy is running; otherwise see `PageShare.is_in_doubt`."""

    blocks: int
    seconds: float
    is_at_rest: bool = True


class PageCalls(Calls):
    """Operations about pages."""

    @operation
    def share_pages(self, pages: SharedPages) -> Steps[PageShare | None]:
        """Let the daemon's GPU worker copy from and to the inference engine's own KV tensors. None
        where that is impossible, with the reason in `last_error`: then use `fetch` and `put`."""
        connection = self._connection
        request = RegisterRequest(
            bus_id=pages.bus_id,
            handles=b"".join(pages.handles),
            planes=pages.planes.astype("<u8").tobytes(),
            page_bytes=pages.page_bytes,
            pages_per_block=pages.pages_per_block,
        )
        attempt = connection.attempt(connection.timeouts.fetch_s)
        with attempt:
            attempt.admit()
            greeting, reply_map = yield from connection.ask(request, attempt.deadline_s)
            reply = read_reply(reply_map, RegisterReply)
            share = PageShare(
                reply.registration,
                greeting.session,
                greeting.epoch,
                len(pages.planes),
                pages.pages_per_block,
                reply.pid,
            )
            if share.can_see_worker:
                return share
            yield from self._unshare(share)
            connection.last_error = (
                "the GPU worker's process is not visible here, so the end of its copies could not "
                "be detected: copy through the arena"
            )
        return None

    @operation
    def load_pages(self, match: Match, share: PageShare, pages: PageTable) -> Steps[LoadedPages]:
        """Load the blocks worth reloading into `pages`: int32 [blocks, pages per block]. Other
        pages of the table are undefined, and must not be used before `is_at_rest`. A cancelled load
        leaves its pages in doubt (`share.is_in_doubt`)."""
        _check_pages(share, pages)
        clock = self._connection.clock
        started_s = clock()
        came: dict[int, int] = {}

        def note(part: LoadedPart) -> Steps[None]:
            came[part.first] = part.blocks
            yield from ()

        yield from self._each_part(match, share, pages, 0, note)
        return LoadedPages(reach(came, 0), clock() - started_s, is_at_rest=not share.is_in_doubt)

    @stream
    def load_pages_by_part(
        self, match: Match, share: PageShare, pages: PageTable, *, planes_per_part: int
    ) -> Stream[LoadedPart]:
        """As `load_pages`, with a report after every `planes_per_part` planes (0: only at the end),
        so that a layer's attention may start while the next ones load. Planes are the layers in
        order, or K and V of each. Ends early on a failure."""
        _check_pages(share, pages)
        return self._each_part(match, share, pages, planes_per_part, give)

    @operation
    def save_pages(
        self,
        tokens: Tokens,
        share: PageShare,
        pages: PageTable,
        *,
        first: int = 0,
        durable: bool = False,
    ) -> Steps[PutResult]:
        """Store blocks `first …` of this prompt from `pages`: int32 [blocks, pages per block]."""
        _check_pages(share, pages)
        packed = encode_tokens(tokens)
        last = first + len(pages)
        whole = len(packed) // (TOKEN_BYTES * self._connection.spec.block_tokens)
        if not 0 <= first <= last <= whole:
            raise ValueError(f"blocks {first} … {last} of a prompt of {whole} whole blocks")
        source = _PageSource(share, pages, first)
        return (yield from PutCall(self._connection).put(packed, first, last, source, durable))

    @operation
    def unshare_pages(self, share: PageShare) -> Steps[bool]:
        """Unregister the pages. Returns True when no copy is running; False: try again."""
        return self._unshare(share)

    def _unshare(self, share: PageShare) -> Steps[bool]:
        connection = self._connection
        attempt = connection.attempt(connection.timeouts.fetch_s, is_answered=False)
        with attempt:
            attempt.admit()
            greeting = yield from connection.greeted(attempt.deadline_s)
            if greeting.epoch == share.epoch:  # else the number may be another registration's
                request = UnregisterRequest(registration=share.number)
                try:
                    yield from connection.ask(request, attempt.deadline_s)
                except DaemonError as error:
                    if error.code == "unknown_registration":
                        share.close()
                    raise
                share.close()
        return share.is_over

    def _each_part(
        self,
        match: Match,
        share: PageShare,
        pages: PageTable,
        planes_per_part: int,
        use: Callable[[LoadedPart], Generator[Any, Any, None]],
    ) -> Generator[Any, Any, None]:
        """Call `use` with the parts of each readable run's copy as they arrive."""
        connection = self._connection
        wanted = min(match.decision.reload_blocks, len(pages))
        attempt = connection.attempt(connection.timeouts.fetch_s)
        with attempt:
            attempt.admit()
            greeting = connection.session_of(match)
            if greeting is None or greeting.session != share.session or not wanted:
                return
            fetch = FetchRequest(lease=match.lease, pages=True)
            inbox = yield from connection.open(fetch, attempt.deadline_s, greeting.session)
            try:
                is_last = False
                while not is_last:
                    reply, _ = yield from connection.next_reply(inbox, attempt.deadline_s)
                    for first, num in _joined(read_reply(reply, FetchReply).ready):
                        rows = pages[first : min(first + num, wanted)]
                        if len(rows):
                            load = LoadRequest(
                                registration=share.number,
                                lease=match.lease,
                                first=first,
                                pages=rows.astype("<i4").tobytes(),
                                planes_per_part=planes_per_part,
                            )
                            yield from _copy(connection, load, share, rows, attempt.deadline_s, use)
                    is_last = not reply.get("more")
            finally:
                connection.close_inbox(inbox)


def _copy(
    connection: Connection,
    request: LoadRequest | SaveRequest,
    share: PageShare,
    written: PageTable,
    deadline_s: float,
    use: Callable[[LoadedPart], Generator[Any, Any, None]],
) -> Generator[Any, Any, None]:
    """A copy by the worker, in parts. A request that was sent and got no reply leaves the `written`
    pages in doubt."""
    copy = object()
    share._unanswered[copy] = written
    first = request.first if isinstance(request, LoadRequest) else 0
    inbox = yield from connection.open(request, deadline_s, share.session)
    try:
        is_last = False
        while not is_last:
            try:
                reply_map, _ = yield from connection.next_reply(inbox, deadline_s)
            except DaemonError:  # a reply: the copy has ended
                del share._unanswered[copy]
                raise
            is_last = not reply_map.get("more")
            if is_last:
                del share._unanswered[copy]
            reply = read_reply(reply_map, LoadReply)
            planes = share.num_planes if is_last else reply.planes
            seconds = reply.seconds if is_last else 0.0
            if planes is UNSET or seconds is UNSET:
                raise WireError("malformed", "a part of a load without its planes or its seconds")
            blocks = min(reply.blocks, len(written))
            yield from use(LoadedPart(first, blocks, planes, seconds))
    finally:
        connection.close_inbox(inbox)


class _PageSource:
    """The blocks of a put, `first …` of the prompt, which the worker copies from pages."""

    def __init__(self, share: PageShare, pages: PageTable, first: int) -> None:
        self._share, self._pages, self._first = share, pages, first

    def hand_over(
        self, connection: Connection, placement: Placement, greeting: Greeting, deadline_s: float
    ) -> Steps[list[Part]]:
        """See Supply. After a failure the ticket is aborted, and the daemon does not reuse its
        slots before the worker's copy has ended."""
        if greeting.session != self._share.session:
            raise DaemonError("unknown_registration", "the pages were shared in another session")
        rows = self._pages[placement.indices.astype(np.intp) - self._first]
        request = SaveRequest(
            registration=self._share.number,
            ticket=placement.ticket,
            indices=placement.indices.tobytes(),
            pages=rows.astype("<i4").tobytes(),
        )
        written = rows[:0]  # a save only reads
        yield from _copy(connection, request, self._share, written, deadline_s, _ignore)
        return []


def _ignore(part: LoadedPart) -> Steps[None]:
    yield from ()


def _check_pages(share: PageShare, pages: PageTable) -> None:
    if pages.ndim != 2 or pages.shape[1] != share.pages_per_block or pages.dtype != np.int32:
        raise ValueError(
            f"pages must be int32 [blocks, {share.pages_per_block}], not {pages.dtype} "
            f"{pages.shape}"
        )


def reach(came: Mapping[int, int], blocks: int) -> int:
    """The number of blocks from the front without a gap, at least `blocks`; `came`: the lengths of
    runs by their first block."""
    while more := came.get(blocks, 0):
        blocks += more
    return blocks


def _joined(runs: Sequence[ReadyRun]) -> list[tuple[int, int]]:
    """The runs as (first, blocks); adjacent ones of different tiers are joined into one load."""
    joined: list[tuple[int, int]] = []
    for first, _, _, _, num in sorted(runs):
        if joined and sum(joined[-1]) == first:
            joined[-1] = joined[-1][0], joined[-1][1] + num
        else:
            joined.append((first, num))
    return joined

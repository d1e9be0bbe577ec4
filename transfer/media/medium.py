"""What a worker needs from a medium: links, each of which copies blocks from one tier to another.

A link is called from one thread of the worker process, a batch at a time. An asynchronous one
(`StartingLink`) may be given the next batch while another thread waits for the last
(copy_thread.py). A link accesses only the slots named by its batch. It returns an outcome for every
move, and raises only when the medium can no longer be used (`TierBroken`): then the worker ends and
the daemon starts another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from hicache.engine.plan import BlockIdentity, Move, Outcome
from hicache.tiers.block import StoredRows
from hicache.tiers.errors import TierBroken, TierCorrupt, TierError, TierMissing, TierUnavailable
from hicache.tiers.tier import checked

if TYPE_CHECKING:
    from hicache.transfer.gpu_pages.engine_pages import EnginePages
    from hicache.transfer.worker_messages import WorkerConfig

Progress = Callable[[str, int, int], None]
"""Called with (unit, done, in all) while a medium is opened."""
T = TypeVar("T")


class Link(Protocol):
    """Copies from one source to one destination (None: the link deletes copies)."""

    @property
    def src(self) -> str: ...
    @property
    def dst(self) -> str | None: ...

    def copy(self, batch: Sequence[Move]) -> list[Outcome]:
        """Copy a batch. Returns an outcome for every move; the destination of a failed one is
        undefined. Raises only TierBroken."""


class Pending(Protocol):
    """A batch being copied. Its slots are in use until `wait` has returned or raised."""

    def wait(self) -> list[Outcome]:
        """Wait for the copies. Returns an outcome for every move, in order. Call it once, from any
        thread. Raises TierDamaged."""


@runtime_checkable
class StartingLink(Link, Protocol):
    """A link that copies asynchronously, batches in the order in which they were started."""

    def start(self, batch: Sequence[Move]) -> Pending:
        """Start copying. Raises TierDamaged; any other error only if no copy was started."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A batch whose copies have finished already."""

    outcomes: list[Outcome]

    def wait(self) -> list[Outcome]:
        return self.outcomes


@dataclass(frozen=True, slots=True)
class Spoilt:
    """A stored block that was corrupt, and has been removed. `tokens`: of its whole prefix, empty
    where unknown."""

    key: bytes
    problem: str
    namespace: bytes = b""
    tokens: bytes = b""


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """Progress of a scrub. `bad`: found since the last report."""

    blocks: int
    num_bytes: int
    total_blocks: int
    bad: list[Spoilt]
    is_done: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """A link copied `num_bytes` in `seconds`."""

    src: str
    dst: str
    num_bytes: int
    seconds: float


class Medium(Protocol):
    """An opened device: its links, and for a persistent one (`remembers`) its stored blocks.
    Created by calling its class with (config: WorkerConfig, near: Arena, progress: Progress).

    `readers` are called by the read queues' threads; `writers`, `forget`, `note` and `describe` by
    the write queues'; `stored` and `scrub` each by a separate thread at the same time; the rest
    before these start or after they have ended. With a queue for each priority (`by_priority`),
    `readers` and `writers` are one link for each, in order. `pages`: inference engines' own pages,
    where this medium can map them (page_worker.py).
    """

    remembers: bool
    by_priority: bool

    detail: str
    notes: list[str]
    readers: Sequence[Link]
    writers: Sequence[Link]

    @property
    def pages(self) -> EnginePages | None: ...

    def probe(self, num_bytes: int, block_bytes: int) -> list[Measured]:
        """Measure the speed of each direction, with real copies outside all slots."""

    def stored(self) -> Iterator[StoredRows]:
        """All stored blocks. May append to `notes` at its end."""

    def forget(self, keys: Mapping[int, Sequence[bytes]]) -> None:
        """Delete records, given by slot size, that the cache engine has no room for."""

    def note(self, uses: Mapping[int, Sequence[tuple[bytes, int, int]]]) -> None:
        """Store uses of blocks, (key, hits, seconds since 1970) by slot size."""

    def scrub(self) -> Iterator[Scrubbed]:
        """Read and check every block, about 1 MiB at a time. Yields progress."""

    def describe(self, namespace: bytes, description: Mapping[str, Any]) -> None:
        """Store a readable description of a namespace."""

    def close(self) -> None:
        """Close the device cleanly."""


class Forgetful:
    """The methods of a Medium that stores nothing persistently."""

    remembers = False
    by_priority = False
    pages: EnginePages | None = None

    def stored(self) -> Iterator[StoredRows]:
        return iter(())

    def forget(self, keys: Mapping[int, Sequence[bytes]]) -> None:
        pass

    def note(self, uses: Mapping[int, Sequence[tuple[bytes, int, int]]]) -> None:
        pass

    def scrub(self) -> Iterator[Scrubbed]:
        return iter(())

    def describe(self, namespace: bytes, description: Mapping[str, Any]) -> None:
        pass


def options_of(cls: type[T], config: WorkerConfig) -> T:
    """The medium's options as its dataclass. Raises TierUnavailable when they are invalid."""
    try:
        return checked(cls, config.spec.options)
    except ValueError as error:
        raise TierUnavailable(f"{config.device}: {error}") from error


def failed(move: Move, error: Exception) -> Outcome:
    """The outcome of a move that failed with this error. A block that the source lacks or holds
    corrupt is reported corrupt, so that it is not read again."""
    is_corrupt = isinstance(error, TierCorrupt | TierMissing)
    return Outcome(move.id, ok=False, error=str(error) or repr(error), corrupt=is_corrupt)


def identity_of(move: Move) -> BlockIdentity:
    """The identity of a move's block. Raises TierError when it is missing."""
    if move.identity is None:
        raise TierError(f"the identity of move {move.id} is missing")
    return move.identity


def start_or_fail(link: Link, batch: Sequence[Move]) -> Pending:
    """Call `link.start`, or `link.copy` where it has none. Any error except a broken medium becomes
    failed outcomes."""
    try:
        return link.start(batch) if isinstance(link, StartingLink) else Finished(link.copy(batch))
    except TierBroken:
        raise
    except Exception as error:  # any error of a driver: these moves fail, others continue
        return Finished([failed(move, error) for move in batch])


def by_size(batch: Sequence[Move], *, of_source: bool) -> Iterator[tuple[int, list[Move]]]:
    """The batch's moves by slot-size class of their source or destination, in order."""
    size = attrgetter("src_slot_bytes" if of_source else "dst_slot_bytes")
    for slot_bytes, moves in groupby(batch, key=size):
        yield slot_bytes, list(moves)

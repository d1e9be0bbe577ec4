"""A link copies blocks from one tier to one other. One per direction of a device, in its worker.

Called from one thread of the worker process, a batch at a time; one whose copies go on by
themselves (`StartingLink`) may be given the next batch while another thread waits for the last
(copy_thread.py). A link owns nothing but the slots
that the moves of its batch name. It reports an outcome for every move and raises only when the
medium cannot be used any more (`TierBroken`): then the worker ends and the daemon recovers.
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
    """One source, one destination (None: the link gives copies up)."""

    @property
    def src(self) -> str: ...
    @property
    def dst(self) -> str | None: ...

    def copy(self, batch: Sequence[Move]) -> list[Outcome]:
        """An outcome for every move. A failed one left nothing to be believed at its destination.
        Raises TierBroken only."""


class Pending(Protocol):
    """A batch on its way. Its slots belong to it until `wait` has returned or raised."""

    def wait(self) -> list[Outcome]:
        """Once, from any one thread: an outcome for every move, in order. Raises TierDamaged."""


@runtime_checkable
class StartingLink(Link, Protocol):
    """A link whose copies go on by themselves, batches in the order in which they were started."""

    def start(self, batch: Sequence[Move]) -> Pending:
        """Raises TierDamaged only, or with nothing on its way."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A batch that need not be waited for."""

    outcomes: list[Outcome]

    def wait(self) -> list[Outcome]:
        return self.outcomes


@dataclass(frozen=True, slots=True)
class Spoilt:
    """A stored block that was not what it should be, and is removed. `tokens`: of its whole prefix,
    empty where that cannot be told any more."""

    key: bytes
    problem: str
    namespace: bytes = b""
    tokens: bytes = b""


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """How far a scrub is, and what it has found since it last told."""

    blocks: int
    num_bytes: int
    total_blocks: int
    bad: list[Spoilt]
    is_done: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """A link copied so much in so long."""

    src: str
    dst: str
    num_bytes: int
    seconds: float


class Medium(Protocol):
    """What a worker opens: one device, the links to and from it, and what it remembers. Made by
    calling its class with (config: WorkerConfig, near: Arena, progress: Progress).

    `readers` are called from the reading direction's threads; `writers`, `forget`, `note` and
    `describe` from the writing direction's; `stored` and `scrub` each from a thread of its own
    meanwhile, where the medium `remembers` what it held; the rest before those start or after they
    have ended. Where the medium has a queue for each priority, `readers` and `writers` are
    one link for each of them, in order, with threads of its own. `pages`: inference engines' own,
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
        """Copy a few blocks each way, for real and outside every slot, and say how long it took."""

    def stored(self) -> Iterator[StoredRows]:
        """What a durable medium holds. `notes` may have grown at the end of it."""

    def forget(self, keys: Mapping[int, Sequence[bytes]]) -> None:
        """Remove records, given by slot size, that nobody knows of any more."""

    def note(self, uses: Mapping[int, Sequence[tuple[bytes, int, int]]]) -> None:
        """Keep (key, hits, seconds since 1970) of blocks, given by slot size."""

    def scrub(self) -> Iterator[Scrubbed]:
        """Read and check every block, about a MiB at a time."""

    def describe(self, namespace: bytes, description: Mapping[str, Any]) -> None:
        """Leave a readable account of a namespace."""

    def close(self) -> None:
        """Leave the device in order."""


class Forgetful:
    """The half of a Medium that a medium without a memory shares."""

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
    """The medium's own options, as its dataclass. Raises TierUnavailable when they are not."""
    try:
        return checked(cls, config.spec.options)
    except ValueError as error:
        raise TierUnavailable(f"{config.device}: {error}") from error


def failed(move: Move, error: Exception) -> Outcome:
    """The outcome of a move that met this error. What the source lacks or holds wrongly must not
    be asked for again, so it is reported corrupt."""
    is_corrupt = isinstance(error, TierCorrupt | TierMissing)
    return Outcome(move.id, ok=False, error=str(error) or repr(error), corrupt=is_corrupt)


def identity_of(move: Move) -> BlockIdentity:
    """Which block a move carries. Raises TierError when it does not say so."""
    if move.identity is None:
        raise TierError(f"move {move.id} does not say which block it carries")
    return move.identity


def start_or_fail(link: Link, batch: Sequence[Move]) -> Pending:
    """`link.start`, or all of `link.copy` where it has none, with any fault but a broken medium
    turned into failed outcomes."""
    try:
        return link.start(batch) if isinstance(link, StartingLink) else Finished(link.copy(batch))
    except TierBroken:
        raise
    except Exception as error:  # whatever a driver raises: these moves are misses, others go on
        return Finished([failed(move, error) for move in batch])


def by_size(batch: Sequence[Move], *, of_source: bool) -> Iterator[tuple[int, list[Move]]]:
    """The batch's moves by slot-size class of their source or destination, in order."""
    size = attrgetter("src_slot_bytes" if of_source else "dst_slot_bytes")
    for slot_bytes, moves in groupby(batch, key=size):
        yield slot_bytes, list(moves)

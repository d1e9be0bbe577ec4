"""What the mover tells the daemon's loop, besides the outcomes of moves."""

from __future__ import annotations

from dataclasses import dataclass

from hicache.engine.plan import Outcome
from hicache.tiers.block import StoredRows
from hicache.transfer.gpu_pages.page_messages import PageTold
from hicache.transfer.media.medium import Spoilt


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """The device serves moves now. `notes` are sentences for the operator. `is_restoring`: what it
    held before is still to be told (WorkerRows, at the end WorkerRestored)."""

    device: str
    tier: str
    pid: int
    detail: str
    notes: list[str]
    is_restoring: bool


@dataclass(frozen=True, slots=True)
class WorkerOpening:
    """It is on its way to WorkerUp, or to its first WorkerRows: so much is done, of so much.
    `unit`: "blocks" or "bytes"."""

    device: str
    tier: str
    unit: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class WorkerMeasured:
    """A probe or a batch moved `num_bytes` over the link from `src` to `dst` in `seconds`."""

    device: str
    src: str
    dst: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerRows:
    """Stored blocks of one namespace, to be answered with `Mover.taken`. After a restart of the
    worker all come again: the truth about the medium."""

    device: str
    tier: str
    rows: StoredRows


@dataclass(frozen=True, slots=True)
class WorkerRestored:
    """All that the device held was told. `notes` as in WorkerUp, and more."""

    device: str
    tier: str
    notes: list[str]


@dataclass(frozen=True, slots=True)
class WorkerNoted:
    """Another sentence for the operator, beside those of WorkerUp: the device serves on."""

    device: str
    tier: str
    note: str


@dataclass(frozen=True, slots=True)
class WorkerScrubbed:
    """How far the scrub is that was asked for, and what it found bad, and removed, since last."""

    device: str
    tier: str
    blocks: int
    bytes: int
    total_blocks: int
    bad: list[Spoilt]
    is_done: bool


@dataclass(frozen=True, slots=True)
class WorkerDown:
    """The worker ended and will be started again. Comes before the outcomes of its moves."""

    device: str
    tier: str
    error: str
    retry_s: float


@dataclass(frozen=True, slots=True)
class PageNews:
    """The answer to something about inference engines' pages."""

    device: str
    told: PageTold


WorkerNews = (
    WorkerUp
    | PageNews
    | WorkerOpening
    | WorkerMeasured
    | WorkerRows
    | WorkerRestored
    | WorkerNoted
    | WorkerScrubbed
    | WorkerDown
)
News = Outcome | WorkerNews

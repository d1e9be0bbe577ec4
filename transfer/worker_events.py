"""The mover's events for the daemon's loop, besides the outcomes of moves."""

from __future__ import annotations

from dataclasses import dataclass

from hicache.engine.plan import Outcome
from hicache.tiers.block import StoredRows
from hicache.transfer.gpu_pages.page_messages import PageReport
from hicache.transfer.media.medium import Spoilt


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """The device is ready for moves. `notes` are sentences for the operator. `is_restoring`: its
    stored blocks are still to be listed (WorkerRows, at the end WorkerRestored)."""

    device: str
    tier: str
    pid: int
    detail: str
    notes: list[str]
    is_restoring: bool


@dataclass(frozen=True, slots=True)
class WorkerOpening:
    """Progress on the way to WorkerUp, or to the first WorkerRows: `done` of `total` `unit`
    ("blocks" or "bytes")."""

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
    """Stored blocks of one namespace, to be acknowledged with `Mover.taken`. After a restart of the
    worker all are listed again, and are then the complete contents of the medium."""

    device: str
    tier: str
    rows: StoredRows


@dataclass(frozen=True, slots=True)
class WorkerRestored:
    """All stored blocks have been listed. `notes`: those of WorkerUp, and further ones."""

    device: str
    tier: str
    notes: list[str]


@dataclass(frozen=True, slots=True)
class WorkerNoted:
    """One more sentence for the operator. The device continues to work."""

    device: str
    tier: str
    note: str


@dataclass(frozen=True, slots=True)
class WorkerScrubbed:
    """Progress of a scrub, and the bad blocks found and removed since the last event."""

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
class PageEvent:
    """A report about inference engines' pages."""

    device: str
    report: PageReport


WorkerEvent = (
    WorkerUp
    | PageEvent
    | WorkerOpening
    | WorkerMeasured
    | WorkerRows
    | WorkerRestored
    | WorkerNoted
    | WorkerScrubbed
    | WorkerDown
)
MoverEvent = Outcome | WorkerEvent

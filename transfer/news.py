"""What the mover tells the daemon's loop, besides the outcomes of moves."""

from __future__ import annotations

from dataclasses import dataclass

from hicache.engine.plan import Outcome, StoredBlock


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """The device serves moves now. `notes` are sentences for the operator."""

    device: str
    tier: str
    pid: int
    detail: str
    notes: list[str]


@dataclass(frozen=True, slots=True)
class WorkerOpening:
    """It is on its way to WorkerUp: so much is done, of so much. `unit`: "blocks" or "bytes"."""

    device: str
    tier: str
    unit: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class WorkerMeasured:
    """A probe or a batch: so many bytes went over a link in so many seconds."""

    device: str
    src: str
    dst: str
    num_bytes: int
    seconds: float
    is_probe: bool


@dataclass(frozen=True, slots=True)
class WorkerRows:
    """Stored blocks of one namespace, in any order; all come before WorkerUp. After a
    restart of the worker they come again (`is_first` is false): the truth about the medium."""

    device: str
    tier: str
    namespace: bytes
    rows: list[StoredBlock]
    is_first: bool


@dataclass(frozen=True, slots=True)
class WorkerDown:
    """The worker ended and will be started again. Comes before the outcomes of its moves.
    `lost`: what the tier held is gone for good."""

    device: str
    tier: str
    lost: bool
    error: str
    retry_s: float


News = Outcome | WorkerUp | WorkerOpening | WorkerMeasured | WorkerRows | WorkerDown

"""What the scheduler's side tells the workers with each step, and what they report back.

Plain data, since between processes vLLM pickles it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class NamespaceIdentity:
    """What a request adds to the namespace of the model: other values, other KV."""

    lora_digest: str = ""
    cache_salt: str = ""
    weights_version: int = 0


@dataclass(frozen=True, slots=True)
class GrantedLease:
    """One rank's lease, made by the scheduler's session of `group` in the daemon's `epoch`."""

    number: int
    group: bytes
    epoch: str


@dataclass(frozen=True, slots=True)
class Load:
    """Fetch the first `len(pages)` blocks of a lease, one lease per rank, into these pages."""

    request: str
    identity: NamespaceIdentity
    leases: tuple[GrantedLease, ...]
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """Offer blocks `first … first + len(pages) - 1` of a prompt, which lie in these pages.

    `tokens`: little-endian u32, up to the end of the last block.
    """

    number: int
    identity: NamespaceIdentity
    tokens: bytes
    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepOrders:
    """The prefill in a step, as `Client.observe` wants it: Σn, Σ(n·c + n²/2), tokens decoded."""

    identity: NamespaceIdentity
    num_requests: int
    sum_n: float
    sum_nc: float
    decode_tokens: int


@dataclass(slots=True)
class Orders:
    """What one step brings. `is_idle`: the step computes nothing, so waiting costs nothing."""

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    step: StepOrders | None = None
    is_idle: bool = False


@dataclass(slots=True)
class WorkerReport:
    """Stores that have ended, by number, with how many ranks say so; those of them that some rank
    could not hand over whole; and how many of their last blocks the daemon did not have before.

    `doubted`: pages that the daemon's GPU worker may still write though their load has been given
    up, once for each rank that says so; `rested`: those of them that it does not any more."""

    ended: dict[int, int] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    fresh: dict[int, int] = field(default_factory=dict)
    doubted: list[int] = field(default_factory=list)
    rested: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.ended or self.doubted or self.rested)

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """vLLM's name for adding another rank's report."""
        for number, ranks in other.ended.items():
            self.ended[number] = self.ended.get(number, 0) + ranks
        self.refused |= other.refused
        for number, blocks in other.fresh.items():
            self.fresh[number] = max(blocks, self.fresh.get(number, 0))
        self.doubted += other.doubted
        self.rested += other.rested
        return self

"""What the scheduler's side sends to the workers with each step, and what they report back.

Plain data: vLLM pickles it between processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class NamespaceIdentity:
    """What a request adds to the model's namespace. Requests that differ in it share no KV."""

    lora_digest: str = ""
    cache_salt: str = ""
    weights_version: int = 0


@dataclass(frozen=True, slots=True)
class GrantedLease:
    """One rank's lease, granted to the scheduler's session of `group` in the daemon's `epoch`."""

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
    """The prefill of a step, as `Client.observe` takes it: Σn, Σ(n·c + n²/2), tokens decoded."""

    identity: NamespaceIdentity
    num_requests: int
    sum_n: float
    sum_nc: float
    decode_tokens: int


@dataclass(slots=True)
class Orders:
    """The orders of one step. `is_idle`: the step computes nothing, so waiting costs nothing."""

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    step: StepOrders | None = None
    is_idle: bool = False


@dataclass(slots=True)
class WorkerReport:
    """What the ranks report of stores and of pages in doubt.

    `ended`: by store number, how many ranks have finished it. `refused`: stores of which some rank
    stored only a part. `fresh`: how many of a store's last blocks the daemon did not have before.
    `doubted`: pages that the daemon's GPU worker may still write although their load was abandoned,
    once for each rank that reports it. `rested`: pages of these that it writes no more."""

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

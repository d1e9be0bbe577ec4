"""The vocabulary of the cache engine's boundary: events in, plans out, outcomes back in.

An event is a client's request or the outcome of a move. `CacheEngine.handle(event)` returns a
`Plan`: the answer to the request, and the moves to start. A move's outcome comes back as another
event. Nothing here does I/O; of `engine`, `transfer` imports only this module.

Times are seconds of one monotonic clock, passed in with each event. msgspec structs, since a
request creates a dozen: 0.14 µs each, against 0.27 µs for a dataclass and 1.5 µs for a frozen one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Generic, Literal, NamedTuple, TypeVar

import msgspec

from hicache.tiers.block import Ids, StoredRows

Answer = TypeVar("Answer", covariant=True)

DecisionName = Literal["reload", "partial", "recompute"]
Ended = Literal["", "turn", "tool_call", "conversation"]
"""What has ended: a turn (next: a person), a turn (next: a tool's result), the conversation."""


class Priority(IntEnum):
    """Lower values go first. A request waits for a demand; a demotion can always wait."""

    DEMAND = 0
    PREFETCH = 1
    DEMOTION = 2


class BlockIdentity(msgspec.Struct, frozen=True):
    """The identity that a persistent tier stores with a block, and compares on every read.

    `tokens` are the block's symbols, little-endian u32; `key` is a hash of the whole prefix.
    """

    namespace: bytes
    key: bytes
    parent: bytes
    tokens: bytes
    depth: int
    hits: int


class Move(msgspec.Struct):
    """A copy of one block from one tier's slot to another's, or (`dst=None`) the deletion of a
    copy.

    `src_slot_bytes`, `dst_slot_bytes`: the size of the slot on each side, 0 where there is none.
    `identity` is set for moves from or to a persistent tier, just before they are sent. The cache
    engine does not reuse the source slot before the outcome, and extends `deadline_s` when a
    request with a later deadline waits for the same move.
    """

    id: int
    block: int
    src: str
    src_slot: int
    dst: str | None
    dst_slot: int
    block_bytes: int
    src_slot_bytes: int
    dst_slot_bytes: int
    priority: Priority
    identity: BlockIdentity | None = None
    deadline_s: float | None = None


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a move. `seconds`: the copy's share of its batch's time. After a failure the
    destination is undefined; `corrupt`: the source is unusable, too; `rejected`: the tier to be
    changed refuses all changes now, not only this one."""

    move: int
    ok: bool
    seconds: float = 0.0
    error: str = ""
    corrupt: bool = False
    rejected: bool = False


class Reshaped(NamedTuple):
    """Pages of a tier that were divided into slots of another size."""

    tier: str
    first_page: int
    num_pages: int


class Plan(msgspec.Struct, Generic[Answer], frozen=True):
    """The result of an event: its answer, the moves to start, and the moves to cancel.

    `reshaped`: pages whose generations a mapped tier raises before it sends the answer or starts a
    move, since both may name slots there.
    """

    answer: Answer
    moves: list[Move] = msgspec.field(default_factory=list)
    cancel: list[int] = msgspec.field(default_factory=list)
    reshaped: Sequence[Reshaped] = ()


class Event(msgspec.Struct, Generic[Answer], frozen=True):
    """Base of all events. The type parameter is the type of its plan's answer."""


# --- requests of inference engines -------------------------------------------------------------


class OpenNamespace(Event[int], frozen=True):
    """Open a namespace. Answer: its number in this run of the cache engine.

    A new namespace takes the number `instead_of`, if given, from an idle one
    (`CacheEngine.idle_namespace`), which is deleted. `flop_per_token`, `flop_per_pair`: the
    arithmetic of its prefills, 0 where unknown. `slot_bytes`: the size of a block's slot in each
    tier; empty: its length rounded up to pages."""

    digest: bytes
    block_tokens: int
    block_bytes: int
    instead_of: int | None = None
    flop_per_token: int = 0
    flop_per_pair: int = 0
    slot_bytes: tuple[int, ...] = ()


class TierRun(msgspec.Struct):
    """`num_blocks` consecutive blocks whose fastest copy is in `tier`."""

    tier: str
    num_blocks: int


class ReloadDecision(msgspec.Struct, frozen=True):
    """How much of a hit to reload, and why. Seconds are estimates at the time of the decision.
    `explain()` returns the sentence, which is composed only when needed."""

    name: DecisionName
    reload_blocks: int
    reason: str
    reload_s: float
    prefill_s: float
    recompute_s: float
    explain: Callable[[], str] = str

    @property
    def sentence(self) -> str:
        """The decision and its reason, for people."""
        return self.explain()


class Matched(msgspec.Struct, frozen=True):
    """`lease` is 0 when nothing is leased (no hit, or nothing worth reloading)."""

    lease: int
    runs: tuple[TierRun, ...]
    hit_blocks: int
    decision: ReloadDecision


class Forecast(msgspec.Struct, frozen=True):
    """The expected time of a prompt with the best part of its hit reloaded. The decision may
    differ: the gain may be too small, or the planner may explore."""

    reload_blocks: int
    reload_s: float
    prefill_s: float
    recompute_s: float


class Scored(msgspec.Struct, frozen=True):
    """What a match would return."""

    runs: tuple[TierRun, ...]
    hit_blocks: int
    forecast: Forecast


class MatchPrompt(Event[Matched], frozen=True):
    """Find the held blocks of a prompt, decide how many to reload, and lease these.

    `is_partial`: the last block is not full, so the next turn's prompt will not contain it.
    `by_worker`: the GPU's worker is to copy the blocks into the inference engine's own pages."""

    namespace: int
    tokens: bytes
    owner: int
    now_s: float
    ttl_s: float
    hop_bytes_per_s: float = 0.0
    skip_blocks: int = 0
    is_partial: bool = False
    by_worker: bool = False


class ReadyRun(msgspec.Struct, frozen=True):
    """Blocks `first … first+len(slots)-1` of the leased prefix can be read in these slots."""

    first: int
    tier: str
    slots: Ids


class FetchStarted(msgspec.Struct, frozen=True):
    """`ready` can be read now; `waiting` more blocks are being copied, and `Arrivals` will report
    them. `unplaced` blocks at the end found no room and will not come. Blocks that have not come by
    `deadline_s` are better recomputed; all are expected within `expected_s`."""

    ready: tuple[ReadyRun, ...]
    waiting: int
    unplaced: int
    expected_s: float
    deadline_s: float


class Fetch(Event[FetchStarted], frozen=True):
    """Make the leased blocks readable by a client, or by the GPU's worker, from the front."""

    lease: int
    now_s: float
    deadline_s: float
    by_worker: bool = False


class Loading(Event[None], frozen=True):
    """The GPU's worker starts copying blocks `first …` of a lease; `Loaded` will report them.
    Ignored for an unknown lease."""

    lease: int
    first: int


class Loaded(Event[None], frozen=True):
    """The GPU's worker has copied these runs of a lease into the inference engine's own pages, in
    `seconds`. Ignored for an unknown lease."""

    lease: int
    runs: Sequence[ReadyRun]
    seconds: float
    now_s: float


class CutShort(Event[None], frozen=True):
    """The fetch of this lease has ended with only the first `num_blocks`."""

    lease: int
    num_blocks: int


class Release(Event[bool], frozen=True):
    """The lease is no longer needed. Answer: whether it existed."""

    lease: int
    now_s: float


class Placed(msgspec.Struct, frozen=True):
    """Where to write the blocks of a put that are not held yet.

    `indices` (block numbers within the prompt) and `slots` correspond; `ticket` is 0 when there is
    nothing to write. `present` blocks are held already, `busy` ones are being written by another
    put, `refused` ones found no room; `room_coming`: running demotions may make room soon.
    """

    ticket: int
    tier: str
    indices: Ids
    slots: Ids
    present: int
    busy: int
    refused: int
    room_coming: bool


class Hint(Event[None], frozen=True):
    """The inference engine's knowledge of whether and when this prompt will be extended. A wrong
    hint costs hits only.

    `ended`: what ended with its answer; `finish_reason`: the inference engine's reason;
    `return_s`: seconds until the prompt is expected again (0: unknown); `keep` is False: evict its
    blocks that were not requested since they were stored; `answer_tokens`: the answer's length (0:
    unknown)."""

    namespace: int
    tokens: bytes
    now_s: float
    ended: Ended = ""
    finish_reason: str = ""
    return_s: float = 0.0
    keep: bool = True
    answer_tokens: int = 0


class Put(Event[Placed], frozen=True):
    """A client offers blocks `first … last-1` of this prompt. Answer: which to write, and where."""

    namespace: int
    tokens: bytes
    first: int
    last: int
    owner: int
    now_s: float
    ttl_s: float


class Commit(Event[int], frozen=True):
    """The ticket's blocks `indices` are written: the next match finds them. The ticket's other
    blocks are dropped. Answer: how many became ready. Raises UnknownTicket."""

    ticket: int
    indices: Ids
    now_s: float
    durable: bool = False


class Abort(Event[int], frozen=True):
    """The ticket's blocks will not be committed. Unless `writer_gone`, their slots are quarantined
    until `WriterGone`. Answer: the number of blocks dropped."""

    ticket: int
    now_s: float
    writer_gone: bool


class WriterGone(Event[int], frozen=True):
    """The owner's process is dead or has acknowledged: end the quarantine of its slots, its leases
    and its tickets. Answer: the number of slots freed."""

    owner: int
    now_s: float


class Observe(Event[None], frozen=True):
    """An inference engine's measurement of one step's prefill.

    `sum_n` new tokens, `sum_nc` = Σ(n·c + n²/2) over the step's requests. `decode_tokens` were
    decoded in the same step.
    """

    namespace: int
    num_requests: int
    sum_n: float
    sum_nc: float
    seconds: float
    decode_tokens: float = 0.0


class ObserveReload(Event[None], frozen=True):
    """A client's measurement of a hit: the bytes of its last copy (hop), and the seconds."""

    lease: int
    hop_bytes: float
    hop_seconds: float
    total_seconds: float


class WarmStarted(msgspec.Struct, frozen=True):
    """Of the `held` blocks at the front of a prompt, `warm` can be read where they are now, and
    `refused` will not come: no room, or no link. `warming`: the number under which `Arrivals` will
    report the end, 0 when nothing more is to come."""

    warming: int
    held: int
    warm: int
    refused: int


class Warm(Event[WarmStarted], frozen=True):
    """A prompt will be requested: copy its held blocks to where they can be read, with a lower
    priority than demands, within `ttl_s`. `by_worker`: as in MatchPrompt."""

    namespace: int
    tokens: bytes
    now_s: float
    ttl_s: float
    by_worker: bool = False


class PinPlaced(msgspec.Struct, frozen=True):
    """The first `blocks` of a prompt are held, and pinned under the number `pin`. 0: none are held,
    or pins would exceed their share of this `tier`."""

    pin: int
    blocks: int
    tier: str = ""


class PinPrompt(Event[PinPlaced], frozen=True):
    """Pin the held blocks of a prompt for `ttl_s`, independent of sessions. `name`: for people."""

    namespace: int
    tokens: bytes
    name: str
    now_s: float
    ttl_s: float


class Unpin(Event[bool], frozen=True):
    """Remove a pin. Answer: whether it existed."""

    pin: int


class Cleared(msgspec.Struct, frozen=True):
    """A step of a clearing: `blocks` removed in it. Unless `is_complete`, send another `Clear` at
    once or, if `is_waiting`, later, after other moves. `is_complete`: all records are deleted and
    all moves of removed blocks have ended."""

    blocks: int
    is_over: bool
    is_waiting: bool
    is_complete: bool = False


class Clear(Event[Cleared], frozen=True):
    """Remove all blocks of a namespace that are not leased or pinned, up to about `max_blocks` in
    this step. `begins`: start a clearing; otherwise continue one, which is complete if none was
    started."""

    namespace: int
    now_s: float
    most_blocks: int = 2**62
    begins: bool = True


# --- outcomes, tiers, time ---------------------------------------------------------------------


class Arrivals(msgspec.Struct, frozen=True):
    """Changes that requests wait for: leases with newly readable runs, and leases whose fetch has
    ended. `durable`: tickets whose blocks are now all in a persistent tier; `warmed`: for each
    ended warming, the blocks that can be read."""

    arrived: dict[int, list[ReadyRun]]
    finished: list[int]
    durable: list[int]
    freed: bool
    warmed: dict[int, WarmStarted] = msgspec.field(default_factory=dict)


class MovesDone(Event[Arrivals], frozen=True):
    """Outcomes of moves, in any order. Unknown moves are ignored."""

    outcomes: Sequence[Outcome]
    now_s: float


class LinkMeasured(Event[None], frozen=True):
    """A link from `src` to `dst` copied `bytes` in `seconds` (a probe, or real batches)."""

    src: str
    dst: str
    num_bytes: int
    seconds: float


class Restore(Event[list[bytes]], frozen=True):
    """Blocks of one namespace that were found in a persistent tier. `zero_s`: the time at 0 of the
    clock of `now_s`, in seconds since 1970. Answer: the keys of blocks without a place (no parent,
    no room), to be deleted from the tier."""

    tier: str
    namespace: int
    rows: StoredRows
    now_s: float
    zero_s: float


class Spoiled(Event[Arrivals], frozen=True):
    """The last block of this prompt, given by the digest of its namespace and its tokens, was
    corrupt in a persistent tier, which has removed it."""

    tier: str
    digest: bytes
    tokens: bytes
    now_s: float


class Restored(Event[None], frozen=True):
    """All rows of the tier were restored: from now on it takes blocks."""

    tier: str
    now_s: float


class Use(msgspec.Struct, frozen=True):
    """The number of a stored block's uses, and its last use (of the daemon's clock)."""

    slot_bytes: int
    key: bytes
    hits: int
    used_s: float


class TakeUses(Event[list[Use]], frozen=True):
    """The uses of a persistent tier's blocks that are not noted there: at most `limit` of them.
    Empty: all are noted, or the tier does not serve. `again` looks through all blocks for more;
    without it, what was found last is continued."""

    tier: str
    limit: int
    again: bool


class TierDown(Event[Arrivals], frozen=True):
    """The tier's worker is dead: all its moves have failed and nothing of the tier can be read. A
    persistent tier lists what it still holds when it is up again (`Restore`). Outcomes of its moves
    may follow and are ignored."""

    tier: str
    now_s: float


class TierUp(Event[None], frozen=True):
    """The tier's worker is ready. `is_restoring`: its rows will follow (`Restore`, at the end
    `Restored`); until then the blocks known so far can be read, and it takes no new ones."""

    tier: str
    now_s: float
    is_restoring: bool = False


class SetAside(Event[int], frozen=True):
    """Before anything is in the tier: the process `owner` may still write these (first page,
    pages), so their slabs are quarantined until it is gone. Answer: the number of slabs."""

    tier: str
    pages: list[tuple[int, int]]
    owner: int


class Shed(Event[list[int]], frozen=True):
    """The machine is short of memory: take `num_slabs` slabs of the tier out of use, free ones
    first, then others as they are emptied, one at a time, so repeat the event. In haste, blocks
    that only this tier holds are dropped. Answer: the first pages of the slabs now out of use."""

    tier: str
    num_slabs: int
    in_haste: bool = False


class Regain(Event[None], frozen=True):
    """Use a slab again that was taken out of use."""

    tier: str
    first_page: int


class Tick(Event[Arrivals], frozen=True):
    """Time has passed: expire leases and tickets, demote above the watermarks."""

    now_s: float


class EndWarmings(Event[None], frozen=True):
    """End all warmings: moves in flight finish, no others are started."""

    now_s: float


class Flush(Event[int], frozen=True):
    """Write all blocks that a persistent tier lacks to it (a clean stop). Answer: the number of
    blocks still to be written; repeat after their outcomes until it is 0."""

    now_s: float


class UnknownLease(KeyError):
    """The lease does not exist: released, or expired."""


class UnknownTicket(KeyError):
    """The ticket does not exist: committed, aborted, or expired."""

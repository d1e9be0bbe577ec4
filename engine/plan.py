"""The vocabulary of the cache engine's boundary: events in, plans out, outcomes back in.

An event is what somebody asked or what became of a move. `CacheEngine.handle(event)` answers with
a `Plan`: the answer for whoever asked, and the moves that must now be carried out. A move's outcome
comes back as another event. Nothing here does I/O; `transfer` imports this module and no other of
the engine.

Times are seconds of one monotonic clock, passed in with each event. Structs of msgspec's, since a
request makes a dozen: 0.14 µs each, against 0.27 µs for a dataclass and 1.5 µs for a frozen one.
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
"""A turn, whose answer waits for a person; a turn that waits for a tool; the whole conversation."""


class Priority(IntEnum):
    """Lower goes first. Demand is a request waiting; demotion can always wait."""

    DEMAND = 0
    PREFETCH = 1
    DEMOTION = 2


class BlockIdentity(msgspec.Struct, frozen=True):
    """What a durable tier writes beside a block, and compares on every read.

    `tokens` are the block's symbols, little-endian u32; `key` commits to the whole prefix.
    """

    namespace: bytes
    key: bytes
    parent: bytes
    tokens: bytes
    depth: int
    hits: int


class Move(msgspec.Struct):
    """One block's copy from one tier's slot to another's, or (`dst=None`) giving up a copy there.

    `src_slot_bytes`, `dst_slot_bytes`: the size of the slot on each side, 0 where there is none.
    `identity` is filled for moves that touch a persistent tier, just before they are dispatched.
    The engine keeps the source slot from being reused until the outcome is in, and puts
    `deadline_s` off when somebody joins who waits longer.
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
    """What became of a move. `seconds` is the copy's share of its batch; on failure nothing of the
    destination may be believed, and `corrupt` says that the source must not be believed either.
    `rejected`: the tier that was to be changed takes nothing now, whatever the block."""

    move: int
    ok: bool
    seconds: float = 0.0
    error: str = ""
    corrupt: bool = False
    rejected: bool = False


class Reshaped(NamedTuple):
    """Pages of a tier that were cut into slots of a size they may not have held before."""

    tier: str
    first_page: int
    num_pages: int


class Plan(msgspec.Struct, Generic[Answer], frozen=True):
    """What the engine decided: the answer, the moves to start, and the moves no longer wanted.

    `reshaped`: pages whose generations a mapped tier raises before it sends the answer or starts a
    move, since both may name slots there.
    """

    answer: Answer
    moves: list[Move] = msgspec.field(default_factory=list)
    cancel: list[int] = msgspec.field(default_factory=list)
    reshaped: Sequence[Reshaped] = ()


class Event(msgspec.Struct, Generic[Answer], frozen=True):
    """Something happened. The type parameter is the answer its plan carries."""


# --- what an inference engine asks -------------------------------------------------------------


class OpenNamespace(Event[int], frozen=True):
    """Somebody will use this namespace. Answer: its number in this run of the engine.

    Where the namespace is new and `instead_of` is given, it takes that number from an idle one
    (`CacheEngine.idle_namespace`), which is forgotten with all that was learned about it.
    `flop_per_token`, `flop_per_pair`: the arithmetic of its prefills, 0 where it is not known.
    `slot_bytes`: what one of its blocks takes in each tier; empty: its length in whole pages."""

    digest: bytes
    block_tokens: int
    block_bytes: int
    instead_of: int | None = None
    flop_per_token: int = 0
    flop_per_pair: int = 0
    slot_bytes: tuple[int, ...] = ()


class TierRun(msgspec.Struct):
    """`num_blocks` blocks in a row whose fastest copy is in `tier`."""

    tier: str
    num_blocks: int


class ReloadDecision(msgspec.Struct, frozen=True):
    """How much of a hit to reload, and why. Seconds are expectations at the time of deciding.

    `told()` is the same in words, made only when somebody wants to read it.
    """

    name: DecisionName
    reload_blocks: int
    reason: str
    reload_s: float
    prefill_s: float
    recompute_s: float
    told: Callable[[], str] = str

    @property
    def sentence(self) -> str:
        """The decision and its reason, for people."""
        return self.told()


class Matched(msgspec.Struct, frozen=True):
    """`lease` is 0 when nothing is held (no hit, or nothing worth reloading)."""

    lease: int
    runs: tuple[TierRun, ...]
    hit_blocks: int
    decision: ReloadDecision


class Forecast(msgspec.Struct, frozen=True):
    """What a prompt is expected to take, with the best part of its hit reloaded. No decision: the
    planner may find the gain too small, or try the other way."""

    reload_blocks: int
    reload_s: float
    prefill_s: float
    recompute_s: float


class Scored(msgspec.Struct, frozen=True):
    """What a match would find."""

    runs: tuple[TierRun, ...]
    hit_blocks: int
    forecast: Forecast


class MatchPrompt(Event[Matched], frozen=True):
    """What of this prompt is held, and how much of it should be reloaded? Leases what it plans.

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
    """Blocks `first … first+len(slots)-1` of the leased prefix can be read at these slots."""

    first: int
    tier: str
    slots: Ids


class FetchStarted(msgspec.Struct, frozen=True):
    """`ready` may be read now; `waiting` more blocks are on their way, to be told by `Arrived`.

    `unplaced` blocks at the end could not be given room and will not come. What has not come by
    `deadline_s` is better recomputed; until then the rest is expected to take `expected_s`.
    """

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
    """The GPU's worker copies blocks `first …` of a lease from now on; they have not come before
    `Loaded` says so. Nothing to an unknown lease."""

    lease: int
    first: int


class Loaded(Event[None], frozen=True):
    """The GPU's worker has copied these runs of a lease into the inference engine's own pages, in
    so many `seconds`. Nothing to an unknown lease."""

    lease: int
    runs: Sequence[ReadyRun]
    seconds: float
    now_s: float


class CutShort(Event[None], frozen=True):
    """The fetch of this lease has been answered, with the first `num_blocks` only."""

    lease: int
    num_blocks: int


class Release(Event[bool], frozen=True):
    """The lease is no longer needed. Answer: whether it existed."""

    lease: int
    now_s: float


class Placed(msgspec.Struct, frozen=True):
    """Where to write the blocks of a put that the cache lacks.

    `indices` (block numbers within the prompt) and `slots` correspond; `ticket` is 0 when there is
    nothing to write. `present` blocks are held already, `busy` are being written by somebody else,
    `refused` found no room; `room_coming` says that demotions under way may make room soon.
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
    """What the inference engine knows about when, and whether, this prompt will go on. Advice only:
    a wrong one costs hits.

    `ended`: what has ended with the answer to it; `finish_reason`: why, in the inference engine's
    own word; `return_s`: the prompt is expected again in so many seconds (0: not known); not to
    `keep`: what nobody has asked for since it was stored is given up; `answer_tokens`: how long the
    answer was (0: not known)."""

    namespace: int
    tokens: bytes
    now_s: float
    ended: Ended = ""
    finish_reason: str = ""
    return_s: float = 0.0
    keep: bool = True
    answer_tokens: int = 0


class Put(Event[Placed], frozen=True):
    """Blocks `first … last-1` of this prompt can be stored: which are wanted, and where?"""

    namespace: int
    tokens: bytes
    first: int
    last: int
    owner: int
    now_s: float
    ttl_s: float


class Commit(Event[int], frozen=True):
    """The ticket's blocks `indices` are written: they are visible to the next match.

    Blocks of the ticket that are not named were not written and are given up.
    Answer: how many became ready. Raises UnknownTicket.
    """

    ticket: int
    indices: Ids
    now_s: float
    durable: bool = False


class Abort(Event[int], frozen=True):
    """The ticket's blocks will not be committed. Unless `writer_gone`, their slots are quarantined
    until `WriterGone`. Answer: blocks given up."""

    ticket: int
    now_s: float
    writer_gone: bool


class WriterGone(Event[int], frozen=True):
    """The owner's process is dead or has acknowledged: end the quarantine of its slots, give up its
    leases and tickets. Answer: slots freed."""

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
    """What a hit really cost: bytes through the engine's own last hop, and seconds for it."""

    lease: int
    hop_bytes: float
    hop_seconds: float
    total_seconds: float


class WarmStarted(msgspec.Struct, frozen=True):
    """Of the `held` blocks at the front of a prompt, `warm` can be read where they are now, and
    `refused` will not come: no room for them, or no way. `warming` is the number by which
    `Arrivals` tells the end, 0 when nothing more is to come."""

    warming: int
    held: int
    warm: int
    refused: int


class Warm(Event[WarmStarted], frozen=True):
    """This prompt will be asked for: copy what is held of it to where it can be read, behind
    everything that anybody waits for, within `ttl_s`. `by_worker`: as in MatchPrompt."""

    namespace: int
    tokens: bytes
    now_s: float
    ttl_s: float
    by_worker: bool = False


class PinPlaced(msgspec.Struct, frozen=True):
    """The first `blocks` of a prompt are held, and kept under the number `pin`. 0: there are none,
    or pins would have more than their share of this `tier`."""

    pin: int
    blocks: int
    tier: str = ""


class PinPrompt(Event[PinPlaced], frozen=True):
    """Keep what is held of this prompt for `ttl_s`, whoever comes and goes. `name`: for people."""

    namespace: int
    tokens: bytes
    name: str
    now_s: float
    ttl_s: float


class Unpin(Event[bool], frozen=True):
    """It need not be kept any more. Answer: whether there was such a pin."""

    pin: int


class Cleared(msgspec.Struct, frozen=True):
    """A step of a clearing: `blocks` forgotten in it. Where it is not over yet it goes on at once,
    or, `is_waiting`, after a while: other moves come first. `is_complete`: it is over, and no
    record is left of what went, nor a block that was on its way."""

    blocks: int
    is_over: bool
    is_waiting: bool
    is_complete: bool = False


class Clear(Event[Cleared], frozen=True):
    """Forget everything of a namespace that nobody holds: about so many blocks of it. `begins`:
    from its start; otherwise what was begun goes on, and is over where nothing was."""

    namespace: int
    now_s: float
    most_blocks: int = 2**62
    begins: bool = True


# --- what became of things ---------------------------------------------------------------------


class Arrivals(msgspec.Struct, frozen=True):
    """News for whoever waits: leases with newly readable runs, and leases that wait for no more.

    `durable` names tickets whose blocks are all in a durable tier now; `warmed`, what of each
    warming that has ended can be read.
    """

    arrived: dict[int, list[ReadyRun]]
    finished: list[int]
    durable: list[int]
    freed: bool
    warmed: dict[int, WarmStarted] = msgspec.field(default_factory=dict)


class MovesDone(Event[Arrivals], frozen=True):
    """Outcomes of moves, in any order. An unknown move is ignored."""

    outcomes: Sequence[Outcome]
    now_s: float


class LinkMeasured(Event[None], frozen=True):
    """A link from `src` to `dst` copied `bytes` in `seconds` (a probe, or real batches)."""

    src: str
    dst: str
    num_bytes: int
    seconds: float


class Restore(Event[list[bytes]], frozen=True):
    """Some of the blocks of one namespace that were found in a durable tier. `zero_s`: when the
    clock of `now_s` stood at 0, in seconds since 1970.

    Answer: keys that found no place (their parent has gone, no room), to be removed from the tier.
    """

    tier: str
    namespace: int
    rows: StoredRows
    now_s: float
    zero_s: float


class Spoiled(Event[Arrivals], frozen=True):
    """The last block of this prompt, given by the digest of its namespace and its tokens, was not
    what it should be in a durable tier, which has removed it."""

    tier: str
    digest: bytes
    tokens: bytes
    now_s: float


class Restored(Event[None], frozen=True):
    """All rows of the tier were told: from now on it takes blocks."""

    tier: str
    now_s: float


class Use(msgspec.Struct, frozen=True):
    """How often a stored block was used in all, and when last (of the daemon's clock)."""

    slot_bytes: int
    key: bytes
    hits: int
    used_s: float


class TakeUses(Event[list[Use]], frozen=True):
    """What of the durable tier's blocks was used and has not been written back: some `limit` of
    them. Empty: it is all known there, or the tier does not serve. `again` looks through all blocks
    for more; without, what was found then is told to its end."""

    limit: int
    again: bool


class TierDown(Event[Arrivals], frozen=True):
    """The tier's worker is dead: all its moves have failed and nothing of the tier can be read.

    A durable tier tells what it still holds when it comes back (`Restore`). Outcomes of its moves
    may follow and are ignored.
    """

    tier: str
    now_s: float


class TierUp(Event[None], frozen=True):
    """The tier's worker is ready. `is_restoring`: its rows are still to come (`Restore`, at the end
    `Restored`); until then it serves what is known of it, and takes nothing."""

    tier: str
    now_s: float
    is_restoring: bool = False


class SetAside(Event[int], frozen=True):
    """Before anything is in the tier: these pages, given as (first page, pages), may be written by
    somebody; the slabs they lie in are quarantined until the `owner` is gone. Answer: slabs."""

    tier: str
    pages: list[tuple[int, int]]
    owner: int


class Shed(Event[list[int]], frozen=True):
    """The machine is short of memory: give up `num_slabs` slabs of the tier, free ones first, then
    such as can be emptied; one more is emptied at a time, so it is asked again. In haste blocks
    that only this tier holds are forgotten. Answer: the pages at which the slabs that are out of
    use now begin."""

    tier: str
    num_slabs: int
    in_haste: bool = False


class Regain(Event[None], frozen=True):
    """A slab that was given up is room again."""

    tier: str
    first_page: int


class Tick(Event[Arrivals], frozen=True):
    """Time passed: expire leases and tickets, demote above the watermarks."""

    now_s: float


class EndWarmings(Event[None], frozen=True):
    """Hold nothing more of what is being warmed: what travels arrives, the rest is not begun."""

    now_s: float


class Flush(Event[int], frozen=True):
    """Write everything that a durable tier lacks down to it (a clean stop). Answer: blocks that
    still have to travel, those read from there not counted; repeat after their outcomes until it
    is 0."""

    now_s: float


class UnknownLease(KeyError):
    """No such lease: released, or expired."""


class UnknownTicket(KeyError):
    """No such ticket: committed, aborted, or expired."""

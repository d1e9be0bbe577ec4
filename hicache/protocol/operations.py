"""The operations of protocol 1: each one's request, reply and traits, declared once.

A request struct holds the fields that a client sends; `Request` holds those that every request has.
A field without a default is required. docs/protocol.md describes the fields. Field names and
defaults are the wire format: clients of every version must continue to work.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hicache.protocol.messages import MAX_DEADLINE_S as MAX_DEADLINE_S
from hicache.protocol.messages import OPERATIONS as OPERATIONS
from hicache.protocol.messages import Int, Q, R, Token, U32s, declare
from hicache.protocol.messages import Operation as Operation
from hicache.protocol.messages import Reply as Reply
from hicache.protocol.messages import Request as Request
from hicache.protocol.messages import decode_request as decode_request
from hicache.protocol.messages import operation_of as operation_of

NAMESPACE_BYTES: Final = 32
MAX_SCORED_PROMPTS: Final = 128
MAX_SCORED_TOKENS: Final = 1 << 21
"""Of all prompts of one `score` together. It is answered in one step of the daemon's loop, which
may take as long as one match of a very long prompt."""
MAX_PIN_S: Final = 30 * 86400.0
MAX_TREE_NODES: Final = 512
"""Nodes of one page of `tree`: the daemon reads 512 in half a millisecond."""

Float = Annotated[float, Meta(ge=0, le=2**63)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
Name = Annotated[str, Meta(max_length=200)]
Digest = Annotated[bytes, Meta(min_length=NAMESPACE_BYTES, max_length=NAMESPACE_BYTES)]
Count = Annotated[int, Meta(ge=0)]
DecisionName = Literal["reload", "partial", "recompute"]
TierRun = tuple[str, Count]
"""(tier, number of blocks)."""
ReadyRun = tuple[Count, str, bytes, bytes, Count]
"""(first block, tier, slots, generations, number of blocks)."""


# --- sessions -----------------------------------------------------------------------------------


_NIL: Final = b"\xc0"


class HelloRequest(Request, tag="hello"):
    """`spec` is decoded by the handler, which checks its nested arrays."""

    protocol: Int
    spec: msgspec.Raw
    client: Name = ""
    transport: str = "arena"
    group: Token = b""

    def __post_init__(self) -> None:
        if bytes(self.spec) == _NIL:
            raise ValueError("nil")  # the decoder takes any value for a raw one


class ArenaFile(msgspec.Struct):
    """One file to map."""

    tier: str
    path: str
    bytes: Count


class HelloReply(Reply):
    session: bytes
    group: bytes
    epoch: str
    version: str
    pid: Count
    namespace: bytes
    block_tokens: Count
    block_bytes: Count
    slot_bytes: Count
    transport: str
    arenas: list[ArenaFile]
    lease_ttl_s: float
    heartbeat_s: float
    max_message_bytes: Count
    max_prompt_tokens: Count
    capabilities: list[str]


class HeartbeatRequest(Request, tag="heartbeat"):
    pass


class ByeRequest(Request, tag="bye"):
    quiet: bool = False


HELLO = declare(Operation(HelloRequest, HelloReply, needs_session=False, capability="frames"))
HEARTBEAT = declare(Operation(HeartbeatRequest, Reply))
BYE = declare(Operation(ByeRequest, Reply, runs_late=True))

# --- prompts ------------------------------------------------------------------------------------


class DecisionReply(msgspec.Struct, omit_defaults=True):
    """How much of a hit to reload, and why; `sentence` only if the request sets `explain`."""

    name: DecisionName
    reload_blocks: Count
    reason: str
    reload_s: float
    prefill_s: float
    recompute_s: float
    sentence: str = ""


class MatchRequest(Request, tag="match"):
    tokens: U32s
    request: Name = ""
    skip_blocks: Int = 0
    hop_bytes_per_s: Annotated[float, Meta(ge=0, le=1e15)] = 0.0
    explain: bool = False
    conversation: Name = ""


class MatchReply(Reply):
    lease: Count
    hit_blocks: Count
    runs: list[TierRun]
    decision: DecisionReply


class FetchRequest(Request, tag="fetch"):
    lease: Int
    pages: bool = False


class FetchReply(Reply):
    """A progress answer has `more`; the reply has `blocks` and `waiting`."""

    ready: list[ReadyRun]
    more: bool | UnsetType = UNSET
    blocks: Count | UnsetType = UNSET
    waiting: Count | UnsetType = UNSET


class ReleaseRequest(Request, tag="release"):
    lease: Int
    hop_bytes: Float = 0.0
    hop_s: Seconds = 0.0
    total_s: Seconds = 0.0
    quiet: bool = False


class ReleaseReply(Reply):
    released: bool


class ScoreRequest(Request, tag="score"):
    namespace: Digest
    tokens: U32s
    lengths: U32s


class PromptScore(msgspec.Struct):
    hit_blocks: Count
    runs: list[TierRun]
    reload_blocks: Count
    reload_s: float
    prefill_s: float
    recompute_s: float


class ScoreReply(Reply):
    block_tokens: Count
    measured: bool
    scores: list[PromptScore]


class WarmRequest(Request, tag="warm"):
    namespace: Digest
    tokens: U32s
    wait: bool = False


class WarmReply(Reply):
    held_blocks: Count
    warm_blocks: Count
    refused_blocks: Count


class PinRequest(Request, tag="pin"):
    namespace: Digest
    tokens: U32s
    ttl_s: Annotated[float, Meta(ge=1, le=MAX_PIN_S)] = 3600.0
    name: Name = ""


class PinReply(Reply):
    pin: str
    blocks: Count
    epoch: str


class UnpinRequest(Request, tag="unpin"):
    pin: Annotated[str, Meta(max_length=64)]


class UnpinReply(Reply):
    unpinned: bool


MATCH = declare(Operation(MatchRequest, MatchReply, capability="match"))
FETCH = declare(Operation(FetchRequest, FetchReply, capability="fetch", deadline="fetch"))
RELEASE = declare(Operation(ReleaseRequest, ReleaseReply, runs_late=True))
SCORE = declare(Operation(ScoreRequest, ScoreReply, needs_session=False, capability="score"))
WARM = declare(Operation(WarmRequest, WarmReply, needs_session=False, capability="warm"))
PIN = declare(Operation(PinRequest, PinReply, needs_session=False, capability="pin"))
UNPIN = declare(Operation(UnpinRequest, UnpinReply, needs_session=False))

# --- storing blocks -----------------------------------------------------------------------------


class PutRequest(Request, tag="put"):
    tokens: U32s
    last: Int
    first: Int = 0


class PutReply(Reply):
    ticket: Count
    tier: str
    indices: U32s
    slots: U32s
    present: Count
    busy: Count
    refused: Count


class CommitRequest(Request, tag="commit"):
    ticket: Int
    indices: U32s
    durable: bool = False


class CommitReply(Reply):
    committed: Count
    durable: bool


class AbortRequest(Request, tag="abort"):
    ticket: Int
    quiet: bool = False


class AbortReply(Reply):
    aborted: Count


class ClearRequest(Request, tag="clear"):
    pass


class ClearReply(Reply):
    cleared: Count
    complete: bool


PUT = declare(Operation(PutRequest, PutReply, capability="put", deadline="put"))
COMMIT = declare(Operation(CommitRequest, CommitReply, capability="durable", deadline="put"))
ABORT = declare(Operation(AbortRequest, AbortReply, runs_late=True))
CLEAR = declare(Operation(ClearRequest, ClearReply, capability="clear", deadline="put"))

# --- what the inference engine reports ----------------------------------------------------------


class ObserveRequest(Request, tag="observe"):
    sum_n: Annotated[float, Meta(ge=0, le=1e15)]
    sum_nc: Annotated[float, Meta(ge=0, le=1e18)]
    seconds: Seconds
    num_requests: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    decode_tokens: Int = 0
    quiet: bool = False


class HintRequest(Request, tag="hint"):
    tokens: U32s = b""
    conversation: Name = ""
    ended: Annotated[str, Meta(max_length=20)] = ""
    finish_reason: Name = ""
    return_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    keep: bool = True
    answer_tokens: Int = 0
    quiet: bool = False


class HintReply(Reply):
    known: bool


OBSERVE = declare(Operation(ObserveRequest, Reply, capability="observe"))
HINT = declare(Operation(HintRequest, HintReply, capability="hint"))

# --- pages of an inference engine's own ---------------------------------------------------------


class RegisterRequest(Request, tag="register"):
    bus_id: Annotated[str, Meta(max_length=64)]
    handles: Annotated[bytes, Meta(max_length=1 << 16)]
    planes: Annotated[bytes, Meta(max_length=1 << 20)]
    page_bytes: Annotated[int, Meta(ge=1, le=1 << 32)]
    pages_per_block: Annotated[int, Meta(ge=1, le=1 << 20)]


class RegisterReply(Reply):
    registration: Count
    pid: Count


class LoadRequest(Request, tag="load"):
    registration: Int
    lease: Int
    pages: U32s
    first: Int = 0
    planes_per_part: Int = 0


class LoadReply(Reply):
    """A progress answer has `more` and `planes`; the reply has `seconds`."""

    blocks: Count
    seconds: float | UnsetType = UNSET
    more: bool | UnsetType = UNSET
    planes: Count | UnsetType = UNSET


class SaveRequest(Request, tag="save"):
    registration: Int
    ticket: Int
    indices: U32s
    pages: U32s


class SaveReply(Reply):
    blocks: Count
    seconds: float


class UnregisterRequest(Request, tag="unregister"):
    registration: Int


REGISTER = declare(Operation(RegisterRequest, RegisterReply, capability="pages"))
LOAD = declare(Operation(LoadRequest, LoadReply))
SAVE = declare(Operation(SaveRequest, SaveReply))
UNREGISTER = declare(Operation(UnregisterRequest, Reply))

# --- operators and routers ----------------------------------------------------------------------


class PingRequest(Request, tag="ping"):
    pass


class PingReply(Reply):
    epoch: str
    version: str
    pid: Count
    uptime_s: float
    ready: bool
    tiers: dict[str, str]
    block_tokens: Count = 0


class EventsRequest(Request, tag="events"):
    namespace: Digest
    after: Int = 0


class EventsReply(Reply):
    epoch: str
    endpoint: str | None
    topic: str
    sequence: Count
    tier_names: list[str]
    keys: bytes
    tiers: bytes
    next: int | None


class HealthRequest(Request, tag="health"):
    pass


class HealthReply(Reply):
    live: bool
    ready: bool
    healthy: bool
    tiers: dict[str, str]
    problems: dict[str, str]
    parts: dict[str, dict[str, Any]]


class StatsRequest(Request, tag="stats"):
    pass


Row = dict[str, Any]


class StatsReply(Reply):
    """The daemon's counters; fields may be added."""

    uptime_s: float
    epoch: str
    pid: Count
    version: str
    events: Row
    sessions: Count
    leases: Count
    pins: list[Row]
    pinned_blocks: Count
    tickets: Count
    waiting: Count
    namespaces: list[Row]
    index: Row
    tiers: list[Row]
    links: list[Row]
    planner: Row
    requests: dict[str, int]
    errors: dict[str, int]
    puts: dict[str, int]
    gate: Row
    history: Row
    dropped_blocks: Count
    workers: dict[str, int]
    memory: Row
    pages: Row
    queues: list[Row]


class ExplainRequest(Request, tag="explain"):
    last: Annotated[int, Meta(ge=1, le=256)] = 10


class ExplainReply(Reply):
    decisions: list[Row]


class WhatIfRequest(Request, tag="what_if"):
    pass


class WhatIfReply(Reply):
    tiers: list[Row]
    share: float
    forgotten: Count
    at_s: bytes
    tokens: bytes
    num_blocks: bytes
    block_tokens: bytes
    block_bytes: bytes
    num_sampled: bytes
    ids: bytes


class TreeRequest(Request, tag="tree"):
    namespace: Annotated[bytes, Meta(max_length=NAMESPACE_BYTES)] = b""
    after: Int = 0
    most: Annotated[int, Meta(ge=1, le=MAX_TREE_NODES)] = MAX_TREE_NODES


class TreeReply(Reply):
    epoch: str
    next: int | None
    end: Count
    tiers: list[str]
    namespaces: list[Row]
    nodes: list[Any]


class VerifyRequest(Request, tag="verify"):
    start: bool = False
    bytes_per_s: Annotated[float, Meta(ge=1e5, le=1e12)] = 64e6


class VerifyReply(Reply):
    devices: list[Row]


class ReloadRequest(Request, tag="reload"):
    file: Annotated[str, Meta(max_length=4096)] = ""


class ReloadReply(Reply):
    live: list[str]
    restart: list[str]


def _admin(request: type[Q], reply: type[R], capability: str = "") -> Operation[Q, R]:
    return declare(
        Operation(request, reply, needs_session=False, is_admin=True, capability=capability)
    )


PING = _admin(PingRequest, PingReply)
EVENTS = _admin(EventsRequest, EventsReply, "events")
HEALTH = _admin(HealthRequest, HealthReply)
STATS = _admin(StatsRequest, StatsReply)
EXPLAIN = _admin(ExplainRequest, ExplainReply)
WHAT_IF = _admin(WhatIfRequest, WhatIfReply)
TREE = _admin(TreeRequest, TreeReply)
VERIFY = _admin(VerifyRequest, VerifyReply)
RELOAD = _admin(ReloadRequest, ReloadReply)

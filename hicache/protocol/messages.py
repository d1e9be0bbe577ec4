"""Protocol 1: what clients and the daemon say to each other. Bytes ↔ structs, no sockets.

A message is one msgpack map, then (only where bulk bytes travel as frames) one part per block.
Every request carries `op`, `id` and, once greeted, `s`, the session token. Everything is checked
here before anybody acts on it: unknown operations and fields, wrong types, values out of range,
depth, sizes. `docs/protocol.md` is the same in prose.

    request  {"op": "match", "id": 7, "s": <16 bytes>, "deadline_s": 0.05, "tokens": <u32 …>}
    reply    {"id": 7, "ok": true, …}            exactly one without "more" for every request
    progress {"id": 7, "ok": true, "more": true, …}
    error    {"id": 7, "ok": false, "error": "expired", "message": "a sentence"}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, Union

import msgpack
import msgspec

PROTOCOL: Final = 1
SESSION_BYTES: Final = 16
TOKEN_BYTES: Final = 4
MAX_HEAD_BYTES: Final = 16 << 20
"""The map alone; block bytes travel in parts of their own."""
# A msgpack array's length is believed, and room made for it, before its items are read, at each
# of up to 1,024 levels: 3 KB could claim half a gigabyte.
_MAX_REQUEST_ARRAY: Final = 64
_MAX_REPLY_ARRAY: Final = 65536

ERRORS: Final = {
    "malformed": "the message is not one msgpack map of the documented form",
    "version": "the daemon speaks another protocol version",
    "unsupported": "the operation is reserved and not built yet",
    "unknown_session": "no such session: say hello again",
    "unknown_lease": "the lease was released or has expired",
    "unknown_ticket": "the put was committed, aborted, or has expired",
    "unknown_registration": "these pages are not registered, or not any more",
    "expired": "the deadline had passed before the daemon came to it",
    "refused": "the daemon cannot take this now",
    "too_large": "more than the configured limits allow",
    "spec": "the namespace cannot be held",
    "forbidden": "this peer may not do that",
    "stopping": "the daemon is shutting down",
    "internal": "a fault in the daemon, logged there",
}

RESERVED_OPS: Final[frozenset[str]] = frozenset()

MAX_SCORED_PROMPTS: Final = 128
MAX_SCORED_TOKENS: Final = 1 << 21
"""Of one `score`, which is answered at one go: of all its prompts together, so that it takes no
longer than one match of a very long prompt."""
NAMESPACE_BYTES: Final = 32
MAX_DEADLINE_S: Final = 3600.0
MAX_PIN_S: Final = 30 * 86400.0
"""What nobody asks for again within a month may go."""
MAX_TREE_NODES: Final = 512
"""Of one page of `tree`: as many as are looked at in half a millisecond."""


class WireError(ValueError):
    """Something decodable-but-wrong came in. `code` is one of ERRORS, `request_id` may be 0."""

    def __init__(self, code: str, message: str, request_id: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.request_id = request_id


class Field(NamedTuple):
    """One field of an operation: its type, its default (None: required), its bounds."""

    kind: type
    default: Any = None
    low: float = 0
    high: float = float(2**63)
    multiple: int = 1


U32S = Field(bytes, multiple=4)
COUNT = Field(int)
NAME = Field(str, "", high=200)
QUIET = Field(bool, False, high=1)
"""Whether an answer is wanted only if it is an error."""

OPS: Final[Mapping[str, Mapping[str, Field]]] = {
    "hello": {
        "protocol": COUNT,
        "client": Field(str, "", high=200),
        "spec": Field(dict),
        "transport": Field(str, "arena"),
        "group": Field(bytes, b"", high=SESSION_BYTES),
    },
    "ping": {},
    "match": {
        "request": Field(str, "", high=200),
        "tokens": U32S,
        "skip_blocks": Field(int, 0),
        "hop_bytes_per_s": Field(float, 0.0, high=1e15),
        "explain": Field(bool, False, high=1),
        "conversation": NAME,
    },
    "fetch": {"lease": COUNT, "pages": Field(bool, False, high=1)},
    "release": {
        "lease": COUNT,
        "hop_bytes": Field(float, 0.0),
        "hop_s": Field(float, 0.0, high=1e6),
        "total_s": Field(float, 0.0, high=1e6),
        "quiet": QUIET,
    },
    "score": {
        "namespace": Field(bytes, low=NAMESPACE_BYTES, high=NAMESPACE_BYTES),
        "tokens": U32S,
        "lengths": U32S,
    },
    "warm": {
        "namespace": Field(bytes, low=NAMESPACE_BYTES, high=NAMESPACE_BYTES),
        "tokens": U32S,
        "wait": Field(bool, False, high=1),
    },
    "pin": {
        "namespace": Field(bytes, low=NAMESPACE_BYTES, high=NAMESPACE_BYTES),
        "tokens": U32S,
        "ttl_s": Field(float, 3600.0, low=1.0, high=MAX_PIN_S),
        "name": NAME,
    },
    "unpin": {"pin": Field(str, high=64)},
    "events": {
        "namespace": Field(bytes, low=NAMESPACE_BYTES, high=NAMESPACE_BYTES),
        "after": Field(int, 0),
    },
    "put": {"tokens": U32S, "first": Field(int, 0), "last": COUNT},
    "commit": {"ticket": COUNT, "indices": U32S, "durable": Field(bool, False, high=1)},
    "abort": {"ticket": COUNT, "quiet": QUIET},
    "observe": {
        "num_requests": Field(int, 1, low=1, high=1e6),
        "sum_n": Field(float, high=1e15),
        "sum_nc": Field(float, high=1e18),
        "decode_tokens": Field(int, 0),
        "seconds": Field(float, high=1e6),
        "quiet": QUIET,
    },
    "register": {
        "bus_id": Field(str, high=64),
        "handles": Field(bytes, high=1 << 16),
        "planes": Field(bytes, high=1 << 20),
        "page_bytes": Field(int, low=1, high=1 << 32),
        "pages_per_block": Field(int, low=1, high=1 << 20),
    },
    "load": {
        "registration": COUNT,
        "lease": COUNT,
        "first": Field(int, 0),
        "pages": U32S,
        "planes_per_part": Field(int, 0),
    },
    "save": {"registration": COUNT, "ticket": COUNT, "indices": U32S, "pages": U32S},
    "unregister": {"registration": COUNT},
    "hint": {
        "tokens": Field(bytes, b"", multiple=4),
        "conversation": NAME,
        "ended": Field(str, "", high=20),
        "finish_reason": NAME,
        "return_s": Field(float, 0.0, high=1e9),
        "keep": Field(bool, True, high=1),
        "answer_tokens": Field(int, 0),
        "quiet": QUIET,
    },
    "heartbeat": {},
    "bye": {"quiet": QUIET},
    "clear": {},
    "stats": {},
    "health": {},
    "explain": {"last": Field(int, 10, low=1, high=256)},
    "what_if": {},
    "tree": {
        "namespace": Field(bytes, b"", high=NAMESPACE_BYTES),
        "after": Field(int, 0),
        "most": Field(int, MAX_TREE_NODES, low=1, high=MAX_TREE_NODES),
    },
    "verify": {
        "start": Field(bool, False, high=1),
        "bytes_per_s": Field(float, 64e6, low=1e5, high=1e12),
    },
    "reload": {"file": Field(str, "", high=4096)},
}

NEEDS_SESSION: Final = frozenset(OPS) - {
    "hello",
    "ping",
    "events",
    "score",
    "warm",
    "pin",
    "unpin",
    "stats",
    "health",
    "explain",
    "what_if",
    "tree",
    "reload",
    "verify",
}

_COMMON: Final[Mapping[str, Field]] = {
    "deadline_s": Field(float, 0.0, high=MAX_DEADLINE_S),
    "sent_s": Field(float, 0.0, high=1e12),
}
_HEAD_FIELDS: Final = frozenset({"op", "id", "s"})
_ALL: Final = {op: {**fields, **_COMMON} for op, fields in OPS.items()}
_DEFAULTS: Final = {op: {n: f.default for n, f in fields.items()} for op, fields in _ALL.items()}
_REQUIRED: Final = {
    op: [n for n in fields if fields[n].default is None] for op, fields in _ALL.items()
}
_RULES: Final = {
    op: {
        n: (f.kind, f.kind in (bytes, str, dict), f.low, f.high, f.multiple, f)
        for n, f in fields.items()
    }
    for op, fields in _ALL.items()
}
"""The same as OPS, flat: every request of every client goes through here."""


class Request(msgspec.Struct):
    """A checked request. `body` holds every field of its operation, defaults filled in: a dict, but
    of a match a MatchRequest.

    `deadline_s` is how long the caller waits, from `sent_s` on the host's CLOCK_MONOTONIC where
    both are on one host (0: the configured default, from now)."""

    op: str
    id: int
    session: bytes
    deadline_s: float
    sent_s: float
    body: Any


Count = Annotated[int, msgspec.Meta(ge=0)]
RequestId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Session = Annotated[bytes, msgspec.Meta(max_length=SESSION_BYTES)]
Name = Annotated[str, msgspec.Meta(max_length=200)]
DeadlineS = Annotated[float, msgspec.Meta(ge=0, le=MAX_DEADLINE_S)]
SentS = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
DecisionName = Literal["reload", "partial", "recompute"]


class DecisionReply(msgspec.Struct, omit_defaults=True):
    """How much of a hit to reload, and why; `sentence` only where it was asked to `explain`."""

    name: DecisionName
    reload_blocks: Count
    reason: str
    reload_s: float
    prefill_s: float
    recompute_s: float
    sentence: str = ""


class MatchRequest(
    msgspec.Struct,
    tag_field="op",
    tag="match",
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """The request that stands between an inference engine and its first token, so it is a struct
    from end to end, and so is its reply. OPS says the same of its fields, for the strict way."""

    id: RequestId = 0
    s: Session = b""
    sent_s: SentS = 0.0
    deadline_s: DeadlineS = 0.0
    tokens: bytes
    request: Name = ""
    skip_blocks: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    hop_bytes_per_s: Annotated[float, msgspec.Meta(ge=0, le=1e15)] = 0.0
    explain: bool = False
    conversation: Name = ""


class MatchReply(msgspec.Struct):
    """What is held of a prompt: `runs` are (tier, number of blocks)."""

    id: int
    ok: bool
    lease: Count
    hit_blocks: Count
    runs: list[tuple[str, Count]]
    decision: DecisionReply


_encoder: Final = msgspec.msgpack.Encoder()


def pack(message: Mapping[str, Any] | MatchRequest | MatchReply) -> bytes:
    """One message's map as bytes."""
    return _encoder.encode(message)


def unpack(data: bytes | memoryview, max_array_len: int = _MAX_REQUEST_ARRAY) -> dict[str, Any]:
    """One map with string keys, bounded before it is decoded. Raises WireError('malformed')."""
    if len(data) > MAX_HEAD_BYTES:
        raise WireError("too_large", f"a message map of {len(data)} bytes; at most 16 MiB")
    try:
        message = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            use_list=True,
            max_array_len=max_array_len,
            max_map_len=256,
            max_ext_len=0,
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise WireError(
            "malformed", f"not a msgpack map: {str(error) or type(error).__name__}"
        ) from None
    if not isinstance(message, dict):
        raise WireError("malformed", f"expected a map, found {type(message).__name__}")
    return message


def decode_request(data: bytes | memoryview) -> Request:
    """Raises WireError naming the field that is wrong; its `request_id` is set when known."""
    return _decode_plain(data) or _decode_strictly(data)


def _struct_of(op: str) -> type[msgspec.Struct]:
    """An operation's table as a struct: what it takes, the strict way takes as well."""
    fields: list[Any] = [("id", Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)])]
    fields.append(("s", Annotated[bytes, msgspec.Meta(max_length=SESSION_BYTES)], b""))
    for name, field in _ALL[op].items():
        if field.kind in (bytes, str):
            bounds = msgspec.Meta(min_length=int(field.low), max_length=min(int(field.high), 2**62))
        elif field.kind is int:
            bounds = msgspec.Meta(ge=int(field.low), le=min(int(field.high), 2**63 - 1))
        else:
            bounds = msgspec.Meta(ge=field.low, le=field.high)
        kind = bool if field.kind is bool else Annotated[field.kind, bounds]
        fields.append((name, kind) if field.default is None else (name, kind, field.default))
    return msgspec.defstruct(
        f"_{op}", fields, tag_field="op", tag=op, kw_only=True, forbid_unknown_fields=True
    )


_PLAIN_OPS: Final = [op for op in OPS if all(f.kind is not dict for f in OPS[op].values())]
_STRUCTS: Final = [MatchRequest, *(_struct_of(op) for op in _PLAIN_OPS if op != "match")]
_plain: Final = msgspec.msgpack.Decoder(Union[tuple(_STRUCTS)])  # noqa: UP007
_U32S: Final = {op: [n for n, f in fields.items() if f.multiple > 1] for op, fields in OPS.items()}


def _decode_plain(data: bytes | memoryview) -> Request | None:
    """A request that is right in every way, four times as fast; None: see what is wrong with it."""
    if len(data) > MAX_HEAD_BYTES:
        return None
    try:
        found: Any = _plain.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if type(found) is MatchRequest:
        if len(found.s) != SESSION_BYTES or len(found.tokens) % TOKEN_BYTES:
            return None
        return Request("match", found.id, found.s, found.deadline_s, found.sent_s, found)
    body = msgspec.structs.asdict(found)
    op: str = found.__struct_config__.tag
    session: bytes = body.pop("s")
    if len(session) != SESSION_BYTES and (session or op in NEEDS_SESSION):
        return None
    for name in _U32S[op]:
        if len(body[name]) % TOKEN_BYTES:
            return None
    return Request(op, body.pop("id"), session, body.pop("deadline_s"), body.pop("sent_s"), body)


def _decode_strictly(data: bytes | memoryview) -> Request:
    message = unpack(data)
    request_id = message.get("id", 0)
    if type(request_id) is not int or not 0 <= request_id < 2**63:
        raise WireError("malformed", "id: must be an unsigned integer")
    op = message.get("op")
    if type(op) is not str:
        raise WireError("malformed", "op: missing, or not a string", request_id)
    rules = _RULES.get(op)
    if rules is None:
        if op in RESERVED_OPS:
            raise WireError("unsupported", f"{op!r} is reserved and not built yet", request_id)
        raise WireError("malformed", f"op: {op[:40]!r} is no operation of protocol 1", request_id)
    session = message.get("s", b"")
    if type(session) is not bytes or len(session) not in (0, SESSION_BYTES):
        raise WireError("malformed", "s: must be the 16 bytes that hello returned", request_id)
    if not session and op in NEEDS_SESSION:
        raise WireError("unknown_session", f"{op} needs a session: say hello first", request_id)
    try:
        body = _DEFAULTS[op].copy()
        for name, value in message.items():
            rule = rules.get(name)
            if rule is not None:
                kind, is_sized, low, high, multiple, field = rule
                size: Any = value
                if is_sized and type(value) is kind:
                    size = len(size)
                    if size % multiple:
                        size = -1
                if type(value) is not kind or not low <= size <= high:
                    value = _checked(value, name, field)
                body[name] = value
            elif name not in _HEAD_FIELDS:
                raise WireError("malformed", f"{name[:40]}: unknown field of {op}")
        for name in _REQUIRED[op]:
            if body[name] is None:
                raise WireError("malformed", f"{name}: missing")
    except WireError as error:
        error.request_id = request_id
        raise
    if op == "match":
        asked = MatchRequest(id=request_id, s=session, **body)
        return Request(op, request_id, session, asked.deadline_s, asked.sent_s, asked)
    deadline_s, sent_s = body.pop("deadline_s"), body.pop("sent_s")
    return Request(op, request_id, session, deadline_s, sent_s, body)


def _checked(value: Any, name: str, field: Field) -> Any:
    """A value that is not plainly right: an int for a float, an absent one, or an error."""
    if value is None:
        return field.default
    kind = type(value)
    if kind is not field.kind:
        if field.kind is not float or kind is not int:
            raise WireError(
                "malformed", f"{name}: must be {field.kind.__name__}, not {kind.__name__}"
            )
        value = float(value)
    if kind is bytes or kind is str or kind is dict:
        if len(value) > field.high:
            raise WireError("too_large", f"{name}: {len(value)} long; at most {field.high:.0f}")
        if len(value) < field.low:
            raise WireError("malformed", f"{name}: {len(value)} long; at least {field.low:.0f}")
        if field.multiple > 1 and len(value) % field.multiple:
            raise WireError("malformed", f"{name}: length {len(value)} is no multiple of 4")
    elif not field.low <= value <= field.high:  # also refuses NaN
        raise WireError("malformed", f"{name}: {value} is outside {field.low:g} … {field.high:g}")
    return value


def error_reply(request_id: int, code: str, message: str = "") -> dict[str, Any]:
    """The one reply of a request that cannot be served."""
    assert code in ERRORS, code
    return {"id": request_id, "ok": False, "error": code, "message": message or ERRORS[code]}


def decode_reply(data: bytes | memoryview) -> dict[str, Any]:
    """A reply's map. Raises WireError when it is not one (the client treats that as a miss)."""
    message = unpack(data, _MAX_REPLY_ARRAY)
    if type(message.get("id")) is not int or type(message.get("ok")) is not bool:
        raise WireError("malformed", "a reply needs an integer id and a boolean ok")
    if not message["ok"] and type(message.get("error")) is not str:
        raise WireError("malformed", "an error reply needs an error code")
    return message

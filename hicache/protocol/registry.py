"""Operations of the protocol: their declaration, their table, and the decoder of requests.

    MATCH = declare(Operation(MatchRequest, MatchReply, capability="match"))
      ├─ decode_request    bytes → MatchRequest, every field checked
      ├─ daemon/operations one handler, registered with `handles(MATCH)`
      ├─ client            one method
      └─ docs/protocol.md  its row of the table of operations, which is generated

`operations` declares the operations of protocol 1. Import it before decoding requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Any, Final, Generic, Literal, TypeVar, Union

import msgspec
from msgspec import Meta

from hicache.protocol.messages import MAX_HEAD_BYTES, SESSION_BYTES, WireError, pack, unpack

MAX_DEADLINE_S: Final = 3600.0
MULTIPLE: Final = "multiple"
Int = Annotated[int, Meta(ge=0, le=2**63 - 1)]
U32s = Annotated[bytes, Meta(extra={MULTIPLE: 4})]
"""Little-endian unsigned 32-bit integers."""
Token = Annotated[bytes, Meta(max_length=SESSION_BYTES)]


class Request(
    msgspec.Struct, tag_field="op", kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The fields of every request. `deadline_s` is how long the caller waits, counted from
    `sent_s` on the host's CLOCK_MONOTONIC, or from arrival where that is 0."""

    id: Int = 0
    s: Token = b""
    deadline_s: Annotated[float, Meta(ge=0, le=MAX_DEADLINE_S)] = 0.0
    sent_s: Annotated[float, Meta(ge=0, le=1e12)] = 0.0


class Reply(msgspec.Struct, kw_only=True):
    """The fields of every reply. The daemon fills in `id`."""

    id: int = 0
    ok: bool = True


Q = TypeVar("Q", bound=Request)
R = TypeVar("R", bound=Reply)
Deadline = Literal["", "fetch", "put"]


@dataclass(frozen=True)
class Operation(Generic[Q, R]):
    """`capability`: its name in the reply to `hello`, if any. `is_admin`: served while the daemon
    stops, too, and not counted as a client's request. `runs_late`: served after its deadline, too.
    `deadline`: the key of the configuration's `deadlines` that limits how long the reply may wait;
    empty: the reply does not wait."""

    request: type[Q]
    reply: type[R]
    needs_session: bool = True
    capability: str = ""
    is_admin: bool = False
    runs_late: bool = False
    deadline: Deadline = ""

    @cached_property
    def name(self) -> str:
        """The operation's name on the wire."""
        return str(self.request.__struct_config__.tag)

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The request's fields, without those of every request."""
        names = self.request.__struct_fields__
        return tuple(name for name in names if name not in Request.__struct_fields__)

    @cached_property
    def u32s(self) -> tuple[str, ...]:
        """The request's fields of type U32s."""
        return tuple(f.name for f in msgspec.structs.fields(self.request) if f.type == U32s)


OPERATIONS: Final[dict[str, Operation[Any, Any]]] = {}
_BY_REQUEST: Final[dict[type[Request], Operation[Any, Any]]] = {}


def declare(operation: Operation[Q, R]) -> Operation[Q, R]:
    """Register an operation for `decode_request`. Its name must be new."""
    assert operation.name not in OPERATIONS, operation.name
    OPERATIONS[operation.name] = _BY_REQUEST[operation.request] = operation
    _decoder.cache_clear()
    return operation


def operation_of(request: Request) -> Operation[Any, Any]:
    """The operation of a decoded request."""
    return _BY_REQUEST[type(request)]


@cache
def _decoder() -> Callable[[bytes | memoryview], Request]:
    requests: Any = Union[tuple(_BY_REQUEST)]  # noqa: UP007
    decode: Callable[[bytes | memoryview], Request] = msgspec.msgpack.Decoder(requests).decode
    return decode


def decode_request(data: bytes | memoryview) -> Request:
    """Decode a request. Raises WireError that names the wrong field; its `request_id` is set when
    known."""
    if len(data) > MAX_HEAD_BYTES:
        unpack(data)
    try:
        request = _decoder()(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        request = _without_nils(data)
    operation = _BY_REQUEST[type(request)]
    if len(request.s) != SESSION_BYTES:
        _check_session(operation, request.s, request.id)
    for name in operation.u32s:
        if len(getattr(request, name)) & 3:
            size = len(getattr(request, name))
            raise WireError("malformed", f"{name}: length {size} is no multiple of 4", request.id)
    return request


def _without_nils(data: bytes | memoryview) -> Request:
    """Decode a refused request again, with nil fields as absent ones. Raises WireError for the
    first mistake, in this order: id, op, s, the fields."""
    message = unpack(data)
    request_id = message.get("id", 0)
    if type(request_id) is not int or not 0 <= request_id < 2**63:
        raise WireError("malformed", "id: must be an unsigned integer")
    op = message.get("op")
    if type(op) is not str:
        raise WireError("malformed", "op: missing, or not a string", request_id)
    operation = OPERATIONS.get(op)
    if operation is None:
        raise WireError("malformed", f"op: {op[:40]!r} is no operation of protocol 1", request_id)
    _check_session(operation, message.get("s", b""), request_id)
    present = {name: value for name, value in message.items() if value is not None}
    try:
        return _decoder()(pack(present))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # msgspec says: "Expected `int`, got `str` - at `$.lease`".
        sentence, _, path = str(error).partition(" - at ")
        where = f"{path.strip('`$.')}: " if path else ""
        code = "too_large" if " of length <= " in sentence else "malformed"
        raise WireError(code, f"{where}{sentence[:200]}", request_id) from None


def _check_session(operation: Operation[Any, Any], session: object, request_id: int) -> None:
    if type(session) is not bytes or len(session) not in (0, SESSION_BYTES):
        raise WireError("malformed", "s: must be the 16 bytes that hello returned", request_id)
    if not session and operation.needs_session:
        op = operation.name
        raise WireError("unknown_session", f"{op} needs a session: say hello first", request_id)

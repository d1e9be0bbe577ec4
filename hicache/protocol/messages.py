"""Protocol 1: the form that every message has, and its errors. Bytes ↔ maps, no sockets.

A message is one msgpack map, then (only where block bytes travel as frames) one part per block.
Every request has `op`, `id` and, within a session, `s`, the session's token. What each operation's
map holds is declared in `operations`. `docs/protocol.md` describes all of it.

    request  {"op": "match", "id": 7, "s": <16 bytes>, "deadline_s": 0.05, "tokens": <u32 …>}
    reply    {"id": 7, "ok": true, …}            exactly one without "more" for every request
    progress {"id": 7, "ok": true, "more": true, …}
    error    {"id": 7, "ok": false, "error": "expired", "message": "a sentence"}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgpack
import msgspec

PROTOCOL: Final = 1
SESSION_BYTES: Final = 16
TOKEN_BYTES: Final = 4
MAX_HEAD_BYTES: Final = 16 << 20
"""Of the map; block bytes travel in parts of their own."""
# The decoder makes room for an array of the length that its head claims before it reads the items,
# at each of up to 1,024 levels: 3 KB could claim half a gigabyte.
_MAX_REQUEST_ARRAY: Final = 64
_MAX_REPLY_ARRAY: Final = 65536

ERRORS: Final = {
    "malformed": "the message is not one msgpack map of the documented form",
    "version": "the daemon speaks another protocol version",
    "unsupported": "this daemon does not serve that operation",
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


class WireError(ValueError):
    """A message is not as it should be. `code` is one of ERRORS; `request_id` may be 0."""

    def __init__(self, code: str, message: str, request_id: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.request_id = request_id


pack: Final[Callable[[Mapping[str, Any] | msgspec.Struct], bytes]] = (
    msgspec.msgpack.Encoder().encode
)
"""One message's map as bytes."""


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

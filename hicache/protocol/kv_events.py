"""What a daemon tells of the blocks it holds, as a router reads it: pages on the front door, and
messages of KV events (`docs/protocol.md`, "KV events").

Light and pure: bytes and maps in, checked structs out. Whatever is not of the documented form is a
WireError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from hicache.protocol.keys import KEY_BYTES
from hicache.protocol.messages import WireError

HEADER_ONLY: Final = 1 << 62
"""As `after`: behind the last page of anything."""


class ToldPage(msgspec.Struct, frozen=True):
    """What has been told as held, when the next message of the topic was to have the number
    `sequence`: some `keys`, and for each the tiers as bits, in the order of `tier_names`."""

    epoch: str
    endpoint: str | None
    topic: str
    sequence: int
    tier_names: list[str]
    keys: bytes
    tiers: bytes
    next: int | None

    def blocks(self) -> Iterator[tuple[bytes, int]]:
        """Each block's key and its tiers."""
        starts = range(0, len(self.keys), KEY_BYTES)
        keys = (self.keys[start : start + KEY_BYTES] for start in starts)
        return zip(keys, self.tiers, strict=True)


class ToldEvent(msgspec.Struct, frozen=True):
    """One event; its tokens are not read."""

    type: str
    block_hashes: list[bytes] = []
    tier: str = ""
    epoch: str = ""


class ToldMessage(msgspec.Struct, frozen=True):
    """The message of this number in its topic."""

    number: int
    events: list[ToldEvent]


class _Batch(msgspec.Struct, array_like=True):
    wall_s: float
    events: list[ToldEvent]


_decode: Final = msgspec.msgpack.Decoder(_Batch).decode


def read_page(reply: Mapping[str, Any], after: int) -> ToldPage:
    """The reply to `events`."""
    fields = {name: reply.get(name) for name in ToldPage.__struct_fields__}
    try:
        page = msgspec.convert(fields, ToldPage, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise WireError("malformed", f"a page of what is held: {error}") from None
    if page.sequence < 0:
        raise WireError("malformed", f"sequence: {page.sequence} in a reply")
    if len(page.keys) != KEY_BYTES * len(page.tiers):
        raise WireError("malformed", f"{len(page.keys)} bytes of keys, {len(page.tiers)} of tiers")
    if max(page.tiers, default=0) >> len(page.tier_names):
        raise WireError("malformed", f"a block in a tier that is none of {len(page.tier_names)}")
    if page.next is not None and page.next <= after:
        raise WireError("malformed", f"next: {page.next} behind {after}")
    return page


def read_message(parts: list[bytes]) -> ToldMessage:
    """A message as a SUB socket brings it."""
    if len(parts) != 3 or len(parts[1]) != 8:
        raise WireError("malformed", "a message has a topic, a number of 8 bytes, and a batch")
    try:
        batch = _decode(parts[2])
    except (ValueError, msgspec.MsgspecError) as error:
        raise WireError("malformed", f"no batch of KV events: {error}") from None
    return ToldMessage(int.from_bytes(parts[1], "big"), batch.events)

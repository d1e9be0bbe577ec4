"""Decodes KV events for a router: pages from the clients' socket, and published messages
(`docs/protocol.md`, "KV events").

Few imports, and pure: bytes and maps in, checked structs out. Raises WireError for anything that
does not have the documented form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from hicache.protocol.keys import KEY_BYTES
from hicache.protocol.messages import WireError

HEADER_ONLY: Final = 1 << 62
"""As `after`: beyond the last page, to get only the header."""


class EventsPage(msgspec.Struct, frozen=True):
    """Published blocks as of the topic's message number `sequence` (exclusive): some `keys`, and
    for each a bit set of tiers, in the order of `tier_names`."""

    epoch: str
    endpoint: str | None
    topic: str
    sequence: int
    tier_names: list[str]
    keys: bytes
    tiers: bytes
    next: int | None

    def blocks(self) -> Iterator[tuple[bytes, int]]:
        """(key, tiers) of each block."""
        starts = range(0, len(self.keys), KEY_BYTES)
        keys = (self.keys[start : start + KEY_BYTES] for start in starts)
        return zip(keys, self.tiers, strict=True)


class KvEvent(msgspec.Struct, frozen=True):
    """One event, without its tokens."""

    type: str
    block_hashes: list[bytes] = []
    tier: str = ""
    epoch: str = ""


class KvEventMessage(msgspec.Struct, frozen=True):
    """A message, with its number in its topic."""

    number: int
    events: list[KvEvent]


class _Batch(msgspec.Struct, array_like=True):
    wall_s: float
    events: list[KvEvent]


_decode: Final = msgspec.msgpack.Decoder(_Batch).decode


def read_page(reply: Mapping[str, Any], after: int) -> EventsPage:
    """Decode a reply to `events`."""
    fields = {name: reply.get(name) for name in EventsPage.__struct_fields__}
    try:
        page = msgspec.convert(fields, EventsPage, builtin_types=(bytes,))
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


def read_message(parts: list[bytes]) -> KvEventMessage:
    """Decode a message received by a SUB socket."""
    if len(parts) != 3 or len(parts[1]) != 8:
        raise WireError("malformed", "a message has a topic, a number of 8 bytes, and a batch")
    try:
        batch = _decode(parts[2])
    except (ValueError, msgspec.MsgspecError) as error:
        raise WireError("malformed", f"no batch of KV events: {error}") from None
    return KvEventMessage(int.from_bytes(parts[1], "big"), batch.events)

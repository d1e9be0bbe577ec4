"""The errors of every tier's medium, and the identity that a persistent tier stores with a block.

Raised inside worker processes, which turn them into failed outcomes. After any of them nothing was
stored, and the bytes read must not be used.
"""

from __future__ import annotations

from typing import Protocol


class TierError(Exception):
    """An operation on a tier failed, and nothing of it was applied."""


class TierFull(TierError):
    """The medium has no room (a full map, a full volume). Evictions may make room."""


class NoRoomForSize(TierFull):
    """Other slot sizes use the room that this one needs."""


class TierMissing(TierError):
    """The tier does not hold the block."""


class TierCorrupt(TierError):
    """The bytes under this key are not the block's. The record is to be removed."""


class TierUnavailable(TierError):
    """The medium cannot be opened: in use by another process, not writable, not supported."""


class TierBroken(TierError):
    """This process can no longer use the medium. Its worker reports this and ends, and a new worker
    tries again. The stored data may be intact."""


class TierDamaged(TierBroken):
    """The stored data cannot be trusted. As TierBroken; after a second time it is set aside."""


class Identity(Protocol):
    """What identifies a block's content in a persistent tier; compared on every read."""

    @property
    def namespace(self) -> bytes: ...
    @property
    def key(self) -> bytes: ...
    @property
    def parent(self) -> bytes: ...
    @property
    def tokens(self) -> bytes: ...
    @property
    def depth(self) -> int: ...
    @property
    def hits(self) -> int: ...

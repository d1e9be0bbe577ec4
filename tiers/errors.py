"""What every tier's medium has in common: how it fails, and what a durable one writes down.

Raised inside worker processes and turned into failed outcomes there. None of these ever leaves a
slot half believed: after any of them nothing was stored, and what was read must not be used.
"""

from __future__ import annotations

from typing import Protocol


class TierError(Exception):
    """A tier could not do what was asked; nothing was applied."""


class TierFull(TierError):
    """The medium has no room (a full map, a full volume). Evictions make room."""


class NoRoomForSize(TierFull):
    """The medium has room, but other slot sizes hold what this one would need."""


class TierMissing(TierError):
    """The tier does not hold the block."""


class TierCorrupt(TierError):
    """What the tier holds under this key is not the block. The record is to be removed."""


class TierUnavailable(TierError):
    """The medium cannot be opened: in use by another process, not writable, not supported."""


class TierBroken(TierError):
    """This process can use the medium no longer: its worker reports so and ends, and a new one
    tries again. What the medium holds may well be whole."""


class TierDamaged(TierBroken):
    """What the medium holds cannot be trusted: as above; after a second time it is set aside."""


class Identity(Protocol):
    """What names a block's content in a durable tier, and is compared on every read."""

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

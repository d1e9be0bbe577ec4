"""The vocabulary of the catalogue (catalog.py) and of its builders: traits, devices, opened tiers.

    configuration section ──▶ builder ──▶ OpenedTier ──▶ cache engine: pool, traits, watermarks
                                              └────────▶ worker: DeviceSpec (medium, codec, options)

The daemon runs builders at its start; a worker process loads the medium and the codec. Both are
named by a path "package.module:name", so that neither process imports what only the other needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from hicache.tiers.arena import Arena
from hicache.tiers.block import TierTraits
from hicache.tiers.pool import SlotPool

if TYPE_CHECKING:
    from hicache.tiers.hbm_probe import Gpus


T = TypeVar("T")


class MappedTier(Protocol):
    """A tier whose slots lie in an arena that this process created and clients map."""

    @property
    def arena(self) -> Arena: ...

    @property
    def path(self) -> Path: ...

    def close(self) -> None:
        """Unmap the arena and remove its file."""


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """How the mover and the daemon treat a device.

    `persistent`: its moves carry their block's identity. `by_priority`: it has a queue for each
    priority and direction. `maps_pages`: its worker copies inference engines' own GPU pages.
    `pins_arena`: its worker pins the near arena, whose memory must stay where it is. `batch_moves`,
    `batch_bytes`: the largest batch that is written to it.
    """

    persistent: bool = False
    by_priority: bool = False
    maps_pages: bool = False
    pins_arena: bool = False
    batch_moves: int = 32
    batch_bytes: int = 16 << 20


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device and the worker process that opens it.

    `name` is the device's in `stats` and logs; `title` (at most 15 bytes) the process's. `medium`
    and `codec` name what the worker loads; no codec: blocks are stored as they are. `options` are
    the medium's own: it checks them when it opens.
    """

    name: str
    title: str
    medium: str
    capacity_bytes: int
    options: Mapping[str, Any] = field(default_factory=dict)
    traits: DeviceTraits = DeviceTraits()
    codec: str = ""

    def __post_init__(self) -> None:
        if len(self.title.encode()) > 15:
            raise ValueError(f"title {self.title!r}: at most 15 bytes")


@dataclass(frozen=True, slots=True)
class OpenedTier:
    """A builder's result. `words`: a description for people; `note`: the reason for it. `mapping`:
    where clients can map the tier; `device`: where a worker copies to and from it."""

    pool: SlotPool
    traits: TierTraits
    words: str
    note: str = ""
    mapping: MappedTier | None = None
    device: DeviceSpec | None = None


@dataclass(frozen=True, slots=True)
class TierSite:
    """Where a tier is opened: the machine's GPUs, the prefix of the names of arenas, and
    `progress`, to be called with (bytes done, bytes in all)."""

    prefix: str
    gpus: Gpus
    progress: Callable[[int, int], None]


class Builder(Protocol):
    """Opens a tier from its section of the configuration."""

    def __call__(self, section: Any, site: TierSite) -> OpenedTier:
        """Open the tier. Raises ArenaError when its memory cannot be allocated, and leaves nothing
        behind."""


@dataclass(frozen=True, slots=True)
class TierKind:
    """One row of the catalogue.

    `rank` orders the hierarchy, fastest first. `section` names the model of its part of the
    configuration, `builder` a Builder. `traits` are what `hicache replay` assumes; a builder may
    open a tier with others. `event_medium` is the tier's medium in KV events. `summary` documents
    the section. `is_near`: see `near_kind`. `codec`: how blocks are stored there, as they are
    where it is empty; not for tiers whose slots clients map.
    """

    name: str
    rank: int
    traits: TierTraits
    section: str
    builder: str
    event_medium: str
    summary: str
    is_near: bool = False
    codec: str = ""


def checked(cls: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass from its fields. Raises ValueError when one is unknown, missing or of the wrong
    type."""
    assert is_dataclass(cls)
    unknown = sorted(values.keys() - {each.name for each in fields(cls)})
    if unknown:
        raise ValueError(f"{cls.__name__} has no {', '.join(unknown)}")
    made: T = msgspec.convert(values, cls)
    return made

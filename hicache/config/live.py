"""What of a changed configuration can be applied to a running daemon.

The keys listed here are read again at every use. Every other key was used once, at start, to make
something (an arena, a socket, an LMDB map) that lives as long as the daemon.
"""

from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel

from hicache.config.loading import effective_values
from hicache.config.messages_for_people import KeyPath, yaml_key
from hicache.config.models import Config

Model = TypeVar("Model", bound=BaseModel)

_LIVE_KEYS = frozenset({"write_policy", "selective_hits", "log_level"})
_LIVE_SECTIONS = frozenset({"planner", "deadlines", "limits", "debug"})
_LIVE_TIER_KEYS = frozenset({"high_watermark", "low_watermark", "write_budget", "min_return"})


@dataclass(frozen=True, slots=True)
class LiveDiff:
    """Changed key paths: those that apply now, and those that need a restart."""

    live: tuple[str, ...]
    restart: tuple[str, ...]


def diff_live(old: Config, new: Config) -> LiveDiff:
    """The keys whose values differ; a tier that came or went is one key that needs a restart."""
    before, after = dict(effective_values(old)), dict(effective_values(new))
    tiers_changed = {path[:2] for path in before.keys() ^ after.keys()}
    changed = [
        path
        for path in {**before, **after}
        if before.get(path) != after.get(path) and path[:2] not in tiers_changed
    ]
    restart = [path for path in changed if not _is_live(path)] + sorted(tiers_changed)
    return LiveDiff(
        live=tuple(".".join(path) for path in changed if _is_live(path)),
        restart=tuple(".".join(path) for path in restart),
    )


def with_live(old: Config, new: Config) -> Config:
    """`old`, but for what of `new` applies now."""
    return _with_live(old, new, ())


def _with_live(old: Model, new: BaseModel, path: KeyPath) -> Model:
    update: dict[str, object] = {}
    for name, field in type(old).model_fields.items():
        here = (*path, yaml_key(name, field))
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(before, BaseModel) and isinstance(after, BaseModel):
            update[name] = _with_live(before, after, here)
        elif _is_live(here):
            update[name] = after
    return old.model_copy(update=update)


def _is_live(path: KeyPath) -> bool:
    if path[0] == "tiers":
        return path[-1] in _LIVE_TIER_KEYS
    return path[0] in _LIVE_SECTIONS or path[0] in _LIVE_KEYS

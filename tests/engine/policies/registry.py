"""Every eviction policy that the tests know: the cache engine's own, and one of another package."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from hicache.config import eviction
from hicache.engine.policies.base import EvictionPolicy

PLUGIN = Path(__file__).with_name("plugin")
"""A folder as pip makes it of a package: a module and its entry points."""


@contextmanager
def installed(*folders: Path) -> Iterator[None]:
    """While it lasts, packages in these folders are found in this process."""
    added = [str(folder) for folder in folders]
    sys.path[:0] = added
    eviction._offered.cache_clear()
    try:
        yield
    finally:
        del sys.path[: len(added)]
        eviction._offered.cache_clear()


@cache
def every_policy() -> Mapping[str, type[EvictionPolicy]]:
    """By name."""
    with installed(PLUGIN):
        return {name: eviction.policy_named(name) for name in eviction.policy_names()}

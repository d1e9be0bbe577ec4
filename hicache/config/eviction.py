"""Eviction policies by name: those of the cache engine, and those of installed packages.

A package offers a policy by an entry point of the group `hicache.policies`, a subclass of
`EvictionPolicy`. It is imported only when a configuration or a command names it. A name of the
cache engine's own always means its own policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from hicache.engine.policies.base import EvictionPolicy
from hicache.engine.policies.catalog import POLICIES

GROUP: Final = "hicache.policies"


class PolicyError(ValueError):
    """A policy that is offered and cannot be used, as a sentence."""


class UnknownPolicy(PolicyError):
    """No policy has this name."""


def policy_names() -> list[str]:
    """The names that can be chosen, the cache engine's own first."""
    return [*POLICIES, *sorted(_offered().keys() - POLICIES.keys())]


def policy_named(name: str) -> type[EvictionPolicy]:
    """The policy of this name. Raises UnknownPolicy, or PolicyError."""
    if name in POLICIES:
        return POLICIES[name]
    offers = _offered().get(name, ())
    if not offers:
        names = ", ".join(policy_names())
        raise UnknownPolicy(f"there is no eviction policy {name!r}; there are {names}")
    if len(offers) > 1:
        sources = " and ".join(map(_source, offers))
        raise PolicyError(f"eviction policy {name!r} is offered by {sources}; uninstall one")
    found: object
    try:
        found = offers[0].load()
    except Exception as error:  # whatever the package's own code raises
        raise PolicyError(
            f"eviction policy {name!r} of {_source(offers[0])} cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, type) or not issubclass(found, EvictionPolicy):
        raise PolicyError(
            f"eviction policy {name!r} of {_source(offers[0])} is no subclass of "
            f"{EvictionPolicy.__module__}.EvictionPolicy"
        )
    missing = sorted(found.__abstractmethods__)
    if found.take is EvictionPolicy.take and found.pop is EvictionPolicy.pop:
        missing.append("take")
    if missing:
        lacks = ", ".join(missing)
        raise PolicyError(f"eviction policy {name!r} of {_source(offers[0])} lacks {lacks}")
    return found


def ignored_policies() -> list[str]:
    """A sentence for each policy of a package that has the name of one of the cache engine's."""
    return [
        f"eviction policy {name!r} of {_source(offer)} is ignored: hicache has one of this name"
        for name in POLICIES
        for offer in _offered().get(name, ())
    ]


@cache
def _offered() -> Mapping[str, tuple[EntryPoint, ...]]:
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for offer in entry_points(group=GROUP):
        found[offer.name] = (*found.get(offer.name, ()), offer)
    return found


def _source(offer: EntryPoint) -> str:
    package = f"package {offer.dist.name}" if offer.dist is not None else "an unknown package"
    return f"{package} ({offer.value})"

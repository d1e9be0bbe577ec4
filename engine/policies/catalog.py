"""The policies by the names under which a configuration chooses them.

A policy of another package is not listed here: its entry point is (`hicache/config/eviction.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from hicache.engine.policies.base import EvictionPolicy
from hicache.engine.policies.gdsf import Gdsf
from hicache.engine.policies.hazard.history import History
from hicache.engine.policies.hazard.policy import Hazard
from hicache.engine.policies.lfu import Lfu
from hicache.engine.policies.lru import Lru
from hicache.engine.policies.s3fifo import S3Fifo

POLICIES: Final[Mapping[str, type[EvictionPolicy]]] = {
    "lru": Lru,
    "lfu": Lfu,
    "s3fifo": S3Fifo,
    "gdsf": Gdsf,
    "hazard": Hazard,
}


def policies_of(
    chosen: Sequence[type[EvictionPolicy]],
    wants_model: bool = False,
) -> tuple[Callable[[int], EvictionPolicy], History | None]:
    """For CacheEngine: a function from a tier's number to its policy, and the history they share,
    None where no policy wants one. `chosen`: by tier. `wants_model`: the write gate needs the
    history's estimates of what returns."""
    history = History()
    history.wants_fits = wants_model
    made = [policy(tier, history) for tier, policy in enumerate(chosen)]
    wanted = wants_model or any(policy.wants_history for policy in made)
    return made.__getitem__, history if wanted else None

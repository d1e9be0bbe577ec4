"""The policies by the names under which a configuration chooses them."""

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

Maker = Callable[[int, History], EvictionPolicy]

POLICIES: Final[Mapping[str, Maker]] = {
    "lru": lambda tier, history: Lru(tier),
    "lfu": lambda tier, history: Lfu(tier),
    "s3fifo": lambda tier, history: S3Fifo(tier),
    "gdsf": lambda tier, history: Gdsf(tier),
    "hazard": Hazard,
}


def policies_of(
    names: Sequence[str],
    wants_model: bool = False,
) -> tuple[Callable[[int], EvictionPolicy], History | None]:
    """For CacheEngine: what makes the policy of a tier by its number, and the history they share,
    None where no policy wants one. `names`: by tier. `wants_model`: somebody else asks what returns
    (WriteGate). Raises KeyError on an unknown name."""
    history = History()
    history.wants_fits = wants_model
    made = [POLICIES[name](tier, history) for tier, name in enumerate(names)]
    wanted = wants_model or any(policy.wants_history for policy in made)
    return made.__getitem__, history if wanted else None

"""The settings in `kv_connector_extra_config`, and the one that vLLM itself must have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Options:
    """`endpoint`: of the daemon; by default HICACHE_ENDPOINT, or the user's default.

    `lookup_s`: how long a request waits for the answer to its lookup. `load_s`: how long for its
    blocks. `store_s`: how long a store may take, its last copy not counted. `store_share`: the
    share of vLLM's blocks that stores under way may hold. `weights_digest`: identifies the weights
    where they are in no local files.
    """

    endpoint: str = ""
    lookup_s: float = 0.5
    load_s: float = 5.0
    store_s: float = 2.0
    store_share: float = 0.25
    weights_digest: str = ""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Options:
        """Raises ValueError with the setting that is unknown, of the wrong type, or out of
        range."""
        known: dict[str, Any] = {field.name: field.default for field in fields(cls)}
        for name, value in extra.items():
            if name not in known:
                raise ValueError(
                    f"kv_connector_extra_config: {name} is unknown; known are {', '.join(known)}"
                )
            if isinstance(known[name], str) != isinstance(value, str):
                raise ValueError(f"kv_connector_extra_config: {name} is of the wrong type")
        options = cls(**{name: type(known[name])(value) for name, value in extra.items()})
        for name in ("lookup_s", "load_s", "store_s"):
            if not 0 < getattr(options, name) <= 3600:
                raise ValueError(f"kv_connector_extra_config: {name} must be 0 … 3600 seconds")
        if not 0 < options.store_share <= 1:
            raise ValueError("kv_connector_extra_config: store_share must be above 0, at most 1")
        return options


def check_failure_policy(policy: str) -> None:
    """Raises ValueError unless vLLM recomputes a block that could not be loaded. Under another
    policy the request would end with an error."""
    if policy != "recompute":
        raise ValueError(
            'hicache needs "kv_load_failure_policy": "recompute" in --kv-transfer-config: under '
            f"{policy!r} vLLM fails a request when a block cannot be loaded, and computes nothing"
        )

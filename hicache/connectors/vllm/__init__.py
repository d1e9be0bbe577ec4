"""vLLM on hicache: a daemon's tiers behind vLLM's own prefix cache.

Door: `HiCacheConnector`, which vLLM loads by name. `connector` has the picture, the command line
and a list of the files here.
"""

from __future__ import annotations

from typing import Any

__all__ = ["HiCacheConnector"]


def __getattr__(name: str) -> Any:
    """vLLM asks this module for the class; all else here is importable without vLLM."""
    if name != "HiCacheConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hicache.connectors.vllm.connector import HiCacheConnector

    return HiCacheConnector

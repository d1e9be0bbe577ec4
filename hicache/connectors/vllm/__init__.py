"""vLLM on hicache: the tiers of a daemon behind vLLM's own prefix cache.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "HiCacheConnector",
        "kv_connector_module_path": "hicache.connectors.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute"}'

Two sides, in two processes or one, each with a thread of its own that talks to the daemon:

    scheduler ──orders──▶ worker (one per rank)        loads, and stores of new whole blocks
        │ match ▲ reports     │ fetch, put
        ▼       └─────────────▼
      daemon ◀───────────────────

What each file answers: `connector` vLLM's words for everything below, with `metrics` the only one
that imports vLLM; `scheduling` and `tracking` what to load and store; `asking` what the daemon says
of a prompt; `working` loads and stores, by its `clients`; `pages` how blocks lie in vLLM's cache;
`namespace` and `weights` whose blocks they are; `orders` what the two sides tell each other;
`announcing` which blocks a router hears of; `options` an operator's settings; `background` the
thread. The daemon is never needed: whatever fails there is a miss.
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

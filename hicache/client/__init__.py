"""The client: what an inference engine, a gateway or a script imports to talk to a daemon.

Light: no lmdb, pydantic or daemon code. Doors: `Client` (blocking), `AsyncClient` (asyncio),
`HeldPrefixes` (a router's copy of what a daemon holds), `admin_call` (one request, no session).
Inside: a core without I/O (`calls`, `put`, `gpu_pages` over `session`) yields `steps`, which a
driver carries out (`blocking`, `aio`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache.client.blocking import AdminLine, Client, admin_call
from hicache.client.calls import Ended
from hicache.client.gpu_pages import LoadedPages, LoadedPart, PageShare, SharedPages
from hicache.client.results import (
    Decision,
    Fetched,
    FetchedRun,
    Match,
    Ping,
    Pinned,
    PutResult,
    Score,
    Warmed,
)
from hicache.client.session import DaemonAbsent, DaemonError
from hicache.protocol.curve import CurveKeys
from hicache.protocol.keys import LayerGroup, NamespaceSpec

if TYPE_CHECKING:
    from hicache.client.aio import AsyncClient
    from hicache.client.prefix_mirror import HeldPrefixes

__all__ = [
    "AdminLine",
    "AsyncClient",
    "Client",
    "CurveKeys",
    "DaemonAbsent",
    "DaemonError",
    "Decision",
    "Ended",
    "Fetched",
    "FetchedRun",
    "HeldPrefixes",
    "LayerGroup",
    "LoadedPages",
    "LoadedPart",
    "Match",
    "NamespaceSpec",
    "PageShare",
    "Ping",
    "Pinned",
    "PutResult",
    "Score",
    "SharedPages",
    "Warmed",
    "admin_call",
]


def __getattr__(name: str) -> Any:
    """Loaded when first named: a blocking client needs no asyncio, and a client no subscriber."""
    if name == "AsyncClient":
        from hicache.client.aio import AsyncClient

        return AsyncClient
    if name == "HeldPrefixes":
        from hicache.client.prefix_mirror import HeldPrefixes

        return HeldPrefixes
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Converts the estimates to plain values that are saved across restarts, and back.

Links are named by their tiers, namespaces by digest: a namespace's estimates wait until it is
opened. Restored estimates are weighted by `KEPT`: the machine may have changed. Pure; the daemon
reads and writes the file.
"""

from __future__ import annotations

from typing import Any, Final

from hicache.engine.planner.cost import plausible_hop
from hicache.engine.requests.match import Estimates
from hicache.engine.residency.copies import Residency

VERSION: Final = 1
KEPT: Final = 0.5
MAX_NAMESPACES: Final = 4096


class SavedEstimates:
    """Snapshots of the estimates, and restored ones that wait for their namespace."""

    def __init__(self, residency: Residency, estimates: Estimates) -> None:
        self._residency = residency
        self._estimates = estimates
        self._waiting: dict[str, dict[str, Any]] = {}

    def snapshot(self) -> dict[str, Any]:
        """All estimates, including restored ones that still wait."""
        names = [tier.name for tier in self._residency.tiers]
        links = {
            f"{names[src]} to {names[dst]}": cost.snapshot()
            for (src, dst), cost in self._estimates.links.items()
            if cost.num_measured
        }
        namespaces = dict(self._waiting)
        for namespace in self._residency.namespaces:
            if self._estimates.prefill[namespace.number].num_observed:
                namespaces[namespace.digest.hex()] = self._learned(namespace.number)
        return {"version": VERSION, "links": links, "namespaces": namespaces}

    def recall(self, known: dict[str, Any]) -> None:
        """Restore a snapshot. Raises ValueError where it is invalid; what was restored until then
        stays."""
        if known.get("version") != VERSION:
            raise ValueError(f"version {known.get('version')!r}, not {VERSION}")
        links, namespaces = known.get("links"), known.get("namespaces")
        if not isinstance(links, dict) or not isinstance(namespaces, dict):
            raise ValueError("no links or no namespaces")
        names = [tier.name for tier in self._residency.tiers]
        for (src, dst), cost in self._estimates.links.items():
            link = links.get(f"{names[src]} to {names[dst]}")
            if link is not None:
                cost.restore(link, KEPT)
        for digest in list(namespaces)[:MAX_NAMESPACES]:
            if isinstance(namespaces[digest], dict):
                self._waiting[digest] = namespaces[digest]

    def opened(self, number: int) -> None:
        """A namespace was opened: restore its estimates. Raises ValueError."""
        known = self._waiting.pop(self._residency.namespaces[number].digest.hex(), None)
        if known is None:
            return
        self._estimates.prefill[number].restore(known.get("prefill"), KEPT)
        hop = known.get("hop_s_per_byte")
        if type(hop) is float and hop > 0:
            self._estimates.hop_s_per_byte[number] = 1.0 / plausible_hop(1.0 / hop)
        if known.get("load") is not None:
            self._estimates.load(number, self._residency).restore(known["load"], KEPT)

    def forget(self, number: int) -> None:
        """Save a namespace's estimates: its number will be used for another namespace."""
        is_known = self._estimates.prefill[number].num_observed > 0
        if is_known and len(self._waiting) < MAX_NAMESPACES:
            digest = self._residency.namespaces[number].digest.hex()
            self._waiting[digest] = self._learned(number)

    def _learned(self, number: int) -> dict[str, Any]:
        load = self._estimates.loads.get(number)
        return {
            "prefill": self._estimates.prefill[number].snapshot(),
            "hop_s_per_byte": self._estimates.hop_s_per_byte[number],
            "load": load.snapshot() if load is not None and load.num_measured else None,
        }

"""Passes measurements of prefills, copies and loads to the estimates.

Owned by the daemon's one loop.
"""

from __future__ import annotations

from hicache.engine import plan as p
from hicache.engine.planner.cost import is_measurable, learn_hop
from hicache.engine.planner.decision_log import DecisionLog
from hicache.engine.requests.match import Estimates
from hicache.engine.residency.copies import Residency


class Measurements:
    """Handles Observe, ObserveReload, Loaded and LinkMeasured."""

    def __init__(self, residency: Residency, estimates: Estimates, record: DecisionLog) -> None:
        self.residency = residency
        self.estimates = estimates
        self.record = record

    def prefill(self, event: p.Observe) -> None:
        """See Observe."""
        self.record.prefilled(event)
        self.estimates.prefill[event.namespace].observe(
            event.num_requests, event.sum_n, event.sum_nc, event.seconds, event.decode_tokens
        )

    def reload(self, event: p.ObserveReload) -> None:
        """See ObserveReload."""
        lease = self.residency.leases.leases.get(event.lease)
        if lease is None:
            return
        hops = self.estimates.hop_s_per_byte
        hops[lease.namespace] = learn_hop(hops[lease.namespace], event.hop_bytes, event.hop_seconds)
        if is_measurable(event.total_seconds):
            lease.took_s = event.total_seconds

    def load(self, event: p.Loaded) -> None:
        """See Loaded."""
        lease = self.residency.leases.leases.get(event.lease)
        if lease is None:
            return
        for run in event.runs:
            lease.not_loaded.difference_update(range(run.first, run.first + len(run.slots)))
        lease.took_s = event.now_s - lease.started_s  # until the client reports its measurement
        block_bytes = self.residency.namespaces[lease.namespace].block_bytes
        bytes_from: dict[int, float] = {}
        for run in event.runs:
            tier = self.residency.number_of(run.tier)
            bytes_from[tier] = bytes_from.get(tier, 0.0) + len(run.slots) * block_bytes
        load = self.estimates.load(lease.namespace, self.residency)
        load.measured(bytes_from, event.seconds)

    def link(self, event: p.LinkMeasured) -> None:
        """See LinkMeasured."""
        link = self.residency.number_of(event.src), self.residency.number_of(event.dst)
        if link in self.estimates.links:
            self.estimates.links[link].measured(event.num_bytes, event.seconds)

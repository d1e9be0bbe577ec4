"""Namespaces by number. A number is reused once its namespace is idle.

Owned by the daemon's one loop.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import suppress

from hicache.engine import plan as p
from hicache.engine.index.node import Node
from hicache.engine.planner.cost import PrefillCost
from hicache.engine.planner.decision_log import DecisionLog
from hicache.engine.planner.estimates import SavedEstimates
from hicache.engine.requests.match import Estimates
from hicache.engine.requests.outages import Outages
from hicache.engine.residency.copies import Namespace, Residency
from hicache.engine.settings import EngineSettings
from hicache.tiers.block import TierSpec, slot_bytes_for


class Namespaces:
    """Handles OpenNamespace. `by_digest`: the numbers of the open ones."""

    def __init__(
        self,
        residency: Residency,
        estimates: Estimates,
        saved: SavedEstimates,
        record: DecisionLog,
        outages: Outages,
        settings: EngineSettings,
    ) -> None:
        self.residency = residency
        self.estimates = estimates
        self.saved = saved
        self.record = record
        self.outages = outages
        self.settings = settings
        self.by_digest: dict[bytes, int] = {}

    def open(self, event: p.OpenNamespace) -> int:
        """See OpenNamespace."""
        residency, estimates = self.residency, self.estimates
        number = self.by_digest.get(event.digest)
        prior = self.settings.prior.for_model(
            event.flop_per_token, event.flop_per_pair, self.settings.flop_per_s
        )
        if number is not None:
            if event.flop_per_token and not estimates.prefill[number].num_observed:
                estimates.prefill[number] = PrefillCost(prior)  # it was restored, but not opened
            return number
        hop_s_per_byte = 1.0 / self.settings.hop_bytes_per_s
        if event.instead_of is None:
            number = len(residency.namespaces)
            residency.namespaces.append(self._new(event, number, residency.index.add_root(number)))
            estimates.prefill.append(PrefillCost(prior))
            estimates.hop_s_per_byte.append(hop_s_per_byte)
        else:
            number = event.instead_of
            idle = residency.namespaces[number]
            assert not idle.root.children, "an idle namespace has blocks"
            del self.by_digest[idle.digest]
            self.record.forget(number)
            self.saved.forget(number)
            estimates.loads.pop(number, None)
            self.outages.clearings.pop(number, None)
            residency.namespaces[number] = self._new(event, number, idle.root)
            estimates.prefill[number] = PrefillCost(prior)
            estimates.hop_s_per_byte[number] = hop_s_per_byte
        self.by_digest[event.digest] = number
        with suppress(ValueError):  # a damaged snapshot: start without it
            self.saved.opened(number)
        return number

    def idle(self, used: Container[int]) -> int | None:
        """A namespace not in `used` without any block, move, lease or ticket; None if there is
        none."""
        book = self.residency.leases
        held = {lease.namespace for lease in book.leases.values()}
        held |= {ticket.namespace for ticket in book.tickets.values()}
        held |= {pin.namespace for pin in book.pins.values()}
        for namespace in self.residency.namespaces:
            number = namespace.number
            if not namespace.root.children and number not in held and number not in used:
                return number
        return None

    def too_small(self, block_bytes: int, slot_bytes: Sequence[int]) -> list[TierSpec]:
        """The tiers that cannot hold a single block of this size."""
        sizes = self._slot_sizes(block_bytes, slot_bytes)
        rooms = zip(self.residency.tiers, self.residency.pools, sizes, strict=True)
        return [tier for tier, pool, size in rooms if not pool.can_hold(size)]

    def _new(self, event: p.OpenNamespace, number: int, root: Node) -> Namespace:
        sizes = self._slot_sizes(event.block_bytes, event.slot_bytes)
        step = 4 * event.block_tokens
        return Namespace(
            number, event.digest, event.block_tokens, event.block_bytes, sizes, root, step
        )

    def _slot_sizes(self, block_bytes: int, stored: Sequence[int]) -> tuple[int, ...]:
        """A block's slot size in each tier: `stored`, or by default its length in whole pages."""
        num_tiers = len(self.residency.tiers)
        sizes = tuple(stored) or (slot_bytes_for(block_bytes),) * num_tiers
        assert len(sizes) == num_tiers, "one slot size for each tier"
        return sizes

"""`release`: ends a lease, with the client's measurement."""

from __future__ import annotations

from hicache.daemon.gate import Asked, Gate, handles
from hicache.daemon.operations.fetch import cut_short
from hicache.engine import plan as p
from hicache.protocol.operations import RELEASE, ReleaseReply, ReleaseRequest


@handles(RELEASE)
def release(gate: Gate, asked: Asked[ReleaseRequest]) -> None:
    """End a lease. One that has ended already is no error."""
    request, released = asked.request, False
    lease = request.lease
    if gate.engine.queries.has_lease(lease, asked.owner):
        gate.do(p.ObserveReload(lease, request.hop_bytes, request.hop_s, request.total_s))
        waiting = gate.waiting.fetches.pop(lease, None)
        if waiting is not None:  # its fetch is still running
            cut_short(gate, waiting)
        released = gate.do(p.Release(lease, asked.now_s))
    gate.confirm(asked, ReleaseReply(released=released))

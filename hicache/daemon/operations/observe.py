"""`observe`: an inference engine's measurement of one prefill step."""

from __future__ import annotations

from hicache.daemon.gate import Asked, Gate, handles
from hicache.engine import plan as p
from hicache.protocol.operations import OBSERVE, ObserveRequest, Reply


@handles(OBSERVE)
def observe(gate: Gate, asked: Asked[ObserveRequest]) -> None:
    """Update the estimate of recomputing."""
    request = asked.request
    event = p.Observe(
        asked.session.namespace,
        request.num_requests,
        request.sum_n,
        request.sum_nc,
        request.seconds,
        request.decode_tokens,
    )
    gate.do(event)
    gate.confirm(asked, Reply())

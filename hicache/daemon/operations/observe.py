"""`observe`: one step of prefill as the inference engine measured it."""

from __future__ import annotations

from hicache.daemon.gate import Asked, Gate, handles
from hicache.engine import plan as p
from hicache.protocol.operations import OBSERVE, ObserveRequest, Reply


@handles(OBSERVE)
def observe(gate: Gate, asked: Asked[ObserveRequest]) -> None:
    """The estimate of what recomputing takes is learned from it."""
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

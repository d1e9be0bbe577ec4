"""`warm`: copies a prompt's blocks to where they can be read, before it is requested.

Needs no session: the client may disconnect before the warming ends. Warmings are limited in number
and time. Used from the daemon's loop only.
"""

from __future__ import annotations

from typing import Final

from hicache.daemon.gate import Asked, Gate, handles
from hicache.daemon.operations.gpu_pages import GpuPages
from hicache.engine import plan as p
from hicache.protocol.operations import WARM, WarmReply, WarmRequest

TICK_S: Final = 0.1
"""The interval at which ends of warmings are noticed."""
MAX_WARMINGS: Final = 64
"""Running warmings: each one is checked after every event."""


@handles(WARM)
def warm(gate: Gate, asked: Asked[WarmRequest]) -> None:
    """Start a warming, and reply at once or at its end."""
    request, engine = asked.request, gate.engine
    gate.check_tokens(request.tokens)
    number = engine.number_of(request.namespace)
    if number is None:
        gate.reply(asked.peer, _reply_of(p.WarmStarted(0, 0, 0, 0)))
        return
    gate.check_leases()
    if len(engine.warming) >= MAX_WARMINGS:
        gate.turn_away("warmings", f"{MAX_WARMINGS} prompts are being warmed; try again later")
    ttl_s = gate.limits.lease_ttl_s
    if request.wait and request.deadline_s:
        ttl_s = min(ttl_s, max(0.0, 0.95 * request.deadline_s - TICK_S))
    by_worker = gate.state(GpuPages).copies_in(number)
    warmed = gate.do(p.Warm(number, request.tokens, asked.now_s, ttl_s, by_worker))
    if request.wait and warmed.warming:
        gate.waiting.warms[warmed.warming] = asked.peer
    else:
        gate.reply(asked.peer, _reply_of(warmed))


def warmings_ended(gate: Gate, arrivals: p.Arrivals) -> None:
    """Reply to requests that wait for the end of these warmings."""
    for number, warmed in arrivals.warmed.items():
        peer = gate.waiting.warms.pop(number, None)
        if peer is not None:
            gate.reply(peer, _reply_of(warmed))


def _reply_of(warmed: p.WarmStarted) -> WarmReply:
    return WarmReply(
        held_blocks=warmed.held, warm_blocks=warmed.warm, refused_blocks=warmed.refused
    )

"""`pin`, `unpin`: prompts that are not evicted. Without a session: a pin ends at its time limit."""

from __future__ import annotations

from typing import Any, Final

from hicache.daemon.gate import Asked, Gate, handles
from hicache.engine import plan as p
from hicache.protocol.operations import (
    PIN,
    UNPIN,
    PinReply,
    PinRequest,
    UnpinReply,
    UnpinRequest,
)

MAX_PINS: Final = 1024
"""`stats` lists each of them."""


@handles(PIN)
def pin(gate: Gate, asked: Asked[PinRequest]) -> None:
    """Pin the longest held prefix."""
    request = asked.request
    gate.check_tokens(request.tokens)
    if len(gate.engine.queries.pins()) >= MAX_PINS:
        gate.turn_away("pinned memory", f"there are {MAX_PINS} pins, which is the limit")
    number = gate.engine.number_of(request.namespace)
    pinned = p.PinPlaced(0, 0)
    if number is not None:
        event = p.PinPrompt(number, request.tokens, request.name, asked.now_s, request.ttl_s)
        pinned = gate.do(event)
    if pinned.tier:
        share = f"{gate.limits.max_pinned:.0%}"
        gate.turn_away(
            "pinned memory",
            f"with these {pinned.blocks} blocks pins would hold more than {share} of "
            f"{pinned.tier} (limits.max_pinned)",
        )
    name = name_of(gate.epoch, pinned.pin)
    gate.reply(asked.peer, PinReply(pin=name, blocks=pinned.blocks, epoch=gate.epoch))


@handles(UNPIN)
def unpin(gate: Gate, asked: Asked[UnpinRequest]) -> None:
    """A pin of an earlier run of the daemon is unknown: its number may be another pin's now."""
    epoch, _, number = asked.request.pin.rpartition("-")
    is_ours = epoch == gate.epoch and number.isdecimal()
    unpinned = is_ours and gate.do(p.Unpin(int(number)))
    gate.reply(asked.peer, UnpinReply(unpinned=unpinned))


def name_of(epoch: str, pin: int) -> str:
    """A pin's name on the wire, unique over all runs of the daemon; "" for no pin."""
    return f"{epoch}-{pin}" if pin else ""


def pin_rows(gate: Gate, now_s: float) -> list[dict[str, Any]]:
    """For `stats`: one row per pin, the oldest first."""
    queries = gate.engine.queries
    return [
        {
            "pin": name_of(gate.epoch, pin.id),
            "name": pin.name,
            "namespace": queries.namespace(pin.namespace).digest.hex(),
            "blocks": pin.num_blocks,
            "ends_in_s": pin.expires_s - now_s,
        }
        for pin in queries.pins()
    ]

"""`ping`, `health`, `events`, `verify`, `reload`: an operator's and a router's short questions.

Served while the daemon stops, too.
"""

from __future__ import annotations

import os

from hicache import __version__
from hicache.config import ConfigError
from hicache.daemon.gate import Asked, Gate, handles
from hicache.daemon.upkeep.kv_publisher import unpublished
from hicache.protocol.messages import WireError
from hicache.protocol.operations import (
    EVENTS,
    HEALTH,
    PING,
    RELOAD,
    VERIFY,
    EventsReply,
    EventsRequest,
    HealthReply,
    HealthRequest,
    PingReply,
    PingRequest,
    ReloadReply,
    ReloadRequest,
    VerifyReply,
    VerifyRequest,
)


@handles(PING)
def ping(gate: Gate, asked: Asked[PingRequest]) -> None:
    """Who this daemon is, and how its tiers are."""
    upkeep = gate.upkeep
    reply = PingReply(
        epoch=gate.epoch,
        version=__version__,
        pid=os.getpid(),
        uptime_s=asked.now_s - upkeep.condition.started_s,
        ready=upkeep.condition.is_ready(),
        tiers=upkeep.condition.tier_states(),
        block_tokens=upkeep.serving.config.block_tokens,
    )
    gate.reply(asked.peer, reply)


@handles(HEALTH)
def health(gate: Gate, asked: Asked[HealthRequest]) -> None:
    """Its state and its problems in words."""
    gate.reply(asked.peer, HealthReply(**gate.upkeep.condition.report(asked.now_s)))


@handles(EVENTS)
def events(gate: Gate, asked: Asked[EventsRequest]) -> None:
    """A page of what was published as held of a namespace, and where it is published."""
    namespace, publisher = asked.request.namespace, gate.upkeep.publisher
    page = unpublished(namespace, gate.epoch)
    if publisher is not None:
        page = publisher.page(namespace, asked.request.after)
    gate.reply(asked.peer, EventsReply(**page))


@handles(VERIFY)
def verify(gate: Gate, asked: Asked[VerifyRequest]) -> None:
    """Begin a scrub, or say how far it is."""
    upkeep = gate.upkeep
    if asked.request.start:
        upkeep.scrubbing.begin(upkeep.condition.tier_states(), asked.request.bytes_per_s)
    gate.reply(asked.peer, VerifyReply(devices=upkeep.scrubbing.told()))


@handles(RELOAD)
def reload(gate: Gate, asked: Asked[ReloadRequest]) -> None:
    """Read the configuration again."""
    try:
        changed = gate.upkeep.serving.reload(asked.request.file)
    except ConfigError as error:
        raise WireError("refused", str(error)) from None
    gate.reply(asked.peer, ReloadReply(live=list(changed.live), restart=list(changed.restart)))

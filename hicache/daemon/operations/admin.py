"""`ping`, `health`, `events`, `verify`, `reload`: for operators and routers.

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
    """The daemon's version, pid and epoch, and the states of its tiers."""
    upkeep = gate.upkeep
    reply = PingReply(
        epoch=gate.epoch,
        version=__version__,
        pid=os.getpid(),
        uptime_s=asked.now_s - upkeep.health.started_s,
        ready=upkeep.health.is_ready(),
        tiers=upkeep.health.tier_states(),
        block_tokens=upkeep.serving.config.block_tokens,
    )
    gate.reply(asked.peer, reply)


@handles(HEALTH)
def health(gate: Gate, asked: Asked[HealthRequest]) -> None:
    """The daemon's state, and its problems in words."""
    gate.reply(asked.peer, HealthReply(**gate.upkeep.health.report(asked.now_s)))


@handles(EVENTS)
def events(gate: Gate, asked: Asked[EventsRequest]) -> None:
    """A page of a namespace's published blocks, and the publisher's endpoint."""
    namespace, publisher = asked.request.namespace, gate.upkeep.publisher
    page = unpublished(namespace, gate.epoch)
    if publisher is not None:
        page = publisher.page(namespace, asked.request.after)
    gate.reply(asked.peer, EventsReply(**page))


@handles(VERIFY)
def verify(gate: Gate, asked: Asked[VerifyRequest]) -> None:
    """Start a scrub, or report its progress."""
    upkeep = gate.upkeep
    if asked.request.start:
        upkeep.scrubbing.begin(upkeep.health.tier_states(), asked.request.bytes_per_s)
    gate.reply(asked.peer, VerifyReply(devices=upkeep.scrubbing.rows()))


@handles(RELOAD)
def reload(gate: Gate, asked: Asked[ReloadRequest]) -> None:
    """Reload the configuration."""
    try:
        changed = gate.upkeep.serving.reload(asked.request.file)
    except ConfigError as error:
        raise WireError("refused", str(error)) from None
    gate.reply(asked.peer, ReloadReply(live=list(changed.live), restart=list(changed.restart)))

"""What an operator or a gateway knows of prompts to come, and the cache cannot: this one will be
asked for soon (`warm`), that one must never be evicted (`pin`).

Asked about a namespace, without a session: who asks holds nothing himself, and may be gone before
it is over. What he asks for is bounded and ends by itself. Used from the daemon's loop only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from hicache.config import LimitsConfig
from hicache.daemon.operations.gpu_pages import Paging
from hicache.daemon.pending import Peer, Waiting
from hicache.engine import plan as p
from hicache.engine.core import CacheEngine
from hicache.protocol.messages import WireError

Fields = Mapping[str, Any]
Handler = Callable[[Peer, Any, float], None]
TICK_S: Final = 0.1
"""What has come to its end is noticed so late."""
MAX_WARMINGS: Final = 64
"""At once: each is looked at after every event."""
MAX_PINS: Final = 1024
"""Of whatever size: they are told to operators one by one."""


class Do(Protocol):
    """Hands an event to the cache engine, and its moves to the mover."""

    def __call__(self, event: p.Event[p.Answer]) -> p.Answer: ...


class Foresight:
    """`handlers`: of the operations answered here. `check_leases` raises WireError('refused') where
    there are enough, `check_tokens` WireError('too_large')."""

    def __init__(
        self,
        engine: CacheEngine,
        paging: Paging,
        waiting: Waiting,
        limits: LimitsConfig,
        turned_away: Counter[str],
        epoch: str,
        do: Do,
        reply: Callable[[Peer, Fields], None],
        check_leases: Callable[[], None],
        check_tokens: Callable[[bytes], None],
    ) -> None:
        self.limits = limits
        self._engine = engine
        self._paging = paging
        self._waiting = waiting
        self._turned_away = turned_away
        self._epoch = epoch
        self._do = do
        self._reply = reply
        self._check_leases = check_leases
        self._check_tokens = check_tokens
        self.handlers: Mapping[str, Handler] = {
            "warm": self._warm,
            "pin": self._pin,
            "unpin": self._unpin,
        }

    def _warm(self, peer: Peer, request: Any, now_s: float) -> None:
        """Plan it, and reply at once or at its end. Raises WireError('too_large' or 'refused')."""
        body = request
        self._check_tokens(body.tokens)
        number = self._engine.number_of(body.namespace)
        if number is None:
            self._reply(peer, _told(p.WarmStarted(0, 0, 0, 0)))
            return
        self._check_leases()
        if len(self._engine.warming) >= MAX_WARMINGS:
            self._turned_away["warmings"] += 1
            raise WireError("refused", f"{MAX_WARMINGS} prompts are being warmed; ask again later")
        ttl_s = self.limits.lease_ttl_s
        if body.wait and request.deadline_s:
            ttl_s = min(ttl_s, max(0.0, 0.95 * request.deadline_s - TICK_S))
        by_worker = self._paging.copies_in(number)
        warmed = self._do(p.Warm(number, body.tokens, now_s, ttl_s, by_worker))
        if body.wait and warmed.warming:
            self._waiting.warms[warmed.warming] = peer
        else:
            self._reply(peer, _told(warmed))

    def _pin(self, peer: Peer, request: Any, now_s: float) -> None:
        """Raises WireError('too_large' or 'refused')."""
        body = request
        self._check_tokens(body.tokens)
        pins = self._engine.residency.leases.pins
        if len(pins) >= MAX_PINS:
            self._turned_away["pinned memory"] += 1
            raise WireError("refused", f"there are {MAX_PINS} pins, and may not be more")
        number = self._engine.number_of(body.namespace)
        pinned = p.PinPlaced(0, 0)
        if number is not None:
            pin = p.PinPrompt(number, body.tokens, body.name, now_s, body.ttl_s)
            pinned = self._do(pin)
        if pinned.tier:
            self._turned_away["pinned memory"] += 1
            share = f"{self.limits.max_pinned:.0%}"
            raise WireError(
                "refused",
                f"with these {pinned.blocks} blocks pins would hold more than {share} of "
                f"{pinned.tier} (limits.max_pinned)",
            )
        name = name_of(self._epoch, pinned.pin)
        self._reply(peer, {"pin": name, "blocks": pinned.blocks, "epoch": self._epoch})

    def _unpin(self, peer: Peer, request: Any, now_s: float) -> None:
        """A pin of another run of the daemon is none: its number may be another's by now."""
        epoch, _, number = request.pin.rpartition("-")
        is_ours = epoch == self._epoch and number.isdecimal()
        self._reply(peer, {"unpinned": is_ours and self._do(p.Unpin(int(number)))})

    def news(self, arrivals: p.Arrivals) -> None:
        """Some warmings have ended: tell whoever waits."""
        for number, warmed in arrivals.warmed.items():
            peer = self._waiting.warms.pop(number, None)
            if peer is not None:
                self._reply(peer, _told(warmed))


def name_of(epoch: str, pin: int) -> str:
    """A pin's name on the wire, which no pin of another run has; empty for none."""
    return f"{epoch}-{pin}" if pin else ""


def pin_rows(engine: CacheEngine, epoch: str, now_s: float) -> list[dict[str, Any]]:
    """For `stats`: one row per pin, the oldest first."""
    server = engine.residency
    return [
        {
            "pin": name_of(epoch, pin.id),
            "name": pin.name,
            "namespace": server.namespaces[pin.namespace].digest.hex(),
            "blocks": pin.num_blocks,
            "ends_in_s": pin.expires_s - now_s,
        }
        for pin in server.leases.pins.values()
    ]


def _told(warmed: p.WarmStarted) -> Fields:
    return {
        "held_blocks": warmed.held,
        "warm_blocks": warmed.warm,
        "refused_blocks": warmed.refused,
    }

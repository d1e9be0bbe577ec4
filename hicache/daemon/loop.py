"""The daemon's one loop: socket → event → plan → mover → reply. Wiring, no policy.

Single-threaded: everything of the cache engine, the sessions and the mover happens here, between
two polls. It never opens a disk environment and never touches CUDA (workers do), and never waits
for anything but the poll.

    ROUTER ──▶ Service ──▶ CacheEngine ──▶ Mover ──▶ workers
       ▲          │                          │
       └─ replies ┴──────── news ◀───────────┘
"""

from __future__ import annotations

import gc
import logging
import math
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import zmq

from hicache import __version__
from hicache.config import Config, LoadedConfig, diff_live, with_live
from hicache.config.units import format_size
from hicache.daemon.build import Parts, engine_settings, new_engine, paces_of, tier_specs
from hicache.daemon.curve_auth import Doorkeeper
from hicache.daemon.dispatch import Asked, Service
from hicache.daemon.fetch_replies import Part
from hicache.daemon.operations import stats as figures
from hicache.daemon.pending import Peer
from hicache.daemon.sessions import Sessions
from hicache.daemon.socket_lock import Instance, listen, peer_pid
from hicache.daemon.upkeep.estimates_file import Keeper
from hicache.daemon.upkeep.health import Condition
from hicache.daemon.upkeep.heap import FreedMemory, grow_table_of_names
from hicache.daemon.upkeep.kv_publisher import Publisher, unpublished
from hicache.daemon.upkeep.refit import Fitter
from hicache.daemon.upkeep.request_sample import Sample
from hicache.daemon.upkeep.supervised import Faults
from hicache.daemon.upkeep.tier_restore import Restoring
from hicache.daemon.upkeep.tier_scrub import Scrubbing
from hicache.daemon.upkeep.trace import TraceRecorder
from hicache.engine import plan as p
from hicache.protocol.endpoint import ipc_path
from hicache.protocol.keys import NamespaceSpec
from hicache.protocol.messages import WireError, error_reply, pack
from hicache.protocol.operations import MatchReply, decode_request, operation_of
from hicache.transfer.mover import (
    Mover,
    News,
    PageNews,
    WorkerDown,
    WorkerMeasured,
    WorkerNews,
    WorkerNoted,
    WorkerOpening,
    WorkerRestored,
    WorkerRows,
    WorkerScrubbed,
    WorkerUp,
)

TICK_S: Final = 0.1
_READABLE: Final = int(zmq.POLLIN)
_FIRST_PART, _LAST_PART = int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.NOBLOCK)
SEND_MORE_S: Final = 0.002
"""How often a client is looked at that has to read before more is sent to it."""
KEEP_S: Final = 2.0
"""How long the last writing of what was learned may take."""
MAX_UNSENT_BYTES: Final = 4 << 20
"""Uses are not noted while a worker has so much still to read."""
MAX_DRAIN: Final = 64
"""Requests served between two polls, so that workers and timers get their turn."""

log = logging.getLogger("hicache")


class Daemon:
    """Serves until `stop`. `load()` reads the configuration again (for SIGHUP and `reload`)."""

    def __init__(
        self,
        config: Config,
        parts: Parts,
        instances: Sequence[Instance],
        load: Callable[[str], LoadedConfig],
        recorder: TraceRecorder | None = None,
    ) -> None:
        self.config = config
        self.parts = parts
        self.epoch = secrets.token_hex(8)
        self.started_s = time.monotonic()
        self._instances = instances
        self._load = load
        self._is_stopping = False
        self._wants_reload = False
        self._wake_read, self._wake_write = socket.socketpair()
        self._undispatched: list[p.Outcome] = []
        self.engine = new_engine(config, parts)
        self.sessions = Sessions(config.limits.max_sessions, config.limits.session_ttl_s)
        self.mover = Mover(
            parts.workers,
            parts.arenas,
            self.engine.identify,
            max_queued=config.limits.max_queued_moves,
        )
        self.restoring = Restoring(self._do)
        self.scrubbing = Scrubbing(parts.workers, self.mover.scrub, self._do, self.engine.knows)
        self.condition = Condition(parts, self.engine, self.mover, self.started_s)
        history = self.engine.history
        self._fitter = Fitter(history) if history is not None else None
        self.service = Service(
            self.engine,
            self.sessions,
            parts.arenas,
            self.epoch,
            os.getpid(),
            config.deadlines,
            config.limits,
            self._send,
            self._dispatch,
            self._describe,
        )
        gpus = [worker.device for worker in parts.workers if worker.spec.traits.maps_pages]
        self.service.paging.serve(gpus, self.mover)
        self._recorder = recorder
        smallest_bytes = min(spec.capacity_bytes for spec in parts.tiers)
        self._sample = Sample(smallest_bytes) if config.what_if else None
        self.service.witnesses.present = [w for w in (self._sample, recorder) if w is not None]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._doorkeepers: list[Doorkeeper] = []
        self._router = self._open_socket()
        self._publisher = self._open_publisher()
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        for keeper in self._doorkeepers:
            self._poller.register(keeper.socket, zmq.POLLIN)
        self._poller.register(self.mover.fileno(), zmq.POLLIN)
        self._poller.register(self._wake_read.fileno(), zmq.POLLIN)
        self._watched: set[int] = set()
        self._news_s = self.started_s
        self._keeper = Keeper(config, self.engine.memory)
        self.shedding = parts.shedding(self._do)
        self._set_aside_what_is_written()
        self._bystanders = self._know_bystanders()

    # --- the loop -------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until a signal or `stop`, then drain and close. Blocks.

        A fault in the loop itself ends the daemon, in order as far as that goes: clients see
        misses, and what was acknowledged as durable is found by the next daemon."""
        try:
            self._serve_until_stopped()
            self._drain()
        finally:
            self._close()

    def _serve_until_stopped(self) -> None:
        self._catch_signals()
        now_s = time.monotonic()
        far = {worker.far for worker in self.parts.workers}
        for spec in self.parts.tiers:
            if spec.name not in far:
                self._do(p.TierUp(spec.name, now_s))
        self.mover.start(now_s)
        grow_table_of_names()
        gc.collect()
        gc.freeze()  # what is made at start stays: the collector need not walk it again and again
        next_tick_s = now_s
        while not self._is_stopping:
            now_s = time.monotonic()
            if now_s >= next_tick_s:
                self._tick(now_s)
                next_tick_s = now_s + TICK_S
            self._watch_processes()
            self._turn(max(0.0, next_tick_s - time.monotonic()))

    def stop(self) -> None:
        """End the loop soon; safe in a signal handler."""
        self._is_stopping = self.condition.is_stopping = True

    def _turn(self, wait_s: float) -> None:
        """One poll, and everything that was ready."""
        if self.service.clearances.is_stepping:
            wait_s = 0.0
        if self.service.waiting.is_sending:
            wait_s = min(wait_s, SEND_MORE_S)
        if self.service.waiting.fetches:
            due_s = self.service.waiting.next_fetch_deadline_s() - time.monotonic()
            wait_s = min(wait_s, max(due_s, 0.0))
        events = dict(self._poller.poll(math.ceil(wait_s * 1000)))
        self._news_s = time.monotonic()
        if self.mover.fileno() in events:
            self._take_news(self.mover.on_readable(time.monotonic()))
        for pidfd in self._watched & events.keys():
            for session in self.sessions.of_dead(pidfd):
                log.info("client %s (pid %d) is gone", session.client or "?", session.pid)
                self.service.end(session, time.monotonic())
            self.service.buried(self.sessions.bury(pidfd), time.monotonic())
        if self._wake_read.fileno() in events:
            self._wake_read.recv(4096)
        for keeper in self._doorkeepers:
            if keeper.socket in events:
                keeper.answer()
        if self._router in events:
            self._serve_requests()
            self._await_the_next()
            self.service.witnesses.tell()
        if self.service.clearances.is_stepping:
            self.service.clear_more(time.monotonic())
        if self.service.waiting.is_sending:
            self.service.send_more()
        if self.service.waiting.fetches:
            self.service.end_overdue_fetches(time.monotonic())
        if self._wants_reload:
            self._wants_reload = False
            self._reload_or_complain()
        self._flush_refused()

    def _tick(self, now_s: float) -> None:
        self._take_news(self.mover.tick(now_s))
        self.service.tick(now_s)
        self.shedding.tick(now_s, self.config.limits.min_available)
        if self.mover.unsent_bytes() < MAX_UNSENT_BYTES:
            self._note(self.restoring.uses(now_s))
        self.condition.loop.turn(now_s)
        self.condition.tell_reluctance()
        for faults, tick in self._bystanders:
            faults.guard(partial(tick, now_s))
        if self.config.debug.check:
            self.engine.validate()

    def _set_aside_what_is_written(self) -> None:
        """Clients of the daemon before this one may not know yet that it is gone."""
        for tier, arena in self.parts.arenas.items():
            owner = self.sessions.inherit({pid for _, _, pid in arena.inherited})
            if owner:
                pages = [(first, count) for first, count, _ in arena.inherited]
                slabs = self._do(p.SetAside(tier, pages, owner))
                log.info("%s: %d slabs may be written by clients of before", tier, slabs)

    def _know_bystanders(self) -> list[tuple[Faults, Callable[[float], None]]]:
        """The parts that no request waits for: they are judged, and may fail."""
        condition = self.condition
        condition.watch("witnesses", lambda now_s: 0.0, self.service.witnesses.faults)
        ticks: list[tuple[Faults, Callable[[float], None]]] = []
        trim = FreedMemory(self.started_s)
        ticks.append((Faults("giving freed memory back"), trim.tick))
        if self._doorkeepers:
            faults_of = [keeper.faults for keeper in self._doorkeepers]
            condition.watch("doorkeeper", lambda now_s: 0.0, *faults_of)
        if self._publisher is not None:
            hand_of_events = self._publisher.hand
            ticks.append((Faults("telling events"), self._publisher.tick))
            condition.watch("events", hand_of_events.owes_s, hand_of_events.faults, ticks[-1][0])
        if self._fitter is not None:
            ticks.append((Faults("fitting"), self._fitter.tick))
            condition.watch("fit", self._fitter.owes_s, self._fitter.faults, ticks[-1][0])
        if (hand := self._keeper.hand) is not None:
            ticks.append((Faults("keeping estimates"), self._keeper.tick))
            condition.watch("estimates", hand.owes_s, hand.faults, ticks[-1][0])
        if self._recorder is not None:
            hand_of_record = self._recorder.hand
            ticks.append((Faults("recording"), self._recorder.tick))
            condition.watch("record", hand_of_record.owes_s, hand_of_record.faults, ticks[-1][0])
        return ticks

    def _watch_processes(self) -> None:
        """Poll the pidfds of the processes behind the sessions of now."""
        wanted = set(self.sessions.pidfds())
        if wanted != self._watched:
            for gone in self._watched - wanted:
                self._poller.unregister(gone)
            for new in wanted - self._watched:
                self._poller.register(new, zmq.POLLIN)
            self._watched = wanted

    # --- requests -------------------------------------------------------------------------------

    def _hire_doorkeeper(self, context: zmq.Context[zmq.Socket[bytes]]) -> Doorkeeper | None:
        """With CURVE keys only. There before the socket is, or somebody might slip in."""
        config = self.config.socket
        if config.curve_secret_key_file and config.curve_allowed_clients_dir:
            keeper = Doorkeeper(
                context, config.curve_secret_key_file, config.curve_allowed_clients_dir
            )
            self._doorkeepers.append(keeper)
            return keeper
        return None

    def _open_socket(self) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.setsockopt(zmq.MAXMSGSIZE, self.config.limits.max_message_bytes)
        router.setsockopt(zmq.SNDHWM, self.config.socket.hwm)
        router.setsockopt(zmq.RCVHWM, self.config.socket.hwm)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        keeper = self._hire_doorkeeper(self._context)
        if keeper is not None:
            keeper.guard(router)
        listen(router, self.config.socket.endpoint)
        return router

    def _open_publisher(self) -> Publisher | None:
        """Where the configuration says so. On tcp behind the same keys as the front door; its
        ZeroMQ is its own, so that what subscribers do costs the front door nothing."""
        config = self.config.events
        if config.endpoint is None:
            return None
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        tiers = [spec.name for spec in self.parts.tiers]
        keeper = self._hire_doorkeeper(context) if ipc_path(config.endpoint) is None else None
        return Publisher(
            context, config.endpoint, config.hwm, self.engine.changes, tiers, self.epoch, keeper
        )

    def _serve_requests(self) -> None:
        router = self._router
        for _ in range(MAX_DRAIN):
            routing_id = router.recv(zmq.NOBLOCK)
            frames = [router.recv(zmq.NOBLOCK, copy=False)]
            while frames[-1].more:
                frames.append(router.recv(zmq.NOBLOCK, copy=False))
            self._serve(routing_id, frames)
            if not int(router.get(zmq.EVENTS)) & _READABLE:
                return  # asked, since an exception for "nothing there" costs more than a request

    def _await_the_next(self) -> None:
        """An inference engine's requests come in rows (match, fetch, release). Looking for the next
        one a little while, before going to sleep, saves each of them the wake-up of this process:
        a third of a match's round trip."""
        router, busy_poll_s = self._router, self.config.socket.busy_poll_s
        give_up_s = time.monotonic() + busy_poll_s
        while (now_s := time.monotonic()) < give_up_s and not self._is_stopping:
            if int(router.get(zmq.EVENTS)) & _READABLE:
                self._serve_requests()
                if now_s - self._news_s > TICK_S / 10:
                    return  # workers and timers get their turn
                give_up_s = time.monotonic() + busy_poll_s
            else:
                os.sched_yield()

    def _serve(self, routing_id: bytes, frames: Sequence[zmq.Frame]) -> None:
        """One request, one reply: nothing that a peer sends gets past here as an exception."""
        peer = Peer(routing_id, 0)
        if not frames:
            return
        now_s = time.monotonic()
        try:
            request = decode_request(frames[0].buffer)
            peer.request_id = request.id
            operation = operation_of(request)
            late_s = now_s - request.sent_s
            is_late = 0 < request.deadline_s < late_s < 3600 and self._is_ipc
            if request.sent_s and is_late and not operation.runs_late:
                raise WireError("expired", f"it came {late_s:.3f} s after it was sent")
            if operation.is_admin:
                fields = _ADMIN[operation.name](self, request)
                self._send(peer, {"id": request.id, "ok": True, **fields})
                return
            if self._is_stopping:
                raise WireError("stopping", "")
            pid = peer_pid(frames[0]) if operation.name == "hello" and self._is_ipc else 0
            parts = [frame.buffer for frame in frames[1:]]
            self.service.handle(Asked(peer, request, parts, pid, now_s))
            os.sched_yield()  # ZeroMQ's own thread has the answer to send; the rest can wait
            plan = self.engine.catch_up()
            if plan is not None:
                self._dispatch(plan)
        except WireError as error:
            self.service.errors[error.code] += 1
            request_id = peer.request_id or error.request_id
            self._send(peer, error_reply(request_id, error.code, error.message))
        except Exception:  # a fault of ours: the client gets a miss, the log gets the story
            self.service.errors["internal"] += 1
            log.exception("a request could not be served")
            self._send(peer, error_reply(peer.request_id, "internal"))

    @property
    def _is_ipc(self) -> bool:
        return self.config.socket.endpoint.startswith("ipc://")

    def _send(
        self,
        peer: Peer,
        message: Mapping[str, Any] | MatchReply,
        parts: Sequence[Part] = (),
    ) -> zmq.MessageTracker | None:
        """A reply. A peer that is gone or does not read loses it: its deadline answers for us."""
        try:
            if parts:
                end = zmq.Frame(parts[-1], track=True, copy=False, copy_threshold=0)
                frames = [peer.routing_id, pack(message), *parts[:-1], end]
                self._router.send_multipart(frames, zmq.NOBLOCK)
                tracker: zmq.MessageTracker = end.tracker
                return tracker
            packed = pack(message)
            send = zmq.backend.Socket.send  # past a wrapper that costs as much again
            send(self._router, peer.routing_id, _FIRST_PART)
            send(self._router, packed, _LAST_PART)
        except zmq.ZMQError:
            self.service.errors["unsent"] += 1
        return None

    # --- moves ----------------------------------------------------------------------------------

    def _do(self, event: p.Event[Any]) -> Any:
        plan = self.engine.handle(event)
        self._dispatch(plan)
        return plan.answer

    def _dispatch(self, plan: p.Plan[Any]) -> None:
        """Carry out a plan, whose answer is sent afterwards. Pages that were cut into slots anew
        come first: from the first move on, other bytes may stand there (race 2 of the arena)."""
        for pages in plan.reshaped:
            if pages.tier in self.service.arenas:
                self.service.arenas[pages.tier].raise_range(pages.first_page, pages.num_pages)
        if plan.cancel:
            self._undispatched += self.mover.cancel(plan.cancel)
        if plan.moves:
            refused = self.mover.submit(plan.moves, time.monotonic())
            self._undispatched += [p.Outcome(m.id, False, error="refused") for m in refused]

    def _flush_refused(self) -> None:
        """Moves that never left come back as failed, after the event that wanted them is over."""
        if self._undispatched:
            outcomes, self._undispatched = self._undispatched, []
            now_s = time.monotonic()
            self.service.news(self._do(p.MovesDone(outcomes, now_s)), now_s)

    def _take_news(self, news: Sequence[News]) -> None:
        now_s = time.monotonic()
        outcomes: list[p.Outcome] = []
        for item in news:
            if isinstance(item, p.Outcome):
                outcomes.append(item)
                continue
            if outcomes:
                self._log_corrupt(outcomes)
                self.service.news(self._do(p.MovesDone(outcomes, now_s)), now_s)
                outcomes = []
            self._take_worker_news(item, now_s)
        if outcomes:
            self._log_corrupt(outcomes)
            self.service.news(self._do(p.MovesDone(outcomes, now_s)), now_s)

    def _take_worker_news(
        self,
        item: WorkerNews,
        now_s: float,
    ) -> None:
        match item:
            case WorkerMeasured():
                self._do(p.LinkMeasured(item.src, item.dst, item.num_bytes, item.seconds))
            case PageNews():
                self.service.paging.take(item, now_s)
            case WorkerOpening():
                of = item.done, item.total, item.unit
                self.condition.notes[item.tier] = self.restoring.told(item.tier, "opening", *of)
            case WorkerRows():
                forget = self.restoring.take(item.tier, item.rows, now_s)
                self.mover.forget(item.device, forget)
                self.mover.taken(item.device)
                of = item.rows.first + len(item.rows), item.rows.total, "blocks"
                self.condition.notes[item.tier] = self.restoring.told(item.tier, "restoring", *of)
            case WorkerUp():
                self._do(p.TierUp(item.tier, now_s, item.is_restoring))
                self.condition.notes[item.tier] = " ".join(item.notes)
                log.info("%s", " ".join([f"{item.tier} is up (pid {item.pid})", *item.notes]))
            case WorkerRestored():
                self._do(p.Restored(item.tier, now_s))
                self.condition.notes[item.tier] = notes = " ".join(item.notes)
                log.info("%s is restored %s", item.tier, notes)
            case WorkerNoted():
                self.condition.notes[item.tier] += f"; {item.note}"
                log.warning("%s: %s", item.tier, item.note)
            case WorkerScrubbed():
                for change in self.scrubbing.take(item, now_s):
                    self.service.news(change, now_s)
            case WorkerDown():
                self.service.paging.worker_gone(item.device, now_s)
                self.scrubbing.end(item.device, f"the tier went down: {item.error}")
                self.condition.notes[item.tier] = item.error
                log.warning(
                    "%s is down: %s; tried again in %.1f s", item.tier, item.error, item.retry_s
                )
                self.service.news(self._do(p.TierDown(item.tier, now_s)), now_s)

    def _note(self, uses: Sequence[p.Use]) -> None:
        for device in self.scrubbing.devices if uses else ():
            self.mover.note(device, uses, self.restoring.zero_s)

    def _log_corrupt(self, outcomes: Sequence[p.Outcome]) -> None:
        for outcome in outcomes:
            move = self.engine.residency.moves.get(outcome.move) if outcome.corrupt else None
            if move is not None:
                said = outcome.error, self.engine.story(move.block)
                log.warning("a stored block was not what it should be: %s; %s", *said)

    def _describe(self, spec: NamespaceSpec) -> None:
        for tier in self.engine.too_small_for(spec.block_bytes):
            log.warning(
                "%s (%s) is too small for a block of %d bytes: those of %s are kept elsewhere",
                tier.name,
                format_size(tier.capacity_bytes),
                spec.block_bytes,
                spec.name or spec.digest().hex()[:12],
            )
        for worker in self.parts.workers:
            if worker.spec.traits.persistent:
                self.mover.describe(worker.device, spec.digest(), spec.to_wire())

    # --- operators' questions -------------------------------------------------------------------

    def _ping(self, _: Any) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "version": __version__,
            "pid": os.getpid(),
            "uptime_s": time.monotonic() - self.started_s,
            "ready": self.condition.is_ready(),
            "tiers": self.condition.tier_states(),
            "block_tokens": self.config.block_tokens,
        }

    def _stats(self, _: Any) -> dict[str, Any]:
        return {
            "uptime_s": time.monotonic() - self.started_s,
            "epoch": self.epoch,
            "pid": os.getpid(),
            "version": __version__,
            "events": self._publisher.counts() if self._publisher is not None else {},
            **figures.report(self.service, self.mover, self.condition, self.parts.media),
        }

    def _what_if(self, _: Any) -> dict[str, Any]:
        """What was asked for lately, for somebody else to replay with other sizes."""
        self.service.witnesses.tell()
        if self._sample is None:
            raise WireError("refused", "what_if is false in the configuration")
        tiers: list[dict[str, Any]] = [
            {
                "name": spec.name,
                "bytes": pool.capacity_bytes,
                "eviction": getattr(self.config.tiers, spec.name).eviction,
            }
            for spec, pool in zip(self.parts.tiers, self.parts.pools, strict=True)
        ]
        return {"tiers": tiers, **self._sample.report()}

    def _health(self, _: Any) -> dict[str, Any]:
        return self.condition.report(time.monotonic())

    def _events(self, request: Any) -> dict[str, Any]:
        """What has been told as held of a namespace, and where more is told."""
        namespace, after = request.namespace, request.after
        if self._publisher is None:
            return unpublished(namespace, self.epoch)
        return self._publisher.page(namespace, after)

    def _explain(self, request: Any) -> dict[str, Any]:
        """The last decisions on hits, in words and as data."""
        self.engine.matching.settle()
        last = request.last
        return {"decisions": figures.decision_rows(self.service, last, time.monotonic())}

    def _tree(self, request: Any) -> dict[str, Any]:
        """A page of the index. Whoever may connect without having proved anything (over TCP without
        keys) is told nothing of what stands in prompts."""
        is_private = self._is_ipc or bool(self._doorkeepers)
        now_s = time.monotonic()
        rows = figures.tree_rows(self.service, request, now_s, with_tokens=is_private)
        return {"epoch": self.epoch, **rows}

    def _verify(self, request: Any) -> dict[str, Any]:
        if request.start:
            self.scrubbing.begin(self.condition.tier_states(), request.bytes_per_s)
        return {"devices": self.scrubbing.told()}

    def _reload(self, request: Any) -> dict[str, Any]:
        from hicache.config import ConfigError

        try:
            applied = self._apply(self._load(request.file).config)
        except ConfigError as error:
            raise WireError("refused", str(error)) from None
        return applied

    def _reload_or_complain(self) -> None:
        from hicache.config import ConfigError

        try:
            applied = self._apply(self._load("").config)
        except ConfigError as error:
            log.error("the configuration was not reloaded: %s", error)
            return
        except (OSError, ValueError, RecursionError) as error:  # no file ends one that serves
            log.error("the configuration was not reloaded: %s", error)
            return
        log.info("applied: %s", ", ".join(applied["live"]) or "nothing")
        if applied["restart"]:
            log.warning("needs a restart: %s", ", ".join(applied["restart"]))

    def _apply(self, config: Config) -> dict[str, Any]:
        """Apply what can change live; what cannot keeps its old value until a restart."""
        diff = diff_live(self.config, config)
        if diff.live:
            self.config = with_live(self.config, config)
            self.engine.configure(
                engine_settings(self.config), tier_specs(self.config, self.parts.tiers)
            )
            self.service.configure(self.config.deadlines, self.config.limits)
            for tier, paces in paces_of(self.config).items():
                self.mover.pace(tier, *paces)
            logging.getLogger().setLevel(self.config.log_level.upper())
        return {"live": list(diff.live), "restart": list(diff.restart)}

    # --- the end --------------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        self._wake_write.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: self.stop())
        signal.signal(signal.SIGINT, lambda *_: self.stop())

        def hang_up(*_: object) -> None:
            self._wants_reload = True

        signal.signal(signal.SIGHUP, hang_up)

    def _drain(self) -> None:
        """Refuse requests; write down what the durable tier lacks, within `shutdown_s`."""
        give_up_s = time.monotonic() + self.config.deadlines.shutdown_s
        left = -1
        while (now_s := time.monotonic()) < give_up_s:
            left = self._do(p.Flush(now_s))
            self._flush_refused()
            if not left:
                break
            self._take_news(self.mover.tick(now_s))
            self._watch_processes()
            self._turn(min(TICK_S, give_up_s - now_s))
        if left:
            log.warning("stopped with %d writes to disk still to do: shutdown was too short", left)
        self._note(self.restoring.all_uses())

    def _close(self) -> None:
        self._router.close()
        if self._publisher is not None:
            self._publisher.close()
        if self._fitter is not None:
            self._fitter.close()
        if self._recorder is not None:
            self.service.witnesses.tell()
            self._recorder.close()
        self._keeper.close(KEEP_S)
        left_s = max(2.0, self.config.deadlines.shutdown_s / 2)
        self.mover.close(left_s)
        for name, error in self.mover.last_words().items():
            log.warning("the last thing that %s said: %s", name, error)
        self.sessions.close_all()
        self._context.destroy(linger=0)
        self.parts.close()
        for instance in self._instances:
            instance.close()
        signal.set_wakeup_fd(-1)
        self._wake_read.close()
        self._wake_write.close()
        log.info("stopped")


_ADMIN: Final[Mapping[str, Callable[[Daemon, Any], dict[str, Any]]]] = {
    "ping": Daemon._ping,
    "stats": Daemon._stats,
    "health": Daemon._health,
    "explain": Daemon._explain,
    "events": Daemon._events,
    "what_if": Daemon._what_if,
    "tree": Daemon._tree,
    "reload": Daemon._reload,
    "verify": Daemon._verify,
}

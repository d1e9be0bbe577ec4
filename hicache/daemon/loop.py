"""The daemon's one loop: socket → event → plan → mover → reply. Wiring, no policy.

Single-threaded: the cache engine, the sessions and the mover run here, between two polls. It never
opens a disk environment and never calls CUDA (workers do), and blocks only in the poll.

    ROUTER ──▶ Service ──▶ CacheEngine ──▶ Mover ──▶ workers
       ▲          │                          │
       └─ replies ┴─────── events ◀───────────┘
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

from hicache.config import Config, LoadedConfig
from hicache.config.units import format_size
from hicache.daemon.build import Parts, engine_settings, new_engine, rates_of, tier_specs
from hicache.daemon.dispatch import Service
from hicache.daemon.gate import Gate, Upkeep
from hicache.daemon.operations import hello
from hicache.daemon.operations.gpu_pages import GpuPages
from hicache.daemon.pending import Part, Peer
from hicache.daemon.server_sockets import ServerSockets
from hicache.daemon.serving_config import ServingConfig
from hicache.daemon.sessions import Sessions
from hicache.daemon.socket_lock import SocketLock, peer_pid
from hicache.daemon.tier_events import TierEvents
from hicache.daemon.upkeep.estimates_file import EstimatesFile
from hicache.daemon.upkeep.health import Health
from hicache.daemon.upkeep.heap import FreedMemory, grow_table_of_names
from hicache.daemon.upkeep.kv_publisher import Publisher
from hicache.daemon.upkeep.observers import Observers
from hicache.daemon.upkeep.refit import Fitter
from hicache.daemon.upkeep.request_sample import Sample
from hicache.daemon.upkeep.supervised import Faults
from hicache.daemon.upkeep.tier_restore import Restoring
from hicache.daemon.upkeep.tier_scrub import Scrubbing
from hicache.daemon.upkeep.trace import TraceRecorder
from hicache.engine import plan as p
from hicache.protocol.endpoint import ipc_path
from hicache.protocol.keys import NamespaceSpec
from hicache.protocol.messages import Reply, pack
from hicache.transfer.mover import Mover

TICK_S: Final = 0.1
_READABLE: Final = int(zmq.POLLIN)
_FIRST_PART, _LAST_PART = int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.NOBLOCK)
SEND_MORE_S: Final = 0.002
"""The interval of checks of whether a client has read, so that more can be sent to it."""
KEEP_S: Final = 2.0
"""How long the last write of the estimates may take."""
MAX_UNSENT_BYTES: Final = 4 << 20
"""Uses are not sent while more than this is unsent to workers."""
MAX_DRAIN: Final = 64
"""The most requests served between two polls, so that workers and timers are not delayed."""

log = logging.getLogger("hicache")


class Daemon:
    """Serves until `stop`. `load()` reads the configuration again (for SIGHUP and `reload`)."""

    def __init__(
        self,
        config: Config,
        parts: Parts,
        locks: Sequence[SocketLock],
        load: Callable[[str], LoadedConfig],
        recorder: TraceRecorder | None = None,
    ) -> None:
        self.parts = parts
        self.serving = ServingConfig(config, load, self._apply)
        self._started_s = time.monotonic()
        self._locks = locks
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
        self.gate = Gate(
            self.engine,
            self.sessions,
            parts.arenas,
            secrets.token_hex(8),
            config.deadlines,
            config.limits,
            self,
            parts.slot_sizes,
        )
        self._is_ipc = ipc_path(config.socket.endpoint) is not None
        self.service = Service(self.gate, shares_clock=self._is_ipc)
        do = self.gate.do
        self.restoring = Restoring(do, parts.slot_sizes)
        self.scrubbing = Scrubbing(parts.workers, self.mover.scrub, do, self.engine.knows)
        self.health = Health(parts, self.engine, self.mover, self._started_s)
        self._tier_events = TierEvents(
            self.service, self.mover, self.health, self.restoring, self.scrubbing
        )
        gpus = [worker.device for worker in parts.workers if worker.spec.traits.maps_pages]
        self.gate.state(GpuPages).serve(gpus, self.mover)
        history = self.engine.history
        self._fitter = Fitter(history) if history is not None else None
        self._recorder = recorder
        smallest_bytes = min(spec.capacity_bytes for spec in parts.tiers)
        sample = Sample(smallest_bytes) if config.what_if else None
        observers = {"the sample of requests": sample, "the record of requests": recorder}
        self.gate.observers = Observers({n: o for n, o in observers.items() if o is not None})
        self._sockets = ServerSockets(config)
        self._router = self._sockets.router
        self._publisher = self._open_publisher()
        self.gate.upkeep = Upkeep(
            parts,
            self.mover,
            self.health,
            self.scrubbing,
            self.serving,
            self._publisher,
            sample,
            is_private=self._is_ipc or bool(self._sockets.curve_auths),
        )
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        for auth in self._sockets.curve_auths:
            self._poller.register(auth.socket, zmq.POLLIN)
        self._poller.register(self.mover.fileno(), zmq.POLLIN)
        self._poller.register(self._wake_read.fileno(), zmq.POLLIN)
        self._watched: set[int] = set()
        self._polled_s = self._started_s
        self._estimates_file = EstimatesFile(config, self.engine.memory)
        self.shedding = parts.shedding(do)
        self._set_aside_what_is_written()
        self._bystanders = self._watch_parts()

    # --- the loop -------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until a signal or `stop`, then drain and close. Blocks.

        A bug in the loop itself ends the daemon, as cleanly as possible: clients get misses, and
        the next daemon finds what was acknowledged as durable."""
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
                self.gate.do(p.TierUp(spec.name, now_s))
        self.mover.start(now_s)
        grow_table_of_names()
        gc.collect()
        gc.freeze()  # the objects made at start stay: the collector need not scan them
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
        self._is_stopping = self.health.is_stopping = self.service.is_stopping = True

    def _turn(self, wait_s: float) -> None:
        """Poll once, and handle everything that is ready."""
        wait_s = self.service.longest_wait_s(wait_s, time.monotonic(), SEND_MORE_S)
        events = dict(self._poller.poll(math.ceil(wait_s * 1000)))
        self._polled_s = time.monotonic()
        if self.mover.fileno() in events:
            reports = self.mover.on_readable(time.monotonic())
            self._tier_events.take(reports, time.monotonic())
        for pidfd in self._watched & events.keys():
            self._process_died(pidfd)
        if self._wake_read.fileno() in events:
            self._wake_read.recv(4096)
        for auth in self._sockets.curve_auths:
            if auth.socket in events:
                auth.answer()
        if self._router in events:
            self._serve_requests()
            self._await_the_next()
            self.gate.observers.deliver()
        self.service.between_polls(time.monotonic())
        if self._wants_reload:
            self._wants_reload = False
            self.serving.reload_or_log()
        self._flush_refused()

    def _process_died(self, pidfd: int) -> None:
        """A client's process is dead."""
        for session in self.sessions.of_dead(pidfd):
            log.info("client %s (pid %d) has ended", session.client or "?", session.pid)
            hello.end_session(self.gate, session, time.monotonic())
        hello.writers_gone(self.gate, self.sessions.process_died(pidfd), time.monotonic())

    def _tick(self, now_s: float) -> None:
        self._tier_events.take(self.mover.tick(now_s), time.monotonic())
        self.service.tick(now_s)
        self.shedding.tick(now_s, self.serving.config.limits.min_available)
        if self.mover.unsent_bytes() < MAX_UNSENT_BYTES:
            self._note(self.restoring.uses(self.scrubbing.devices.values(), now_s))
        self.health.loop.turn(now_s)
        self.health.log_refusals()
        for faults, tick in self._bystanders:
            faults.guard(partial(tick, now_s))
        if self.serving.config.debug.check:
            self.engine.validate()

    def _set_aside_what_is_written(self) -> None:
        """Quarantine slots that clients of the previous daemon may still write."""
        for tier, arena in self.parts.arenas.items():
            owner = self.sessions.inherit({pid for _, _, pid in arena.inherited})
            if owner:
                pages = [(first, count) for first, count, _ in arena.inherited]
                slabs = self.gate.do(p.SetAside(tier, pages, owner))
                log.info("%s: clients of the last daemon may still write %d slabs", tier, slabs)

    def _watch_parts(self) -> list[tuple[Faults, Callable[[float], None]]]:
        """The parts that no request waits for, which are watched and may fail."""
        health = self.health
        health.watch("witnesses", lambda now_s: 0.0, *self.gate.observers.faults)
        ticks: list[tuple[Faults, Callable[[float], None]]] = []
        trim = FreedMemory(self._started_s)
        ticks.append((Faults("giving freed memory back"), trim.tick))
        if self._sockets.curve_auths:
            faults_of = [auth.faults for auth in self._sockets.curve_auths]
            health.watch("doorkeeper", lambda now_s: 0.0, *faults_of)
        if self._publisher is not None:
            events_thread = self._publisher.work_thread
            ticks.append((Faults("telling events"), self._publisher.tick))
            health.watch("events", events_thread.owes_s, events_thread.faults, ticks[-1][0])
        if self._fitter is not None:
            ticks.append((Faults("fitting"), self._fitter.tick))
            health.watch("fit", self._fitter.owes_s, self._fitter.faults, ticks[-1][0])
        if (thread := self._estimates_file.work_thread) is not None:
            ticks.append((Faults("keeping estimates"), self._estimates_file.tick))
            health.watch("estimates", thread.owes_s, thread.faults, ticks[-1][0])
        if self._recorder is not None:
            record_thread = self._recorder.work_thread
            ticks.append((Faults("recording"), self._recorder.tick))
            health.watch("record", record_thread.owes_s, record_thread.faults, ticks[-1][0])
        return ticks

    def _watch_processes(self) -> None:
        """Poll the pidfds of the processes of the current sessions."""
        wanted = set(self.sessions.pidfds())
        if wanted != self._watched:
            for gone in self._watched - wanted:
                self._poller.unregister(gone)
            for new in wanted - self._watched:
                self._poller.register(new, zmq.POLLIN)
            self._watched = wanted

    # --- requests -------------------------------------------------------------------------------

    def _open_publisher(self) -> Publisher | None:
        """The KV-event publisher, if configured. On tcp with the same keys as the clients' socket.
        It has a separate ZeroMQ context, so that subscribers do not slow clients down."""
        config = self.serving.config.events
        if config.endpoint is None:
            return None
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        tiers = [spec.name for spec in self.parts.tiers]
        is_tcp = ipc_path(config.endpoint) is None
        auth = self._sockets.new_curve_auth(context) if is_tcp else None
        epoch, changes = self.gate.epoch, self.engine.changes
        return Publisher(context, config.endpoint, config.hwm, changes, tiers, epoch, auth)

    def _serve_requests(self) -> None:
        router = self._router
        for _ in range(MAX_DRAIN):
            routing_id = router.recv(zmq.NOBLOCK)
            frames = [router.recv(zmq.NOBLOCK, copy=False)]
            while frames[-1].more:
                frames.append(router.recv(zmq.NOBLOCK, copy=False))
            if frames:
                head, parts = frames[0], [frame.buffer for frame in frames[1:]]
                pid_of = partial(self._pid_of, head)
                self.service.serve(Peer(routing_id, 0), head.buffer, parts, pid_of)
            if not int(router.get(zmq.EVENTS)) & _READABLE:
                return  # checked first: an exception would cost more than a request

    def _await_the_next(self) -> None:
        """Busy-poll for the next request before sleeping. An inference engine's requests come in
        series (match, fetch, release), and waking this process up takes a third of a match's round
        trip."""
        router, busy_poll_s = self._router, self.serving.config.socket.busy_poll_s
        give_up_s = time.monotonic() + busy_poll_s
        while (now_s := time.monotonic()) < give_up_s and not self._is_stopping:
            if int(router.get(zmq.EVENTS)) & _READABLE:
                self._serve_requests()
                if now_s - self._polled_s > TICK_S / 10:
                    return  # let workers and timers run
                give_up_s = time.monotonic() + busy_poll_s
            else:
                os.sched_yield()

    def _pid_of(self, head: zmq.Frame) -> int:
        return peer_pid(head) if self._is_ipc else 0

    def send(
        self, peer: Peer, message: Mapping[str, Any] | Reply, parts: Sequence[Part] = ()
    ) -> zmq.MessageTracker | None:
        """See Outlet. If the peer has ended or does not read, the message is lost, and the client
        counts its request as a miss at its deadline."""
        try:
            if parts:
                end = zmq.Frame(parts[-1], track=True, copy=False, copy_threshold=0)
                frames = [peer.routing_id, pack(message), *parts[:-1], end]
                self._router.send_multipart(frames, zmq.NOBLOCK)
                tracker: zmq.MessageTracker = end.tracker
                return tracker
            packed = pack(message)
            send = zmq.backend.Socket.send  # without pyzmq's wrapper, which takes as long again
            send(self._router, peer.routing_id, _FIRST_PART)
            send(self._router, packed, _LAST_PART)
        except zmq.ZMQError:
            self.gate.errors["unsent"] += 1
        return None

    # --- moves ----------------------------------------------------------------------------------

    def dispatch(self, plan: p.Plan[Any]) -> None:
        """See Outlet. The plan's answer is sent afterwards. Generations of reshaped pages are
        raised first: the moves may write other bytes there (race 2 of the arena)."""
        for pages in plan.reshaped:
            if pages.tier in self.gate.arenas:
                self.gate.arenas[pages.tier].raise_range(pages.first_page, pages.num_pages)
        if plan.cancel:
            self._undispatched += self.mover.cancel(plan.cancel)
        if plan.moves:
            refused = self.mover.submit(plan.moves, time.monotonic())
            self._undispatched += [p.Outcome(m.id, False, error="refused") for m in refused]

    def _flush_refused(self) -> None:
        """Report moves that could not be sent as failed, after the event that started them."""
        outcomes, self._undispatched = self._undispatched, []
        self._tier_events.moves_done(outcomes, time.monotonic())

    def _note(self, uses: Mapping[str, Sequence[p.Use]]) -> None:
        for device, tier in self.scrubbing.devices.items():
            if uses[tier]:
                self.mover.note(device, uses[tier], self.restoring.zero_s)

    def describe(self, spec: NamespaceSpec) -> None:
        """See Outlet."""
        sizes = self.parts.slot_sizes(spec.block_bytes)
        for tier in self.engine.too_small_for(spec.block_bytes, tuple(sizes.values())):
            log.warning(
                "%s (%s) is too small for a block of %d bytes: %s uses the other tiers",
                tier.name,
                format_size(tier.capacity_bytes),
                spec.block_bytes,
                spec.name or spec.digest().hex()[:12],
            )
        for worker in self.parts.workers:
            if worker.spec.traits.persistent:
                self.mover.describe(worker.device, spec.digest(), spec.to_wire())

    def _apply(self, config: Config) -> None:
        """Apply a changed configuration, as far as it can change live."""
        self.engine.configure(engine_settings(config), tier_specs(config, self.parts.tiers))
        self.gate.configure(config.deadlines, config.limits)
        for tier, rates in rates_of(config).items():
            self.mover.throttle(tier, *rates)
        logging.getLogger().setLevel(config.log_level.upper())

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
        """Refuse requests; write what the persistent tiers lack, within `shutdown_s`."""
        give_up_s = time.monotonic() + self.serving.config.deadlines.shutdown_s
        left = -1
        while (now_s := time.monotonic()) < give_up_s:
            left = self.gate.do(p.Flush(now_s))
            self._flush_refused()
            if not left:
                break
            self._tier_events.take(self.mover.tick(now_s), now_s)
            self._watch_processes()
            self._turn(min(TICK_S, give_up_s - now_s))
        if left:
            log.warning("stopped before %d writes to disk: shutdown_s was too short", left)
        self._note(self.restoring.all_uses(self.scrubbing.devices.values()))

    def _close(self) -> None:
        self._router.close()
        if self._publisher is not None:
            self._publisher.close()
        if self._fitter is not None:
            self._fitter.close()
        if self._recorder is not None:
            self.gate.observers.deliver()
            self._recorder.close()
        self._estimates_file.close(KEEP_S)
        left_s = max(2.0, self.serving.config.deadlines.shutdown_s / 2)
        self.mover.close(left_s)
        for name, error in self.mover.last_words().items():
            log.warning("the last error of %s: %s", name, error)
        self.sessions.close_all()
        self._sockets.close()
        self.parts.close()
        for instance in self._locks:
            instance.close()
        signal.set_wakeup_fd(-1)
        self._wake_read.close()
        self._wake_write.close()
        log.info("stopped")

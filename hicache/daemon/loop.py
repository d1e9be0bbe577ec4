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

from hicache.config import Config, LoadedConfig
from hicache.config.units import format_size
from hicache.daemon.build import Parts, engine_settings, new_engine, paces_of, tier_specs
from hicache.daemon.dispatch import Service
from hicache.daemon.gate import Gate, Upkeep
from hicache.daemon.operations import hello
from hicache.daemon.operations.gpu_pages import GpuPages
from hicache.daemon.pending import Part, Peer
from hicache.daemon.server_sockets import ServerSockets
from hicache.daemon.serving_config import ServingConfig
from hicache.daemon.sessions import Sessions
from hicache.daemon.socket_lock import Instance, peer_pid
from hicache.daemon.tier_events import TierEvents
from hicache.daemon.upkeep.estimates_file import Keeper
from hicache.daemon.upkeep.health import Condition
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
from hicache.protocol.messages import pack
from hicache.protocol.registry import Reply
from hicache.transfer.mover import Mover

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
        self.parts = parts
        self.serving = ServingConfig(config, load, self._apply)
        self._started_s = time.monotonic()
        self._instances = instances
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
        self.condition = Condition(parts, self.engine, self.mover, self._started_s)
        self._tier_events = TierEvents(
            self.service, self.mover, self.condition, self.restoring, self.scrubbing
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
            self.condition,
            self.scrubbing,
            self.serving,
            self._publisher,
            sample,
            is_private=self._is_ipc or bool(self._sockets.doorkeepers),
        )
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        for keeper in self._sockets.doorkeepers:
            self._poller.register(keeper.socket, zmq.POLLIN)
        self._poller.register(self.mover.fileno(), zmq.POLLIN)
        self._poller.register(self._wake_read.fileno(), zmq.POLLIN)
        self._watched: set[int] = set()
        self._news_s = self._started_s
        self._keeper = Keeper(config, self.engine.memory)
        self.shedding = parts.shedding(do)
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
                self.gate.do(p.TierUp(spec.name, now_s))
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
        self._is_stopping = self.condition.is_stopping = self.service.is_stopping = True

    def _turn(self, wait_s: float) -> None:
        """One poll, and everything that was ready."""
        wait_s = self.service.longest_wait_s(wait_s, time.monotonic(), SEND_MORE_S)
        events = dict(self._poller.poll(math.ceil(wait_s * 1000)))
        self._news_s = time.monotonic()
        if self.mover.fileno() in events:
            news = self.mover.on_readable(time.monotonic())
            self._tier_events.take(news, time.monotonic())
        for pidfd in self._watched & events.keys():
            self._bury(pidfd)
        if self._wake_read.fileno() in events:
            self._wake_read.recv(4096)
        for keeper in self._sockets.doorkeepers:
            if keeper.socket in events:
                keeper.answer()
        if self._router in events:
            self._serve_requests()
            self._await_the_next()
            self.gate.observers.deliver()
        self.service.between_polls(time.monotonic())
        if self._wants_reload:
            self._wants_reload = False
            self.serving.reload_or_log()
        self._flush_refused()

    def _bury(self, pidfd: int) -> None:
        """A client's process is dead."""
        for session in self.sessions.of_dead(pidfd):
            log.info("client %s (pid %d) is gone", session.client or "?", session.pid)
            hello.end_session(self.gate, session, time.monotonic())
        hello.writers_gone(self.gate, self.sessions.bury(pidfd), time.monotonic())

    def _tick(self, now_s: float) -> None:
        self._tier_events.take(self.mover.tick(now_s), time.monotonic())
        self.service.tick(now_s)
        self.shedding.tick(now_s, self.serving.config.limits.min_available)
        if self.mover.unsent_bytes() < MAX_UNSENT_BYTES:
            self._note(self.restoring.uses(self.scrubbing.devices.values(), now_s))
        self.condition.loop.turn(now_s)
        self.condition.tell_reluctance()
        for faults, tick in self._bystanders:
            faults.guard(partial(tick, now_s))
        if self.serving.config.debug.check:
            self.engine.validate()

    def _set_aside_what_is_written(self) -> None:
        """Clients of the daemon before this one may not know yet that it is gone."""
        for tier, arena in self.parts.arenas.items():
            owner = self.sessions.inherit({pid for _, _, pid in arena.inherited})
            if owner:
                pages = [(first, count) for first, count, _ in arena.inherited]
                slabs = self.gate.do(p.SetAside(tier, pages, owner))
                log.info("%s: %d slabs may be written by clients of before", tier, slabs)

    def _know_bystanders(self) -> list[tuple[Faults, Callable[[float], None]]]:
        """The parts that no request waits for: they are judged, and may fail."""
        condition = self.condition
        condition.watch("witnesses", lambda now_s: 0.0, *self.gate.observers.faults)
        ticks: list[tuple[Faults, Callable[[float], None]]] = []
        trim = FreedMemory(self._started_s)
        ticks.append((Faults("giving freed memory back"), trim.tick))
        if self._sockets.doorkeepers:
            faults_of = [keeper.faults for keeper in self._sockets.doorkeepers]
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

    def _open_publisher(self) -> Publisher | None:
        """Where the configuration says so. On tcp with the same keys as the clients' socket. It has
        a ZeroMQ context of its own, so that subscribers cost the clients nothing."""
        config = self.serving.config.events
        if config.endpoint is None:
            return None
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        tiers = [spec.name for spec in self.parts.tiers]
        is_tcp = ipc_path(config.endpoint) is None
        keeper = self._sockets.new_doorkeeper(context) if is_tcp else None
        epoch, changes = self.gate.epoch, self.engine.changes
        return Publisher(context, config.endpoint, config.hwm, changes, tiers, epoch, keeper)

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
                return  # asked, since an exception for "nothing there" costs more than a request

    def _await_the_next(self) -> None:
        """An inference engine's requests come in rows (match, fetch, release). Looking for the next
        one a little while, before going to sleep, saves each of them the wake-up of this process:
        a third of a match's round trip."""
        router, busy_poll_s = self._router, self.serving.config.socket.busy_poll_s
        give_up_s = time.monotonic() + busy_poll_s
        while (now_s := time.monotonic()) < give_up_s and not self._is_stopping:
            if int(router.get(zmq.EVENTS)) & _READABLE:
                self._serve_requests()
                if now_s - self._news_s > TICK_S / 10:
                    return  # workers and timers get their turn
                give_up_s = time.monotonic() + busy_poll_s
            else:
                os.sched_yield()

    def _pid_of(self, head: zmq.Frame) -> int:
        return peer_pid(head) if self._is_ipc else 0

    def send(
        self, peer: Peer, message: Mapping[str, Any] | Reply, parts: Sequence[Part] = ()
    ) -> zmq.MessageTracker | None:
        """See Outlet. A peer that is gone or does not read loses the message and counts its request
        as a miss at its deadline."""
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
            self.gate.errors["unsent"] += 1
        return None

    # --- moves ----------------------------------------------------------------------------------

    def dispatch(self, plan: p.Plan[Any]) -> None:
        """See Outlet. The plan's answer is sent afterwards. Pages that were cut into slots anew
        come first: from the first move on, other bytes may stand there (race 2 of the arena)."""
        for pages in plan.reshaped:
            if pages.tier in self.gate.arenas:
                self.gate.arenas[pages.tier].raise_range(pages.first_page, pages.num_pages)
        if plan.cancel:
            self._undispatched += self.mover.cancel(plan.cancel)
        if plan.moves:
            refused = self.mover.submit(plan.moves, time.monotonic())
            self._undispatched += [p.Outcome(m.id, False, error="refused") for m in refused]

    def _flush_refused(self) -> None:
        """Moves that never left come back as failed, after the event that wanted them is over."""
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
                "%s (%s) is too small for a block of %d bytes: those of %s are kept elsewhere",
                tier.name,
                format_size(tier.capacity_bytes),
                spec.block_bytes,
                spec.name or spec.digest().hex()[:12],
            )
        for worker in self.parts.workers:
            if worker.spec.traits.persistent:
                self.mover.describe(worker.device, spec.digest(), spec.to_wire())

    def _apply(self, config: Config) -> None:
        """A configuration that differs in what can change while serving."""
        self.engine.configure(engine_settings(config), tier_specs(config, self.parts.tiers))
        self.gate.configure(config.deadlines, config.limits)
        for tier, paces in paces_of(config).items():
            self.mover.pace(tier, *paces)
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
        """Refuse requests; write down what the durable tier lacks, within `shutdown_s`."""
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
            log.warning("stopped with %d writes to disk still to do: shutdown was too short", left)
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
        self._keeper.close(KEEP_S)
        left_s = max(2.0, self.serving.config.deadlines.shutdown_s / 2)
        self.mover.close(left_s)
        for name, error in self.mover.last_words().items():
            log.warning("the last thing that %s said: %s", name, error)
        self.sessions.close_all()
        self._sockets.close()
        self.parts.close()
        for instance in self._instances:
            instance.close()
        signal.set_wakeup_fd(-1)
        self._wake_read.close()
        self._wake_write.close()
        log.info("stopped")

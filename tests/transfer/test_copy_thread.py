"""A worker with a GPU's medium, driven over its socket: batches overlap, outcomes keep their order.

The device is the stand-in, whose copies finish late; threads are real.
"""

from __future__ import annotations

import select
import socket
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.bench.gpu_check.stand_in import StandIn
from hicache.engine.plan import Move, Priority
from hicache.tiers.arena import Arena
from hicache.tiers.block import PAGE_BYTES
from hicache.tiers.hbm import gpu_spec
from hicache.transfer.media.cuda import CudaLink, CudaMedium
from hicache.transfer.queues import queue_name, queue_names
from hicache.transfer.worker import Worker
from hicache.transfer.worker_messages import (
    Batch,
    Done,
    MalformedMessage,
    Stream,
    WorkerConfig,
    pack,
    pack_batch,
    unpack_done,
)

NUM_SLOTS = 12
TIER_BYTES = NUM_SLOTS * PAGE_BYTES
WAIT_S = 30.0


class Daemon:
    """The other end of the worker's socket: the bytes of both tiers, and their free slots."""

    def __init__(self, arena: Arena, device: StandIn) -> None:
        config = WorkerConfig(gpu_spec(0, TIER_BYTES), "dram", "/x", "hbm")
        self.medium = CudaMedium(config, arena, cupy=device)
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(WAIT_S)
        self._theirs = theirs
        self._thread = threading.Thread(
            target=Worker(theirs, self.medium).serve, args=(Stream(), ())
        )
        self._stream, self._heard = Stream(), deque[Done]()
        self.real = {
            "dram": arena.data,
            "hbm": np.frombuffer(self.medium._pool.memory.buffer, np.uint8),
        }
        self.free = {tier: list(range(NUM_SLOTS)) for tier in self.real}
        self.sent: dict[str, deque[tuple[Batch, list[npt.NDArray[np.uint8]]]]] = {
            queue: deque() for queue in queue_names(by_priority=True)
        }
        self._num = 0

    def __enter__(self) -> Daemon:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.sendall(pack("stop"))
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self.medium.close()
        self.sock.close()
        self._theirs.close()

    def send(
        self,
        src: str,
        num_moves: int,
        rng: np.random.Generator,
        is_bad: bool = False,
        priority: Priority = Priority.DEMAND,
    ) -> None:
        """Send a batch of moves between free slots, with new bytes to read. A bad batch names
        blocks longer than both tiers."""
        dst = "hbm" if src == "dram" else "dram"
        num_bytes = 2 * TIER_BYTES if is_bad else PAGE_BYTES
        moves: list[Move] = []
        expected: list[npt.NDArray[np.uint8]] = []
        for _ in range(min(num_moves, len(self.free[src]), len(self.free[dst]))):
            a, b = self.free[src].pop(0), self.free[dst].pop()
            self._num += 1
            moves.append(
                Move(self._num, 0, src, a, dst, b, num_bytes, num_bytes, num_bytes, priority)
            )
            expected.append(rng.integers(0, 256, PAGE_BYTES, np.uint8))
            self.real[src][a * PAGE_BYTES :][:PAGE_BYTES] = expected[-1]
        if not moves:
            return
        self._num += 1
        queue = queue_name("read" if src == "hbm" else "write", priority, by_priority=True)
        batch = Batch(self._num, moves, queue)
        self.sent[queue].append((batch, expected))
        self.sock.sendall(pack_batch(batch))

    def hear(self) -> None:
        """Check one reply: it is for the oldest batch of its queue, and its outcomes are true. Its
        slots are free for other moves at once."""
        while not self._heard:
            for message in self._stream.feed(self.sock.recv(1 << 16)):
                assert message["t"] == "done", message
                self._heard.append(unpack_done(message))
        done = self._heard.popleft()
        (sent,) = (q for q in self.sent.values() if q and q[0][0].number == done.batch)
        batch, expected = sent.popleft()
        assert [o.move for o in done.outcomes] == [move.id for move in batch.moves]
        assert done.seconds >= 0.0
        for move, outcome, right in zip(batch.moves, done.outcomes, expected, strict=True):
            assert move.dst is not None
            there = self.real[move.dst][move.dst_slot * PAGE_BYTES :][:PAGE_BYTES]
            if outcome.ok:
                assert np.array_equal(there, right), "reported as copied, and it is not"
            there[:] = 0
            self.free[move.src].append(move.src_slot)
            self.free[move.dst].append(move.dst_slot)


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena.create(Path(folder) / "arena", TIER_BYTES)
        yield arena
        arena.close()


class Held(StandIn):
    """A device on which no wait for an event returns before `gate` is set (if `held` names streams:
    no wait for theirs); `enqueued` counts copies."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[int] = set()
        self.gate, self.enqueued = threading.Event(), threading.Semaphore(0)
        make, enqueue = self.cuda.Event, self.cuda.runtime.memcpyAsync

        def held_event(**more: bool) -> object:
            event = make(**more)
            synchronize: Callable[[], None] = event.synchronize

            def wait() -> None:
                if not self.held or event._stream.ptr in self.held:
                    assert self.gate.wait(WAIT_S)
                synchronize()

            event.synchronize = wait
            return event

        def counted(*arguments: int) -> None:
            enqueue(*arguments)
            self.enqueued.release()

        self.cuda.Event, self.cuda.runtime.memcpyAsync = held_event, counted


def test_the_next_batch_is_begun_before_the_last_has_arrived(arena: Arena) -> None:
    """Races 1 and 2: a batch that fails at once is reported after the one still being copied."""
    device, rng = Held(), np.random.default_rng(0)
    with Daemon(arena, device) as daemon:
        while device.enqueued.acquire(blocking=False):
            pass  # the worker's measurement at its start
        daemon.send("hbm", 2, rng)
        daemon.send("hbm", 1, rng, is_bad=True)
        daemon.send("hbm", 1, rng)
        for _ in range(3):
            assert device.enqueued.acquire(timeout=WAIT_S)
        assert select.select([daemon.sock], [], [], 0)[0] == []
        device.gate.set()
        for _ in range(3):
            daemon.hear()


def test_demands_do_not_wait_for_demotions(arena: Arena) -> None:
    """Nor behind demotions in flight: each priority has a separate stream."""
    device, rng = Held(), np.random.default_rng(0)
    with Daemon(arena, device) as daemon:
        demotions = daemon.medium.readers[Priority.DEMOTION]
        assert isinstance(demotions, CudaLink)
        device.held.add(demotions._stream.ptr)
        for _ in range(3):
            daemon.send("hbm", 1, rng, priority=Priority.DEMOTION)
        daemon.send("hbm", 1, rng, priority=Priority.DEMAND)
        daemon.send("dram", 1, rng, priority=Priority.PREFETCH)
        daemon.hear()
        daemon.hear()
        assert {queue for queue, sent in daemon.sent.items() if sent} == {"read-demotion"}
        device.gate.set()
        for _ in range(3):
            daemon.hear()


def test_an_unknown_queue_is_malformed(arena: Arena) -> None:
    device = StandIn()
    with Daemon(arena, device) as daemon, pytest.raises(MalformedMessage, match="has no queue"):
        Worker(daemon.sock, daemon.medium)._handle(
            {"t": "batch", "n": 1, "moves": [], "queue": "up"}
        )


def test_stop_waits_for_what_has_begun(arena: Arena) -> None:
    """Race 4: the arena is unmapped after `serve` has returned, never during a copy."""
    device, rng = Held(), np.random.default_rng(0)
    with Daemon(arena, device) as daemon:
        while device.enqueued.acquire(blocking=False):
            pass
        daemon.send("dram", 2, rng)
        daemon.send("dram", 2, rng)
        for _ in range(4):
            assert device.enqueued.acquire(timeout=WAIT_S)
        daemon.sock.sendall(pack("stop"))
        assert len(device.waiting) == 4
        device.gate.set()
        daemon._thread.join(WAIT_S)
        assert device.waiting == []
        daemon.hear()
        daemon.hear()


def test_a_move_that_no_link_carries_fails_in_its_turn(arena: Arena) -> None:
    with Daemon(arena, StandIn()) as daemon:
        stray = Move(1, 0, "dram", 0, "disk", 0, 100, PAGE_BYTES, PAGE_BYTES, Priority.DEMAND)
        daemon.sock.sendall(pack_batch(Batch(7, [stray], "write-demand")))
        (message,) = Stream().feed(daemon.sock.recv(1 << 16))
        (outcome,) = unpack_done(message).outcomes
        assert not outcome.ok
        assert "no link" in outcome.error


_step = st.one_of(
    st.tuples(st.sampled_from(["dram", "hbm"]), st.integers(1, 5), st.sampled_from(Priority)),
    st.just(("hear", 0, Priority.DEMAND)),
)


@given(
    steps=st.lists(_step, max_size=30),
    seed=st.integers(0, 1 << 32),
    refuse=st.sets(st.integers(10, 60), max_size=3),
)
@settings(max_examples=120)
def test_outcomes_come_in_order_and_are_true(
    arena: Arena, steps: Sequence[tuple[str, int, Priority]], seed: int, refuse: set[int]
) -> None:
    """Any number of batches of every priority, in both directions; replies are read at any time;
    copies finish late, and some calls are refused in the middle of a batch."""
    delays = Random(seed)  # not hypothesis' own: threads draw from it
    device = StandIn(lambda waiting: delays.randint(0, waiting), sorted(refuse))
    rng = np.random.default_rng(0)
    with Daemon(arena, device) as daemon:
        for what, num_moves, priority in steps:
            if what != "hear":
                daemon.send(what, num_moves, rng, priority=priority)
            elif any(daemon.sent.values()):
                daemon.hear()
        while any(daemon.sent.values()):
            daemon.hear()

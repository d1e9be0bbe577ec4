"""KV events over real sockets: a router's copy of the index, whatever is lost, whoever listens."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from hicache.client.prefix_mirror import HeldPrefixes, seen_from
from hicache.daemon.upkeep import kv_publisher as events
from hicache.daemon.upkeep.kv_publisher import (
    MAX_MESSAGE_BYTES,
    MAX_WAITING,
    Publisher,
    topic_of,
    unpublished,
)
from hicache.engine import plan as p
from tests.client.scripted_daemon import ScriptedDaemon, Seen
from tests.engine.world import BLOCK_BYTES, BLOCK_TOKENS, DIGEST, MAPPED, World, keys_of, tokens_of
from tests.zmtp import RawSubscriber, subscription, unsubscription

PATIENCE_S = 60.0
SLOTS = 6000
TOPIC = topic_of(DIGEST)


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="hc-"))
    yield folder
    shutil.rmtree(folder)


class Station:
    """An engine, what is published of it, and its front door in another thread."""

    def __init__(self, folder: Path, epoch: str = "first", hwm: int = 1000) -> None:
        self.world = World((("dram", SLOTS, MAPPED),))
        self.lock = threading.Lock()
        self.endpoint = f"ipc://{folder}/events"
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        changes = self.world.engine.changes
        self.publisher = Publisher(context, self.endpoint, hwm, changes, ["dram"], epoch)

    def answer(self, seen: Seen) -> dict[str, Any]:
        with self.lock:
            return self.publisher.page(seen.body["namespace"], seen.body["after"])

    def store(self, *blocks: int) -> None:
        with self.lock:
            self.world.store(tokens_of(*blocks))

    def clear(self) -> None:
        with self.lock:
            self.world.do(p.Clear(0, self.world.now_s))

    def tick(self) -> None:
        with self.lock:
            self.publisher.tick(time.monotonic())

    def tick_until(self, is_done: Callable[[], object]) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        while not is_done():
            assert time.monotonic() < give_up_s, "waited in vain"
            self.tick()

    def close(self) -> None:
        self.publisher.close()


@pytest.fixture
def station(folder: Path) -> Iterator[Station]:
    station = Station(folder)
    yield station
    station.close()


@pytest.fixture
def door(folder: Path, station: Station) -> Iterator[ScriptedDaemon]:
    with ScriptedDaemon(f"ipc://{folder}/door") as door:
        door.on("events", station.answer)
        yield door


@pytest.fixture
def router(door: ScriptedDaemon) -> Iterator[HeldPrefixes]:
    with HeldPrefixes(door.endpoint, DIGEST, BLOCK_TOKENS, request_s=10.0) as router:
        yield router


def subscriber(station: Station, topic: bytes = TOPIC) -> zmq.Socket[bytes]:
    """One that was heard of, and hears."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    socket = context.socket(zmq.SUB)
    socket.linger = 0
    socket.connect(station.endpoint)
    socket.subscribe(topic)
    return socket


def heard_by(
    station: Station, socket: zmq.Socket[bytes], what: Callable[[], None]
) -> list[list[bytes]]:
    """Do this and tell, again and again, until this subscriber hears of it."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not socket.poll(20):
        assert time.monotonic() < give_up_s, "it hears nothing"
        what()
        station.tick()
    messages = []
    while socket.poll(200):
        messages.append(socket.recv_multipart())
    return messages


def knows(router: HeldPrefixes, *prompts: tuple[int, ...]) -> bool:
    router.poll(0.01)
    told = [router.match(tokens_of(*blocks)) for blocks in prompts]
    return told == [[("dram", len(blocks))] for blocks in prompts]


def settle(station: Station, router: HeldPrefixes) -> None:
    """Until ZeroMQ has heard of its subscription: a message came."""
    numbers = iter(range(1 << 20, 1 << 30))

    def came() -> bool:
        router.poll(0.01)
        if router.state != "current":
            return False
        number = next(numbers)
        station.store(number)
        station.tick()
        return router.poll(0.1) > 0 and router.match(tokens_of(number)) == [("dram", 1)]

    station.tick_until(came)


# --- what a router knows --------------------------------------------------------------------------


def test_a_router_knows_what_is_held(station: Station, router: HeldPrefixes) -> None:
    """What there was before it came, in pages, what came after, and what went."""
    station.store(*range(5000))
    station.tick_until(lambda: not station.publisher.counts()["blocks_pending"])
    station.tick_until(lambda: knows(router, tuple(range(5000))))
    assert len(router) == 5000
    long = tokens_of(*range(5000))
    assert router.match(long + long) == [("dram", 5000)]
    station.store(7, 8)
    station.tick_until(lambda: knows(router, (7, 8)))
    assert router.match(tokens_of(8)) == []
    station.clear()
    station.tick_until(lambda: router.poll(0.01) and not len(router))
    assert router.state == "current"


@pytest.mark.parametrize("seed", range(6))
def test_a_router_that_joins_while_everything_changes(
    station: Station, router: HeldPrefixes, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random histories, in pages of three blocks and ticks of about as many; with an odd seed, of
    a router that loses messages."""
    monkeypatch.setattr(events, "MAX_PAGE_BLOCKS", 3)
    monkeypatch.setattr(events, "MAX_BYTES_PER_TICK", 700)
    chance = random.Random(seed)
    prompts = [tuple(chance.choices(range(3), k=chance.randint(1, 9))) for _ in range(60)]
    deeds = {"store": 4.0, "clear": 0.2, "tick": 4.0, "poll": 4.0, "lose": seed % 2}
    for _ in range(300):
        match chance.choices(list(deeds), list(deeds.values()))[0]:
            case "store":
                station.store(*chance.choice(prompts))
            case "clear":
                station.clear()
            case "tick":
                station.tick()
            case "poll":
                router.poll(0.01)
            case _:
                if router._socket is not None and router._socket.poll(0):
                    router._socket.recv_multipart()

    def is_right() -> bool:
        router.poll(0.01)
        held = [station.world.tiers_of(tokens_of(*blocks)) for blocks in prompts]
        told = [router.match(tokens_of(*blocks)) for blocks in prompts]
        return told == [[("dram", len(tiers))] if tiers else [] for tiers in held]

    station.tick_until(is_right)
    assert len(router) == len(station.world.engine.residency.blocks)


def test_who_lost_a_message_reads_everything_again(station: Station, router: HeldPrefixes) -> None:
    """It sees a gap in the sequence; until it has read, it answers by what it knew."""
    first, lost, last = (1, 2), (3, 4), (5, 6)
    station.store(*first)
    station.tick_until(lambda: knows(router, first))
    num_gaps = router.num_gaps
    lose_one(station, router, lost)
    station.store(*last)
    station.tick_until(lambda: router.poll(0.01) >= 0 and router.num_gaps > num_gaps)
    assert router.state == "reading"
    assert router.match(tokens_of(*first)) == [("dram", 2)]
    station.tick_until(lambda: knows(router, first, lost, last))
    assert (router.num_gaps, router.num_malformed) == (num_gaps + 1, 0)


def test_a_last_message_that_was_lost_is_noticed(station: Station, router: HeldPrefixes) -> None:
    """No other one follows that would show a gap: the front door is asked."""
    station.store(1, 2)
    station.tick_until(lambda: knows(router, (1, 2)))
    num_gaps = router.num_gaps
    lose_one(station, router, (3, 4))
    station.tick_until(lambda: knows(router, (1, 2), (3, 4)))
    assert router.num_gaps == num_gaps + 1


def lose_one(station: Station, router: HeldPrefixes, blocks: tuple[int, ...]) -> None:
    """These are told, and the message never gets there: it is taken away, unless ZeroMQ had not
    heard of the subscription yet."""
    number = station.publisher.page(DIGEST, 0)["sequence"]
    station.store(*blocks)
    station.tick()
    assert router._socket is not None
    while router._socket.poll(1000):
        if int.from_bytes(router._socket.recv_multipart()[1], "big") == number:
            return


def test_what_could_not_be_told_shows_as_a_gap(
    station: Station, router: HeldPrefixes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault between noting that something was told and telling it."""
    station.store(1, 2)
    station.tick_until(lambda: knows(router, (1, 2)))
    num_gaps = router.num_gaps
    station.store(3, 4)
    with monkeypatch.context() as patched:
        patched.setattr(events, "_pack", None)
        with pytest.raises(TypeError):
            station.tick()
    station.store(5, 6)
    station.tick_until(lambda: knows(router, (1, 2), (3, 4), (5, 6)))
    assert router.num_gaps == num_gaps + 1


def test_another_run_of_the_daemon_that_holds_nothing(
    folder: Path, station: Station, door: ScriptedDaemon, router: HeldPrefixes
) -> None:
    """It has nothing to tell; the router finds out, and holds nothing."""
    station.store(1, 2)
    station.tick_until(lambda: knows(router, (1, 2)))
    station.close()
    after = Station(folder, "second")
    door.on("events", after.answer)
    after.tick_until(lambda: not router.poll(0.01) and router.epoch == "second")
    assert len(router) == 0
    after.store(3)
    after.tick_until(lambda: knows(router, (3,)))
    assert router.match(tokens_of(1, 2)) == []
    after.close()


def test_a_daemon_that_has_died_holds_nothing(
    station: Station, door: ScriptedDaemon, router: HeldPrefixes
) -> None:
    station.store(1, 2)
    station.tick_until(lambda: knows(router, (1, 2)))
    door.stop()
    station.tick_until(lambda: not router.poll(0.01) and not len(router))
    assert router.state == "absent"
    assert "no daemon answers" in router.error or "has gone" in router.error


def test_a_daemon_that_publishes_nothing(door: ScriptedDaemon, router: HeldPrefixes) -> None:
    door.on("events", lambda seen: unpublished(seen.body["namespace"], "e"))
    assert router.poll(0.2) == 0
    assert "events.endpoint is not configured" in router.error
    assert (len(router), router.match(tokens_of(1))) == (0, [])


def test_messages_that_mean_nothing_are_counted_and_passed_over(
    folder: Path, station: Station, door: ScriptedDaemon
) -> None:
    """Somebody else's socket: everything is read again each time, ever more slowly."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    stranger = context.socket(zmq.PUB)
    stranger.linger = 0
    stranger.bind(f"ipc://{folder}/stranger")
    station.store(1, 2)
    station.tick()
    stored = {"type": "BlockStored", "block_hashes": [b"k"], "epoch": "first", "tier": "tape"}
    number = station.publisher.page(DIGEST, 0)["sequence"].to_bytes(8, "big")
    garbage: list[list[bytes]] = [
        [TOPIC],
        [TOPIC, b"short", b""],
        [TOPIC, bytes(8), b"\xc1"],
        [TOPIC, bytes(8), b"\xdd\xff\xff\xff\xff"],
        [TOPIC, bytes(8), msgspec.msgpack.encode([0.0, [7], None])],
        [TOPIC, bytes(8), msgspec.msgpack.encode({"events": 1})],
        [TOPIC, number, msgspec.msgpack.encode([0.0, [stored], None])],
    ]
    with HeldPrefixes(
        door.endpoint,
        DIGEST,
        BLOCK_TOKENS,
        request_s=10.0,
        events_endpoint=f"ipc://{folder}/stranger",
    ) as router:
        for count, message in enumerate(garbage, 1):

            def is_counted(count: int = count, message: list[bytes] = message) -> bool:
                if router.num_malformed < count and router.state == "current":
                    stranger.send_multipart(message)
                router.poll(0.05)
                return router.num_malformed >= count

            station.tick_until(is_counted)
        station.tick_until(lambda: knows(router, (1, 2)) and router.state == "current")
    stranger.close(0)


@pytest.mark.parametrize(
    ("front_door", "told", "reached"),
    [
        ("tcp://10.0.0.7:1", "tcp://0.0.0.0:5", "tcp://10.0.0.7:5"),
        ("tcp://10.0.0.7:1", "tcp://*:5", "tcp://10.0.0.7:5"),
        ("tcp://[fe80::1]:1", "tcp://[::]:5", "tcp://[fe80::1]:5"),
        ("tcp://10.0.0.7:1", "tcp://10.0.0.8:5", "tcp://10.0.0.8:5"),
        ("ipc:///a", "tcp://0.0.0.0:5", "tcp://0.0.0.0:5"),
        ("ipc:///a", "ipc:///b", "ipc:///b"),
    ],
)
def test_any_address_of_the_daemons_machine_is_that_of_its_front_door(
    front_door: str, told: str, reached: str
) -> None:
    assert seen_from(front_door, told) == reached


# --- what is published ----------------------------------------------------------------------------


class Batch(msgspec.Struct, array_like=True):
    """As a reader of vLLM's events declares them."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    tier: str
    epoch: str
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


def test_messages_are_laid_out_as_vllms(station: Station) -> None:
    """Topic, sequence, and a batch that is an array of maps; bounded in size."""
    socket = subscriber(station)
    heard_by(station, socket, lambda: change(station))
    number = station.publisher.page(DIGEST, 0)["sequence"]
    tokens = tokens_of(*range(1200))
    station.store(*range(1200))
    messages = heard_by(station, socket, lambda: None)
    assert {message[0] for message in messages} == {TOPIC}
    numbers = [int.from_bytes(message[1], "big") for message in messages]
    assert numbers == list(range(number, number + len(messages)))
    batches = [msgspec.msgpack.decode(message[2], type=Batch) for message in messages]
    keys, ids, parent = [], [], None
    for batch in batches:
        assert batch.data_parallel_rank is None
        for event in batch.events:
            assert isinstance(event, BlockStored)
            assert event.parent_block_hash == parent
            assert (event.block_size, event.medium, event.tier) == (BLOCK_TOKENS, "CPU", "dram")
            assert event.epoch == "first"
            keys += event.block_hashes
            ids += event.token_ids
            parent = keys[-1]
    assert keys == keys_of(tokens)
    assert ids == [block for block in range(1200) for _ in range(BLOCK_TOKENS)]
    station.clear()
    gone: set[bytes] = set()
    for message in heard_by(station, socket, lambda: None):
        for event in msgspec.msgpack.decode(message[2], type=Batch).events:
            assert isinstance(event, BlockRemoved)
            gone.update(event.block_hashes)
    assert gone >= set(keys)
    socket.close(0)


def test_the_first_message_of_a_topic_clears(station: Station) -> None:
    """For who only listens: what a daemon before this one told is over."""
    other = station.world.open(b"other".ljust(32), BLOCK_BYTES)
    socket = subscriber(station, b"")
    heard_by(station, socket, lambda: change(station, other))
    station.store(1)
    (message,) = heard_by(station, socket, lambda: None)
    assert message[:2] == [TOPIC, bytes(8)]
    cleared, stored = msgspec.msgpack.decode(message[2], type=Batch).events
    assert isinstance(cleared, AllBlocksCleared)
    assert isinstance(stored, BlockStored)
    socket.close(0)


def change(station: Station, namespace: int = 0) -> None:
    """Something that is worth a message, each time."""
    station.world.do(p.Clear(namespace, station.world.now_s))
    station.world.store(tokens_of(99, int(station.world.now_s)), namespace=namespace)


@pytest.mark.parametrize("block_tokens", [1, 16, 256, 4096])
def test_a_message_is_bounded_however_large_a_block_is(station: Station, block_tokens: int) -> None:
    """So is what is told in one tick."""
    world, digest = station.world, b"large".ljust(32)
    number = world.do(p.OpenNamespace(digest, block_tokens, BLOCK_BYTES))
    world.digests[number] = digest
    count = max(60, min(5000, 200_000 // block_tokens))
    ids = random.Random(1).choices(range(1 << 31, 1 << 32), k=count * block_tokens)
    tokens = b"".join(token.to_bytes(4, "little") for token in ids)
    world.now_s += 1
    placed = world.do(p.Put(number, tokens, 0, count, 1, world.now_s, 100.0))
    world.do(p.Commit(placed.ticket, placed.indices, world.now_s, False))
    socket = subscriber(station, topic_of(digest))
    num_told = 0
    while num_told < count:
        before = station.publisher.num_sent
        station.tick()
        assert station.publisher.num_sent - before <= 5
        left = station.publisher.counts()["blocks_pending"]
        num_told, told_now = count - left, count - left - num_told
        assert 1 <= told_now <= 2048
        assert told_now * block_tokens <= max(32768, block_tokens)
        while socket.poll(0):
            assert len(socket.recv_multipart()[2]) <= MAX_MESSAGE_BYTES
        while station.publisher.work_thread.num_waiting:
            time.sleep(0.001)
    assert station.publisher.counts()["dropped"] == 0
    socket.close(0)


# --- who subscribes -------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_flood_of_subscriptions_stops_nobody(station: Station, router: HeldPrefixes) -> None:
    """100,000 of one peer, and unsubscriptions of what it never subscribed, the topic of others
    among them: a router that listens hears every message."""
    settle(station, router)
    flood = [subscription(os.urandom(8).hex().encode()) for _ in range(100_000)]
    flood += [unsubscription(os.urandom(8)) for _ in range(1000)]
    flood += [unsubscription(TOPIC), unsubscription(b"")] * 1000
    with RawSubscriber(station.endpoint) as peer:
        thread = threading.Thread(target=peer.send, args=[b"".join([*flood, subscription(TOPIC)])])
        thread.start()
        number, num_gaps = 0, router.num_gaps
        give_up_s = time.monotonic() + PATIENCE_S
        while thread.is_alive() or not peer.hears(TOPIC):
            assert time.monotonic() < give_up_s, "all that it said was never read"
            number += 1
            station.store(number)
            station.tick_until(lambda number=number: knows(router, (number,)))  # type: ignore[misc]
        thread.join()
    counts = station.publisher.counts()
    assert (router.num_gaps, counts["dropped"]) == (num_gaps, 0)
    assert not station.publisher.work_thread.faults.num
    station.store(1, 1)
    station.tick_until(lambda: knows(router, (1, 1)))


def test_too_large_a_subscription_ends_its_connection(
    station: Station, router: HeldPrefixes
) -> None:
    """A topic costs ZeroMQ fifty times its length."""
    settle(station, router)
    with RawSubscriber(station.endpoint) as peer:
        peer.send(subscription(bytes(1 << 20)))
        peer.wait_for_the_end()
    station.store(2)
    station.tick_until(lambda: knows(router, (2,)))


@pytest.mark.thorough
def test_a_subscriber_that_has_stopped_costs_nobody_else_a_message(folder: Path) -> None:
    """Beyond `hwm` messages it loses what it does not read, and the others hear everything."""
    station = Station(folder, hwm=10)
    with ScriptedDaemon(f"ipc://{folder}/door") as door:
        door.on("events", station.answer)
        stopped = subscriber(station)
        stopped.setsockopt(zmq.RCVHWM, 1)
        with HeldPrefixes(door.endpoint, DIGEST, BLOCK_TOKENS, request_s=10.0) as router:
            heard_by(station, stopped, lambda: change(station))
            settle(station, router)
            num_gaps = router.num_gaps
            for number in range(40):
                station.clear()
                station.store(*range(number, number + 1000))
                station.tick_until(lambda: not station.publisher.counts()["blocks_pending"])
                station.tick_until(
                    lambda number=number: knows(router, tuple(range(number, number + 1000)))  # type: ignore[misc]
                )
            assert router.num_gaps == num_gaps
        numbers = []
        while stopped.poll(500):
            numbers.append(int.from_bytes(stopped.recv_multipart()[1], "big"))
        last = station.publisher.page(DIGEST, 0)["sequence"] - 1
        assert numbers == sorted(numbers)
        assert len(numbers) < last - numbers[0], "it lost some"
        assert station.publisher.counts()["dropped"] == 0
        stopped.close(0)
    station.close()


def test_a_thread_that_fails_is_counted_and_what_does_not_fit_is_dropped(
    station: Station,
) -> None:
    """The loop goes on; each message that was dropped has its number."""
    station.publisher._socket.close(0)
    number = 0
    give_up_s = time.monotonic() + PATIENCE_S
    while station.publisher.counts()["dropped"] < 3:
        assert time.monotonic() < give_up_s
        number += 1
        station.store(number)
        station.tick()
    assert station.publisher.work_thread.faults.num >= 1
    assert station.publisher.page(DIGEST, 0)["sequence"] == number
    assert station.publisher.counts()["messages"] == number - 3 >= MAX_WAITING


def test_topics_of_nothing_are_forgotten_and_go_on_with_greater_numbers(
    station: Station, router: HeldPrefixes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_TOPICS", 0)
    for number in range(3):
        station.store(number)
        station.tick_until(lambda number=number: knows(router, (number,)))  # type: ignore[misc]
        station.clear()
        station.tick_until(lambda: router.poll(0.01) and not len(router))
        assert not station.publisher._sequences
    assert router.num_gaps <= 1


def test_a_place_where_nothing_can_be_published(tmp_path: Path) -> None:
    world = World((("dram", 4, MAPPED),))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(OSError, match="cannot publish at"):
        Publisher(context, f"ipc://{tmp_path}/no/where", 9, world.engine.changes, ["dram"], "e")
    context.destroy(linger=0)

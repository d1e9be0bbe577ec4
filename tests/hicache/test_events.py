"""KV events over a real socket: a router's copy of the index, a gap, another run of the daemon."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from hicache.engine import plan as p
from hicache.events import MAX_BLOCKS_PER_MESSAGE, Publisher
from hicache.router import HeldPrefixes
from tests.engine.world import BLOCK_TOKENS, DIGEST, World, keys_of, tokens_of

PATIENCE_S = 20.0


@pytest.fixture
def endpoint() -> Iterator[str]:
    folder = Path(tempfile.mkdtemp(prefix="hc-"))
    yield f"ipc://{folder}/events"
    shutil.rmtree(folder)


class Station:
    """An engine and what is published of it."""

    def __init__(self, endpoint: str, epoch: str = "first", slots: int = 2000) -> None:
        self.world = World((("dram", slots, True, False),))
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        changes = self.world.engine.changes
        self.publisher = Publisher(self.context, endpoint, 1000, changes, epoch)

    def tick_until(self, is_done: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        while not is_done():
            assert time.monotonic() < give_up_s, "waited in vain"
            self.publisher.tick(self.world.now_s)

    def close(self) -> None:
        self.publisher.close()
        self.context.destroy(linger=0)


@pytest.fixture
def station(endpoint: str) -> Iterator[Station]:
    station = Station(endpoint)
    yield station
    station.close()


@pytest.fixture
def router(endpoint: str) -> Iterator[HeldPrefixes]:
    with HeldPrefixes(endpoint, DIGEST, BLOCK_TOKENS) as router:
        yield router


def test_a_router_knows_what_is_held(station: Station, router: HeldPrefixes) -> None:
    """What there was before it came, in pieces, what came after, and what went."""
    long, other = tokens_of(*range(1500)), tokens_of(7, 8)
    station.world.store(long)
    station.tick_until(lambda: router.poll(0.01) > 0 and len(router) == 1500)
    assert router.match(long + long) == [("dram", 1500)]
    station.world.store(other)
    station.tick_until(lambda: router.poll(0.01) > 0)
    assert router.match(other) == [("dram", 2)]
    assert router.match(tokens_of(8)) == []
    station.world.do(p.Clear(0, station.world.now_s))
    station.tick_until(lambda: router.poll(0.01) > 0 and not len(router))
    assert router.num_gaps == 0


def test_messages_are_laid_out_as_vllms(station: Station, endpoint: str) -> None:
    """Topic, sequence, and a batch of arrays whose first item names them; bounded in size."""
    tokens = tokens_of(*range(MAX_BLOCKS_PER_MESSAGE + 1))
    keys = keys_of(tokens)
    station.world.store(tokens)
    socket = station.context.socket(zmq.SUB)
    socket.linger = 0
    socket.connect(endpoint)
    socket.subscribe(b"")
    messages: list[list[bytes]] = []

    def heard() -> bool:
        while socket.poll(10):
            messages.append(socket.recv_multipart())
        return len(messages) == 2

    station.tick_until(heard)
    socket.close()
    batches = [msgspec.msgpack.decode(packed) for _, _, packed in messages]
    assert [message[0] for message in messages] == [DIGEST.hex().encode()] * 2
    assert [int.from_bytes(message[1], "big") for message in messages] == [0, 1]
    assert [batch[2:] for batch in batches] == [[None, "first"]] * 2
    ids = [number for number in range(len(keys)) for _ in range(BLOCK_TOKENS)]
    cut = MAX_BLOCKS_PER_MESSAGE
    first = ["BlockStored", keys[:cut], None, ids[: cut * 2], BLOCK_TOKENS, None, "dram"]
    last = ["BlockStored", keys[cut:], keys[cut - 1], ids[cut * 2 :], BLOCK_TOKENS, None, "dram"]
    assert batches[0][1] == [["AllBlocksCleared"], first]
    assert batches[1][1] == [last]


def test_who_lost_a_message_is_told_all_again(station: Station, router: HeldPrefixes) -> None:
    """It sees a gap in the sequence, forgets what it knew, and subscribes again."""
    first, lost, last = tokens_of(1, 2), tokens_of(3, 4), tokens_of(5, 6)
    station.world.store(first)
    station.tick_until(lambda: router.poll(0.01) > 0)
    station.world.store(lost)
    station.publisher.tick(0.0)
    assert router._socket.poll(int(1000 * PATIENCE_S))
    router._socket.recv_multipart()
    station.world.store(last)
    station.tick_until(lambda: router.poll(0.01) > 0 and len(router) == 6)
    assert router.num_gaps == 1
    assert [router.match(tokens) for tokens in (first, lost, last)] == [[("dram", 2)]] * 3


def test_another_run_of_the_daemon(endpoint: str, router: HeldPrefixes) -> None:
    """Another epoch: what the one before held counts no more, and all is told anew."""
    before = Station(endpoint)
    before.world.store(tokens_of(1, 2))
    before.tick_until(lambda: router.poll(0.01) > 0)
    before.close()
    after = Station(endpoint, "second")
    after.world.store(tokens_of(3))
    after.tick_until(lambda: router.poll(0.01) > 0 and router.epoch == "second")
    assert router.match(tokens_of(1, 2)) == []
    assert router.match(tokens_of(3)) == [("dram", 1)]
    assert router.num_gaps == 0
    after.close()


def test_nothing_is_noted_once_nobody_listens(station: Station, endpoint: str) -> None:
    changes = station.world.engine.changes
    station.publisher.tick(0.0)
    assert not changes.is_listening
    with HeldPrefixes(endpoint, DIGEST, BLOCK_TOKENS):
        station.tick_until(lambda: changes.is_listening)
        assert station.publisher.num_subscriptions == 1
    station.tick_until(lambda: not changes.is_listening)


def test_a_place_where_nothing_can_be_published(tmp_path: Path) -> None:
    station = World((("dram", 4, True, False),))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(OSError, match="cannot publish at"):
        Publisher(context, f"ipc://{tmp_path}/no/where", 10, station.engine.changes, "e")
    context.destroy(linger=0)

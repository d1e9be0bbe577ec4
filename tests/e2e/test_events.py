"""KV events of a real daemon: a router knows what is held, in all tiers, whatever dies."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from hicache.client.prefix_mirror import HeldPrefixes
from hicache.daemon.upkeep.kv_publisher import topic_of
from hicache.protocol.kv_events import HEADER_ONLY
from tests.e2e.daemon_process import SPEC, DaemonProcess, hicache, prompt, store, wait_for
from tests.zmtp import RawSubscriber, subscription, unsubscription

pytestmark = pytest.mark.e2e


class PublishingHousehold(DaemonProcess):
    """Its daemon tells at `events`."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(autostart=False)
        self.events = self.root / "events"
        self.configure(events={"endpoint": f"ipc://{self.events}"}, **changes)

    def router(self) -> HeldPrefixes:
        return HeldPrefixes(self.endpoint, SPEC.digest(), SPEC.block_tokens, request_s=10.0)


@pytest.fixture
def server() -> Iterator[PublishingHousehold]:
    with PublishingHousehold() as server:
        yield server


@pytest.mark.timeout(240)
def test_a_router_knows_what_is_held(server: PublishingHousehold) -> None:
    """What it says is what `score` says: before it came and after, over a daemon that was killed,
    one that found on disk what was there, and a `clear`."""
    server.start()
    assert stat.S_IMODE(server.events.stat().st_mode) == 0o600
    prompts = [prompt(seed, 6) for seed in range(5)]
    client = server.client()
    for tokens in prompts[:2]:
        assert store(client, tokens, durable=True) == 6
    with server.router() as router:

        def knows_all() -> bool:
            router.poll(0.05)
            told = [router.match(tokens) for tokens in prompts]
            return told == [list(score.runs) for score in client.score(prompts)]

        wait_for(knows_all, "what was stored before")
        assert len(router) == 12
        for tokens in prompts[2:]:
            assert store(client, tokens) == 6
        wait_for(knows_all, "what was stored since")
        first = router.epoch
        server.kill()
        wait_for(lambda: not router.poll(0.05) and not len(router), "nothing of a dead daemon")
        server.start()
        wait_for(lambda: knows_all() and router.epoch not in ("", first), "what was on disk")
        assert len(router) >= 12
        assert client.clear() == len(router)
        wait_for(lambda: knows_all() and not len(router), "nothing")
        counts = server.stats()["events"]
        assert counts["messages"] >= 1
        assert (counts["dropped"], counts["blocks_pending"]) == (0, 0)


@pytest.mark.timeout(180)
def test_a_daemon_that_starts_again_with_nothing(server: PublishingHousehold) -> None:
    """It has nothing to tell. A router that asks holds nothing, and hears what comes."""
    server.configure(disk=None, events={"endpoint": f"ipc://{server.events}"})
    server.start()
    tokens = prompt(1, 4)
    assert store(server.client(), tokens) == 4
    with server.router() as router:
        wait_for(lambda: router.poll(0.05) and len(router) == 4, "what was stored")
        first = router.epoch
        server.stop()
        server.start()
        wait_for(lambda: not router.poll(0.05) and router.epoch not in ("", first), "the other one")
        assert len(router) == 0
        assert store(server.client(), tokens) == 4
        wait_for(lambda: router.poll(0.05) and len(router) == 4, "what was stored then")


@pytest.mark.timeout(180)
def test_whatever_is_said_to_the_events_socket(server: PublishingHousehold) -> None:
    """Bytes that are no ZeroMQ, subscriptions that are too large, and sockets of the wrong kind."""
    server.start()
    client = server.client()
    with server.router() as router, zmq.Context() as context:
        for number in range(20):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(str(server.events))
                stranger.sendall(os.urandom(1 + number * 400))
        peers = [context.socket(kind) for kind in (zmq.DEALER, zmq.PUB, zmq.REQ, zmq.XPUB)]
        for peer in peers:
            peer.linger = 0
            peer.connect(f"ipc://{server.events}")
        with RawSubscriber(f"ipc://{server.events}") as raw:
            raw.send(unsubscription(topic_of(SPEC.digest())) * 1000)
            raw.send(subscription(bytes(1 << 20)))
            raw.wait_for_the_end()
        tokens = prompt(3, 5)
        assert store(client, tokens) == 5
        wait_for(lambda: router.poll(0.05) and len(router) == 5, "what was stored")
        for peer in peers:
            peer.close(0)


def test_the_front_door_says_where_and_from_which_number(server: PublishingHousehold) -> None:
    server.start()
    digest = SPEC.digest()
    nothing = server.ask("events", namespace=digest)
    assert (nothing["sequence"], nothing["keys"], nothing["next"]) == (0, b"", None)
    assert store(server.client(), prompt(1, 3)) == 3
    wait_for(lambda: server.ask("events", namespace=digest)["sequence"], "what was told")
    page = server.ask("events", namespace=digest)
    assert page["endpoint"] == f"ipc://{server.events}"
    assert page["topic"] == digest.hex()
    assert (page["tier_names"], page["next"]) == (["hbm", "dram", "disk"], None)
    assert (len(page["keys"]), len(page["tiers"])) == (96, 3)
    header = server.ask("events", namespace=digest, after=HEADER_ONLY)
    assert (header["keys"], header["tiers"], header["next"]) == (b"", b"", None)
    assert header["sequence"] == page["sequence"]
    assert server.ask("stats")["sessions"]


def test_where_nothing_is_published() -> None:
    with DaemonProcess(hbm=None, disk=None) as server:
        page = server.ask("events", namespace=SPEC.digest())
        assert (page["endpoint"], page["sequence"], page["keys"], page["next"]) == (
            None,
            0,
            b"",
            None,
        )
        assert server.stats()["events"] == {}


def test_a_file_where_the_events_socket_should_be_is_left_alone(
    server: PublishingHousehold, tmp_path: Path
) -> None:
    server.log.touch()
    (precious := tmp_path / "precious.txt").write_text("kept")
    server.configure(events={"endpoint": f"ipc://{precious}"})
    ran = hicache("serve", "--config", str(server.file))
    assert ran.returncode != 0
    assert f"{precious} is not a socket" in ran.stderr
    assert "events.endpoint" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert precious.read_text() == "kept"


def test_two_daemons_do_not_publish_at_one_endpoint(server: PublishingHousehold) -> None:
    """The second ends, and the first goes on."""
    server.start()
    with DaemonProcess(autostart=False) as other, socket.socket() as taken:
        other.log.touch()
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for endpoint, why in (
            (f"ipc://{server.events}", "already serves"),
            (f"tcp://127.0.0.1:{taken.getsockname()[1]}", "cannot publish at tcp"),
        ):
            other.configure(events={"endpoint": endpoint})
            ran = hicache("serve", "--config", str(other.file))
            assert ran.returncode != 0
            assert why in ran.stderr
            assert "Traceback" not in ran.stderr
    with server.router() as router:
        assert store(server.client(), prompt(1, 3)) == 3
        wait_for(lambda: router.poll(0.05) and len(router) == 3, "what was stored")

"""CURVE on `tcp://`, with a real daemon: who is listed works, anybody else gets misses, in time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from hicache.client import AsyncClient, Client, CurveKeys, DaemonAbsent, admin_call
from hicache.client.prefix_mirror import HeldPrefixes
from tests.e2e.daemon_process import (
    SPEC,
    DaemonProcess,
    blocks_of,
    hicache,
    prompt,
    read,
    store,
    wait_for,
)

pytestmark = pytest.mark.e2e

PLENTY_S = 10.0
"""A timeout that a miss must not need: it is noticed when the handshake fails."""


def free_port() -> int:
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        return socket.bind_to_random_port("tcp://127.0.0.1")


def make_keys(folder: Path, name: str) -> None:
    ran = hicache("config", "keys", str(folder), name)
    assert ran.returncode == 0, ran.stderr


class Castle(DaemonProcess):
    """A daemon whose daemon asks for keys: `server`'s own, and `friend` is listed."""

    def __init__(self, keys: Path, **changes: Any) -> None:
        self.keys = keys
        self.allowed = keys / "allowed"
        if not keys.exists():
            make_keys(keys, "server")
            make_keys(keys, "friend")
            make_keys(keys, "stranger")
            self.allowed.mkdir()
            self.admit("friend")
        socket = {
            "endpoint": f"tcp://127.0.0.1:{free_port()}",
            "curve_secret_key_file": str(keys / "server.key_secret"),
            "curve_allowed_clients_dir": str(self.allowed),
        }
        super().__init__(endpoint=socket["endpoint"], socket=socket, hbm=None, disk=None, **changes)

    def admit(self, name: str) -> None:
        (self.allowed / f"{name}.key").write_bytes((self.keys / f"{name}.key").read_bytes())

    def keys_of(self, name: str, server: str = "server") -> CurveKeys:
        return CurveKeys.load(self.keys / f"{name}.key_secret", self.keys / f"{server}.key")

    def ask(self, op: str, **body: Any) -> dict[str, Any]:
        return admin_call(self.endpoint, op, body, 10.0, self.keys_of("friend"))

    def guest(self, curve: CurveKeys | None, **more: Any) -> Client:
        return self.client(curve=curve, timeout_s=PLENTY_S, **more)


@pytest.fixture(scope="module")
def castle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Castle]:
    with Castle(tmp_path_factory.mktemp("curve") / "keys") as server:
        yield server


def test_a_listed_client_works(castle: Castle) -> None:
    client = castle.guest(castle.keys_of("friend"))
    tokens = prompt(1, 6)
    assert store(client, tokens) == 6
    assert client.greeting is not None
    assert client.greeting.transport == "frames"
    assert read(client, tokens) == 6


def test_a_listed_client_may_look_into_the_index(castle: Castle) -> None:
    tokens = prompt(9, 2)
    store(castle.guest(castle.keys_of("friend")), tokens)
    keys = str(castle.keys / "friend.key_secret"), str(castle.keys / "server.key")
    ran = hicache("tree", "--json", "--endpoint", castle.endpoint, "--curve", *keys)
    rows = json.loads(ran.stdout)["branches"]
    assert tokens[:4].tolist() in [row["token_ids"] for row in rows]
    assert hicache("tree", "--endpoint", castle.endpoint).returncode == 1


def test_a_listed_client_of_asyncio_works(castle: Castle) -> None:
    async def talk() -> int:
        tokens = prompt(2, 6)
        async with AsyncClient(
            SPEC, castle.endpoint, timeout_s=PLENTY_S, curve=castle.keys_of("friend")
        ) as client:
            await client.put(tokens, blocks_of(tokens))
            return (await client.match(tokens)).hit_blocks

    assert asyncio.run(talk()) == 6


def outsiders(castle: Castle) -> dict[str, CurveKeys | None]:
    return {
        "not listed": castle.keys_of("stranger"),
        "another daemon's key": castle.keys_of("friend", "stranger"),
        "no keys": None,
    }


@pytest.mark.parametrize("who", ["not listed", "another daemon's key", "no keys"])
def test_anybody_else_gets_a_miss_at_once(castle: Castle, who: str) -> None:
    """As a miss, with a sentence that says where to look, and long before the timeout."""
    keys = outsiders(castle)[who]
    started_s = time.monotonic()
    client = castle.guest(keys)
    assert not client.match(prompt(1, 6)).is_answered
    assert "CURVE keys" in client.last_error
    assert client.put(prompt(3, 2), blocks_of(prompt(3, 2))).stored == 0

    async def ask() -> str:
        async with AsyncClient(SPEC, castle.endpoint, timeout_s=PLENTY_S, curve=keys) as other:
            assert not (await other.match(prompt(1, 6))).is_answered
            return other.last_error

    assert "CURVE keys" in asyncio.run(ask())
    assert time.monotonic() - started_s < PLENTY_S / 2
    assert castle.stats()["sessions"] <= len(castle.clients)


def test_keys_for_a_daemon_that_has_none() -> None:
    """A client that asks for CURVE never falls back to plain text."""
    public, secret = zmq.curve_keypair()
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with DaemonProcess(endpoint=endpoint, hbm=None, disk=None) as server:
        client = server.client(curve=CurveKeys(zmq.curve_keypair()[0], public, secret))
        assert not client.match(prompt(1, 2)).is_answered
        assert "CURVE keys" in client.last_error


def test_a_daemon_that_stands_still_is_a_miss_by_the_deadline(castle: Castle) -> None:
    """Its ZeroMQ answers the handshake up to the question that the daemon's loop must answer."""
    import psutil

    process = psutil.Process(castle.pid)
    process.suspend()
    try:
        started_s = time.monotonic()
        client = castle.client(curve=castle.keys_of("friend"), timeout_s=0.5)
        assert not client.match(prompt(1, 6)).is_answered
        assert 0.4 < time.monotonic() - started_s < PLENTY_S / 2
    finally:
        process.resume()
    wait_for(castle.is_ready, "the daemon, going on")


def test_a_key_is_added_and_taken_away_while_it_runs(castle: Castle) -> None:
    keys = castle.keys_of("stranger")
    with pytest.raises(DaemonAbsent, match="CURVE keys"):
        admin_call(castle.endpoint, "ping", curve=keys)
    castle.admit("stranger")
    assert admin_call(castle.endpoint, "ping", curve=keys)["ready"]
    (castle.allowed / "stranger.key").unlink()
    with pytest.raises(DaemonAbsent, match="CURVE keys"):
        admin_call(castle.endpoint, "ping", curve=keys)


def test_the_command_line(castle: Castle) -> None:
    curve = ("--curve", str(castle.keys / "friend.key_secret"), str(castle.keys / "server.key"))
    ran = hicache("ping", "--json", "--endpoint", castle.endpoint, *curve)
    assert json.loads(ran.stdout)["pid"] == castle.pid
    ran = hicache("stats", "--json", "--endpoint", castle.endpoint, *curve)
    assert json.loads(ran.stdout)["tiers"][0]["name"] == "dram"
    ran = hicache("config", "reload", "--endpoint", castle.endpoint, *curve)
    assert ran.stdout == "nothing changed\n"
    ran = hicache("ping", "--endpoint", castle.endpoint)
    assert ran.returncode == 1
    assert "CURVE keys" in ran.stderr
    ran = hicache("ping", "--endpoint", castle.endpoint, "--curve", "nowhere", "nothing")
    assert ran.returncode == 2
    assert "nowhere cannot be read" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.timeout(240)
def test_a_benchmark_of_a_daemon_with_keys(castle: Castle) -> None:
    curve = ("--curve", str(castle.keys / "friend.key_secret"), str(castle.keys / "server.key"))
    measured = ("bench", "rpc", "--calls", "1", "--endpoint", castle.endpoint)
    assert hicache(*measured, *curve, patience_s=200.0).returncode == 0
    ran = hicache(*measured)
    assert "CURVE keys" in ran.stderr
    ran = hicache("bench", "store", *curve)
    assert ran.returncode == 2
    assert "--endpoint" in ran.stderr


def test_a_daemon_that_cannot_start_says_why(castle: Castle, tmp_path: Path) -> None:
    """Sentences with the key to change, before any memory is taken; nothing is left behind."""
    arenas = set(castle.arena_folder.iterdir())
    empty = tmp_path / "empty"
    empty.mkdir()
    config = json.loads(castle.file.read_text())
    good = config["socket"]
    file = tmp_path / "wrong.yaml"

    def serve(*args: str, **changes: str) -> tuple[int, str]:
        file.write_text(json.dumps({**config, "socket": {**good, **changes}}))
        ran = hicache("serve", "--config", str(file), *args)
        assert "Traceback" not in ran.stderr
        assert set(castle.arena_folder.iterdir()) == arenas
        return ran.returncode, ran.stderr

    status, said = serve(curve_secret_key_file=str(castle.keys / "server.key"))
    assert status == 2
    assert "socket.curve_secret_key_file" in said
    assert "holds no secret key" in said
    status, said = serve(curve_allowed_clients_dir=str(empty))
    assert status == 2
    assert "socket.curve_allowed_clients_dir" in said
    status, said = serve()
    assert status == 1
    assert "cannot listen at" in said
    del good["curve_secret_key_file"], good["curve_allowed_clients_dir"]
    status, said = serve("--endpoint", "tcp://0.0.0.0:1")
    assert status == 2
    assert "can be reached from other machines" in said


def test_events_are_for_those_who_are_listed(tmp_path: Path) -> None:
    """The events' socket stands behind the same door: who is turned away hears nothing, of the
    front door or of what is published."""
    events = f"tcp://127.0.0.1:{free_port()}"
    with Castle(tmp_path / "keys", events={"endpoint": events}) as castle:
        tokens, digest = prompt(31, 3), SPEC.digest()
        friends_keys = castle.keys_of("friend")
        with ExitStack() as stack:
            context = stack.enter_context(zmq.Context())

            def router(curve: CurveKeys | None) -> HeldPrefixes:
                held = HeldPrefixes(
                    castle.endpoint, digest, SPEC.block_tokens, curve=curve, request_s=PLENTY_S
                )
                return stack.enter_context(held)

            def listener(curve: CurveKeys | None) -> zmq.Socket[bytes]:
                socket = stack.enter_context(context.socket(zmq.SUB))
                if curve is not None:
                    curve.apply(socket)
                socket.subscribe(b"")
                socket.connect(events)
                return socket

            friend, ear = router(friends_keys), listener(friends_keys)
            strangers = [router(curve) for curve in outsiders(castle).values()]
            ears = [listener(curve) for curve in outsiders(castle).values()]
            client = castle.guest(friends_keys)
            assert store(client, tokens) == 3
            wait_for(lambda: friend.poll(0.05) and len(friend) == 3, "what was stored")
            assert friend.match(tokens) == [("dram", 3)]
            number = 40

            def hears() -> int:
                nonlocal number
                number += 1
                store(client, prompt(number, 1))
                return ear.poll(200)

            wait_for(hears, "a message for who is listed")
            wait_for(lambda: friend.poll(0.05) and len(friend) == number - 40 + 3, "all of it")
            assert not any(stranger.poll() or len(stranger) for stranger in strangers)
            assert all("refused this client" in stranger.error for stranger in strangers)
            assert not any(ear.poll(0) for ear in ears)

"""Whatever comes in at the socket or the command line: one answer each, and nobody is harmed."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import psutil
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from hicache.client import DaemonError, admin_call
from hicache.protocol.endpoint import ipc_path
from hicache.protocol.messages import PROTOCOL, pack
from tests.e2e.daemon_process import (
    MIB,
    SPEC,
    DaemonProcess,
    Peer,
    blocks_of,
    hicache,
    prompt,
    read,
    store,
    wait_for,
)

pytestmark = pytest.mark.e2e

WHOLE = prompt(99, 3).tobytes()


@pytest.fixture
def peer(server: DaemonProcess) -> Peer:
    return server.peer()


def put(peer: Peer, session: bytes, tokens: bytes = WHOLE, first: int = 0, last: int = 3) -> Any:
    return peer.ask("put", s=session, tokens=tokens, first=first, last=last)


# --- what is not protocol 1 ---------------------------------------------------------------------

GARBAGE = {
    "no msgpack": b"\xc1\xc1\xc1",
    "an empty message": b"",
    "a truncated map": pack({"op": "ping", "id": 1})[:-1],
    "two maps": pack({"op": "ping", "id": 1}) * 2,
    "an array": msgpack.packb([1, 2, 3]),
    "a number": msgpack.packb(7),
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "no op": msgpack.packb({"id": 1}),
    "no string as op": msgpack.packb({"id": 1, "op": 7}),
    "an unknown op": msgpack.packb({"id": 1, "op": "selfdestruct"}),
    "a negative id": msgpack.packb({"id": -1, "op": "ping"}),
    "a huge id": msgpack.packb({"id": 2**63, "op": "ping"}),
    "a boolean id": msgpack.packb({"id": True, "op": "ping"}),
    "integer keys": msgpack.packb({1: 2}),
    "an extension": msgpack.packb({"op": "ping", "id": 1, "x": msgpack.ExtType(5, b"x" * 99)}),
    "a claim of much": b"\x81\xa1a\xdd\xff\xff\xff\xff",
    "a deep nest": b"\x81\xa1a" + b"\x91" * 5000,
    "an unknown field": msgpack.packb({"op": "ping", "id": 1, "colour": "red"}),
    "a wrong deadline": msgpack.packb({"op": "ping", "id": 1, "deadline_s": "soon"}),
    "a deadline that is no number": msgpack.packb({"op": "ping", "id": 1, "deadline_s": np.nan}),
    "a session of three bytes": msgpack.packb({"op": "heartbeat", "id": 1, "s": b"abc"}),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_gets_one_error_reply(server: DaemonProcess, peer: Peer, what: str) -> None:
    """Decodable or not: `malformed`, once, with a sentence; the next request is served."""
    reply = peer.send(GARBAGE[what])
    assert (reply["ok"], reply["error"]) == (False, "malformed")
    assert len(reply["message"]) > 8
    assert peer.ask("ping")["ok"]


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "tokens as an array": ("match", {"tokens": [1, 2, 3]}, "malformed"),
    "tokens of seven bytes": ("match", {"tokens": b"1234567"}, "malformed"),
    "no tokens": ("match", {}, "malformed"),
    "an unknown field": ("match", {"tokens": WHOLE, "urgent": True}, "malformed"),
    "a negative number": ("match", {"tokens": WHOLE, "skip_blocks": -1}, "malformed"),
    "text for a number": ("fetch", {"lease": "7"}, "malformed"),
    "a lease nobody has": ("fetch", {"lease": 123456}, "unknown_lease"),
    "a ticket nobody has": ("commit", {"ticket": 123456, "indices": b""}, "unknown_ticket"),
    "an abort of nothing": ("abort", {"ticket": 123456}, "unknown_ticket"),
    "too many blocks": ("put", {"tokens": WHOLE, "first": 0, "last": 4}, "malformed"),
    "no blocks": ("put", {"tokens": WHOLE, "first": 2, "last": 2}, "malformed"),
    "first after last": ("put", {"tokens": WHOLE, "first": 3, "last": 1}, "malformed"),
    "a name of a mile": ("match", {"tokens": WHOLE, "request": "x" * 300}, "too_large"),
    "NaN seconds": ("observe", {"sum_n": 1.0, "sum_nc": 1.0, "seconds": np.nan}, "malformed"),
    "a namespace of three bytes": ("warm", {"namespace": b"abc", "tokens": WHOLE}, "malformed"),
    "a wait in words": ("warm", {"namespace": bytes(32), "tokens": b"", "wait": "y"}, "malformed"),
    "a pin for ever": ("pin", {"namespace": bytes(32), "tokens": b"", "ttl_s": 1e9}, "malformed"),
    "a pin by number": ("unpin", {"pin": 7}, "malformed"),
    "endless seconds": ("observe", {"sum_n": 1.0, "sum_nc": 1.0, "seconds": np.inf}, "malformed"),
    "an empty page": ("tree", {"most": 0}, "malformed"),
    "a page too long": ("tree", {"most": 513}, "malformed"),
    "a page before the first": ("tree", {"after": -1}, "malformed"),
    "a digest in hex": ("tree", {"namespace": "ab"}, "malformed"),
    "a digest too long": ("tree", {"namespace": bytes(33)}, "too_large"),
    "a page after nothing": ("tree", {"after": None, "before": 7}, "malformed"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_fields_get_one_error_reply(server: DaemonProcess, peer: Peer, what: str) -> None:
    """In a good session, a request that is wrong gets its error and the session goes on."""
    session = peer.hello()["session"]
    op, fields, code = WRONG[what]
    reply = peer.ask(op, s=session, **fields)
    assert (reply["ok"], reply["error"]) == (False, code), reply
    assert peer.ask("heartbeat", s=session)["ok"]


def test_another_protocol_version(server: DaemonProcess, peer: Peer) -> None:
    """`version`, and the sentence says which one is spoken here."""
    for version in (0, 2, 2**40):
        reply = peer.hello(protocol=version)
        assert reply["error"] == "version"
        assert str(PROTOCOL) in reply["message"]


def test_without_a_session(server: DaemonProcess, peer: Peer) -> None:
    """No token, or one that was never given: `unknown_session`."""
    assert peer.ask("match", tokens=WHOLE)["error"] == "unknown_session"
    assert peer.ask("match", tokens=WHOLE, s=bytes(16))["error"] == "unknown_session"
    session = peer.hello()["session"]
    assert peer.ask("bye", s=session)["ok"]
    assert peer.ask("heartbeat", s=session)["error"] == "unknown_session"


def test_parts_that_nobody_asked_for(server: DaemonProcess, peer: Peer) -> None:
    """More parts than blocks, empty parts, parts of the wrong size, parts where none belong: an
    error or none, and the ticket is still good for the right ones."""
    spec = replace(SPEC, model_digest="parts", block_bytes=4096)
    session = peer.hello(spec, transport="frames")["session"]
    assert peer.ask("ping", tuple([b""] * 200))["ok"]
    tokens = prompt(98, 3)
    ticket = put(peer, session, tokens.tobytes())["ticket"]
    block = bytes(4096)
    indices = np.arange(3, dtype="<u4").tobytes()
    commit = {"s": session, "ticket": ticket, "indices": indices}
    for parts in [(), (b"", b"", b""), (block,) * 2, (block,) * 4, (block, block, block + b"x")]:
        reply = peer.ask("commit", parts, **commit)
        assert reply["error"] == "malformed", parts
    right = tuple(row.tobytes() for row in blocks_of(tokens, spec))
    assert peer.ask("commit", right, **commit)["committed"] == 3
    assert read(server.client(spec), tokens, spec) == 3


def test_commit_of_blocks_that_are_not_in_the_ticket(server: DaemonProcess, peer: Peer) -> None:
    """Indices beyond the ticket's, or twice the same, make nothing visible that was not written."""
    spec = replace(SPEC, model_digest="foreign indices", block_bytes=4096)
    session = peer.hello(spec, transport="frames")["session"]
    tokens = prompt(97, 3)
    ticket = put(peer, session, tokens.tobytes())["ticket"]
    indices = np.array([0, 0, 7, 2**31], "<u4").tobytes()
    first = blocks_of(tokens, spec)[0].tobytes()
    reply = peer.ask("commit", (first,) * 4, s=session, ticket=ticket, indices=indices)
    if reply["ok"]:
        assert reply["committed"] == 1
    assert read(server.client(spec), tokens, spec) <= 1


def test_an_oversize_message_closes_its_connection(server: DaemonProcess) -> None:
    """A part above max_message: no reply, the connection is gone, the daemon serves the others."""
    peer = server.peer()
    monitor = peer.socket.get_monitor_socket()
    assert peer.ask("ping")["ok"]
    peer.socket.send(b"\x81" + bytes(2 << 20))

    def is_closed() -> bool:
        while monitor.poll(0):
            if recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED:
                return True
        return False

    wait_for(is_closed, "the end of the connection")
    peer.socket.disable_monitor()
    assert server.peer().ask("ping")["ok"]


def test_bytes_that_are_not_zeromq(server: DaemonProcess) -> None:
    """Somebody speaks HTTP, noise, or nothing at all to the socket."""
    path = ipc_path(server.endpoint)
    assert path is not None
    noise = np.random.default_rng(1).bytes(100_000)
    for data in (b"GET / HTTP/1.1\r\n\r\n", noise, b"\xff" + bytes(8) + b"\x7f" + noise, b""):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(path)
            with suppress(BrokenPipeError, ConnectionResetError):
                stranger.sendall(data)
            assert server.peer().ask("ping")["ok"]


def test_requests_that_come_too_late(server: DaemonProcess, peer: Peer) -> None:
    """Sent ten seconds ago with a second's patience: `expired`, and nothing was done."""
    spec = replace(SPEC, model_digest="late", block_bytes=4096)
    session = peer.hello(spec, transport="frames")["session"]
    late: dict[str, Any] = {"sent_s": time.monotonic() - 10.0, "deadline_s": 1.0}
    reply = peer.ask("put", s=session, tokens=WHOLE, first=0, last=3, **late)
    assert reply["error"] == "expired"
    assert peer.ask("match", s=session, tokens=WHOLE, **late)["error"] == "expired"
    assert put(peer, session)["ticket"]


def test_what_is_given_back_too_late_is_taken_back(server: DaemonProcess, peer: Peer) -> None:
    """A daemon that stood still for a moment kept the sessions that clients had closed meanwhile,
    and leases until their time was over: their releases had `expired`."""
    client, spec = server.model("given back late", block_bytes=4096)
    tokens = prompt(92, 3)
    store(client, tokens, spec)
    session = peer.hello(spec, transport="frames")["session"]
    late: dict[str, Any] = {"sent_s": time.monotonic() - 10.0, "deadline_s": 1.0}
    lease = peer.ask("match", s=session, tokens=tokens.tobytes())["lease"]
    assert peer.ask("release", s=session, lease=lease, **late)["released"]
    ticket = put(peer, session)["ticket"]
    assert peer.ask("abort", s=session, ticket=ticket, **late)["ok"]
    assert peer.ask("bye", s=session, **late)["ok"]
    assert peer.ask("match", s=session, tokens=WHOLE)["error"] == "unknown_session"


EXTREMES = (5e-324, 1e-300, 1e-9, 1e6)


def test_no_number_spoils_the_planner(server: DaemonProcess) -> None:
    """All that the wire lets through, in every field that is learned from: `hop_bytes` of 5e-324
    made every later reload of the namespace take for ever."""
    client, spec = server.model("numbers", block_bytes=4096)
    tokens = prompt(91, 3)
    store(client, tokens, spec)
    peer = server.peer()
    session = peer.hello(spec, transport="frames")["session"]

    def match(**more: Any) -> dict[str, Any]:
        return peer.ask("match", s=session, tokens=tokens.tobytes(), **more)

    for one in EXTREMES:
        for other in EXTREMES:
            lease = match(hop_bytes_per_s=one)["lease"]
            said: dict[str, Any] = {"hop_bytes": one, "hop_s": other, "total_s": other}
            assert peer.ask("release", s=session, lease=lease, **said)["released"]
            step: dict[str, Any] = {
                "num_requests": 1,
                "sum_n": one,
                "sum_nc": other,
                "seconds": other,
            }
            assert peer.ask("observe", s=session, **step)["ok"]
    decision = match()["decision"]
    seconds = [decision[name] for name in ("reload_s", "prefill_s", "recompute_s")]
    assert all(0.0 <= value < 3600.0 for value in seconds), decision
    error = server.stats()["planner"]["mean_abs_error_s"]
    assert error is None or error < 3600.0


# --- other people's leases and tickets ----------------------------------------------------------


def test_foreign_leases_and_tickets(server: DaemonProcess) -> None:
    """Numbers are easily guessed; they are good only in the group that was given them. A session
    that joins the group with its token may use them."""
    owner, spec = server.peer(), replace(SPEC, model_digest="mine", block_bytes=4096)
    greeting = owner.hello(spec, transport="frames")
    session = greeting["session"]
    tokens, other = prompt(96, 3).tobytes(), prompt(95, 3).tobytes()
    indices = np.arange(3, dtype="<u4").tobytes()
    blocks = (bytes(4096),) * 3
    ticket = put(owner, session, tokens)["ticket"]
    owner.ask("commit", blocks, s=session, ticket=ticket, indices=indices)
    lease = owner.ask("match", s=session, tokens=tokens)["lease"]
    ticket = put(owner, session, other)["ticket"]
    assert lease
    assert ticket

    thief = server.peer()
    stolen = thief.hello(spec, transport="frames")["session"]
    assert thief.ask("fetch", s=stolen, lease=lease)["error"] == "unknown_lease"
    assert thief.ask("release", s=stolen, lease=lease)["released"] is False
    commit = {"ticket": ticket, "indices": indices}
    assert thief.ask("commit", blocks, s=stolen, **commit)["error"] == "unknown_ticket"
    assert thief.ask("abort", s=stolen, ticket=ticket)["error"] == "unknown_ticket"
    assert thief.ask("bye", s=stolen)["ok"]

    friend = server.peer()
    joined = friend.hello(spec, transport="frames", group=greeting["group"])["session"]
    assert friend.ask("fetch", s=joined, lease=lease)["blocks"] == 3
    assert friend.ask("commit", blocks, s=joined, **commit)["committed"] == 3
    assert owner.ask("release", s=session, lease=lease)["released"] is True


def test_a_group_outlives_one_of_its_sessions(server: DaemonProcess) -> None:
    """Leases belong to the group: they go with its last session, not with its first."""
    first, second = server.peer(), server.peer()
    spec = replace(SPEC, model_digest="a group", block_bytes=4096)
    client = server.client(spec)
    tokens = prompt(94, 3)
    store(client, tokens, spec)
    before = server.stats()["leases"]
    greeting = first.hello(spec, transport="frames")
    lease = first.ask("match", s=greeting["session"], tokens=tokens.tobytes())["lease"]
    joined = second.hello(spec, transport="frames", group=greeting["group"])["session"]
    first.ask("bye", s=greeting["session"])
    assert server.stats()["leases"] == before + 1
    assert second.ask("fetch", s=joined, lease=lease)["blocks"] == 3
    second.ask("bye", s=joined)
    assert server.stats()["leases"] == before


def test_a_client_that_never_reads_its_frames() -> None:
    """Eight fetches of 50 MiB made the daemon grow by as much as they had asked for. Now a session
    has little on its way; what reads is served whole, however large."""
    limits = {"max_unread": "8MiB"}
    with DaemonProcess(hbm=None, disk=None, limits=limits, deadlines={"fetch": "2s"}) as server:
        tokens = prompt(89, 200)
        reader = server.client(transport="frames")
        assert store(reader, tokens) == 200
        assert read(reader, tokens) == 200
        before = psutil.Process(server.pid).memory_info().rss
        asker = server.peer()
        session = asker.hello(transport="frames")["session"]
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        mute = context.socket(zmq.DEALER)
        mute.rcvhwm = 1
        mute.linger = 0
        mute.connect(server.endpoint)
        for number in range(8):
            lease = asker.ask("match", s=session, tokens=tokens.tobytes())["lease"]
            mute.send(pack({"op": "fetch", "id": number + 1, "s": session, "lease": lease}))
        wait_for(lambda: server.stats()["errors"].get("unread") == 8, "the end of all fetches")
        assert psutil.Process(server.pid).memory_info().rss < before + 40 * MIB
        assert read(reader, tokens) == 200
        context.destroy(linger=0)


# --- hello's limits -----------------------------------------------------------------------------


def test_hello_refuses_what_it_cannot_hold(server: DaemonProcess, peer: Peer) -> None:
    """Each with its code and a sentence that says what to do."""
    group = SPEC.groups[0]
    cases = [
        (replace(SPEC, groups=(group, group)), "one layer group"),
        (replace(SPEC, groups=(replace(group, window=128),)), "sliding window"),
        (replace(SPEC, tp_rank=2, tp_size=2), "count from 0"),
        (replace(SPEC, block_bytes=1 << 30), "larger tiers"),
    ]
    for spec, sentence in cases:
        reply = peer.hello(spec)
        assert reply["error"] == "spec"
        assert sentence in reply["message"]
    broken: list[dict[str, Any]] = [{}, {**SPEC.to_wire(), "dtype": 7}, {**SPEC.to_wire(), "x": 1}]
    for fields in broken:
        assert peer.ask("hello", protocol=PROTOCOL, spec=fields)["error"] == "spec"
    assert peer.hello(transport="pigeon")["error"] == "malformed"
    assert peer.hello()["ok"]


def test_more_sessions_than_the_limit(server: DaemonProcess, peer: Peer) -> None:
    """The 41st of 40 is `refused`, with the key to raise; one that leaves makes room."""
    tokens = []
    while (reply := peer.hello())["ok"]:
        tokens.append(reply["session"])
        assert len(tokens) <= 40
    assert reply["error"] == "refused"
    assert "limits.max_sessions" in reply["message"]
    client = server.client()
    assert not client.match(prompt(93, 2)).is_answered
    assert "max_sessions" in client.last_error
    assert peer.ask("bye", s=tokens.pop())["ok"]
    assert peer.hello()["ok"]
    tokens.append(b"")  # the one just opened ends with its process; say bye to the rest
    for token in filter(None, tokens):
        peer.ask("bye", s=token)


def test_more_namespaces_than_the_limit() -> None:
    """They were never forgotten: a host with many adapters or salts was full for ever. One that
    has neither clients nor blocks makes room for another."""
    with DaemonProcess(hbm=None, disk=None, limits={"max_namespaces": 3}) as server:
        specs = [
            replace(SPEC, cache_salt=f"salt {number}", block_bytes=4096) for number in range(9)
        ]
        tokens = prompt(90, 3)
        keeper = server.client(specs[0])
        assert store(keeper, tokens, specs[0]) == 3
        keeper.close()
        for spec in specs[1:]:
            client = server.client(spec)
            assert client.match(tokens).is_answered, client.last_error
            assert client.match(tokens).hit_blocks == 0
            assert store(client, tokens, spec) == 3
            assert read(client, tokens, spec) == 3
            client.clear()
            client.close()
        assert len(server.stats()["namespaces"]) == 3
        assert read(server.client(specs[0]), tokens, specs[0]) == 3

        peer = server.peer()
        assert peer.hello(specs[1])["ok"]
        assert peer.hello(specs[2])["ok"]
        reply = peer.hello(specs[3])
        assert reply["error"] == "refused"
        assert "limits.max_namespaces" in reply["message"]
        assert peer.hello(specs[1])["ok"]


# --- the command line ---------------------------------------------------------------------------


def test_stats_and_ping_as_processes(server: DaemonProcess) -> None:
    """`--json` is data, and the exit status says whether the daemon is ready."""
    ran = hicache("ping", "--json", "--endpoint", server.endpoint)
    assert ran.returncode == 0, ran.stderr
    ping = json.loads(ran.stdout)
    assert ping["ready"] is True
    assert ping["pid"] == server.pid
    ran = hicache("stats", "--json", "--endpoint", server.endpoint)
    assert ran.returncode == 0, ran.stderr
    stats = json.loads(ran.stdout)
    assert [tier["name"] for tier in stats["tiers"]] == ["hbm", "dram", "disk"]
    assert stats["tiers"][0]["medium"] == "host memory (emulated)"
    nobody = hicache("ping", "--json", "--endpoint", f"ipc://{server.root}/nobody.sock")
    assert nobody.returncode == 1
    assert json.loads(nobody.stdout)["ready"] is False


def test_a_second_daemon_on_the_same_socket(server: DaemonProcess) -> None:
    """It refuses with a sentence that names the first's pid, and the first does not notice."""
    second = server.root / "second.yaml"
    config = json.loads(server.file.read_text())
    config["tiers"]["disk"]["path"] = str(server.root / "second")
    second.write_text(json.dumps(config))
    arenas = set(server.arena_folder.iterdir())
    ran = hicache("serve", "--config", str(second))
    assert ran.returncode == 1
    assert f"pid {server.pid}" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert set(server.arena_folder.iterdir()) == arenas


MISTAKES: dict[str, tuple[Callable[[dict[str, Any]], Any], list[str]]] = {
    "an unknown key": (lambda c: c["tiers"].update(drum=c["tiers"]["dram"]), ["drum", "dram"]),
    "a size of nonsense": (lambda c: c["tiers"]["dram"].update(size="lots"), ["dram.size", "lots"]),
    "two at once": (
        lambda c: c.update(debug="perhaps", write_policy="never"),
        ["debug", "write_policy", "write_back"],
    ),
    "more memory than there is": (
        lambda c: c["tiers"]["dram"].update(size="4TiB"),
        ["tiers.dram"],
    ),
    "more disk than there is": (
        lambda c: c["tiers"]["disk"].update(size="900TiB"),
        ["tiers.disk.size"],
    ),
    "no YAML": (lambda c: c.clear(), ["tiers"]),
}


def test_a_file_where_the_socket_should_be_is_left_alone(
    server: DaemonProcess, tmp_path: Path
) -> None:
    (precious := tmp_path / "precious.txt").write_text("kept")
    ran = hicache("serve", "--config", str(server.file), "--endpoint", f"ipc://{precious}")
    assert ran.returncode != 0
    assert f"{precious} is not a socket" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert precious.read_text() == "kept"


@pytest.mark.parametrize("what", MISTAKES)
def test_serve_with_a_wrong_configuration(server: DaemonProcess, tmp_path: Path, what: str) -> None:
    """Sentences that name the file and the key, status 2, no traceback, nothing left behind."""
    spoil, words = MISTAKES[what]
    config = json.loads(server.file.read_text())
    config["socket"]["endpoint"] = f"ipc://{server.root}/wrong.sock"
    spoil(config)
    file = tmp_path / "wrong.yaml"
    file.write_text(json.dumps(config))
    arenas = set(server.arena_folder.iterdir())
    ran = hicache("serve", "--config", str(file))
    assert ran.returncode == 2, ran.stderr
    assert "Traceback" not in ran.stderr
    assert "wrong.yaml" in ran.stderr
    assert all(word in ran.stderr for word in words), ran.stderr
    assert set(server.arena_folder.iterdir()) == arenas


def test_reload_reads_only_files() -> None:
    """A pipe would stop the daemon's loop for everybody, and a null byte is no path."""
    with DaemonProcess() as server:
        os.mkfifo(server.root / "pipe")
        for name in (f"{server.root}/pipe", str(server.root), "/dev/zero", "a\0b", "/nowhere"):
            with pytest.raises(DaemonError, match="no such file"):
                server.ask("reload", file=name)
        assert server.is_ready()


def test_reload_by_signal_and_by_command() -> None:
    """What can change live does; the rest is named; a broken file changes nothing at all."""
    with DaemonProcess(hbm=None, disk=None) as server:
        client = server.client()
        tokens = prompt(92, 4)
        store(client, tokens)

        def mode() -> Any:
            return server.stats()["planner"]["mode"]

        retired = {"match": "1s"}
        recompute = {"mode": "always_recompute"}
        server.configure(hbm=None, disk=None, planner=recompute, deadlines=retired)
        psutil.Process(server.pid).send_signal(signal.SIGHUP)
        wait_for(lambda: mode() == "always_recompute", "the reload")
        assert "deadlines.match has no effect" in server.said()
        assert client.match(tokens).decision.name == "recompute"

        server.configure(hbm=None, disk=None, dram={"size": "96MiB"}, block_tokens=32)
        ran = hicache("config", "reload", "--json", "--endpoint", server.endpoint)
        assert ran.returncode == 0, ran.stderr
        reply = json.loads(ran.stdout)
        assert reply["live"] == ["planner.mode"]
        assert set(reply["restart"]) == {"tiers.dram.size", "block_tokens"}
        assert mode() == "always_reload"
        ran = hicache("config", "reload", "--endpoint", server.endpoint)
        assert "needs a restart" in ran.stdout
        assert "tiers.dram.size" in ran.stdout

        server.file.write_text('{"planner": {"mode": "sometimes"}}')
        with pytest.raises(DaemonError, match=r"planner\.mode"):
            admin_call(server.endpoint, "reload")
        server.expected_errors.append("the configuration was not reloaded")
        psutil.Process(server.pid).send_signal(signal.SIGHUP)
        wait_for(lambda: "was not reloaded" in server.said(), "the complaint")
        assert mode() == "always_reload"
        assert read(client, tokens) == 4

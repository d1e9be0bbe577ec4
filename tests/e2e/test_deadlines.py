"""Links that are slower than they seemed, or stall: a request waits as long as its estimate allows,
goes on with what has come, and what comes later helps the next. Fetches may take an hour here, so a
deadline that is not kept shows as a test that does not end."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from hicache.client import Client
from hicache.commands.explain import explain
from hicache.protocol.messages import pack
from tests.e2e.daemon_process import DaemonProcess, Tokens, blocks_of, prompt, read, store, wait_for

pytestmark = pytest.mark.e2e

BLOCKS = 12
PATIENT: dict[str, Any] = {
    "hbm": None,
    "deadlines": {"fetch": "1h"},
    "planner": {
        "mode": "measured",
        "probe_links": False,
        "min_deadline": "1s",
        "exploration": 0,
    },
}
STALLED = {"stall": {"disk_to_dram": True}}


@pytest.fixture
def server() -> Iterator[DaemonProcess]:
    """Four prompts on disk, none of which is in memory."""
    with DaemonProcess(**PATIENT) as server:
        client = server.client()
        for seed in range(4):
            assert store(client, prompt(seed, BLOCKS)) == BLOCKS
        server.forget_clients()
        server.stop()
        server.start()
        yield server


def hinder(server: DaemonProcess, **debug: Any) -> None:
    server.configure(**PATIENT, debug=debug)
    assert "debug" in " ".join(server.ask("reload")["live"])


def patient(server: DaemonProcess) -> Client:
    return server.client(fetch_timeout_s=3000.0)


def last_decision(server: DaemonProcess) -> dict[str, Any]:
    row: dict[str, Any] = server.ask("explain", last=1)["decisions"][0]
    return row


def in_memory(server: DaemonProcess) -> int:
    blocks: int = server.tier("dram")["blocks"]
    return blocks


def fetch(server: DaemonProcess, client: Client, tokens: Tokens) -> int:
    """All of it is wanted; how much came."""
    came = read(client, tokens)
    client.ping()  # a release is not waited for
    row = last_decision(server)
    assert (row["reload_blocks"], row["blocks_came"]) == (BLOCKS, came)
    return came


def test_a_link_that_stalls_costs_the_deadline_at_most(server: DaemonProcess) -> None:
    client = patient(server)
    assert fetch(server, client, prompt(0, BLOCKS)) == BLOCKS
    hinder(server, **STALLED)
    assert fetch(server, client, prompt(1, BLOCKS)) == 0
    told = CliRunner().invoke(explain, ["--endpoint", server.endpoint, "--last", "1"]).stdout
    assert "Reload 48 tokens from disk" in told
    assert "0 of 12 blocks came in time" in told
    assert server.stats()["planner"]["cut_short"] == 1
    assert client.connected, "a deadline is no trouble"
    hinder(server)
    wait_for(lambda: in_memory(server) > BLOCKS, "blocks that were on their way")
    server.settle()
    assert fetch(server, client, prompt(2, BLOCKS)) == BLOCKS
    assert fetch(server, client, prompt(1, BLOCKS)) == BLOCKS


def test_a_fetch_that_joins_a_stalled_one_has_its_own_deadline(server: DaemonProcess) -> None:
    """Two clients want the same blocks; both go on, and the next finds them."""
    hinder(server, **STALLED)
    one, other = patient(server), patient(server)
    matches = [client.match(prompt(0, BLOCKS)) for client in (one, other)]
    runs = [client.fetch_runs(match) for client, match in zip((one, other), matches, strict=True)]
    assert [list(some) for some in runs] == [[], []]
    for client, match in zip((one, other), matches, strict=True):
        client.release(match)
    hinder(server)
    server.settle()
    assert fetch(server, one, prompt(0, BLOCKS)) == BLOCKS


def test_a_request_may_end_at_every_stage(server: DaemonProcess) -> None:
    """Before its fetch, while its blocks wait or travel, and when they are there: nothing is left
    behind, and the next one finds what came."""
    peer = server.peer()
    session = peer.hello()["session"]
    asked = {"s": session, "tokens": prompt(0, BLOCKS).tobytes()}
    lease = peer.ask("match", **asked)["lease"]
    assert peer.ask("release", s=session, lease=lease)["released"]
    hinder(server, **STALLED)
    lease = peer.ask("match", **asked)["lease"]
    said = pack({"op": "fetch", "id": 90, "s": session, "lease": lease, "deadline_s": 3000.0})
    peer.socket.send(said)
    peer.socket.send(pack({"op": "release", "id": 91, "s": session, "lease": lease}))
    fetched, released = peer.answer(), peer.answer()
    assert (fetched["id"], fetched["blocks"], fetched["ready"]) == (90, 0, [])
    assert (released["id"], released["released"]) == (91, True)
    assert server.stats()["leases"] == 0
    hinder(server)
    server.settle()
    assert fetch(server, patient(server), prompt(0, BLOCKS)) == BLOCKS
    lease = peer.ask("match", **asked)["lease"]
    assert peer.ask("fetch", s=session, lease=lease)["blocks"] == BLOCKS
    assert peer.ask("release", s=session, lease=lease)["released"]
    assert not peer.ask("release", s=session, lease=lease)["released"]


def teach(client: Client, seconds: float) -> None:
    """What a prefill of the whole prompt takes."""
    tokens = len(prompt(0, BLOCKS))
    for _ in range(4):
        client.observe(sum_n=tokens, sum_nc=tokens**2 / 2, seconds=seconds)


def test_a_link_that_became_slow_is_given_up_and_then_avoided(server: DaemonProcess) -> None:
    """Forty times slower than prefill. The first load is cut short; then it is known."""
    client = patient(server)
    teach(client, 0.1)
    hinder(server, throttle_bytes_per_s={"disk_to_dram": "750KB"})  # 3 MiB: 4 s
    assert fetch(server, client, prompt(0, BLOCKS)) < BLOCKS
    server.settle()
    decision = client.match(prompt(1, BLOCKS)).decision
    assert (decision.name, decision.reason) == ("recompute", "slower")


def test_a_stalled_link_is_avoided_while_it_is_silent(server: DaemonProcess) -> None:
    client = patient(server)
    teach(client, 0.5)
    hinder(server, **STALLED)
    assert fetch(server, client, prompt(0, BLOCKS)) == 0

    def is_avoided() -> bool:
        match = client.match(prompt(1, BLOCKS))
        client.release(match)
        return match.decision.reason == "slower"

    wait_for(is_avoided, "a decision against the link")


def test_what_was_learned_survives_a_restart(server: DaemonProcess) -> None:
    """Unless its file cannot be read: then it is learned again, and nothing else is lost."""
    teach(server.client(), 100.0)
    for damage, reason in ((None, "faster"), (b'{"version": 9}', "unmeasured")):
        server.forget_clients()
        server.stop()
        if damage is not None:
            (server.disk / "estimates.json").write_bytes(damage)
        server.start()
        client = server.client()
        match = client.match(prompt(0, BLOCKS))
        client.release(match)
        assert match.decision.reason == reason
        assert ("are not used" in server.said()) == (damage is not None)
    assert read(client, prompt(0, BLOCKS)) == BLOCKS


def test_the_other_links_stall() -> None:
    """Nothing goes down, up to HBM, or to disk: every call ends by its deadline, and all is well
    once they go on."""
    changes: dict[str, Any] = {
        "hbm": {"size": "8MiB"},
        "dram": {"size": "16MiB"},
        "deadlines": {"put": "500ms"},
    }
    stalled = {"stall": dict.fromkeys(("hbm_to_dram", "dram_to_hbm", "dram_to_disk"), True)}
    with DaemonProcess(**changes, debug=stalled) as server:
        client = server.client()
        for seed in range(10):
            store(client, prompt(seed, BLOCKS))
            read(client, prompt(seed, BLOCKS))
        late = prompt(100, BLOCKS)
        assert not client.put(late, blocks_of(late), durable=True).durable
        server.configure(**changes)
        server.ask("reload")
        server.settle()
        assert server.ask("health")["healthy"]
        last = prompt(200, BLOCKS)
        wait_for(lambda: client.put(last, blocks_of(last), durable=True).durable, "a durable put")
        assert read(client, last) == BLOCKS


@pytest.mark.parametrize("debug", [STALLED, {"throttle_bytes_per_s": {"disk_to_dram": "200KB"}}])
def test_the_tokens_are_the_same(server: DaemonProcess, debug: dict[str, Any]) -> None:
    """A model behind the link: what it says depends on nothing that came, or came too late."""
    for extra in ("torch", "transformers"):
        pytest.importorskip(extra, reason="needs the extra: pip install .[demo]")
    transformers = importlib.import_module("tests.connectors.test_transformers")
    model, said = transformers.make_model(), transformers.prompt_of(120)
    alone = transformers.CachedModel(model, None, block_tokens=4).generate(said, 8)
    served = transformers.CachedModel(model, lambda spec: server.client(spec), block_tokens=4)
    assert served.generate(said, 8).tokens == alone.tokens
    server.forget_clients()
    server.stop()
    server.configure(**PATIENT, debug=debug)
    server.start()
    served = transformers.CachedModel(
        model, lambda spec: server.client(spec, fetch_timeout_s=3000.0), block_tokens=4
    )
    again = served.generate(said, 8)
    assert again.decision is not None
    assert again.decision.reload_blocks == 29
    assert again.tokens == alone.tokens
    assert not served.last_trouble

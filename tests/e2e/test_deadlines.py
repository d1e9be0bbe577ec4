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
from tests.e2e.household import Household, Tokens, blocks_of, prompt, read, store, wait_for

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
def house() -> Iterator[Household]:
    """Four prompts on disk, none of which is in memory."""
    with Household(**PATIENT) as house:
        client = house.client()
        for seed in range(4):
            assert store(client, prompt(seed, BLOCKS)) == BLOCKS
        house.forget_clients()
        house.stop()
        house.start()
        yield house


def hinder(house: Household, **debug: Any) -> None:
    house.configure(**PATIENT, debug=debug)
    assert "debug" in " ".join(house.ask("reload")["live"])


def patient(house: Household) -> Client:
    return house.client(fetch_timeout_s=3000.0)


def last_decision(house: Household) -> dict[str, Any]:
    row: dict[str, Any] = house.ask("explain", last=1)["decisions"][0]
    return row


def in_memory(house: Household) -> int:
    blocks: int = house.tier("dram")["blocks"]
    return blocks


def fetch(house: Household, client: Client, tokens: Tokens) -> int:
    """All of it is wanted; how much came."""
    came = read(client, tokens)
    client.ping()  # a release is not waited for
    row = last_decision(house)
    assert (row["reload_blocks"], row["blocks_came"]) == (BLOCKS, came)
    return came


def test_a_link_that_stalls_costs_the_deadline_at_most(house: Household) -> None:
    client = patient(house)
    assert fetch(house, client, prompt(0, BLOCKS)) == BLOCKS
    hinder(house, **STALLED)
    assert fetch(house, client, prompt(1, BLOCKS)) == 0
    told = CliRunner().invoke(explain, ["--endpoint", house.endpoint, "--last", "1"]).stdout
    assert "Reload 48 tokens from disk" in told
    assert "0 of 12 blocks came in time" in told
    assert house.stats()["planner"]["cut_short"] == 1
    assert client.connected, "a deadline is no trouble"
    hinder(house)
    wait_for(lambda: in_memory(house) > BLOCKS, "blocks that were on their way")
    house.settle()
    assert fetch(house, client, prompt(2, BLOCKS)) == BLOCKS
    assert fetch(house, client, prompt(1, BLOCKS)) == BLOCKS


def test_a_fetch_that_joins_a_stalled_one_has_its_own_deadline(house: Household) -> None:
    """Two clients want the same blocks; both go on, and the next finds them."""
    hinder(house, **STALLED)
    one, other = patient(house), patient(house)
    matches = [client.match(prompt(0, BLOCKS)) for client in (one, other)]
    runs = [client.fetch_runs(match) for client, match in zip((one, other), matches, strict=True)]
    assert [list(some) for some in runs] == [[], []]
    for client, match in zip((one, other), matches, strict=True):
        client.release(match)
    hinder(house)
    house.settle()
    assert fetch(house, one, prompt(0, BLOCKS)) == BLOCKS


def test_a_request_may_end_at_every_stage(house: Household) -> None:
    """Before its fetch, while its blocks wait or travel, and when they are there: nothing is left
    behind, and the next one finds what came."""
    peer = house.peer()
    session = peer.hello()["session"]
    asked = {"s": session, "tokens": prompt(0, BLOCKS).tobytes()}
    lease = peer.ask("match", **asked)["lease"]
    assert peer.ask("release", s=session, lease=lease)["released"]
    hinder(house, **STALLED)
    lease = peer.ask("match", **asked)["lease"]
    said = pack({"op": "fetch", "id": 90, "s": session, "lease": lease, "deadline_s": 3000.0})
    peer.socket.send(said)
    peer.socket.send(pack({"op": "release", "id": 91, "s": session, "lease": lease}))
    fetched, released = peer.answer(), peer.answer()
    assert (fetched["id"], fetched["blocks"], fetched["ready"]) == (90, 0, [])
    assert (released["id"], released["released"]) == (91, True)
    assert house.stats()["leases"] == 0
    hinder(house)
    house.settle()
    assert fetch(house, patient(house), prompt(0, BLOCKS)) == BLOCKS
    lease = peer.ask("match", **asked)["lease"]
    assert peer.ask("fetch", s=session, lease=lease)["blocks"] == BLOCKS
    assert peer.ask("release", s=session, lease=lease)["released"]
    assert not peer.ask("release", s=session, lease=lease)["released"]


def teach(client: Client, seconds: float) -> None:
    """What a prefill of the whole prompt takes."""
    tokens = len(prompt(0, BLOCKS))
    for _ in range(4):
        client.observe(sum_n=tokens, sum_nc=tokens**2 / 2, seconds=seconds)


def test_a_link_that_became_slow_is_given_up_and_then_avoided(house: Household) -> None:
    """Forty times slower than prefill. The first load is cut short; then it is known."""
    client = patient(house)
    teach(client, 0.1)
    hinder(house, throttle_bytes_per_s={"disk_to_dram": "750KB"})  # 3 MiB: 4 s
    assert fetch(house, client, prompt(0, BLOCKS)) < BLOCKS
    house.settle()
    decision = client.match(prompt(1, BLOCKS)).decision
    assert (decision.name, decision.reason) == ("recompute", "slower")


def test_a_stalled_link_is_avoided_while_it_is_silent(house: Household) -> None:
    client = patient(house)
    teach(client, 0.5)
    hinder(house, **STALLED)
    assert fetch(house, client, prompt(0, BLOCKS)) == 0

    def is_avoided() -> bool:
        match = client.match(prompt(1, BLOCKS))
        client.release(match)
        return match.decision.reason == "slower"

    wait_for(is_avoided, "a decision against the link")


def test_what_was_learned_survives_a_restart(house: Household) -> None:
    """Unless its file cannot be read: then it is learned again, and nothing else is lost."""
    teach(house.client(), 100.0)
    for damage, reason in ((None, "faster"), (b'{"version": 9}', "unmeasured")):
        house.forget_clients()
        house.stop()
        if damage is not None:
            (house.disk / "estimates.json").write_bytes(damage)
        house.start()
        client = house.client()
        match = client.match(prompt(0, BLOCKS))
        client.release(match)
        assert match.decision.reason == reason
        assert ("is not used" in house.said()) == (damage is not None)
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
    with Household(**changes, debug=stalled) as house:
        client = house.client()
        for seed in range(10):
            store(client, prompt(seed, BLOCKS))
            read(client, prompt(seed, BLOCKS))
        late = prompt(100, BLOCKS)
        assert not client.put(late, blocks_of(late), durable=True).durable
        house.configure(**changes)
        house.ask("reload")
        house.settle()
        assert house.ask("health")["healthy"]
        last = prompt(200, BLOCKS)
        wait_for(lambda: client.put(last, blocks_of(last), durable=True).durable, "a durable put")
        assert read(client, last) == BLOCKS


@pytest.mark.parametrize("debug", [STALLED, {"throttle_bytes_per_s": {"disk_to_dram": "200KB"}}])
def test_the_tokens_are_the_same(house: Household, debug: dict[str, Any]) -> None:
    """A model behind the link: what it says depends on nothing that came, or came too late."""
    for extra in ("torch", "transformers"):
        pytest.importorskip(extra, reason="needs the extra: pip install .[demo]")
    transformers = importlib.import_module("tests.connectors.test_transformers")
    model, said = transformers.make_model(), transformers.prompt_of(120)
    alone = transformers.CachedModel(model, None, block_tokens=4).generate(said, 8)
    served = transformers.CachedModel(model, lambda spec: house.client(spec), block_tokens=4)
    assert served.generate(said, 8).tokens == alone.tokens
    house.forget_clients()
    house.stop()
    house.configure(**PATIENT, debug=debug)
    house.start()
    served = transformers.CachedModel(
        model, lambda spec: house.client(spec, fetch_timeout_s=3000.0), block_tokens=4
    )
    again = served.generate(said, 8)
    assert again.decision is not None
    assert again.decision.reload_blocks == 29
    assert again.tokens == alone.tokens
    assert not served.last_trouble

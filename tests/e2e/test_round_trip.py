"""What goes in comes out, bit by bit, over every transport and client; and nothing else does."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache.client import AsyncClient, Client, PutResult
from hicache.client.session import Transport
from tests.e2e.daemon_process import (
    SPEC,
    DaemonProcess,
    blocks_of,
    free_port,
    prompt,
    read,
    store,
    wait_for,
)

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("transport", ["arena", "frames"])
def test_put_match_fetch(server: DaemonProcess, transport: Transport) -> None:
    """A prompt is stored, found and read back; a longer one shares its prefix; a shorter one gets
    less than it is long, for its last token is always computed."""
    spec = replace(SPEC, model_digest=f"round trip by {transport}")
    client = server.client(spec, transport=transport)
    tokens = prompt(1, 6)
    assert client.match(tokens).hit_blocks == 0
    assert client.put(tokens, blocks_of(tokens, spec)) == PutResult(stored=6)
    assert client.greeting is not None
    assert client.greeting.transport == transport
    assert read(client, tokens, spec) == 6
    longer = np.concatenate([tokens[:-1], prompt(2, 3)])
    assert read(client, longer, spec) == 6
    assert read(client, tokens[:-1], spec) == 5
    other = np.concatenate([tokens[:12], prompt(3, 3)])
    assert read(client, other, spec) == 3


def test_what_one_transport_stores_the_other_reads(server: DaemonProcess) -> None:
    """The bytes are the same however they travelled."""
    arena, spec = server.model("both ways")
    frames = server.client(spec, transport="frames")
    first, second = prompt(4, 5), prompt(5, 5)
    assert store(arena, first, spec) == 5
    assert store(frames, second, spec) == 5
    assert read(frames, first, spec) == 5
    assert read(arena, second, spec) == 5


@pytest.mark.parametrize("transport", ["arena", "frames"])
def test_the_asyncio_client(server: DaemonProcess, transport: Transport) -> None:
    """The same names as coroutines; eight prompts at once on one client."""
    spec = replace(SPEC, model_digest=f"asyncio by {transport}")

    async def one(client: AsyncClient, seed: int) -> None:
        tokens = prompt(seed, 4)
        blocks = blocks_of(tokens, spec)
        assert (await client.put(tokens, blocks)).stored == 4
        match = await client.match(tokens)
        out = np.zeros_like(blocks)
        fetched = await client.fetch(match, out)
        await client.release(match)
        assert fetched.blocks == match.hit_blocks == 4
        assert np.array_equal(out, blocks)

    async def main() -> None:
        async with AsyncClient(
            spec, server.endpoint, transport=transport, timeout_s=10.0, fetch_timeout_s=10.0
        ) as client:
            await asyncio.gather(*(one(client, seed) for seed in range(20, 28)))
            assert (await client.ping()) is not None
            assert (await client.stats()) is not None

    asyncio.run(main())


@pytest.mark.timeout(180)
def test_tcp_on_this_machine() -> None:
    """Over tcp the daemon cannot see who calls: blocks travel as frames unless memory is asked for,
    and a session that says nothing for its time to live is taken for dead, leases and all."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with DaemonProcess(endpoint=endpoint, hbm=None, limits={"session_ttl": "1500ms"}) as server:
        client = server.client()
        tokens = prompt(6, 5)
        assert store(client, tokens) == 5
        assert client.greeting is not None
        assert client.greeting.transport == "frames"
        assert read(client, tokens) == 5
        by_arena = server.client(transport="arena")
        assert read(by_arena, tokens) == 5
        assert client.match(tokens).lease
        assert by_arena.match(tokens).lease
        assert server.stats()["leases"] == 2
        wait_for(lambda: server.stats()["sessions"] == 0, "the end of both silent sessions")
        assert server.stats()["leases"] == 0
        assert read(client, tokens) == 5  # it says hello again by itself


@pytest.mark.timeout(180)
def test_planner_modes() -> None:
    """always_recompute finds but never reloads; measured decides by what it was told and says why:
    dear prefill reloads, nearly free prefill recomputes."""
    with DaemonProcess(planner={"mode": "always_recompute", "probe_links": True}) as server:
        client = server.client()
        tokens = prompt(7, 8)
        assert store(client, tokens) == 8
        match = client.match(tokens)
        assert (match.hit_blocks, match.decision.name, match.lease) == (8, "recompute", 0)
        measured = {"mode": "measured", "exploration": 0, "probe_links": True}
        server.configure(planner={**measured, "prior_per_token": "1s"})
        server.ask("reload")
        dear, spec = server.model("a dear model")
        assert store(dear, tokens, spec) == 8
        assert dear.match(tokens).decision.name == "reload"
        assert read(dear, tokens, spec) == 8
        cheap, spec = server.model("a cheap model")
        for tokens_new in (64, 256, 1024, 4096) * 4:
            cheap.observe(sum_n=tokens_new, sum_nc=tokens_new**2 / 2, seconds=1e-9 * tokens_new)
        assert store(cheap, tokens, spec) == 8
        match = cheap.match(tokens)
        assert (match.hit_blocks, match.decision.name) == (8, "recompute")
        assert match.decision.sentence
        assert server.stats()["planner"]["decisions"]["reload"] >= 2
        server.configure(planner={**measured, "prior_flop_rate": "1TFLOP/s"})
        server.ask("reload")
        for shape, reason in (({"flop_per_token": 10**12}, "faster"), ({}, "unmeasured")):
            told, spec = server.model(f"a model: {reason}", **shape)
            assert store(told, tokens, spec) == 8
            assert told.match(tokens).decision.reason == reason


CHANGES: dict[str, dict[str, Any]] = {
    "another model": {"model_digest": "another"},
    "other weights": {"weights_digest": "fine-tuned"},
    "weights raised in place": {"weights_version": 1},
    "another dtype": {"dtype": "bfloat16"},
    "fewer layers": {"groups": (replace(SPEC.groups[0], layers=4),)},
    "more heads": {"groups": (replace(SPEC.groups[0], kv_heads=4),)},
    "another layout": {"groups": (replace(SPEC.groups[0], layout="layer,token,kv,head,dim"),)},
    "another block size": {"block_tokens": 2},
    "more bytes a block": {"block_bytes": SPEC.block_bytes * 2},
    "a LoRA": {"lora_digest": "an adapter"},
    "a salt": {"cache_salt": "tenant 2"},
    "other RoPE": {"rope": "theta=1e6"},
    "quantised": {"quantisation": "fp8"},
}


@pytest.mark.parametrize("what", CHANGES)
def test_nothing_crosses_a_namespace(server: DaemonProcess, what: str) -> None:
    """Whoever differs in anything that changes KV bytes never hits what another stored."""
    owner = server.client()
    tokens = prompt(8, 4)
    assert store(owner, tokens) == 4
    stranger_spec = replace(SPEC, **CHANGES[what])
    stranger = server.client(stranger_spec)
    match = stranger.match(tokens)
    assert match.is_answered
    assert (match.hit_blocks, match.lease, match.runs) == (0, 0, ())
    # Both hold the same prompt side by side, each with its own bytes.
    assert store(stranger, tokens, stranger_spec) == len(tokens) // stranger_spec.block_tokens
    assert read(stranger, tokens, stranger_spec) == len(tokens) // stranger_spec.block_tokens
    assert read(owner, tokens) == 4


def test_a_name_is_not_part_of_the_namespace(server: DaemonProcess) -> None:
    """`name` is for people: two inference engines that call one model differently share it."""
    owner, spec = server.model("named")
    tokens = prompt(9, 4)
    assert store(owner, tokens, spec) == 4
    assert read(server.client(replace(spec, name="as we call it")), tokens, spec) == 4


def test_two_clients_store_the_same_prefix(server: DaemonProcess) -> None:
    """While one writes, the other asks for the same blocks: it is told they are busy, writes
    nothing and waits for nothing; later they are present."""
    one, spec = server.model("the same prefix")
    two = server.client(spec)
    tokens = prompt(10, 4)
    blocks = blocks_of(tokens, spec)
    answers: list[PutResult] = []

    def fill(index: int, view: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        if not answers:
            answers.append(two.put(tokens, lambda *_: pytest.fail("written twice")))
            assert two.match(tokens).hit_blocks == 0, "visible before its commit"
        view[:] = blocks[index]

    assert one.put(tokens, fill) == PutResult(stored=4)
    assert answers == [PutResult(busy=4)]
    assert two.put(tokens, lambda *_: pytest.fail("written twice")) == PutResult(present=4)
    assert read(two, tokens, spec) == 4


def test_two_clients_race_for_the_same_prefixes(server: DaemonProcess) -> None:
    """Two threads put the same prompts as fast as they can: each block is stored exactly once."""
    spec = replace(SPEC, model_digest="the race", block_bytes=16 << 10)
    prompts = [prompt(seed, 4) for seed in range(40, 60)]
    clients = [server.client(spec), server.client(spec)]
    stored = [0, 0]

    def run(number: int, client: Client) -> None:
        for tokens in prompts:
            stored[number] += client.put(tokens, blocks_of(tokens, spec)).stored

    threads = [
        threading.Thread(target=run, args=(number, client)) for number, client in enumerate(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(stored) == 20 * 4
    assert all(read(clients[0], tokens, spec) == 4 for tokens in prompts)


def test_a_put_of_blocks_that_are_there(server: DaemonProcess) -> None:
    """No copy and no error, and only what is new is asked for when a prompt has grown."""
    client, spec = server.model("there already")
    tokens = prompt(11, 4)
    assert store(client, tokens, spec) == 4
    before = server.used()
    never = lambda *_: pytest.fail("a block that is there was written")  # noqa: E731
    assert client.put(tokens, never) == PutResult(present=4)
    grown = np.concatenate([tokens[:-1], prompt(12, 2)])
    blocks = blocks_of(grown, spec)
    written: list[int] = []

    def fill(index: int, view: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        written.append(index)
        view[:] = blocks[index]

    assert server.used() == before
    assert client.put(grown, fill) == PutResult(stored=2, present=4)
    assert written == [4, 5]
    assert read(client, grown, spec) == 6


def test_what_fill_raises_stores_nothing(server: DaemonProcess) -> None:
    """The caller's own fault comes out of `put`; the ticket is given back at once."""
    client, spec = server.model("a fault of its own")
    tokens = prompt(13, 4)
    before = server.used()

    def fill(index: int, view: object) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        client.put(tokens, fill)
    wait_for(lambda: server.used() == before, "the slots back")
    assert store(client, tokens, spec) == 4


def test_clear_forgets_one_namespace_only(server: DaemonProcess) -> None:
    """What somebody holds stays; the neighbour's blocks are not touched."""
    client, spec = server.model("to be cleared")
    neighbour, neighbours = server.model("the neighbour")
    kept, gone = prompt(14, 3), prompt(15, 3)
    assert store(client, kept, spec) == store(client, gone, spec) == 3
    assert store(neighbour, gone, neighbours) == 3
    server.settle()
    match = client.match(kept)
    assert match.lease
    assert client.clear() == 3
    assert client.match(gone).hit_blocks == 0
    assert client.match(kept).hit_blocks == 3
    client.release(match)
    assert read(neighbour, gone, neighbours) == 3


def test_a_durable_put_is_on_disk_when_it_is_answered(server: DaemonProcess) -> None:
    """Its acknowledgement comes after the commit: the disk has as many blocks more."""
    client, spec = server.model("durable")
    before = server.tier("disk")["blocks"]
    tokens = prompt(16, 5)
    result = client.put(tokens, blocks_of(tokens, spec), durable=True)
    assert (result.stored, result.durable) == (5, True)
    assert server.tier("disk")["blocks"] == before + 5


def test_one_request_asked_twice_has_one_lease(server: DaemonProcess) -> None:
    """The same id and prompt get the same lease; another prompt under it another one."""
    client, spec = server.model("idempotent")
    tokens = prompt(17, 4)
    store(client, tokens, spec)
    one, again = client.match(tokens, request="r1"), client.match(tokens, request="r1")
    assert one.lease == again.lease != 0
    assert client.match(tokens[:9], request="r1").lease != one.lease
    client.release(one)
    assert client.match(tokens, request="r1").lease not in (0, one.lease)


def test_what_is_cleared_is_cleared_on_disk_too(tmp_path: Path) -> None:
    """Prompts that branch, on disk: what they share goes with them, and does not come back."""
    shared = prompt(1, 4)
    prompts = [np.concatenate([shared[:16], prompt(seed, 4)]) for seed in range(2, 40)]
    with DaemonProcess(disk={"path": str(tmp_path / "disk"), "size": "96MiB"}) as server:
        client = server.client()
        for tokens in prompts:
            client.put(tokens, blocks_of(tokens), durable=True)
        server.settle()
        assert client.clear() == 4 + 4 * len(prompts)
        assert [client.match(tokens).hit_blocks for tokens in prompts] == [0] * len(prompts)
        wait_for(lambda: not server.stats()["tiers"][-1]["blocks"], "records deleted")
        server.stop()
        server.start()
        server.forget_clients()
        assert [server.client().match(tokens).hit_blocks for tokens in prompts] == [0] * len(
            prompts
        )

"""An operator knows what will be asked for: real daemons, real tiers, no session."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hicache.client import AsyncClient
from tests.e2e.daemon_process import SPEC, DaemonProcess, prompt, read, store, wait_for

pytestmark = pytest.mark.e2e


@pytest.mark.timeout(180)
def test_what_is_on_disk_is_warmed_and_read_from_memory() -> None:
    tokens, other = prompt(1, 20), prompt(2, 4)
    with DaemonProcess() as server:
        assert store(server.client(), tokens, durable=True) == 20
        assert store(server.client(), other, durable=True) == 4
        server.forget_clients()
        server.stop()
        server.start()
        wait_for(lambda: server.tier("disk")["blocks"] == 24, "what is on disk")
        operator = server.client()
        assert operator.score([tokens])[0].runs == (("disk", 20),)
        warmed = operator.warm(tokens, wait_s=60.0)
        assert warmed
        assert (warmed.held_blocks, warmed.warm_blocks, warmed.refused_blocks) == (20, 20, 0)
        assert not operator.connected
        assert server.stats()["leases"] == 0
        wait_for(lambda: "disk" not in dict(operator.score([tokens])[0].runs), "reads from memory")
        assert operator.score([other])[0].runs == (("disk", 4),)
        before = server.tier("disk")["bytes_served"]
        assert read(operator, tokens) == 20
        assert server.tier("disk")["bytes_served"] == before

        async def main() -> None:
            async with AsyncClient(SPEC, server.endpoint) as gateway:
                assert await gateway.warm(other)

        asyncio.run(main())
        wait_for(lambda: "disk" not in dict(operator.score([other])[0].runs), "the other, too")
        assert operator.warm(other, wait_s=60.0).warm_blocks == 4
        server.stop()
        assert not operator.warm(tokens)


@pytest.mark.timeout(300)
def test_what_is_pinned_outlives_ten_times_the_tiers() -> None:
    """Three small tiers are filled ten times over. The pinned prefix is a hit all the while, with
    the right bytes; once it is unpinned it goes as any other does. What was pinned for a second is
    free by itself, and a pin of the last run is none of this one's."""
    kept, passing = prompt(1, 8), prompt(2, 8)
    sizes: dict[str, Any] = {
        "hbm": {"size": "8MiB"},
        "dram": {"size": "16MiB"},
        "disk": {"size": "64MiB"},
    }
    with DaemonProcess(limits={"max_pinned": 0.5}, **sizes) as server:
        client, operator = server.client(), server.client()
        assert store(client, kept) == store(client, passing) == 8
        pinned = operator.pin(kept, name="the tools")
        assert (pinned.blocks, pinned.epoch) == (8, server.ask("ping")["epoch"])
        assert operator.pin(passing, ttl_s=1.0)
        assert not operator.connected
        stats = server.stats()
        assert [(row["name"], row["blocks"]) for row in stats["pins"]] == [
            ("the tools", 8),
            ("", 8),
        ]
        assert (stats["pinned_blocks"], stats["leases"]) == (16, 0)
        wait_for(lambda: len(server.stats()["pins"]) == 1, "the end of the short one")
        for seed in range(100, 100 + 10 * 88 * 4 // 16):
            store(client, prompt(seed, 16))
            if seed % 20 == 0:
                assert read(client, kept) == 8
        assert read(client, kept) == 8
        assert read(client, passing) == 0
        for tier in server.stats()["tiers"]:
            assert tier["pinned_bytes"] <= tier["capacity_bytes"] / 2
        assert sum(tier["pinned_bytes"] for tier in server.stats()["tiers"]) >= 8 * SPEC.block_bytes
        client.clear()
        assert read(client, kept) == 8
        assert not operator.pin(prompt(100 + 10 * 88 * 4 // 16 - 1, 16), ttl_s=31 * 86400)
        assert operator.unpin(pinned)
        assert not operator.unpin(pinned)
        client.clear()
        assert read(client, kept) == 0
        assert store(client, kept, durable=True) == 8
        again = operator.pin(kept)
        server.stop()
        server.start()
        wait_for(lambda: server.client().score([kept])[0].hit_blocks == 8, "what was on disk")
        assert server.stats()["pins"] == []
        assert not server.client().unpin(again)


@pytest.mark.timeout(180)
def test_more_than_the_share_is_refused(server: DaemonProcess) -> None:
    """With a sentence, counted, and nothing of it is held."""
    client, spec = server.model("too much to pin")
    tokens = prompt(3, 200)
    store(client, tokens[: 4 * 60 + 1], spec)
    before = server.stats()["pinned_blocks"]
    assert not client.pin(tokens)
    assert "limits.max_pinned" in client.last_error
    stats = server.stats()
    assert stats["pinned_blocks"] == before
    (row,) = (row for row in stats["queues"] if row["name"] == "pinned memory")
    assert (row["key"], row["refused"]) == ("limits.max_pinned", 1)

"""A router asks a real daemon where prompts lie: in all tiers, with no session and no lease."""

from __future__ import annotations

import asyncio

import pytest

from hicache.client import AsyncClient, Score
from tests.e2e.daemon_process import SPEC, DaemonProcess, prompt, store, wait_for

pytestmark = pytest.mark.e2e


@pytest.mark.timeout(180)
def test_a_router_sees_what_is_on_disk() -> None:
    """Stored by an inference engine, and found again after a restart: a router that has
    never said hello hears of it, and what it asks leaves no trace but in the count of requests."""
    tokens, others = prompt(1, 6), [prompt(seed, 3) for seed in range(2, 9)]
    with DaemonProcess() as server:
        assert store(server.client(), tokens, durable=True) == 6
        server.forget_clients()
        server.stop()
        server.start()
        wait_for(lambda: server.tier("disk")["blocks"] == 6, "what is on disk")
        before = server.stats()
        router = server.client()
        scores = router.score([tokens, *others, tokens[:12]])
        assert [score.hit_blocks for score in scores] == [6, *[0] * 7, 3]
        assert scores[0].runs == (("disk", 6),)
        assert scores[0].hit_tokens == 6 * SPEC.block_tokens
        assert not router.connected
        after = server.stats()
        assert after["requests"].pop("score") == 1
        for name in ("sessions", "leases", "namespaces", "planner", "links", "requests"):
            assert after[name] == before[name], name
        match = router.match(tokens)
        assert (match.hit_blocks, match.runs) == (6, scores[0].runs)
        router.release(match)
        server.stop()
        assert router.score([tokens]) == [Score(is_answered=False)]


def test_the_asyncio_client_scores(server: DaemonProcess) -> None:
    """Several at once on one client, over the shared daemon."""
    client, spec = server.model("scored side by side")
    tokens = prompt(11, 4)
    assert store(client, tokens, spec) == 4

    async def main() -> list[list[Score]]:
        async with AsyncClient(spec, server.endpoint, timeout_s=10.0) as router:
            return await asyncio.gather(*(router.score([tokens, tokens[:5]]) for _ in range(4)))

    for first, second in asyncio.run(main()):
        assert (first.hit_blocks, second.hit_blocks) == (4, 1)

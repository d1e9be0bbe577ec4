"""A router that only listens knows what a real daemon holds, in all tiers, over a restart."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from hicache.router import HeldPrefixes
from tests.e2e.household import SPEC, Household, prompt, store, wait_for

pytestmark = pytest.mark.e2e


@pytest.mark.timeout(240)
def test_a_router_that_listens_knows_what_is_held() -> None:
    """What it heard is what `score` says, before and after the daemon is another."""
    prompts = [prompt(seed, 6) for seed in range(5)]
    with Household() as house:
        file = house.root / "events"
        house.stop()
        house.configure(events={"endpoint": f"ipc://{file}"})
        house.start()
        assert stat.S_IMODE(Path(file).stat().st_mode) == 0o600
        client = house.client()
        with HeldPrefixes(f"ipc://{file}", SPEC.digest(), SPEC.block_tokens) as router:

            def knows_all() -> bool:
                router.poll(0.05)
                told = [router.match(tokens) for tokens in prompts]
                return told == [list(score.runs) for score in client.score(prompts)]

            for tokens in prompts[:3]:
                assert store(client, tokens, durable=True) == 6
            wait_for(knows_all, "what was stored")
            assert len(router) == 18
            first = router.epoch
            for tokens in prompts[3:]:
                assert store(client, tokens) == 6
            wait_for(knows_all, "what was stored since")
            house.stop()
            house.start()
            wait_for(lambda: knows_all() and router.epoch != first, "another daemon's blocks")
            assert len(router) == 30
            assert client.clear() == 30
            wait_for(lambda: knows_all() and not len(router), "nothing")

"""An operator knows what will be asked for: real daemons, real tiers, no session."""

from __future__ import annotations

import asyncio

import pytest

from hicache.aio import AsyncClient
from tests.e2e.household import Household, prompt, read, store, wait_for

pytestmark = pytest.mark.e2e


@pytest.mark.timeout(180)
def test_what_is_on_disk_is_warmed_and_read_from_memory() -> None:
    tokens, other = prompt(1, 20), prompt(2, 4)
    with Household() as house:
        assert store(house.client(), tokens, durable=True) == 20
        assert store(house.client(), other, durable=True) == 4
        house.forget_clients()
        house.stop()
        house.start()
        wait_for(lambda: house.tier("disk")["blocks"] == 24, "what is on disk")
        operator = house.client()
        assert operator.score([tokens])[0].runs == (("disk", 20),)
        warmed = operator.warm(tokens, wait_s=60.0)
        assert warmed
        assert (warmed.held_blocks, warmed.warm_blocks, warmed.refused_blocks) == (20, 20, 0)
        assert not operator.connected
        assert house.stats()["leases"] == 0
        wait_for(lambda: "disk" not in dict(operator.score([tokens])[0].runs), "reads from memory")
        assert operator.score([other])[0].runs == (("disk", 4),)
        before = house.tier("disk")["bytes_served"]
        assert read(operator, tokens) == 20
        assert house.tier("disk")["bytes_served"] == before

        async def main() -> None:
            async with AsyncClient(operator._connection.spec, house.endpoint) as gateway:
                assert await gateway.warm(other)

        asyncio.run(main())
        wait_for(lambda: "disk" not in dict(operator.score([other])[0].runs), "the other, too")
        assert operator.warm(other, wait_s=60.0).warm_blocks == 4
        house.stop()
        assert not operator.warm(tokens)

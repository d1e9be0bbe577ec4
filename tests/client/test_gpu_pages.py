"""The client's side of an inference engine's pages, with a daemon that does as it is told."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache.client import AsyncClient
from hicache.client.gpu_pages import PageShare, SharedPages
from hicache.client.results import Match
from hicache.connectors.common.page_sharing import PageSharing
from tests.client.scripted_daemon import HOLD, SPEC, Many, ScriptedDaemon, Seen, hit

PAGES = SharedPages("0000:00:00.0", (bytes(64),), np.array([[0, 0, 64, 32]], np.uint64), 64, 1)


def table(*pages: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(pages, np.int32).reshape(-1, 1)


def readable(*runs: tuple[int, int]) -> dict[str, Any]:
    return {"ready": [[first, "dram", b"", b"", num] for first, num in runs]}


Scene = Callable[[ScriptedDaemon, AsyncClient], Coroutine[Any, Any, None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Scene], None]:
    """A scene with a daemon whose worker is this very process, and a client of short patience."""

    def run(scene: Scene) -> None:
        endpoint = f"ipc:///tmp/hc-{os.getpid()}-{tmp_path.name[-40:]}"

        async def all_of_it() -> None:
            with ScriptedDaemon(endpoint) as daemon:
                daemon.on("register", {"registration": 5, "pid": os.getpid()})
                daemon.on("match", hit(4))
                daemon.on("fetch", readable((0, 4)))
                daemon.on("unregister", {})
                plenty_s = 20.0
                client = AsyncClient(
                    SPEC,
                    endpoint,
                    timeout_s=plenty_s,
                    fetch_timeout_s=plenty_s,
                    put_timeout_s=plenty_s,
                )
                await scene(daemon, client)
                await client.close()

        try:
            asyncio.run(all_of_it())
        finally:
            Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    return run


def num_pidfds() -> int:
    links = [str(Path(f"/proc/self/fd/{name}").resolve()) for name in os.listdir("/proc/self/fd")]
    return sum(link.endswith("anon_inode:[pidfd]") for link in links)


async def shared(client: AsyncClient) -> tuple[PageShare, Match]:
    share = await client.share_pages(PAGES)
    assert share is not None, client.last_error
    return share, await client.match(list(range(16)))


def test_a_load_of_no_blocks_ends(play: Callable[[Scene], None]) -> None:
    """What was readable is not any more: the answer is no blocks, for this run and not the next."""

    async def scene(daemon: ScriptedDaemon, client: AsyncClient) -> None:
        share, match = await shared(client)
        daemon.on("fetch", readable((0, 2), (3, 1)))
        daemon.on("load", lambda seen: {"blocks": seen.body["first"] // 3, "seconds": 0.0})
        came = await client.load_pages(match, share, table(1, 2, 3, 4))
        assert (came.blocks, came.is_at_rest) == (0, True)

    play(scene)


def test_pages_in_doubt_are_those_without_an_answer(play: Callable[[Scene], None]) -> None:
    """Of several loads at once, and of no save: it only reads."""

    def answered(seen: Seen) -> Any:
        return (
            HOLD if seen.body["pages"] == b"\x07\0\0\0\x08\0\0\0" else {"blocks": 1, "seconds": 0.5}
        )

    async def scene(daemon: ScriptedDaemon, client: AsyncClient) -> None:
        share, match = await shared(client)
        daemon.on("fetch", Many([({**readable((0, 1)), "more": True}, []), (readable((1, 2)), [])]))
        daemon.on("load", answered)
        held = asyncio.ensure_future(client.load_pages(match, share, table(6, 7, 8)))
        while share.pages_in_doubt != {7, 8}:
            await asyncio.sleep(0)
        daemon.on("fetch", readable((0, 1)))
        came = await client.load_pages(match, share, table(3))
        assert came.blocks == 1
        assert share.pages_in_doubt == {7, 8}
        held.cancel()
        await asyncio.wait([held])
        assert share.is_in_doubt
        assert share.pages_in_doubt == {7, 8}
        assert await client.unshare_pages(share)
        assert not share.pages_in_doubt

    play(scene)


def test_a_share_whose_worker_has_ended_keeps_nothing_open(play: Callable[[Scene], None]) -> None:
    """Nobody can be asked to let go: the daemon may have ended with its worker."""

    async def scene(daemon: ScriptedDaemon, client: AsyncClient) -> None:
        before = num_pidfds()
        with subprocess.Popen(["sleep", "60"]) as worker:
            daemon.on("register", {"registration": 5, "pid": worker.pid})
            share, _ = await shared(client)
            assert not share.is_over
            assert num_pidfds() == before + 1
            worker.kill()
        assert share.is_over
        assert num_pidfds() == before
        assert share.is_over

    play(scene)


def test_a_save_ends_with_its_put(play: Callable[[Scene], None]) -> None:
    """It had all of a put's time, of which asking for room had used some already."""
    late_s = 0.0
    placed = {"ticket": 3, "tier": "dram", "indices": bytes(4), "slots": b""}

    def placed_late(seen: Seen) -> dict[str, Any]:
        nonlocal late_s
        late_s = 15.0
        return {**placed, "present": 0, "busy": 0, "refused": 0}

    async def scene(daemon: ScriptedDaemon, client: AsyncClient) -> None:
        client._connection.clock = lambda: time.monotonic() + late_s
        daemon.on("put", placed_late)
        daemon.on("save", {"blocks": 1, "seconds": 0.1})
        daemon.on("commit", {"committed": 1, "durable": False})
        share, _ = await shared(client)
        saved = await client.save_pages(list(range(4)), share, table(7))
        assert saved.stored == 1, client.last_error
        assert daemon.wait_for("save").request.deadline_s <= 20.0 - late_s

    play(scene)


def test_two_at_once_register_once(play: Callable[[Scene], None]) -> None:
    """Who comes second copies by itself, and does not wait for the first."""

    async def scene(daemon: ScriptedDaemon, client: AsyncClient) -> None:
        sharing = PageSharing(client, PAGES)
        daemon.on("register", HOLD)
        first = asyncio.ensure_future(sharing.usable())
        held = await asyncio.to_thread(daemon.wait_for, "register")
        assert await sharing.usable() is None
        assert not first.done()
        daemon.answer(held, {"registration": 5, "pid": os.getpid()})
        share = await first
        assert share is not None
        assert await sharing.usable() is share
        assert [seen.op for seen in daemon.seen].count("register") == 1

    play(scene)


def test_a_share_that_is_left_is_replaced_when_it_is_gone(play: Callable[[Scene], None]) -> None:
    async def scene(daemon: ScriptedDaemon, client: AsyncClient) -> None:
        sharing = PageSharing(client, PAGES)
        share = await sharing.usable()
        assert share is not None
        assert await sharing.usable() is share
        sharing.leave(share)
        assert await sharing.usable() is None
        assert await client.unshare_pages(share)
        other = await sharing.usable()
        assert other is not None
        assert other is not share
        sharing.leave(share)  # again, by somebody who is late
        assert await sharing.usable() is other
        assert await sharing.close()
        assert [seen.op for seen in daemon.seen].count("register") == 2

    play(scene)

"""Both clients against a daemon that does what it should not: every trouble is a miss, in time.

Each test runs with the blocking client and with the asyncio one behind the same names.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache.client import (
    AsyncClient,
    Client,
    DaemonAbsent,
    DaemonError,
    FetchedRun,
    Match,
    NamespaceSpec,
    PutResult,
    admin_call,
)
from hicache.client.put import TELL_S, Offer, Source
from hicache.client.session import TOLD_SHARE
from hicache.protocol import messages
from hicache.protocol.operations import (
    MAX_SCORED_TOKENS,
    OPERATIONS,
    Count,
    Operation,
    Reply,
    Request,
)
from hicache.tiers.arena import Arena
from tests.client.scripted_daemon import (
    DIE,
    HOLD,
    SPEC,
    Many,
    ScriptedDaemon,
    Seen,
    greeting,
    hit,
    refuse,
)
from tests.docs.protocol_reference import PRODUCT

TOKENS = list(range(16))
PLENTY_S = 8.0
"""No call that should return at once may take this long, however busy the machine is."""


class Waiting:
    """The asyncio client, one call at a time, looking like the blocking one."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncClient(*args, **named)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._client, name)
        if not callable(value):
            return value
        return lambda *args, **named: self._runner.run(self._wait(value(*args, **named)))

    async def _wait(self, call: Any) -> Any:
        return [run async for run in call] if hasattr(call, "__aiter__") else await call

    def end(self) -> None:
        self.close()
        self._runner.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: a socket's path has 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="hc-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def endpoint(folder: Path) -> str:
    return f"ipc://{folder}/s"


@pytest.fixture
def daemon(endpoint: str) -> Iterator[ScriptedDaemon]:
    with ScriptedDaemon(endpoint) as daemon:
        yield daemon


@pytest.fixture(params=["blocking", "asyncio"])
def connect(request: pytest.FixtureRequest, endpoint: str) -> Iterator[Any]:
    """Make a client; its type is the blocking one's, whichever it is."""
    made: list[Any] = []

    def make(spec: NamespaceSpec = SPEC, **named: Any) -> Any:
        named = {"timeout_s": PLENTY_S, **named}
        client = (Client if request.param == "blocking" else Waiting)(spec, endpoint, **named)
        made.append(client)
        return client

    yield make
    for client in made:
        client.end() if isinstance(client, Waiting) else client.close()


def rows(count: int, start: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return (
        np.full((count, 64), 7, np.uint8) + np.arange(start, start + count, dtype=np.uint8)[:, None]
    )


def u32(*numbers: int) -> bytes:
    return np.array(numbers, "<u4").tobytes()


def assert_every_call_misses(client: Any) -> None:
    out = rows(4)
    match = client.match(TOKENS)
    assert (match.lease, match.hit_blocks, match.runs, match.is_answered) == (0, 0, (), False)
    assert (match.decision.name, match.decision.reason) == ("recompute", "unavailable")
    assert match.decision.sentence == client.last_error != ""
    assert client.fetch(match, out).blocks == 0
    assert list(client.fetch_runs(match)) == []
    assert client.put(TOKENS, out) == PutResult(refused=4)
    assert client.release(match) is None
    assert client.observe(sum_n=1, sum_nc=1, seconds=1) is None
    assert client.hint(TOKENS, ended="turn") is None
    assert client.ping() is None
    assert client.stats() is None
    assert client.health() is None
    assert client.heartbeat() is False
    assert client.clear() == 0
    assert not client.connected


# --- no daemon, or one that goes ----------------------------------------------------------------


def test_an_absent_daemon_is_a_miss(connect: Any) -> None:
    started = time.monotonic()
    assert_every_call_misses(connect())
    assert time.monotonic() - started < PLENTY_S


def test_a_stale_socket_file_is_a_miss(connect: Any, endpoint: str) -> None:
    """What a killed daemon leaves behind: the path is there, and nobody listens."""
    with ScriptedDaemon(endpoint):
        pass
    Path(endpoint.removeprefix("ipc://")).touch()
    assert_every_call_misses(connect())


def test_a_daemon_that_never_answers_costs_one_timeout(
    connect: Any, daemon: ScriptedDaemon
) -> None:
    daemon.on("hello", HOLD)
    client = connect(timeout_s=0.05)
    assert "no answer in time" in client.match(TOKENS).decision.sentence
    for _ in range(20):
        assert not client.match(TOKENS).is_answered
    assert len(daemon.ops()) < 20


def test_a_daemon_that_dies_in_the_middle_of_a_call(connect: Any, daemon: ScriptedDaemon) -> None:
    daemon.on("match", DIE)
    client = connect(timeout_s=60.0)
    started = time.monotonic()
    assert "has gone" in client.match(TOKENS).decision.sentence
    assert time.monotonic() - started < 30
    assert_every_call_misses(client)


def test_a_daemon_that_dies_in_the_middle_of_a_fetch(connect: Any, daemon: ScriptedDaemon) -> None:
    """What came before is used: it is a whole prefix."""
    begun = {"ready": [[0, "dram", b"", b"", 2]]}, [bytes(64)] * 2
    daemon.on("match", hit(4))
    daemon.on("fetch", Many([begun], then=HOLD))
    client = connect(fetch_timeout_s=60.0)
    out = rows(4)
    copied = threading.Event()
    copy = client._connection.copy

    def copy_and_say(task: Any) -> Any:
        done = yield from copy(task)
        copied.set()
        return done

    client._connection.copy = copy_and_say

    def stop_when_copied() -> None:
        assert copied.wait(PLENTY_S)
        daemon.stop()

    killer = threading.Thread(target=stop_when_copied)
    killer.start()
    started = time.monotonic()
    assert client.fetch(client.match(TOKENS), out).blocks == 2
    assert time.monotonic() - started < 30
    killer.join()


def test_a_daemon_that_comes_back_is_found(connect: Any, endpoint: str) -> None:
    client = connect()
    for epoch in ("e1", "e2"):
        with ScriptedDaemon(endpoint) as daemon:
            daemon.on("hello", greeting(epoch=epoch))
            daemon.on("match", lambda seen: hit(1))
            patience = time.monotonic() + PLENTY_S
            while not client.match(TOKENS).is_answered:  # sent before it was known to be dead
                assert time.monotonic() < patience
            assert client.connected
            assert client.greeting.epoch == epoch or "hello" not in daemon.ops()


def test_a_call_may_be_the_probe_after_the_retry_time(connect: Any, endpoint: str) -> None:
    client = connect()
    assert not client.match(TOKENS).is_answered
    with ScriptedDaemon(endpoint) as daemon:
        daemon.on("match", hit(1))
        patience = time.monotonic() + PLENTY_S
        while not client.match(TOKENS).is_answered:
            assert time.monotonic() < patience


# --- answers that are wrong ---------------------------------------------------------------------


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x80", b"garbage" * 9, b"\x81\xa2id\x01"])
def test_garbage_is_a_miss(connect: Any, daemon: ScriptedDaemon, raw: bytes) -> None:
    daemon.on("match", raw)
    client = connect(timeout_s=60.0)
    assert "garbage" in client.match(TOKENS).decision.sentence


@pytest.mark.parametrize(
    "change",
    [
        {"lease": "1"},
        {"lease": -1},
        {"lease": True},
        {"hit_blocks": 1.5},
        {"runs": [["dram"]]},
        {"runs": [[1, 2]]},
        {"runs": "dram"},
        {"decision": None},
        {"decision": {"name": "maybe"}},
        {"hit_blocks": 0},
    ],
)
def test_a_wrong_match_is_a_miss(connect: Any, daemon: ScriptedDaemon, change: Any) -> None:
    daemon.on("match", {**hit(4), **change})
    client = connect()
    assert not client.match(TOKENS).is_answered
    assert client.connected


@pytest.mark.parametrize(
    "change",
    [
        {"session": b"short"},
        {"session": "x" * 16},
        {"transport": "pigeon"},
        {"block_bytes": 128},
        {"arenas": [1]},
        {"arenas": [{"tier": "dram"}]},
        {"lease_ttl_s": "long"},
        {"epoch": None},
    ],
)
def test_a_wrong_hello_is_a_miss(connect: Any, daemon: ScriptedDaemon, change: Any) -> None:
    daemon.on("hello", greeting(**change))
    assert not connect().match(TOKENS).is_answered


@pytest.mark.parametrize("code", ["spec", "version", "forbidden", "stopping", "internal"])
def test_a_refused_hello_is_a_miss(connect: Any, daemon: ScriptedDaemon, code: str) -> None:
    daemon.on("hello", refuse(code))
    client = connect()
    assert not client.match(TOKENS).is_answered
    assert code in client.last_error


@pytest.mark.parametrize(
    "ready",
    [
        None,
        "all",
        [[0, "dram", b"", b""]],
        [[0, "dram", b"", b"", 3]],
        [[-1, "dram", b"", b"", 1]],
        [[0, 5, b"", b"", 1]],
        [[0, "dram", u32(1), u32(0), 1]],
        [[0, "dram", b"abc", b"", 1]],
    ],
)
def test_a_wrong_fetch_is_a_miss(connect: Any, daemon: ScriptedDaemon, ready: Any) -> None:
    daemon.on("match", hit(4))
    daemon.on("fetch", Many([({"ready": ready}, [bytes(64)])]))
    client = connect()
    assert client.fetch(client.match(TOKENS), rows(4)).blocks == 0
    assert client.last_error


@pytest.mark.parametrize(
    "change",
    [
        {"ticket": "1"},
        {"indices": b"abc"},
        {"indices": u32(4)},
        {"indices": u32(1, 1)},
        {"present": None},
        {"tier": 1},
    ],
)
def test_a_wrong_put_stores_nothing(connect: Any, daemon: ScriptedDaemon, change: Any) -> None:
    daemon.on("put", {**placed(0, 1), **change})
    client = connect()
    assert client.put(TOKENS, rows(4)) == PutResult(refused=4)
    assert "commit" not in daemon.ops()


@pytest.mark.parametrize("code", ["expired", "refused", "internal", "too_large", "no-such-code"])
def test_an_error_is_a_miss_and_the_next_call_is_tried(
    connect: Any, daemon: ScriptedDaemon, code: str
) -> None:
    client = connect()
    if code == "no-such-code":
        daemon.on("match", {"ok": False, "error": code, "message": 7})
    else:
        daemon.on("match", refuse(code))
    assert not client.match(TOKENS).is_answered
    assert code in client.last_error
    daemon.on("match", hit(1))
    assert client.match(TOKENS).hit_blocks == 1


# --- late replies -------------------------------------------------------------------------------


def test_a_late_reply_is_not_the_next_ones_and_its_lease_goes_back(
    connect: Any, daemon: ScriptedDaemon
) -> None:
    client = connect(timeout_s=0.2)
    daemon.on("match", HOLD)
    assert not client.match(TOKENS).is_answered
    held = daemon.wait_for("match")
    daemon.on("match", hit(0))
    daemon.answer(held, hit(4, lease=77))
    patience = time.monotonic() + PLENTY_S
    while "release" not in daemon.ops():
        assert time.monotonic() < patience
        assert client.match(TOKENS).hit_blocks == 0
    assert daemon.wait_for("release").body["lease"] == 77


def test_a_late_placement_is_aborted(connect: Any, daemon: ScriptedDaemon) -> None:
    client = connect(timeout_s=0.2)
    daemon.on("put", HOLD)
    assert client.put(TOKENS, rows(4)).refused == 4
    daemon.answer(daemon.wait_for("put"), placed(0, 1, ticket=9))
    daemon.on("match", hit(0))
    patience = time.monotonic() + PLENTY_S
    while "abort" not in daemon.ops():
        assert time.monotonic() < patience
        client.match(TOKENS)
    assert daemon.wait_for("abort").body["ticket"] == 9


# --- sessions -----------------------------------------------------------------------------------


def test_a_session_that_is_not_known_is_opened_again(connect: Any, daemon: ScriptedDaemon) -> None:
    client = connect()
    daemon.on("match", hit(1))
    client.match(TOKENS)
    second = bytes(16)
    daemon.on("hello", greeting(session=second, epoch="e2"))
    daemon.on(
        "match",
        lambda seen: hit(2) if seen.request.s == second else refuse("unknown_session"),
    )
    assert client.match(TOKENS).hit_blocks == 2
    assert daemon.ops() == ["hello", "match", "match", "hello", "match"]
    assert client.greeting.epoch == "e2"


def test_it_is_opened_again_only_once(connect: Any, daemon: ScriptedDaemon) -> None:
    daemon.on("match", refuse("unknown_session"))
    client = connect()
    assert not client.match(TOKENS).is_answered
    assert daemon.ops() == ["hello", "match", "hello", "match"]


def test_a_lease_of_a_lost_session_is_never_fetched(connect: Any, daemon: ScriptedDaemon) -> None:
    """Another daemon's lease may have the same number, and other blocks."""
    client = connect()
    daemon.on("match", hit(4, lease=1))
    old = client.match(TOKENS)
    daemon.on(
        "ping",
        {"epoch": "e2", "version": "0", "pid": 1, "uptime_s": 0.1, "ready": True, "tiers": {}},
    )
    daemon.on("hello", greeting(session=bytes(16), epoch="e2"))
    assert client.ping().epoch == "e2"
    assert client.match(TOKENS).lease == 1
    assert client.fetch(old, rows(4)).blocks == 0
    client.release(old)
    assert "fetch" not in daemon.ops()
    assert "release" not in daemon.ops()


def test_an_observation_nobody_waits_for_still_finds_out(
    connect: Any, daemon: ScriptedDaemon
) -> None:
    client = connect()
    daemon.on("observe", refuse("unknown_session"))
    patience = time.monotonic() + PLENTY_S
    daemon.on("match", hit(0))
    while daemon.ops().count("hello") < 2:
        assert time.monotonic() < patience
        client.observe(sum_n=8, sum_nc=32, seconds=0.1)
        client.match(TOKENS)


def test_a_hint_says_only_what_is_known(connect: Any, daemon: ScriptedDaemon) -> None:
    client = connect()
    daemon.on("match", hit(0))
    client.match(TOKENS, conversation="a")
    client.hint(conversation="a", ended="tool_call", return_s=3)
    client.hint(TOKENS, finish_reason="length", keep=False, answer_tokens=7)
    assert daemon.wait_for("match").body["conversation"] == "a"
    about = daemon.wait_for("hint", 2).body
    assert about == {
        "tokens": np.asarray(TOKENS, "<u4").tobytes(),
        "conversation": "",
        "ended": "",
        "finish_reason": "length",
        "return_s": 0.0,
        "keep": False,
        "answer_tokens": 7,
        "quiet": True,
    }
    first = daemon.wait_for("hint").body
    assert (first["conversation"], first["ended"], first["return_s"]) == ("a", "tool_call", 3.0)


def test_close_says_bye(connect: Any, daemon: ScriptedDaemon) -> None:
    client = connect()
    daemon.on("match", hit(0))
    client.match(TOKENS)
    client.close()
    daemon.wait_for("bye")


def test_every_request_tells_when_it_was_sent_and_how_long_it_waits(
    connect: Any, daemon: ScriptedDaemon
) -> None:
    client = connect(timeout_s=5.0)
    daemon.on("match", hit(0))
    before = time.monotonic()
    client.match(TOKENS, request="r1", skip_blocks=2, hop_bytes_per_s=1e9)
    seen = daemon.wait_for("match")
    assert before <= seen.request.sent_s <= time.monotonic()
    assert 0 < seen.request.deadline_s < 5.0
    assert seen.body == {
        "request": "r1",
        "tokens": np.array(TOKENS, "<u4").tobytes(),
        "skip_blocks": 2,
        "hop_bytes_per_s": 1e9,
        "explain": False,
        "conversation": "",
    }


def test_a_long_prompt_is_cut_to_whole_blocks(connect: Any, daemon: ScriptedDaemon) -> None:
    daemon.on("hello", greeting(max_prompt_tokens=10))
    daemon.on("match", hit(0))
    daemon.on("put", {**placed(), "present": 2})
    client = connect()
    client.match(TOKENS)
    assert len(daemon.wait_for("match").body["tokens"]) == 8 * 4
    assert client.put(TOKENS, rows(4)) == PutResult(present=2, refused=2)
    assert daemon.wait_for("put").body["last"] == 2


def test_a_child_opens_a_session_of_its_own(daemon: ScriptedDaemon, endpoint: str) -> None:
    daemon.on("match", hit(1))
    with Client(SPEC, endpoint, timeout_s=PLENTY_S) as client:
        client.match(TOKENS)
        child = os.fork()
        if not child:
            os._exit(0 if client.match(TOKENS).hit_blocks == 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert client.match(TOKENS).hit_blocks == 1
    assert [op for op in daemon.ops() if op != "bye"] == [
        "hello",
        "match",
        "hello",
        "match",
        "match",
    ]


# --- blocks in frames ---------------------------------------------------------------------------


def placed(
    *indices: int, ticket: int = 1, slots: tuple[int, ...] = (), refused: int = 0
) -> dict[str, Any]:
    return {
        "ticket": ticket if indices else 0,
        "tier": "dram",
        "indices": u32(*indices),
        "slots": u32(*slots),
        "present": 0,
        "busy": 0,
        "refused": refused,
    }


def commit_all(seen: Seen) -> dict[str, Any]:
    return {"committed": len(seen.body["indices"]) // 4, "durable": seen.body["durable"]}


def test_blocks_travel_as_frames(connect: Any, daemon: ScriptedDaemon) -> None:
    daemon.on("put", {**placed(1, 3), "present": 1, "busy": 1})
    daemon.on("commit", commit_all)
    client = connect()
    result = client.put(TOKENS, rows(4), durable=True)
    assert result == PutResult(stored=2, present=1, busy=1, durable=True)
    commit = daemon.wait_for("commit")
    assert commit.parts == [rows(4)[1].tobytes(), rows(4)[3].tobytes()]
    assert commit.body == {"ticket": 1, "indices": u32(1, 3), "durable": True}

    daemon.on("match", hit(4))
    late, early = (
        [rows(4)[2].tobytes(), rows(4)[3].tobytes()],
        [rows(4)[0].tobytes(), rows(4)[1].tobytes()],
    )
    first = ({"ready": [[2, "dram", b"", b"", 2]]}, late)
    last = ({"ready": [[0, "hbm", b"", b"", 1], [1, "dram", b"", b"", 1]], "blocks": 4}, early)
    daemon.on("fetch", Many([first, last]))
    out = np.zeros((4, 64), np.uint8)
    fetched = client.fetch(client.match(TOKENS), out)
    assert (fetched.blocks, fetched.by_tier) == (4, {"hbm": 1, "dram": 3})
    assert (out == rows(4)).all()


def test_a_hole_ends_the_prefix(connect: Any, daemon: ScriptedDaemon) -> None:
    daemon.on("match", hit(4))
    ready = [[0, "dram", b"", b"", 1], [2, "dram", b"", b"", 2]]
    daemon.on("fetch", Many([({"ready": ready}, [bytes(64)] * 3)]))
    client = connect()
    fetched = client.fetch(client.match(TOKENS), rows(4))
    assert (fetched.blocks, fetched.by_tier) == (1, {"dram": 1})


def test_a_small_buffer_takes_what_fits(connect: Any, daemon: ScriptedDaemon) -> None:
    daemon.on("match", hit(4))
    daemon.on("fetch", Many([({"ready": [[0, "dram", b"", b"", 4]]}, [bytes(64)] * 4)]))
    client = connect()
    assert client.fetch(client.match(TOKENS), rows(2)).blocks == 2


def test_runs_can_be_read_in_place(connect: Any, daemon: ScriptedDaemon) -> None:
    daemon.on("match", hit(2))
    daemon.on("fetch", Many([({"ready": [[0, "dram", b"", b"", 2]]}, [rows(1)[0].tobytes()] * 2)]))
    client = connect()
    (run,) = list(client.fetch_runs(client.match(TOKENS)))
    assert isinstance(run, FetchedRun)
    assert (run.first, run.tier, run.num_blocks, len(run.views)) == (0, "dram", 2, 2)
    assert (run.views[1] == rows(1)[0]).all()
    assert run.verify()


def test_other_calls_between_runs(daemon: ScriptedDaemon, endpoint: str) -> None:
    """A fetch in progress keeps its replies while another call reads the socket."""
    daemon.on("match", hit(2))
    run = {"ready": [[0, "dram", b"", b"", 1]]}, [bytes(64)]
    end = {"ready": [[1, "dram", b"", b"", 1]]}, [bytes(64)]
    daemon.on("fetch", Many([run, end]))
    with Client(SPEC, endpoint, timeout_s=PLENTY_S) as client:
        firsts = []
        for got in client.fetch_runs(client.match(TOKENS)):
            firsts.append(got.first)
            assert client.match(TOKENS).hit_blocks == 2
        assert firsts == [0, 1]


def test_frames_of_a_put_stay_within_a_message(connect: Any, daemon: ScriptedDaemon) -> None:
    room = 64 << 10
    daemon.on("hello", greeting(max_message_bytes=room + 2 * 64))
    daemon.on("put", lambda seen: placed(*range(seen.body["first"], seen.body["last"])))
    daemon.on("commit", commit_all)
    client = connect()
    assert client.put(TOKENS, rows(4)) == PutResult(stored=4)
    assert [len(seen.parts) for seen in daemon.seen if seen.op == "commit"] == [2, 2]


def test_a_block_too_large_for_any_message_is_refused(connect: Any, daemon: ScriptedDaemon) -> None:
    daemon.on("hello", greeting(max_message_bytes=64))
    client = connect()
    assert client.put(TOKENS, rows(4)) == PutResult(refused=4)
    assert "larger" in client.last_error


def test_refused_blocks_are_offered_again_while_there_is_progress(
    connect: Any, daemon: ScriptedDaemon
) -> None:
    answers = iter(
        [
            placed(0, 1, refused=2),
            {**placed(2, refused=1), "present": 2},
            {**placed(refused=1), "present": 3},
            {**placed(3), "present": 3},
        ]
    )
    daemon.on("put", lambda seen: next(answers))
    daemon.on("commit", commit_all)
    assert connect().put(TOKENS, rows(4)) == PutResult(stored=4)


@pytest.mark.parametrize("durable", [False, True])
def test_a_commit_ends_with_its_put(connect: Any, daemon: ScriptedDaemon, durable: bool) -> None:
    """It had as long as any other call, however little was left of the put's own time."""
    daemon.on("put", placed(0, ticket=6))
    daemon.on("commit", HOLD)
    client = connect(put_timeout_s=1.0)
    assert client.put(TOKENS, rows(4), durable=durable) == PutResult(refused=4)
    assert daemon.wait_for("commit").request.deadline_s <= 1.0 < PLENTY_S * TOLD_SHARE
    assert daemon.wait_for("abort").body["ticket"] == 6


@pytest.mark.parametrize(
    ("left_s", "durable", "by_s"),
    [
        (5.0, False, 1.0),
        (5.0, True, 5.0),
        (0.5, False, 0.5),
        (0.5, True, 0.5),
        (-3.0, False, TELL_S),  # the copy took longer than the put may
        (-3.0, True, TELL_S),
    ],
)
def test_how_long_a_commit_is_waited_for(left_s: float, durable: bool, by_s: float) -> None:
    offer = Offer(b"", 0, 1, Source(rows(1), 0, 64), durable, 100.0 + left_s)
    assert offer.commit_by_s(100.0, call_s=1.0) == pytest.approx(100.0 + by_s)


def test_a_commit_that_was_not_carried_out_is_given_up(
    connect: Any, daemon: ScriptedDaemon
) -> None:
    """Its slots stayed with nobody for as long as the session lived."""
    daemon.on("put", placed(0, 1, ticket=8))
    daemon.on("commit", refuse("expired"))
    assert connect().put(TOKENS, rows(4)).stored == 0
    assert daemon.wait_for("abort").body["ticket"] == 8


def test_what_no_time_is_left_for_is_not_offered(connect: Any, daemon: ScriptedDaemon) -> None:
    """It was, with a deadline in the past, and the daemon that could not answer by then was taken
    for one that hangs."""
    late_s = 0.0

    def fill(index: int, view: np.ndarray[Any, Any]) -> None:
        nonlocal late_s
        late_s = 2 * PLENTY_S

    daemon.on("hello", greeting(max_message_bytes=(64 << 10) + 2 * 64))
    daemon.on("put", lambda seen: placed(*range(seen.body["first"], seen.body["last"])))
    daemon.on("commit", commit_all)
    client = connect(put_timeout_s=PLENTY_S)
    client._connection.clock = lambda: time.monotonic() + late_s
    assert client.put(TOKENS, fill) == PutResult(stored=2, refused=2)
    assert daemon.ops() == ["hello", "put", "commit"]
    assert "put's deadline passed" in client.last_error


def test_a_full_cache_refuses_and_that_is_all(connect: Any, daemon: ScriptedDaemon) -> None:
    daemon.on("put", placed(refused=4))
    assert connect().put(TOKENS, rows(4)) == PutResult(refused=4)
    assert daemon.ops() == ["hello", "put"]


def test_only_missing_blocks_are_filled(connect: Any, daemon: ScriptedDaemon) -> None:
    daemon.on("put", {**placed(2), "present": 3})
    daemon.on("commit", commit_all)
    filled = []

    def fill(index: int, view: np.ndarray[Any, Any]) -> None:
        filled.append(index)
        view[:] = index

    assert connect().put(TOKENS, fill).stored == 1
    assert filled == [2]
    assert daemon.wait_for("commit").parts == [bytes([2]) * 64]


def test_what_fill_raises_comes_out_and_the_ticket_goes_back(
    connect: Any, daemon: ScriptedDaemon
) -> None:
    daemon.on("put", placed(0, 1, ticket=5))

    def fill(index: int, view: np.ndarray[Any, Any]) -> None:
        raise ZeroDivisionError

    client = connect()
    with pytest.raises(ZeroDivisionError):
        client.put(TOKENS, fill)
    assert daemon.wait_for("abort").body["ticket"] == 5
    assert "commit" not in daemon.ops()


@pytest.mark.parametrize(
    "blocks",
    [
        np.zeros((4, 63), np.uint8),
        np.zeros((4, 64), np.int8),
        np.zeros(256, np.uint8),
        np.zeros((4, 128), np.uint8)[:, ::2],
        np.zeros((3, 64), np.uint8),
    ],
)
def test_a_callers_own_mistake_raises(connect: Any, blocks: Any) -> None:
    client = connect()
    with pytest.raises(ValueError, match="blocks"):
        client.put(TOKENS, blocks)


def test_other_mistakes_of_a_caller(connect: Any) -> None:
    client = connect()
    with pytest.raises(ValueError, match="whole blocks"):
        client.put(TOKENS, rows(5), last=5)
    with pytest.raises(ValueError, match="out must be"):
        client.fetch(Match.miss(""), np.zeros((1, 3), np.uint8))
    with pytest.raises(ValueError, match="token"):
        client.match([-1])
    with pytest.raises(ValueError, match="transport"):
        connect(transport="pigeon")


# --- blocks in an arena -------------------------------------------------------------------------


@pytest.fixture
def arena(folder: Path) -> Iterator[Arena]:
    arena = Arena.create(folder / "arena", 8 * 4096)
    yield arena
    arena.close()


def mapped(arena: Arena, **changed: Any) -> dict[str, Any]:
    file = {"tier": "dram", "path": str(arena.path), "bytes": arena.data_bytes}
    return greeting(transport="arena", arenas=[file], **changed)


def test_blocks_are_written_to_and_read_from_the_arena(
    connect: Any, daemon: ScriptedDaemon, arena: Arena
) -> None:
    daemon.on("hello", mapped(arena))
    daemon.on("put", placed(0, 1, 3, slots=(4, 5, 2)))
    daemon.on("commit", commit_all)
    client = connect()
    assert client.put(TOKENS, rows(4)).stored == 3
    assert daemon.wait_for("hello").body["transport"] == "auto"
    assert daemon.wait_for("commit").parts == []
    for slot, block in ((4, 0), (5, 1), (2, 3)):
        assert (arena.view(slot, 64) == rows(4)[block]).all()

    daemon.on("match", hit(3))
    daemon.on("fetch", {"ready": [[0, "dram", u32(4, 5, 2), u32(0, 0, 0), 3]], "blocks": 3})
    out = np.zeros((3, 64), np.uint8)
    assert client.fetch(client.match(TOKENS), out).blocks == 3
    assert (out == rows(4)[[0, 1, 3]]).all()


def test_another_generation_ends_the_prefix(
    connect: Any, daemon: ScriptedDaemon, arena: Arena
) -> None:
    """A slot that got another block while it was copied: race 1 of the arena."""
    daemon.on("hello", mapped(arena))
    daemon.on("match", hit(4))
    runs = [[first, "dram", u32(first), u32(0), 1] for first in range(4)]
    daemon.on("fetch", {"ready": runs, "blocks": 4})
    arena.raise_generations(np.array([2], np.int32))
    client = connect()
    assert client.fetch(client.match(TOKENS), rows(4)).blocks == 2
    assert "reused" in client.last_error
    verdicts = [run.verify() for run in client.fetch_runs(client.match(TOKENS))]
    assert verdicts == [True, True, False, True]


@pytest.mark.parametrize("slot", [8, 2**31, 2**32 - 1])
def test_a_slot_beyond_the_arena_is_a_miss(
    connect: Any, daemon: ScriptedDaemon, arena: Arena, slot: int
) -> None:
    daemon.on("hello", mapped(arena))
    daemon.on("match", hit(1))
    daemon.on("fetch", {"ready": [[0, "dram", u32(slot), u32(0), 1]], "blocks": 1})
    daemon.on("put", placed(0, slots=(slot,), ticket=3))
    client = connect()
    assert client.fetch(client.match(TOKENS), rows(1)).blocks == 0
    assert client.put(TOKENS, rows(4)).stored == 0
    assert daemon.wait_for("abort").body["ticket"] == 3


def test_fill_writes_into_the_arena(connect: Any, daemon: ScriptedDaemon, arena: Arena) -> None:
    daemon.on("hello", mapped(arena))
    daemon.on("put", placed(1, slots=(6,)))
    daemon.on("commit", commit_all)
    assert connect().put(TOKENS, lambda index, view: view.fill(index + 40)).stored == 1
    assert (arena.view(6, 64) == 41).all()


def test_a_new_session_maps_the_new_arena(
    connect: Any, daemon: ScriptedDaemon, arena: Arena, folder: Path
) -> None:
    daemon.on("hello", mapped(arena))
    daemon.on("match", hit(1))
    daemon.on("fetch", {"ready": [[0, "dram", u32(0), u32(0), 1]], "blocks": 1})
    client = connect()
    (before,) = list(client.fetch_runs(client.match(TOKENS)))
    other = Arena.create(folder / "other", 8 * 4096)
    other.view(0, 64)[:] = 99
    second = bytes(16)
    daemon.on("hello", mapped(other, session=second, epoch="e2"))
    daemon.on(
        "match",
        lambda seen: hit(1) if seen.request.s == second else refuse("unknown_session"),
    )
    out = rows(1)
    assert client.fetch(client.match(TOKENS), out).blocks == 1
    assert (out == 99).all()
    assert len(before.views[0]) == 64
    assert not before.verify()
    other.close()


def test_an_arena_that_cannot_be_mapped_means_frames(
    connect: Any, daemon: ScriptedDaemon, arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    def by_transport(seen: Seen) -> dict[str, Any]:
        if seen.body["transport"] == "frames":
            return greeting()
        missing = [{"tier": "dram", "path": "/nowhere/arena", "bytes": 4096}]
        return greeting(transport="arena", arenas=missing)

    daemon.on("hello", by_transport)
    daemon.on("match", hit(1))
    daemon.on("fetch", Many([({"ready": [[0, "dram", b"", b"", 1]]}, [bytes(64)])]))
    client = connect()
    with caplog.at_level(logging.WARNING):
        assert client.fetch(client.match(TOKENS), rows(1)).blocks == 1
    assert [record.name for record in caplog.records if "cannot map" in record.message] == [
        "hicache.client"
    ]
    assert client.greeting.transport == "frames"


def test_an_arena_that_was_asked_for_and_cannot_be_mapped_is_a_miss(
    connect: Any, daemon: ScriptedDaemon
) -> None:
    missing = [{"tier": "dram", "path": "/nowhere/arena", "bytes": 4096}]
    daemon.on("hello", greeting(transport="arena", arenas=missing))
    client = connect(transport="arena")
    assert "/nowhere/arena" in client.match(TOKENS).decision.sentence


@pytest.mark.parametrize(
    ("transport", "scheme", "said"),
    [
        ("auto", "ipc", "auto"),
        ("auto", "tcp", "frames"),
        ("arena", "tcp", "arena"),
        ("frames", "ipc", "frames"),
    ],
)
def test_which_transport_is_asked_for(
    endpoint: str, transport: Any, scheme: str, said: str
) -> None:
    """Over tcp the arena's path is another host's, unless the caller knows better."""
    if scheme == "tcp":
        with socket.create_server(("127.0.0.1", 0)) as server:
            endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    with (
        ScriptedDaemon(endpoint) as daemon,
        Client(SPEC, endpoint, timeout_s=PLENTY_S, transport=transport) as client,
    ):
        daemon.on("match", hit(0))
        assert client.match(TOKENS).is_answered
        assert daemon.wait_for("hello").body["transport"] == said


# --- asyncio alone ------------------------------------------------------------------------------


def test_calls_side_by_side(daemon: ScriptedDaemon, endpoint: str) -> None:
    """One session is opened for all; replies out of order find their calls."""
    held: list[Seen] = []

    def last_one_answers_all(seen: Seen) -> Any:
        held.append(seen)
        if len(held) == 8:
            for each in reversed(held):
                daemon.answer(each, hit(int(each.body["request"])))
        return HOLD

    daemon.on("match", last_one_answers_all)

    async def main() -> list[int]:
        async with AsyncClient(SPEC, endpoint, timeout_s=PLENTY_S) as client:
            calls = [client.match(TOKENS, request=str(number)) for number in range(8)]
            return [match.hit_blocks for match in await asyncio.gather(*calls)]

    assert asyncio.run(main()) == list(range(8))
    assert daemon.ops().count("hello") == 1


def test_a_cancelled_put_ends_when_its_writing_has(
    daemon: ScriptedDaemon, endpoint: str, arena: Arena
) -> None:
    daemon.on("hello", mapped(arena))
    daemon.on("put", placed(0, slots=(0,), ticket=4))
    writing, go_on, written = threading.Event(), threading.Event(), threading.Event()

    def fill(index: int, view: np.ndarray[Any, Any]) -> None:
        writing.set()
        assert go_on.wait(PLENTY_S)
        written.set()

    async def main() -> None:
        async with AsyncClient(SPEC, endpoint, timeout_s=PLENTY_S) as client:
            putting = asyncio.create_task(client.put(TOKENS, fill, last=1))
            await asyncio.to_thread(writing.wait)
            putting.cancel()
            await asyncio.sleep(0)
            assert not putting.done()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await putting
            assert written.is_set()

    asyncio.run(main())
    assert daemon.wait_for("abort").body["ticket"] == 4


# --- without a session --------------------------------------------------------------------------


def test_an_admin_call(daemon: ScriptedDaemon, endpoint: str) -> None:
    daemon.on("stats", {"uptime_s": 1.5})
    daemon.on("reload", refuse("forbidden"))
    assert admin_call(endpoint, "stats") == {"uptime_s": 1.5}
    with pytest.raises(DaemonError, match="forbidden") as caught:
        admin_call(endpoint, "reload", {"file": "/x"})
    assert caught.value.code == "forbidden"
    assert daemon.ops() == ["stats", "reload"]


def test_an_admin_call_to_nobody(endpoint: str) -> None:
    for nobody in (endpoint, "tcp://127.0.0.1:1", "nonsense"):
        with pytest.raises(DaemonAbsent) as caught:
            admin_call(nobody, "stats", timeout_s=PLENTY_S)
        assert nobody in str(caught.value)


class AddedRequest(Request, tag="added_by_this_test"):
    text: str


class AddedReply(Reply):
    length: Count


@pytest.fixture
def added() -> Iterator[Operation[AddedRequest, AddedReply]]:
    declared = messages.declare(Operation(AddedRequest, AddedReply))
    yield declared
    del OPERATIONS[declared.name], messages._BY_REQUEST[declared.request]
    messages._decoder.cache_clear()


def test_an_operation_of_another_package_is_one_method(
    added: Operation[AddedRequest, AddedReply], endpoint: str
) -> None:
    """Of each client: the reply's fields are checked as those of any operation."""

    class MyClient(Client):
        def length(self, text: str) -> AddedReply | None:
            return self.call(added, text=text)

    class MyAsyncClient(AsyncClient):
        async def length(self, text: str) -> AddedReply | None:
            return await self.call(added, text=text)

    async def main() -> AddedReply | None:
        async with MyAsyncClient(SPEC, endpoint, timeout_s=PLENTY_S) as client:
            return await client.length("four")

    with (
        ScriptedDaemon(endpoint) as daemon,
        MyClient(SPEC, endpoint, timeout_s=PLENTY_S) as client,
    ):
        daemon.on("added_by_this_test", lambda seen: {"length": len(seen.body["text"])})
        found, also = client.length("text"), asyncio.run(main())
        assert found is not None
        assert also is not None
        assert (found.length, also.length) == (4, 4)
        assert client.greeting is not None
        assert daemon.wait_for("added_by_this_test").request.s == client.greeting.session
        daemon.on("added_by_this_test", {"length": -1})
        assert client.length("text") is None
        assert "length" in client.last_error


def test_parameters_and_documentation_are_those_that_were_declared() -> None:
    kinds: tuple[Any, ...] = (Client, AsyncClient)
    for kind in kinds:
        parameters = inspect.signature(kind.put).parameters
        assert list(parameters) == ["self", "tokens", "blocks", "first", "last", "durable"]
        assert str(kind.put.__doc__).startswith("Store blocks")


def test_both_clients_have_the_same_names() -> None:
    def names(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert names(Client) == names(AsyncClient)
    pages = {"register", "load", "save", "unregister"}
    with_session = {op for op, declared in PRODUCT.items() if declared.needs_session}
    assert names(Client) >= (with_session - pages - {"commit", "abort", "bye"})
    assert names(Client) >= {"share_pages", "load_pages", "save_pages", "unshare_pages"}


# --- scores -------------------------------------------------------------------------------------


def scored(seen: Seen) -> dict[str, Any]:
    """As many blocks as a prompt has, all on disk."""
    lengths = np.frombuffer(seen.body["lengths"], "<u4").tolist()
    assert sum(lengths) * 4 == len(seen.body["tokens"])
    one = {"reload_s": 1.0, "prefill_s": 2.0, "recompute_s": 9.0}
    return {
        "block_tokens": 4,
        "measured": True,
        "scores": [
            {"hit_blocks": n // 4, "runs": [["disk", n // 4]], "reload_blocks": n // 4, **one}
            for n in lengths
        ],
    }


def test_scores_of_any_number_of_prompts(connect: Any, daemon: ScriptedDaemon) -> None:
    """In requests of 128 prompts or 2²¹ tokens; no session is opened for it."""
    daemon.on("score", scored)
    client = connect()
    assert client.score([]) == []
    scores = client.score([TOKENS[: 4 * (n % 4)] for n in range(130)])
    assert [score.hit_blocks for score in scores] == [n % 4 for n in range(130)]
    assert (scores[1].hit_tokens, scores[1].runs) == (4, (("disk", 1),))
    assert (scores[1].expected_s, scores[1].saved_s) == (3.0, 6.0)
    assert all(score.is_measured and score.is_answered for score in scores)
    long = np.zeros(MAX_SCORED_TOKENS + 9, "<u4")
    most = MAX_SCORED_TOKENS // 4
    assert [score.hit_blocks for score in client.score([long, TOKENS, long[:-9]])] == [
        most,
        4,
        most,
    ]
    daemon.on("score", lambda seen: scored(seen) | {"measured": False})
    (unmeasured,) = client.score([TOKENS])
    assert (unmeasured.hit_blocks, unmeasured.expected_s, unmeasured.saved_s) == (4, None, None)
    assert daemon.ops() == ["score"] * 6
    assert {seen.body["namespace"] for seen in daemon.seen} == {SPEC.digest()}
    assert not client.connected


@pytest.mark.parametrize(
    "trouble",
    [
        refuse("stopping"),
        b"garbage",
        DIE,
        {"block_tokens": 4, "measured": True, "scores": []},
        {"block_tokens": 4, "measured": True, "scores": [7, 7]},
        {"block_tokens": 4, "scores": [{}, {}]},
    ],
)
def test_scores_that_nobody_told(connect: Any, daemon: ScriptedDaemon, trouble: Any) -> None:
    """What came before the trouble counts, what did not come is not answered; nothing is raised."""
    daemon.on("score", lambda seen: scored(seen) if len(daemon.seen) == 1 else trouble)
    client = connect()
    scores = client.score([TOKENS] * 130)
    assert [score.is_answered for score in scores] == [True] * 128 + [False] * 2
    assert scores[-1].hit_blocks == 0
    assert client.last_error


# --- warming ------------------------------------------------------------------------------------


def test_a_prompt_is_warmed_without_a_session(connect: Any, daemon: ScriptedDaemon) -> None:
    daemon.on("warm", {"held_blocks": 4, "warm_blocks": 1, "refused_blocks": 2})
    client = connect()
    warmed = client.warm(TOKENS)
    assert warmed
    assert (warmed.held_blocks, warmed.warm_blocks, warmed.refused_blocks) == (4, 1, 2)
    client.warm(TOKENS, wait_s=30.0)
    assert [seen.body["wait"] for seen in daemon.seen] == [False, True]
    assert [seen.body["namespace"] for seen in daemon.seen] == [SPEC.digest()] * 2
    assert daemon.seen[1].request.deadline_s == pytest.approx(30.1 / 0.95), "ends at 30 s"
    assert not client.connected


@pytest.mark.parametrize(
    "trouble",
    [
        refuse("refused"),
        b"garbage",
        DIE,
        {"held_blocks": 1, "warm_blocks": 1, "refused_blocks": 1},
        {"held_blocks": 1, "warm_blocks": 1},
        {"held_blocks": -1, "warm_blocks": 0, "refused_blocks": 0},
    ],
)
def test_a_warming_that_nobody_answers(connect: Any, daemon: ScriptedDaemon, trouble: Any) -> None:
    daemon.on("warm", trouble)
    client = connect()
    warmed = client.warm(TOKENS)
    assert not warmed
    assert warmed.held_blocks == 0
    assert client.last_error


# --- pins ---------------------------------------------------------------------------------------


def test_a_prompt_is_pinned_and_unpinned_without_a_session(
    connect: Any, daemon: ScriptedDaemon
) -> None:
    daemon.on("pin", {"pin": "e-7", "blocks": 4, "epoch": "e"})
    daemon.on("unpin", lambda seen: {"unpinned": seen.body["pin"] == "e-7"})
    client = connect()
    pinned = client.pin(TOKENS, ttl_s=60, name="tools")
    assert pinned
    assert (pinned.pin, pinned.blocks, pinned.epoch) == ("e-7", 4, "e")
    assert client.unpin(pinned) is True
    assert client.unpin("e-7") is True
    assert client.unpin("e-8") is False
    body = daemon.seen[0].body
    assert (body["ttl_s"], body["name"], body["namespace"]) == (60.0, "tools", SPEC.digest())
    assert not client.connected
    daemon.on("pin", {"pin": "", "blocks": 0, "epoch": "e"})
    assert not client.pin(TOKENS)
    assert not client.last_error


@pytest.mark.parametrize(
    "trouble",
    [
        refuse("refused"),
        b"garbage",
        DIE,
        {"pin": "e-7", "blocks": 0, "epoch": "e"},
        {"pin": "", "blocks": 2, "epoch": "e"},
        {"pin": 7, "blocks": 2, "epoch": "e"},
    ],
)
def test_a_pin_that_nobody_answers(connect: Any, daemon: ScriptedDaemon, trouble: Any) -> None:
    daemon.on("pin", trouble)
    client = connect()
    assert not client.pin(TOKENS)
    assert client.last_error


@pytest.mark.parametrize("trouble", [refuse("internal"), b"garbage", DIE, {}, {"unpinned": 1}])
def test_an_unpin_that_nobody_answers(connect: Any, daemon: ScriptedDaemon, trouble: Any) -> None:
    daemon.on("unpin", trouble)
    client = connect()
    assert client.unpin("e-7") is False
    assert client.last_error

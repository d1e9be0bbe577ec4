"""The client's core by itself: no socket, no thread; a test feeds replies and moves the clock.

What goes out, in which order and with which deadline; replies that are malformed, late, or from
another run of the daemon; the circuit breaker; calls side by side; what is cleaned up.
"""

from __future__ import annotations

import ast
import inspect
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hicache.client import calls, put, replies, results, session, steps
from hicache.client.results import Match, PutResult
from hicache.client.session import TOLD_SHARE, DaemonAbsent
from hicache.client.steps import Give, HangUp, MapArenas, Pause, Send, Wait, Work
from hicache.protocol.messages import pack
from tests.client.by_hand import TOKENS, ByHand, Call
from tests.client.scripted_daemon import greeting, hit


@pytest.fixture
def core() -> ByHand:
    return ByHand()


@pytest.fixture
def open_core(core: ByHand) -> ByHand:
    core.greeted()
    return core


def ping_reply(epoch: str = "e1") -> dict[str, Any]:
    return {"epoch": epoch, "version": "0", "pid": 1, "uptime_s": 1.0, "ready": True, "tiers": {}}


def u32(*numbers: int) -> bytes:
    return np.array(numbers, "<u4").tobytes()


def placed(*indices: int, ticket: int = 1, refused: int = 0) -> dict[str, Any]:
    return {
        "ticket": ticket if indices else 0,
        "tier": "dram",
        "indices": u32(*indices),
        "slots": b"",
        "present": 0,
        "busy": 0,
        "refused": refused,
    }


def blocks(count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.arange(count, dtype=np.uint8)[:, None] + np.zeros((count, 64), np.uint8)


@pytest.mark.parametrize("module", [calls, put, replies, results, session, steps])
def test_the_core_does_no_io(module: ModuleType) -> None:
    imported = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Import):
            imported |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    assert not imported & {"asyncio", "os", "select", "socket", "threading", "time", "zmq"}


# --- what goes out ------------------------------------------------------------------------------


def test_the_first_call_opens_a_session(core: ByHand) -> None:
    call = core.begin(core.client.match(TOKENS, request="r"))
    hello = call.sent("hello")
    assert (hello.protocol, hello.transport, hello.s) == (1, "auto", b"")
    call.reply(greeting())
    match = call.sent("match")
    assert (match.s, match.tokens, match.request) == (bytes(range(16)), u32(*TOKENS), "r")
    call.reply(hit(3))
    assert call.result.hit_blocks == 3
    assert call.result.session == bytes(range(16))


def test_a_request_is_given_a_little_less_time_than_is_left(open_core: ByHand) -> None:
    call = open_core.begin(open_core.client.match(TOKENS))
    request = call.sent("match")
    assert request.sent_s == 100.0
    assert request.deadline_s == pytest.approx(TOLD_SHARE * 1.0)


def test_the_time_that_hello_took_is_gone(core: ByHand) -> None:
    call = core.begin(core.client.match(TOKENS))
    call.sent("hello")
    core.now_s += 0.75
    call.reply(greeting())
    assert call.sent("match").deadline_s == pytest.approx(TOLD_SHARE * 0.25)


def test_a_reply_may_come_with_the_sending(open_core: ByHand) -> None:
    """As the blocking driver does it: one send and one receive are one step."""
    call = open_core.begin(open_core.client.match(TOKENS))
    assert isinstance(call.step, Send)
    call.go_on([pack({"id": 3, "ok": True, **hit(2)})])
    assert call.step is None
    assert call.result.hit_blocks == 2


def test_another_calls_reply_may_come_with_the_sending(open_core: ByHand) -> None:
    first = open_core.begin(open_core.client.match(TOKENS))
    request = first.sent("match")
    second = open_core.begin(open_core.client.match(TOKENS))
    second.go_on([pack({"id": request.id, "ok": True, **hit(1)})])
    assert isinstance(second.step, Wait)
    first.go_on()
    assert first.result.hit_blocks == 1
    open_core.connection.feed([pack({"id": request.id + 1, "ok": True, **hit(2)})])
    second.go_on()
    assert second.result.hit_blocks == 2


# --- deadlines ----------------------------------------------------------------------------------


def test_a_call_ends_at_its_deadline(open_core: ByHand) -> None:
    call = open_core.begin(open_core.client.match(TOKENS))
    call.sent("match")
    assert isinstance(call.step, Wait)
    assert call.step.deadline_s == 101.0
    open_core.now_s = 100.9
    call.go_on()
    assert isinstance(call.step, Wait), "woken for no reason"
    open_core.now_s = 101.0
    call.go_on()
    assert not call.result.is_answered
    assert "no answer in time" in call.result.decision.sentence
    assert open_core.connection.last_error == call.result.decision.sentence


def test_a_reply_that_has_come_counts_even_after_the_deadline(open_core: ByHand) -> None:
    call = open_core.begin(open_core.client.match(TOKENS))
    call.sent("match")
    open_core.now_s = 200.0
    call.reply(hit(1))
    assert call.result.hit_blocks == 1


def test_a_fetch_ends_at_its_own_deadline_with_what_has_come(open_core: ByHand) -> None:
    match = Match(1, 4, (), hit_decision(4), session=bytes(range(16)))
    out = blocks(4)
    call = open_core.begin(open_core.client.fetch(match, out))
    call.sent("fetch")
    call.reply({"ready": [[0, "dram", b"", b"", 2]], "more": True}, bytes(64), bytes(64))
    assert isinstance(call.step, Work)
    call.go_on(call.step.task())
    assert isinstance(call.step, Wait)
    assert call.step.deadline_s == 105.0
    open_core.now_s = 105.0
    call.go_on()
    assert call.result.blocks == 2
    assert call.result.seconds == 5.0
    assert not out[:2].any()


def hit_decision(blocks: int) -> Any:
    return results.Decision("reload", blocks, "cheaper")


# --- the circuit breaker ------------------------------------------------------------------------


def missed(core: ByHand) -> Call:
    """A call that no daemon can be reached for."""
    call = core.begin(core.client.match(TOKENS))
    call.fail(DaemonAbsent("no daemon answers"))
    assert not call.result.is_answered
    return call


def test_after_a_failure_calls_are_refused_until_the_retry_time(core: ByHand) -> None:
    missed(core)
    refused = core.begin(core.client.match(TOKENS))
    assert refused.step is None, "nothing is sent"
    assert refused.result.decision.sentence == "no daemon answers"
    core.now_s += 0.1
    probe = core.begin(core.client.match(TOKENS))
    assert isinstance(probe.step, Send)
    assert core.begin(core.client.match(TOKENS)).step is None, "one probe at a time"
    probe.sent("hello")
    probe.reply(greeting())
    probe.sent("match")
    probe.reply(hit(1))
    assert core.begin(core.client.match(TOKENS)).step is not None


def test_each_failure_doubles_the_wait(core: ByHand) -> None:
    for wait_s in (0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0):
        missed(core)
        core.now_s += wait_s - 0.01
        assert core.begin(core.client.match(TOKENS)).step is None
        core.now_s += 0.02


def test_an_error_of_one_call_does_not_open_the_breaker(open_core: ByHand) -> None:
    call = open_core.begin(open_core.client.match(TOKENS))
    call.sent("match")
    call.refuse("internal")
    assert not call.result.is_answered
    assert open_core.begin(open_core.client.match(TOKENS)).step is not None


def test_a_stopping_daemon_opens_the_breaker(open_core: ByHand) -> None:
    call = open_core.begin(open_core.client.match(TOKENS))
    call.sent("match")
    call.refuse("stopping")
    assert open_core.begin(open_core.client.match(TOKENS)).step is None


# --- replies that are wrong ---------------------------------------------------------------------


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x80", b"garbage", b"\x81\xa2id\x01"])
def test_garbage_ends_the_connection(open_core: ByHand, raw: bytes) -> None:
    call = open_core.begin(open_core.client.match(TOKENS))
    call.go_on([raw])
    assert isinstance(call.step, HangUp)
    open_core.connection.lost(call.step.why)  # the driver has closed it
    call.go_on()
    assert "garbage" in call.result.decision.sentence
    assert "garbage" in open_core.connection.feed([raw]), "a driver that feeds it is told to"


@pytest.mark.parametrize(
    "change",
    [{"lease": -1}, {"lease": True}, {"runs": [["dram"]]}, {"decision": None}, {"hit_blocks": 0}],
)
def test_a_malformed_match_is_a_miss(open_core: ByHand, change: dict[str, Any]) -> None:
    call = open_core.begin(open_core.client.match(TOKENS))
    call.sent("match")
    call.reply({**hit(4), **change})
    assert not call.result.is_answered
    assert open_core.connection.last_error
    assert open_core.begin(open_core.client.match(TOKENS)).step is not None, "something answers"


def test_fields_that_are_not_known_are_passed_over(open_core: ByHand) -> None:
    """A daemon of a later version may say more."""
    call = open_core.begin(open_core.client.ping())
    call.sent("ping")
    call.reply({**ping_reply(), "mood": "good"})
    assert call.result.epoch == "e1"


def test_a_lost_connection_fails_every_waiting_call(open_core: ByHand) -> None:
    waiting = [open_core.begin(open_core.client.match(TOKENS)) for _ in range(3)]
    for call in waiting:
        call.sent("match")
    open_core.connection.lost("the daemon has gone")
    for call in waiting:
        call.go_on()
        assert call.result.decision.sentence == "the daemon has gone"


# --- late replies -------------------------------------------------------------------------------


def test_a_late_match_gives_its_lease_back(open_core: ByHand) -> None:
    call = open_core.begin(open_core.client.match(TOKENS))
    late = call.sent("match")
    open_core.now_s += 2.0
    call.go_on()
    open_core.feed(late, hit(4, lease=77))
    open_core.now_s += 2.0
    following = open_core.begin(open_core.client.match(TOKENS))
    released = following.sent("release")
    assert (released.lease, released.quiet) == (77, True)
    following.sent("match")
    following.reply(hit(0))
    assert following.result.is_answered


def test_a_late_match_of_a_lost_session_gives_nothing_back(open_core: ByHand) -> None:
    call = open_core.begin(open_core.client.match(TOKENS))
    late = call.sent("match")
    open_core.now_s += 2.0
    call.go_on()
    open_core.connection.lose(bytes(range(16)))
    open_core.feed(late, hit(4, lease=77))
    open_core.now_s += 2.0
    assert open_core.begin(open_core.client.match(TOKENS)).sent("hello")


def test_a_cancelled_match_gives_its_lease_back(open_core: ByHand) -> None:
    call = open_core.begin(open_core.client.match(TOKENS))
    cancelled = call.sent("match")
    with pytest.raises(KeyboardInterrupt):
        call.fail(KeyboardInterrupt())
    open_core.feed(cancelled, hit(4, lease=5))
    assert open_core.begin(open_core.client.match(TOKENS)).sent("release").lease == 5


def test_a_reply_to_no_request_is_dropped(open_core: ByHand) -> None:
    assert open_core.connection.feed([pack({"id": 999, "ok": True, **hit(4)})]) == ""
    assert open_core.begin(open_core.client.match(TOKENS)).sent("match")


# --- sessions -----------------------------------------------------------------------------------


def test_an_unknown_session_is_opened_anew_once(open_core: ByHand) -> None:
    call = open_core.begin(open_core.client.match(TOKENS))
    call.sent("match")
    call.refuse("unknown_session")
    call.sent("hello")
    call.reply(greeting(session=bytes(16), epoch="e2"))
    assert call.sent("match").s == bytes(16)
    call.refuse("unknown_session")
    assert not call.result.is_answered


def test_another_epoch_ends_the_session(open_core: ByHand) -> None:
    """Leases of before are neither fetched nor released."""
    match = Match(1, 4, (), hit_decision(4), session=bytes(range(16)))
    call = open_core.begin(open_core.client.ping())
    call.sent("ping")
    call.reply(ping_reply("e2"))
    assert open_core.connection.greeting is None
    fetch = open_core.begin(open_core.client.fetch(match, blocks(4)))
    assert fetch.step is None
    assert fetch.result.blocks == 0
    assert open_core.begin(open_core.client.release(match)).step is None


def test_calls_side_by_side_open_one_session(core: ByHand) -> None:
    first = core.begin(core.client.match(TOKENS))
    first.sent("hello")
    second = core.begin(core.client.match(TOKENS))
    assert isinstance(second.step, Wait)
    first.reply(greeting())
    first.sent("match")
    second.go_on()
    assert second.sent("match").s == bytes(range(16))


def test_the_second_call_opens_the_session_where_the_first_could_not(core: ByHand) -> None:
    first = core.begin(core.client.match(TOKENS))
    first.sent("hello")
    second = core.begin(core.client.match(TOKENS))
    first.refuse("internal")
    assert not first.result.is_answered
    second.go_on()
    assert second.sent("hello")


def test_a_call_that_waits_for_another_ones_hello_ends_in_time(core: ByHand) -> None:
    first = core.begin(core.client.match(TOKENS))
    first.sent("hello")
    second = core.begin(core.client.match(TOKENS))
    core.now_s += 1.0
    second.go_on()
    assert "no answer in time" in second.result.decision.sentence
    assert isinstance(first.step, Wait)


def test_arenas_that_cannot_be_mapped_mean_frames(core: ByHand) -> None:
    call = core.begin(core.client.heartbeat())
    call.sent("hello")
    file = {"tier": "dram", "path": "/nowhere/arena", "bytes": 4096}
    call.reply(greeting(transport="arena", arenas=[file]))
    assert isinstance(call.step, MapArenas)
    assert call.step.paths == ["/nowhere/arena"]
    call.fail(FileNotFoundError("/nowhere/arena"))
    call.sent("bye")
    assert call.sent("hello").transport == "frames"
    call.reply(greeting())
    call.sent("heartbeat")
    call.reply({})
    assert call.result is True
    assert core.connection.has_parts


def test_close_says_bye_over_an_open_connection_only(open_core: ByHand) -> None:
    call = open_core.begin(open_core.client.close())
    assert isinstance(call.step, Send)
    assert not call.step.may_connect
    call.sent("bye")
    call.reply({})
    assert isinstance(call.step, HangUp)
    assert call.step.is_final
    call.go_on()
    assert open_core.connection.greeting is None


def test_a_child_process_begins_anew(open_core: ByHand) -> None:
    open_core.connection.forked()
    assert open_core.begin(open_core.client.match(TOKENS)).sent("hello")


# --- puts ---------------------------------------------------------------------------------------


def test_a_put_offers_again_while_room_turns_up(open_core: ByHand) -> None:
    call = open_core.begin(open_core.client.put(TOKENS, blocks(4)))
    call.sent("put")
    call.reply(placed(0, 1, refused=2))
    assert isinstance(call.step, Work)
    call.go_on(call.step.task())
    assert isinstance(call.step, Send)
    assert [bytes(part) for part in call.step.frames[1:]] == [bytes(64), bytes([1]) * 64]
    call.sent("commit")
    call.reply({"committed": 2, "durable": False})
    call.sent("put")
    call.reply({**placed(refused=2), "present": 2})
    assert isinstance(call.step, Pause)
    open_core.now_s += 0.2
    call.go_on()
    call.sent("put")
    call.reply({**placed(refused=2), "present": 2})
    assert call.result == PutResult(stored=2, refused=2)


def test_what_a_copy_raises_gives_the_ticket_up(open_core: ByHand) -> None:
    call = open_core.begin(open_core.client.put(TOKENS, lambda index, view: None))
    call.sent("put")
    call.reply(placed(0, 1, ticket=9))
    assert isinstance(call.step, Work)
    call.fail(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        assert call.sent("abort").ticket == 9
    assert [request.ticket for request in open_core.requests if hasattr(request, "ticket")] == [9]


# --- streams ------------------------------------------------------------------------------------


def test_a_stream_gives_runs_as_they_come(open_core: ByHand) -> None:
    match = Match(1, 2, (), hit_decision(2), session=bytes(range(16)))
    call = open_core.begin(open_core.client.fetch_runs(match))
    call.sent("fetch")
    call.reply({"ready": [[1, "dram", b"", b"", 1]], "more": True}, bytes(64))
    assert isinstance(call.step, Give)
    assert call.step.item.first == 1
    call.go_on()
    call.reply({"ready": [[0, "dram", b"", b"", 1]]}, bytes(64))
    assert isinstance(call.step, Give)
    call.go_on()
    assert call.step is None

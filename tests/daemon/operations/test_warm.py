"""Warming and pinning by request and reply: what is taken, what is refused, who is told when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hicache.config import DeadlinesConfig, LimitsConfig
from hicache.daemon.operations.pin import MAX_PINS, pin_rows
from hicache.daemon.operations.warm import MAX_WARMINGS
from hicache.engine import plan as p
from hicache.protocol.messages import WireError
from hicache.protocol.operations import MAX_PIN_S
from tests.daemon.test_dispatch import Desk
from tests.engine.test_races import DRAM_DISK, END, on_disk_only
from tests.engine.world import DIGEST, MAPPED, ON_DISK, STEP, tokens_of

A = tokens_of(1, 2, 3)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    desk = Desk(tmp_path, DRAM_DISK)
    on_disk_only(desk.world, A)
    return desk


def about(prompt: bytes, **changes: Any) -> dict[str, Any]:
    return {"namespace": DIGEST, "tokens": prompt, **changes}


def counts(reply: dict[str, Any]) -> tuple[int, int, int]:
    return reply["held_blocks"], reply["warm_blocks"], reply["refused_blocks"]


def finish(desk: Desk, *moves: int) -> None:
    """These moves end, and the service hears of it."""
    desk.service.answer_waiting(desk.world.finish(*moves), desk.world.now_s)


def test_a_warming_is_answered_when_it_is_planned(desk: Desk) -> None:
    assert counts(desk.ask("warm", **about(A + END))) == (3, 0, 0)
    finish(desk, *desk.world.in_flight)
    assert len(desk.sent) == 1
    assert counts(desk.ask("warm", **about(A + END))) == (3, 3, 0)
    assert not desk.world.engine.residency.leases.leases


def test_who_waits_is_told_at_its_end(desk: Desk) -> None:
    desk.request("warm", **about(A), wait=True)
    first, *others = desk.world.in_flight
    finish(desk, first)
    assert not desk.sent
    assert len(desk.gate.waiting) == 1
    finish(desk, *others)
    assert counts(desk.sent[-1].message) == (3, 3, 0)
    assert len(desk.sent) == 1
    assert len(desk.gate.waiting) == 0


def test_who_waits_has_an_answer_by_the_deadline(desk: Desk) -> None:
    """With what has come by then; what travels arrives and stays."""
    desk.request("warm", **about(A), wait=True, deadline_s=2.0)
    first, *others = desk.world.in_flight
    finish(desk, first)
    desk.service.tick(desk.world.now_s + 0.7)
    assert not desk.sent
    desk.service.tick(desk.world.now_s + 1.9)
    assert counts(desk.sent[-1].message) == (3, 1, 2)
    assert not desk.world.engine.residency.leases.leases
    finish(desk, *others)
    assert len(desk.sent) == 1
    assert counts(desk.ask("warm", **about(A))) == (3, 3, 0)


def test_nobody_waits_for_what_is_warm_or_unknown(desk: Desk) -> None:
    assert counts(desk.ask("warm", **about(tokens_of(7, 8)), wait=True)) == (0, 0, 0)
    assert counts(desk.ask("warm", **about(A, namespace=b"x" * 32), wait=True)) == (0, 0, 0)
    assert not desk.world.engine.knows(b"x" * 32)
    assert not desk.world.in_flight


def test_a_warming_that_nobody_waits_for_holds_nothing_for_ever(desk: Desk) -> None:
    desk.ask("warm", **about(A))
    leases = desk.world.engine.residency.leases.leases
    assert len(leases) == 1
    desk.service.tick(desk.world.now_s + desk.gate.limits.lease_ttl_s + 1)
    assert not leases


def test_a_warming_is_no_mans_lease(desk: Desk) -> None:
    """A session cannot release it, and it does not end with one."""
    session = desk.hello()
    desk.ask("warm", **about(A))
    (lease,) = desk.world.engine.residency.leases.leases
    assert not desk.ask("release", s=session.token, lease=lease)["released"]
    with pytest.raises(WireError) as error:
        desk.ask("fetch", s=session.token, lease=lease)
    assert error.value.code == "unknown_lease"
    desk.world.do(p.WriterGone(session.group.number, desk.world.now_s))
    assert lease in desk.world.engine.residency.leases.leases


def test_warmings_give_way_before_a_match_is_refused(desk: Desk) -> None:
    """1. The disk stands still while a prompt is warmed, most of which lies in memory. 2. That is
    more than leases may hold. 3. The warming ends, who waits for it is told, and others are
    served."""
    session = desk.hello()
    desk.gate.configure(DeadlinesConfig(), LimitsConfig(max_leased=0.25))
    desk.request("warm", **about(A), wait=True)
    first, second, _ = desk.world.in_flight
    finish(desk, first, second)
    assert len(desk.sent) == 1, "it was not answered yet"
    desk.service.tick(desk.world.now_s)
    assert counts(desk.sent[-1].message) == (3, 2, 1)
    assert not desk.world.engine.residency.leases.leases
    assert desk.gate.leased_share == 0
    assert desk.ask("match", s=session.token, tokens=A)["ok"]


def test_warmings_are_leases_too(desk: Desk) -> None:
    desk.gate.configure(DeadlinesConfig(), LimitsConfig(max_leases=1))
    desk.ask("warm", **about(A))
    with pytest.raises(WireError, match="max_leases") as error:
        desk.ask("warm", **about(A))
    assert error.value.code == "refused"


def test_only_so_many_are_warmed_at_once(desk: Desk) -> None:
    for _ in range(MAX_WARMINGS):
        desk.ask("warm", **about(A))
    with pytest.raises(WireError, match="64 prompts are being warmed") as error:
        desk.ask("warm", **about(A))
    assert error.value.code == "refused"
    finish(desk, *desk.world.in_flight)
    assert counts(desk.ask("warm", **about(A))) == (3, 3, 0)
    assert not desk.world.engine.residency.leases.leases


@pytest.mark.parametrize(
    ("changes", "code", "told"),
    [
        ({"namespace": DIGEST[:31]}, "malformed", "namespace"),
        ({"namespace": DIGEST + b"n"}, "too_large", "namespace"),
        ({"namespace": "n" * 32}, "malformed", "namespace"),
        ({"tokens": b"odd"}, "malformed", "tokens"),
        ({"tokens": bytes(4 * 2_000_001)}, "too_large", "max_prompt_tokens"),
        ({"wait": 1}, "malformed", "wait"),
        ({"wait_s": 1.0}, "malformed", "wait_s"),
    ],
)
def test_a_bad_request_gets_one_clear_error(
    desk: Desk, changes: dict[str, Any], code: str, told: str
) -> None:
    with pytest.raises(WireError, match=told) as error:
        desk.ask("warm", **about(A, **changes))
    assert error.value.code == code
    assert not desk.sent
    assert not desk.world.in_flight


# --- pins ---------------------------------------------------------------------------------------

ROOMY = (("dram", 8, MAPPED), ("disk", 20, ON_DISK))


@pytest.fixture
def roomy(tmp_path: Path) -> Desk:
    """With two blocks of A in memory, which is a quarter of it."""
    desk = Desk(tmp_path, ROOMY)
    desk.world.store(A[: 2 * STEP])
    desk.world.finish_all()
    return desk


def test_a_pin_is_told_with_its_epoch(roomy: Desk) -> None:
    reply = roomy.ask("pin", **about(A + END), name="the tools", ttl_s=60)
    assert (reply["blocks"], reply["epoch"]) == (2, "epoch")
    assert reply["pin"].startswith("epoch-")
    (row,) = pin_rows(roomy.gate, roomy.world.now_s + 1)
    assert (row["pin"], row["name"], row["blocks"]) == (reply["pin"], "the tools", 2)
    assert (row["namespace"], row["ends_in_s"]) == (DIGEST.hex(), 59)
    assert roomy.ask("unpin", pin=reply["pin"])["unpinned"] is True
    assert roomy.ask("unpin", pin=reply["pin"])["unpinned"] is False
    assert not roomy.world.engine.residency.blocks.num_pins


def test_a_pin_lasts_an_hour_unless_it_is_said_otherwise(roomy: Desk) -> None:
    roomy.ask("pin", **about(A))
    start_s = roomy.world.now_s
    roomy.service.tick(start_s + 3599)
    assert len(roomy.world.engine.residency.leases.pins) == 1
    roomy.service.tick(start_s + 3600)
    assert not roomy.world.engine.residency.leases.pins


def test_nothing_held_is_no_pin(roomy: Desk) -> None:
    for unknown in (about(tokens_of(7)), about(A, namespace=b"x" * 32), about(b"")):
        reply = roomy.ask("pin", **unknown)
        assert (reply["pin"], reply["blocks"], reply["epoch"]) == ("", 0, "epoch")
    assert not roomy.world.engine.knows(b"x" * 32)


@pytest.mark.parametrize(
    "pin", ["", "-", "epoch", "epoch-", "epoch-x", "epoch--1", "epoch-99", "EPOCH-1", "epoch-²"]
)
def test_no_other_name_unpins(roomy: Desk, pin: str) -> None:
    """Not that of another run of the daemon either: its number may be another pin's by now."""
    mine = roomy.ask("pin", **about(A))["pin"]
    number = mine.rpartition("-")[2]
    assert roomy.ask("unpin", pin=pin)["unpinned"] is False
    assert roomy.ask("unpin", pin=f"before-{number}")["unpinned"] is False
    assert len(roomy.world.engine.residency.leases.pins) == 1


def test_more_than_the_share_is_refused_with_a_sentence(roomy: Desk) -> None:
    roomy.world.store(A)
    with pytest.raises(WireError, match=r"3 blocks .* more than 25% of dram \(limits.max_pinned\)"):
        roomy.ask("pin", **about(A))
    assert roomy.gate.turned_away["pinned memory"] == 1
    assert not roomy.world.engine.residency.leases.pins


def test_there_are_only_so_many_pins(roomy: Desk) -> None:
    for _ in range(MAX_PINS):
        assert roomy.ask("pin", **about(A))["pin"]
    with pytest.raises(WireError, match="1024 pins") as error:
        roomy.ask("pin", **about(A))
    assert error.value.code == "refused"


def test_a_pin_is_no_lease_and_no_sessions(roomy: Desk) -> None:
    """It needs none, ends with none, and clear leaves it."""
    session = roomy.hello()
    roomy.ask("pin", **about(A))
    (pin,) = roomy.world.engine.residency.leases.pins
    assert not roomy.ask("release", s=session.token, lease=pin)["released"]
    roomy.ask("bye", s=session.token)
    roomy.world.do(p.Clear(0, roomy.world.now_s))
    assert not roomy.world.engine.residency.leases.leases
    assert len(roomy.world.tiers_of(A)) == 2


@pytest.mark.parametrize(
    ("changes", "code", "told"),
    [
        ({"namespace": DIGEST[:31]}, "malformed", "namespace"),
        ({"tokens": b"odd"}, "malformed", "tokens"),
        ({"tokens": bytes(4 * 2_000_001)}, "too_large", "max_prompt_tokens"),
        ({"ttl_s": 0}, "malformed", "ttl_s"),
        ({"ttl_s": MAX_PIN_S + 1}, "malformed", "ttl_s"),
        ({"ttl_s": float("nan")}, "malformed", "ttl_s"),
        ({"ttl_s": "long"}, "malformed", "ttl_s"),
        ({"name": "x" * 201}, "too_large", "name"),
        ({"pin": "x"}, "malformed", "pin"),
    ],
)
def test_a_bad_pin_gets_one_clear_error(
    roomy: Desk, changes: dict[str, Any], code: str, told: str
) -> None:
    with pytest.raises(WireError, match=told) as error:
        roomy.ask("pin", **about(A, **changes))
    assert error.value.code == code
    assert not roomy.world.engine.residency.leases.pins


@pytest.mark.parametrize(
    ("fields", "code"),
    [({}, "malformed"), ({"pin": 7}, "malformed"), ({"pin": "x" * 65}, "too_large")],
)
def test_a_bad_unpin_gets_one_clear_error(roomy: Desk, fields: dict[str, Any], code: str) -> None:
    with pytest.raises(WireError, match="pin") as error:
        roomy.ask("unpin", **fields)
    assert error.value.code == code

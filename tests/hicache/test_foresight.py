"""Warming by request and reply: what is taken, what is refused, and who is told when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hicache.config import DeadlinesConfig, LimitsConfig
from hicache.engine import plan as p
from hicache.wire import WireError
from tests.engine.test_races import DRAM_DISK, END, on_disk_only
from tests.engine.world import DIGEST, tokens_of
from tests.hicache.test_service import Desk

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
    desk.service.news(desk.world.finish(*moves), desk.world.now_s)


def test_a_warming_is_answered_when_it_is_planned(desk: Desk) -> None:
    assert counts(desk.ask("warm", **about(A + END))) == (3, 0, 0)
    finish(desk, *desk.world.in_flight)
    assert len(desk.sent) == 1
    assert counts(desk.ask("warm", **about(A + END))) == (3, 3, 0)
    assert not desk.world.engine.residency.leases.leases


def test_who_waits_is_told_at_its_end(desk: Desk) -> None:
    desk.send("warm", **about(A), wait=True)
    first, *others = desk.world.in_flight
    finish(desk, first)
    assert not desk.sent
    assert len(desk.service.waiting) == 1
    finish(desk, *others)
    assert counts(desk.sent[-1].message) == (3, 3, 0)
    assert len(desk.sent) == 1
    assert len(desk.service.waiting) == 0


def test_who_waits_has_an_answer_by_the_deadline(desk: Desk) -> None:
    """With what has come by then; what travels arrives and stays."""
    desk.send("warm", **about(A), wait=True, deadline_s=2.0)
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
    desk.service.tick(desk.world.now_s + desk.service.limits.lease_ttl_s + 1)
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


def test_warmings_are_leases_too(desk: Desk) -> None:
    desk.service.configure(DeadlinesConfig(), LimitsConfig(max_leases=1))
    desk.ask("warm", **about(A))
    with pytest.raises(WireError, match="max_leases") as error:
        desk.ask("warm", **about(A))
    assert error.value.code == "refused"


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

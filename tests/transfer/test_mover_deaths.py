"""Workers that die, hang or find a damaged device: a miss, and the tier comes up again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from hicache.transfer.worker_events import WorkerUp
from tests.tiers.blocks import content
from tests.transfer.rig import BLOCK, DISK, GPU, SLOT, Rig

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("device", [DISK, GPU])
def test_a_worker_killed_in_the_middle_fails_its_moves_and_comes_back(
    rig: Rig, device: str
) -> None:
    far = {DISK: "disk", GPU: "hbm"}[device]
    rig.fill("dram", *range(100))
    rig.hold(device)
    moves = [rig.move("dram", far, n) for n in range(100)]
    assert not rig.submit(*moves)
    first_pid = rig.mover.pids()[device]
    os.kill(first_pid, signal.SIGKILL)
    outcomes = rig.outcomes(*moves)
    assert not any(o.ok or o.corrupt for o in outcomes)
    assert "SIGKILL" in outcomes[0].error
    down = rig.downs()[0]
    assert (down.device, down.tier) == (device, far)
    assert rig.events.index(down) < rig.events.index(outcomes[0])
    assert not any(rig.mover.backlog()["dram", far].values())
    assert rig.submit(rig.move("dram", far, 1)), "refused while the tier is down"
    rig.wait(lambda: rig.mover.states()[device] == "up")
    assert rig.mover.pids()[device] != first_pid
    assert all(o.ok for o in rig.run(*[rig.move("dram", far, n) for n in range(100)]))


def test_kills_at_random_moments_lose_no_acknowledged_block(rig: Rig) -> None:
    rng = np.random.default_rng(3)
    rig.fill("dram", *range(300))
    for round_number in range(10):
        rig.wait(lambda: rig.mover.states()[DISK] == "up")
        moves = [rig.move("dram", "disk", n) for n in rng.permutation(300).tolist()]
        assert not rig.submit(*moves)
        wanted = len(rig.heard()) + int(rng.integers(0, 250))
        rig.wait(lambda wanted=wanted: len(rig.heard()) >= wanted)  # type: ignore[misc]
        os.kill(rig.mover.pids()[DISK], signal.SIGKILL)
        outcomes = rig.outcomes(*moves)
        rig.wait(lambda n=round_number: len(rig.downs()) == n + 1)  # type: ignore[misc]
        rig.skew_s += rig.downs()[-1].retry_s
        rig.wait(lambda: rig.mover.states()[DISK] == "up")
        kept = [m.block for m, o in zip(moves, outcomes, strict=True) if o.ok]
        rig.dram.arena.data[:] = 0
        reads = rig.run(*[rig.move("disk", "dram", n) for n in kept])
        assert all(o.ok for o in reads)
        assert all(rig.holds("dram", n) for n in kept)
        rig.fill("dram", *range(300))


def test_a_stuck_worker_is_killed(rig: Rig) -> None:
    rig.hold(GPU)
    move = rig.move("dram", "hbm", 1)
    assert not rig.submit(move)
    rig.pass_time(31)
    (outcome,) = rig.outcomes(move)
    assert not outcome.ok
    assert "did not answer" in outcome.error
    rig.wait(lambda: rig.mover.states()[GPU] == "up")


@pytest.mark.parametrize("device", [DISK, GPU])
def test_an_idle_worker_that_is_stopped_is_overdue_and_killed(rig: Rig, device: str) -> None:
    """Only pings were sent to it. The other worker continues."""
    (other,) = {DISK, GPU} - {device}
    first_pid = rig.mover.pids()[device]
    rig.hold(device)
    rig.wait(lambda: rig.mover.overdue_s(rig.now_s)[device] > 0.5)
    assert rig.mover.overdue_s(rig.now_s)[other] < 30.0
    rig.pass_time(31)
    rig.wait(lambda: rig.mover.pids().get(device, first_pid) != first_pid)
    rig.wait(lambda: rig.mover.states()[device] == "up")
    down = next(down for down in rig.downs() if down.device == device)
    assert "did not answer" in down.error
    rig.wait(lambda: rig.mover.overdue_s(rig.now_s)[other] == 0.0)


def test_a_daemon_that_was_stopped_itself_kills_no_worker(rig: Rig) -> None:
    """The daemon was stopped for a minute with a batch in flight: it reads the reply before it
    judges a worker stuck."""
    rig.hold(GPU)
    move = rig.move("dram", "hbm", 1)
    assert not rig.submit(move)
    rig.events += rig.mover.tick(rig.now_s)
    rig.skew_s += 60.0
    rig.events += rig.mover.tick(rig.now_s)
    rig.let_go(GPU)
    assert rig.outcomes(move)[0].ok
    assert not rig.downs()


def test_restarts_back_off_and_a_healthy_run_resets_that(rig: Rig) -> None:
    waits = []
    for number in range(4):
        os.kill(rig.mover.pids()[GPU], signal.SIGKILL)
        rig.wait(lambda n=number: len(rig.downs()) > n)  # type: ignore[misc]
        waits.append(rig.downs()[-1].retry_s)
        rig.skew_s += waits[-1]
        rig.wait(lambda: rig.mover.states()[GPU] == "up")
    rig.skew_s += 61.0
    os.kill(rig.mover.pids()[GPU], signal.SIGKILL)
    rig.wait(lambda: len(rig.downs()) == 5)
    assert [*waits, rig.downs()[-1].retry_s] == pytest.approx([0.2, 0.4, 0.8, 1.6, 0.2])


def test_a_medium_that_kills_its_worker_twice_is_set_aside(rig: Rig) -> None:
    """SIGBUS is how a damaged mapping shows. What was being read then counts as corrupt, or it
    would be tried for ever; after the second time the environment is not opened again."""
    rig.fill("dram", *range(40))
    rig.run(*[rig.move("dram", "disk", n) for n in range(40)])
    for time in (1, 2):
        rig.hold(DISK)
        reads = [rig.move("disk", "dram", n) for n in range(70, 170)]
        assert not rig.submit(*reads)
        os.kill(rig.mover.pids()[DISK], signal.SIGBUS)
        rig.let_go(DISK)
        outcomes = rig.outcomes(*reads)
        assert [o.corrupt for o in outcomes] == [True] * 64 + [False] * 36
        assert len(rig.downs()) == time
        rig.wait(lambda: rig.mover.states()[DISK] == "up")
        if time == 1:
            assert rig.run(rig.move("disk", "dram", 1))[0].ok
    up = [event for event in rig.events if isinstance(event, WorkerUp)][-1]
    assert "was set aside" in up.notes[0]
    assert not rig.run(rig.move("disk", "dram", 1))[0].ok
    assert rig.run(rig.move("dram", "disk", 1))[0].ok


def test_a_file_cut_short_under_a_worker_is_a_miss_and_the_tier_comes_back(rig: Rig) -> None:
    """A real SIGBUS: LMDB's map reaches beyond the end of the file."""
    rig.run(*[rig.move("dram", "disk", n) for n in range(40)])
    file = rig.disk_path / f"class-{SLOT}" / "data.mdb"
    with file.open("r+b") as raw:
        raw.truncate(5 * 4096)
    outcomes = rig.run(*[rig.move("disk", "dram", n) for n in range(40)])
    assert not any(o.ok for o in outcomes)
    rig.wait(lambda: bool(rig.downs()))
    rig.wait(lambda: rig.mover.states()[DISK] == "up")
    assert rig.run(rig.move("dram", "disk", 1))[0].ok


def test_flipped_bytes_on_disk_are_a_corrupt_outcome(tmp_path: Path) -> None:
    rig = Rig(tmp_path, devices=[DISK])
    rig.fill("dram", 1, 2)
    rig.run(rig.move("dram", "disk", 1), rig.move("dram", "disk", 2))
    rig.close()
    file = rig.disk_path / f"class-{SLOT}" / "data.mdb"
    raw = bytearray(file.read_bytes())
    raw[raw.find(content(1, BLOCK)[5000:5100].tobytes())] ^= 1
    file.write_bytes(raw)
    rig = Rig(tmp_path, devices=[DISK])
    one, two = rig.run(rig.move("disk", "dram", 1), rig.move("disk", "dram", 2))
    assert (one.ok, one.corrupt) == (False, True)
    assert two.ok
    assert rig.holds("dram", 2)
    rig.close()


def test_close_finishes_moves_in_flight_and_cancels_waiting_ones(tmp_path: Path) -> None:
    rig = Rig(tmp_path, devices=[GPU])
    rig.fill("dram", *range(100))
    rig.hold(GPU)
    moves = [rig.move("dram", "hbm", n) for n in range(100)]
    assert not rig.submit(*moves)
    rig.let_go(GPU)
    rig.close()
    outcomes = {outcome.move: outcome for outcome in rig.heard()}
    assert [outcomes[move.id].ok for move in moves] == [True] * 64 + [False] * 36


def test_close_kills_a_worker_that_does_not_stop(tmp_path: Path) -> None:
    rig = Rig(tmp_path, devices=[GPU])
    pid = rig.mover.pids()[GPU]
    rig.hold(GPU)
    move = rig.move("dram", "hbm", 1)
    assert not rig.submit(move)
    rig.events += rig.mover.close(0.05)
    assert [(o.move, o.ok) for o in rig.heard()] == [(move.id, False)]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)

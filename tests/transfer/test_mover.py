"""The mover with real worker processes over real sockets: copies, order, deadlines, cancelling."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest

from hicache.engine.plan import Priority, Use
from hicache.tiers.disk.disk_tier import DiskTier
from hicache.transfer.mover import Mover
from hicache.transfer.worker_events import WorkerMeasured, WorkerRestored, WorkerRows, WorkerUp
from tests.tiers.blocks import NAMESPACE, content, listed, name
from tests.transfer.rig import BLOCK, DISK, GPU, MIB, SLOT, Rig

pytestmark = pytest.mark.thorough


def slots(*blocks: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(blocks, np.int32) * (SLOT // 4096)


def test_a_block_goes_down_and_up_again(rig: Rig) -> None:
    rig.fill("hbm", *range(70))
    for src, dst in (("hbm", "dram"), ("dram", "disk")):
        assert all(o.ok for o in rig.run(*[rig.move(src, dst, n) for n in range(70)]))
    for arena in rig.arenas.values():
        arena.data[:] = 0
    assert all(o.ok for o in rig.run(*[rig.move("disk", "dram", n) for n in range(70)]))
    assert all(rig.holds("dram", n) for n in range(70))
    assert all(o.ok for o in rig.run(*[rig.move("dram", "hbm", n) for n in range(70)]))
    assert all(rig.holds("hbm", n) for n in range(70))
    assert all(o.ok for o in rig.run(*[rig.move("disk", None, n) for n in range(70)]))
    (gone,) = rig.run(rig.move("disk", "dram", 3))
    assert not gone.ok
    assert gone.corrupt, "what is not there must not be asked for again"
    assert not any(any(b.values()) for b in rig.mover.backlog().values())


def test_every_link_is_probed_at_start_and_every_batch_is_measured(rig: Rig) -> None:
    probes = {(n.src, n.dst) for n in rig.events if isinstance(n, WorkerMeasured)}
    assert probes == {("dram", "hbm"), ("hbm", "dram"), ("dram", "disk"), ("disk", "dram")}
    assert not (rig.disk_path / "probe").exists()
    rig.events.clear()
    rig.run(*[rig.move("dram", "disk", n) for n in range(3)])
    measured = [n for n in rig.events if isinstance(n, WorkerMeasured)]
    assert {(n.src, n.dst) for n in measured} == {("dram", "disk")}
    assert sum(n.num_bytes for n in measured) == 3 * BLOCK
    assert all(n.seconds > 0 for n in measured)


def test_generations_are_raised_before_a_slot_is_written(rig: Rig) -> None:
    before = rig.dram.arena.generations(slots(1, 2))
    rig.hold(GPU)
    assert not rig.submit(rig.move("hbm", "dram", 1))
    assert (rig.dram.arena.generations(slots(1, 2)) - before).tolist() == [1, 0]
    rig.let_go(GPU)


def test_demand_overtakes_demotion_and_batches_are_bounded(rig: Rig) -> None:
    rig.fill("dram", *range(120))
    rig.hold(GPU)
    low = [rig.move("dram", "hbm", n, Priority.DEMOTION) for n in range(100)]
    mid = [rig.move("dram", "hbm", n, Priority.PREFETCH) for n in range(100, 110)]
    high = [rig.move("dram", "hbm", n) for n in range(110, 120)]
    assert not rig.submit(*low)
    assert not rig.submit(*mid, *high)
    assert rig.mover.backlog()["dram", "hbm"] == {0: 10 * BLOCK, 1: 10 * BLOCK, 2: 100 * BLOCK}
    rig.let_go(GPU)
    rig.outcomes(*low, *mid, *high)
    ids = [outcome.move for outcome in rig.heard()]
    sent_first, waited = low[:64], low[64:]
    assert ids == [move.id for move in [*sent_first, *high, *mid, *waited]]


def test_reads_do_not_wait_behind_writes(rig: Rig) -> None:
    """The queues are separate: with two write batches in flight, a read is sent at once."""
    rig.fill("dram", *range(200))
    rig.run(rig.move("dram", "disk", 300))
    rig.hold(DISK)
    writes = [rig.move("dram", "disk", n, Priority.DEMOTION) for n in range(200)]
    read = rig.move("disk", "dram", 300)
    assert not rig.submit(*writes, read)
    reads = rig.mover._device_of["disk", "dram"][0].queue("read", Priority.DEMAND)
    assert [move.id for batch, _ in reads.in_flight.values() for move in batch.moves] == [read.id]
    rig.let_go(DISK)
    rig.outcomes(read, *writes)


def test_a_queued_move_past_its_deadline_fails_unsent(rig: Rig) -> None:
    rig.hold(GPU)
    first = [rig.move("dram", "hbm", n) for n in range(64)]
    late = rig.move("dram", "hbm", 100, deadline_s=rig.now_s + 5)
    fine = rig.move("dram", "hbm", 101, deadline_s=rig.now_s + 500)
    before = rig.hbm.arena.generations(slots(100))
    assert not rig.submit(*first, late, fine)
    rig.skew_s = 10.0
    (outcome,) = rig.outcomes(late)
    assert not outcome.ok
    assert "deadline" in outcome.error
    rig.let_go(GPU)
    assert all(o.ok for o in rig.outcomes(*first, fine))
    assert rig.hbm.arena.generations(slots(100)) == before, "never sent"


def test_cancel_reaches_what_is_queued_only(rig: Rig) -> None:
    rig.hold(GPU)
    moves = [rig.move("dram", "hbm", n) for n in range(70)]
    assert not rig.submit(*moves)
    cancelled = rig.mover.cancel([moves[0].id, moves[69].id, moves[66].id, 12345])
    assert [(o.move, o.ok, o.error) for o in cancelled] == [
        (moves[69].id, False, "cancelled"),
        (moves[66].id, False, "cancelled"),
    ]
    rig.let_go(GPU)
    left = [move for move in moves if move not in (moves[69], moves[66])]
    assert all(o.ok for o in rig.outcomes(*left))


def test_a_full_queue_and_an_unknown_link_refuse(rig: Rig) -> None:
    rig.hold(GPU)
    moves = [rig.move("dram", "hbm", n % 100) for n in range(9000)]
    refused = rig.submit(*moves, rig.move("hbm", "disk", 1))
    assert len(refused) == 9001 - 8192
    assert refused[-1].dst == "disk"
    rig.let_go(GPU)


def test_a_block_that_was_removed_fails_unsent(rig: Rig) -> None:
    rig.forgotten.add(5)
    five, six = rig.run(rig.move("dram", "disk", 5), rig.move("dram", "disk", 6))
    assert (five.ok, six.ok) == (False, True)
    assert "was removed" in five.error


def test_a_slot_outside_the_arena_fails_alone(rig: Rig) -> None:
    bad = rig.move("dram", "hbm", 1)
    bad.src_slot = 1 << 20
    good = rig.move("dram", "hbm", 2)
    bad_outcome, good_outcome = rig.run(bad, good)
    assert (bad_outcome.ok, good_outcome.ok) == (False, True)
    assert "leaves the arena" in bad_outcome.error


def test_what_is_stored_comes_as_rows_after_a_restart(tmp_path: Path) -> None:
    rig = Rig(tmp_path, devices=[DISK])
    rig.run(*[rig.move("dram", "disk", n) for n in range(5)])
    rig.mover.describe(DISK, NAMESPACE, {"name": "smol"})
    rig.close()
    again = Rig(tmp_path, devices=[DISK])
    assert [up.is_restoring for up in again.events if isinstance(up, WorkerUp)] == [True]
    assert tokens_told(again) == {name(n).tokens for n in range(5)}
    told = [event.rows for event in again.events if isinstance(event, WorkerRows)]
    assert {(rows.namespace, rows.total) for rows in told} == {(NAMESPACE, 5)}
    assert (again.disk_path / "namespaces" / f"{NAMESPACE.hex()}.json").exists()
    again.mover.forget(DISK, [(SLOT, name(n).key) for n in range(4)])
    outcomes = again.run(*[again.move("disk", "dram", n) for n in range(5)])
    again.close()
    # `forget` is in the writer's order, not the reader's: look again after a stop.
    last = Rig(tmp_path, devices=[DISK])
    assert outcomes[4].ok
    assert tokens_told(last) == {name(4).tokens}
    last.close()


def tokens_told(rig: Rig) -> set[bytes]:
    """Waits until all that was stored is told; the tokens of each block."""
    rig.wait(lambda: any(isinstance(event, WorkerRestored) for event in rig.events))
    told = [event.rows for event in rig.events if isinstance(event, WorkerRows)]
    return {
        rows.tokens[at : at + rows.step]
        for rows in told
        for at in range(0, len(rows.tokens), rows.step)
    }


def store_small(path: Path, numbers: range) -> None:
    with DiskTier(path / "disk", 32 * MIB, durability="fast") as tier:
        for start in numbers[::200]:
            tier.put(4096, [(name(n), content(n, 100)) for n in range(start, start + 200)])


def test_many_rows_come_as_they_are_taken_and_moves_go_on(tmp_path: Path) -> None:
    """Rows wait in the worker until earlier ones are acknowledged; reads and writes do not wait."""
    store_small(tmp_path, range(1000, 4000))
    rig = Rig(tmp_path, devices=[DISK])
    rig.takes_rows = False
    rig.fill("dram", 1)
    assert rig.run(rig.move("dram", "disk", 1))[0].ok
    assert rig.run(rig.move("disk", "dram", 1))[0].ok
    assert not any(isinstance(event, WorkerRestored) for event in rig.events)
    rig.takes_rows = True
    assert tokens_told(rig) >= {name(n).tokens for n in range(1000, 4000)}
    rig.close()


def test_stopped_in_the_middle_of_telling(tmp_path: Path) -> None:
    store_small(tmp_path, range(3000))
    rig = Rig(tmp_path, devices=[DISK])
    rig.takes_rows = False
    rig.wait(lambda: any(isinstance(event, WorkerRows) for event in rig.events))
    rig.close()
    again = Rig(tmp_path, devices=[DISK])
    assert len(tokens_told(again)) == 3000
    again.close()


def test_a_block_without_its_parent_is_not_told_and_is_removed(tmp_path: Path) -> None:
    """It was written while its parent's record was being deleted, and the daemon died then."""
    above = name(1)
    orphan = name(2, parent=above.key, depth=1)
    below = name(3, parent=orphan.key, depth=2)
    with DiskTier(tmp_path / "disk", 32 * MIB, durability="fast") as tier:
        tier.put(SLOT, [(row, content(1, BLOCK)) for row in (orphan, below, name(4))])
    rig = Rig(tmp_path, devices=[DISK])
    assert tokens_told(rig) == {name(4).tokens}
    (restored,) = [event for event in rig.events if isinstance(event, WorkerRestored)]
    assert "2 blocks had lost their parent block" in restored.notes[0]
    rig.close()
    with DiskTier(tmp_path / "disk", 32 * MIB) as tier:
        assert [row.key for row in listed(tier)] == [name(4).key]


def test_accounts_of_namespaces_without_blocks_go(tmp_path: Path) -> None:
    rig = Rig(tmp_path, devices=[DISK])
    rig.run(rig.move("dram", "disk", 1))
    for digest in (NAMESPACE, b"a" * 32, b"b" * 32):
        rig.mover.describe(DISK, digest, {"name": "one"})
    rig.close()
    folder = tmp_path / "disk" / "namespaces"
    assert len(list(folder.iterdir())) == 3
    again = Rig(tmp_path, devices=[DISK])
    again.mover.describe(DISK, b"c" * 32, {"name": "new"})
    tokens_told(again)
    again.close()
    assert {file.stem for file in folder.iterdir()} == {NAMESPACE.hex(), (b"c" * 32).hex()}


def test_an_account_that_cannot_be_written_ends_no_worker(tmp_path: Path) -> None:
    """Its folder cannot be used: descriptions are for people only."""
    rig = Rig(tmp_path, devices=[DISK])
    (rig.disk_path / "namespaces").write_text("a file")
    pids = rig.mover.pids()
    rig.mover.describe(DISK, NAMESPACE, {"name": "smol"})
    assert rig.run(rig.move("dram", "disk", 1))[0].ok
    assert rig.run(rig.move("disk", "dram", 1))[0].ok
    assert rig.mover.pids() == pids
    rig.close()


def test_uses_are_told_after_a_restart(tmp_path: Path) -> None:
    rig = Rig(tmp_path, devices=[DISK])
    rig.run(*[rig.move("dram", "disk", n) for n in range(2)])
    rig.mover.note(DISK, [Use(SLOT, name(1).key, 9, 50.0), Use(SLOT, name(7).key, 1, 1.0)], 3e9)
    rig.close()
    again = Rig(tmp_path, devices=[DISK])
    tokens_told(again)
    (rows,) = [event.rows for event in again.events if isinstance(event, WorkerRows)]
    uses = list(zip(rows.hits.tolist(), rows.used_s.tolist(), strict=True))
    assert uses[0] == (9, 3_000_000_050), "what was used last is told first"
    assert uses[1][0] == 0
    assert len(uses) == 2
    again.close()


def test_a_second_worker_on_a_path_says_whose_it_is(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    rig = Rig(tmp_path, devices=[DISK])
    config = rig.mover._devices[DISK].worker.config
    options = {**config.spec.options, "lock_wait_s": 0.0}
    config = replace(config, spec=replace(config.spec, options=options))
    second = Mover([config], rig.arenas, rig.identify)
    second.start(rig.now_s)
    events = second.close(10.0)  # `stop` waits behind the opening, which fails
    assert not events
    third = Mover([config], rig.arenas, rig.identify)
    rig.mover, first = third, rig.mover
    third.start(rig.now_s)
    rig.wait(lambda: bool(rig.downs()))
    rig.mover = first
    third.close(10.0)
    down = rig.downs()[0]
    assert f"in use by the process with pid {first.pids()[DISK]}" in down.error
    rig.close()


def test_a_worker_has_its_name(rig: Rig) -> None:
    for device, title in ((DISK, "hicache-disk-0"), (GPU, "hicache-gpu-0")):
        pid = rig.mover.pids()[device]
        assert Path(f"/proc/{pid}/comm").read_text().strip() == title


def test_a_throttled_link_measures_as_slow_as_its_limit(rig: Rig) -> None:
    """In the measurements of its batches, and in its probe after a restart."""
    rig.fill("dram", *range(8))
    assert all(o.ok for o in rig.run(*[rig.move("dram", "disk", n) for n in range(8)]))
    rig.mover.throttle("disk", 4e6, inf)
    rig.events.clear()
    assert all(o.ok for o in rig.run(*[rig.move("disk", "dram", n) for n in range(8)]))
    (measured,) = (n for n in rig.events if isinstance(n, WorkerMeasured))
    assert measured.num_bytes / measured.seconds <= 4e6
    os.kill(rig.mover.pids()[DISK], signal.SIGKILL)
    rig.wait(lambda: any(isinstance(n, WorkerUp) for n in rig.events))
    probes = [n for n in rig.events if isinstance(n, WorkerMeasured)]
    speeds = {n.src: n.num_bytes / n.seconds for n in probes}
    assert speeds["disk"] <= 4e6 < speeds["dram"]


def test_a_stalled_link_goes_on_when_it_may(rig: Rig) -> None:
    """What travels is not called back, what is queued can be; the other direction is free."""
    rig.fill("dram", *range(100))
    assert all(o.ok for o in rig.run(*[rig.move("dram", "disk", n) for n in range(100)]))
    rig.mover.throttle("disk", 0.0, inf)
    late = [rig.move("disk", "dram", n) for n in range(100)]
    assert not rig.submit(*late)
    assert rig.run(rig.move("dram", "disk", 100))[0].ok
    assert not rig.heard_of(late)
    cancelled = rig.mover.cancel([move.id for move in late])
    assert len(cancelled) == 100 - 2 * 32, "but for two batches"
    rig.events += cancelled
    rig.mover.throttle("disk", inf, inf)
    assert [outcome.ok for outcome in rig.outcomes(*late)] == [True] * 64 + [False] * 36


def test_a_stalled_worker_stops_in_order(rig: Rig) -> None:
    rig.fill("dram", 1)
    rig.mover.throttle("disk", inf, 0.0)
    move = rig.move("dram", "disk", 1)
    assert not rig.submit(move)
    outcomes = rig.mover.close(10.0)
    assert [(o.move, o.ok) for o in outcomes] == [(move.id, True)]

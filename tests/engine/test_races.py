"""Each race as a numbered story: who wins, what the loser sees (in prose in docs/races.md)."""

from __future__ import annotations

from typing import Any

import pytest

from hicache.engine import plan as p
from hicache.engine.planner.planner import PlannerSettings
from hicache.engine.policies.hazard.evaluation import unjudged
from hicache.engine.policies.hazard.model import NUM_BINS, Model
from hicache.engine.settings import EngineSettings
from tests.engine.world import (
    BLOCK_BYTES,
    DIGEST,
    MAPPED,
    ON_DISK,
    STEP,
    THREE_TIERS,
    UNMAPPED,
    World,
    keys_of,
    tokens_of,
)

SMALL = (("hbm", 2, MAPPED), ("dram", 4, MAPPED), ("disk", 20, ON_DISK))
NO_DISK = (("hbm", 2, MAPPED), ("dram", 3, MAPPED))
DRAM_DISK = (("dram", 4, MAPPED), ("disk", 20, ON_DISK))
GPU_ONLY_HBM = (("hbm", 4, UNMAPPED), ("dram", 6, MAPPED), ("disk", 20, ON_DISK))
END = tokens_of(99)
"""One block that is never stored: with it behind, all of a prompt may be reloaded."""


def world(tiers: Any = SMALL, **options: Any) -> World:
    reload = PlannerSettings(mode="always_reload")
    return World(tiers, EngineSettings(planner=reload, **options))


def on_disk_only(w: World, *prompts: bytes) -> None:
    """Store prompts, write them down, and lose the faster copies."""
    for prompt in prompts:
        w.store(prompt)
    while w.do(p.Flush(w.now_s)):
        w.finish_all()
    for tier in ("hbm", "dram"):
        if tier in [spec.name for spec in w.engine.residency.tiers]:
            w.lose(tier)
            w.recover(tier)
    for prompt in prompts:
        assert set(w.tiers_of(prompt)) == {"disk"}


def test_room_for_the_front_costs_the_end() -> None:
    """1. A prompt was read from dram, and its lease ends. Its front, which others share, ranks
       above all in hbm, its end below all in dram.
    2. Room is made for the front in hbm. What it displaces goes down, where the end of the same
       prompt is forgotten for it.
    3. The end has no node any more, and nobody looks for it.
    """
    w = World(
        (("hbm", 40, MAPPED), ("dram", 80, MAPPED)),
        EngineSettings(planner=PlannerSettings(mode="always_reload")),
        eviction="hazard",
    )
    trunk_first(w)
    other, path = tokens_of(*range(500, 540)), tokens_of(*range(78))
    w.store(other)
    w.now_s += 100
    w.match(path)
    w.store(path)
    w.release(w.match(tokens_of(*range(30), 1000)).lease)
    w.finish_all()
    lease = w.match(path + END).lease
    w.fetch(lease)
    for number in (2000, 2001):  # the newest nodes are gone: their numbers name nothing
        w.store(tokens_of(number))
    for number in (2001, 2000):
        w.do(p.Hint(w.namespace, tokens_of(number), w.now_s, keep=False))
    trunk_first(w)
    w.release(lease)
    assert w.tiers_of(path) == ["dram"] * 50


def trunk_first(w: World) -> None:
    """From now on trunks rank above all, and what was just used below the rest."""
    history = w.engine.history
    assert history is not None
    others = [1.0] + [2.0] * (NUM_BINS - 1)
    ranks = [[3.0] * NUM_BINS if levels[0] == 1 else others for levels in history._levels]
    hits = unjudged()
    hits[0] = 1.0
    history.adopt(Model(ranks, others, ranks, others, hits))


# --- demotion ---------------------------------------------------------------------------------


def test_asked_for_while_draining() -> None:
    """1. A is demoted from hbm to dram: its copy there drains while the bytes travel.
    2. A prompt asks for A: its copy is rescued, and served from hbm at once.
    3. The copy in dram arrives all the same. Both stay.
    """
    w = world()
    a = tokens_of(1, 2)
    w.store(a)
    assert w.moving("hbm", "dram")
    matched = w.match(a + END)
    assert matched.runs == (p.TierRun("hbm", 2),)
    assert w.fetch(matched.lease).waiting == 0
    w.finish_all()
    assert w.tiers_of(a) == ["hbm+dram", "hbm+dram"]


def test_nobody_asked_while_draining() -> None:
    """1. A is demoted. 2. Nobody asks: the old copy goes when the new one is ready, not before."""
    w = world()
    a = tokens_of(1, 2)
    w.store(a)
    moves = w.moving("hbm", "dram")
    assert set(w.tiers_of(a)) == {"hbm"}
    w.finish(*moves)
    assert set(w.tiers_of(a)) == {"dram"}


def test_demoted_while_being_promoted() -> None:
    """1. A, read from dram, is copied up to hbm. 2. Room is needed in dram, and A is its coldest.
    3. The copy in dram is being read: its slot is kept until the outcome is in. The right bytes
    arrive in hbm.
    """
    w = world((("hbm", 8, MAPPED), ("dram", 3, MAPPED)))
    w.lose("hbm")
    a = tokens_of(1, 2)
    w.store(a)
    w.recover("hbm")
    lease = w.match(a + END).lease
    w.fetch(lease)
    w.release(lease)
    up = w.moving("dram", "hbm")
    assert len(up) == 2
    slots = {w.in_flight[n].src_slot for n in up}
    w.store(tokens_of(3, 4, 5, 6, 7, 8))
    for move in w.in_flight.values():
        assert move.dst != "dram" or move.dst_slot not in slots
    w.finish(*up)
    assert all("hbm" in tiers for tiers in w.tiers_of(a))
    w.finish_all()


@pytest.mark.parametrize("tier", ["dram", "hbm"])
def test_a_tier_dies_in_the_middle_of_a_demotion(tier: str) -> None:
    """1. A travels from hbm to dram. 2. One of the two dies.
    3. Without dram, A is in hbm as before. Without hbm, the half-written copy is not believed: A
    is forgotten.
    """
    w = world(NO_DISK)
    a = tokens_of(1, 2)
    w.store(a)
    assert w.moving("hbm", "dram")
    w.lose(tier)
    assert w.tiers_of(a) == (["hbm", "hbm"] if tier == "dram" else [])
    w.recover(tier)
    w.finish_all()


def test_a_demotion_fails() -> None:
    """1. A travels from hbm to dram; the copy fails. 2. The copy in hbm is ready again."""
    w = world(NO_DISK)
    a = tokens_of(1)
    w.store(a)
    w.store(tokens_of(2))
    down = w.moving("hbm", "dram")
    assert down
    w.finish(*down, ok=False)
    assert w.tiers_of(a) == ["hbm"]


# --- fetching ---------------------------------------------------------------------------------


def test_two_fetches_of_the_same_block_are_one_move() -> None:
    """1. Two requests fetch A from disk. 2. One move is made. 3. Its outcome is told to both."""
    w = world()
    a = tokens_of(1)
    on_disk_only(w, a)
    first, second = w.match(a + END).lease, w.match(a + END, owner=2).lease
    assert w.fetch(first).waiting == 1
    assert w.fetch(second).waiting == 1
    assert len(w.moving("disk", "dram")) == 1
    w.finish_all()
    assert set(w.arrived) == {first, second} == w.finished
    assert w.read(0, w.arrived[first], a) == 1


def test_a_fetch_joins_a_promotion_under_way() -> None:
    """1. A is on its way up for somebody who gives up; the move cannot be called back.
    2. Another request fetches A. 3. It waits for that same move.
    """
    w = world()
    a = tokens_of(1)
    on_disk_only(w, a)
    gone = w.match(a + END).lease
    w.fetch(gone)
    w.release(gone)
    lease = w.match(a + END).lease
    assert w.fetch(lease).waiting == 1
    assert len(w.moving("disk", "dram")) == 1
    w.finish_all()
    assert w.read(0, w.arrived[lease], a) == 1
    assert lease in w.finished


def test_released_while_its_blocks_are_on_their_way() -> None:
    """1. A fetch is under way. 2. Its request is cancelled: the plan names the moves nobody wants.
    3a. A queued one is taken back and reported as failed: A is on disk as before.
    3b. One in flight arrives all the same: A is in dram too, for the next who asks.
    """
    w = world()
    a = tokens_of(1, 2)
    on_disk_only(w, a)
    lease = w.match(a + END).lease
    w.fetch(lease)
    queued, flying = w.moving("disk", "dram")
    unwanted = w.engine.handle(p.Release(lease, w.now_s)).cancel
    assert sorted(unwanted) == sorted([queued, flying])
    w.finish(queued, ok=False)
    w.finish(flying)
    assert w.tiers_of(a) == ["disk", "dram+disk"]
    assert not w.finished


def test_a_joined_move_has_the_later_deadline() -> None:
    """1. A fetch is under way. 2. Another one wants the same blocks and waits longer. 3. The first
    deadline drops nothing that the second waits for."""
    w = world()
    a = tokens_of(1, 2)
    on_disk_only(w, a)
    first, second = w.match(a + END).lease, w.match(a + END).lease
    w.do(p.Fetch(first, w.now_s, w.now_s + 0.01))
    w.do(p.Fetch(second, w.now_s, w.now_s + 0.05))
    moves = [w.in_flight[n] for n in w.moving("disk", "dram")]
    assert [move.deadline_s for move in moves] == [w.now_s + 0.05] * 2


def test_released_while_somebody_else_waits() -> None:
    """1. Two wait for A. 2. One gives up: the move goes on. 3. The other is told."""
    w = world()
    a = tokens_of(1)
    on_disk_only(w, a)
    first, second = w.match(a + END).lease, w.match(a + END).lease
    w.fetch(first)
    w.fetch(second)
    assert w.engine.handle(p.Release(first, w.now_s)).cancel == []
    w.finish_all()
    assert set(w.arrived) == {second}


def test_the_disk_dies_in_the_middle_of_a_fetch() -> None:
    """1. Of two blocks, one has arrived. 2. The disk's worker dies. 3. The wait ends at once: what
    arrived is a whole prefix, and the rest is a miss.
    """
    w = world()
    a = tokens_of(1, 2)
    on_disk_only(w, a)
    lease = w.match(a + END).lease
    w.fetch(lease)
    w.finish(w.moving("disk", "dram")[0])
    assert lease not in w.finished
    w.lose("disk")
    assert lease in w.finished
    assert w.read(0, w.arrived[lease], a) == 1
    w.release(lease)
    assert w.match(a + END).hit_blocks == 1


def test_a_block_in_the_middle_is_corrupt() -> None:
    """1. The middle one of three blocks fails its checksum. 2. Its copy is removed, the fetch ends
    before it. 3. The third block stays behind the hole, and is no hit. 4. The middle block is
    stored again: all three are hits.
    """
    w = world()
    a = tokens_of(1, 2, 3)
    on_disk_only(w, a)
    lease = w.match(a + END).lease
    w.fetch(lease)
    front, middle, last = w.moving("disk", "dram")
    w.rows.pop(keys_of(a)[1])
    w.finish(middle, ok=False, corrupt=True)
    w.finish(front, last)
    assert lease in w.finished
    assert w.read(0, [run for run in w.arrived[lease] if run.first == 0], a) == 1
    w.release(lease)
    assert w.tiers_of(a) == ["dram+disk", "-", "dram+disk"]
    assert w.match(a + END).hit_blocks == 1
    placed = w.store(a)
    assert placed.indices.tolist() == [1]
    assert w.match(a + END).hit_blocks == 3


def test_a_fetch_larger_than_the_room_comes_in_parts() -> None:
    """1. Six blocks on disk, four slots in dram, two of them leased by somebody. 2. Two blocks
    come. 3. The other lease ends: the rest follows as far as there is room, the fetch ends there.
    """
    w = world(DRAM_DISK)
    big, small = tokens_of(1, 2, 3, 4, 5, 6), tokens_of(7, 8)
    on_disk_only(w, small)
    holder = w.match(small + END).lease
    w.fetch(holder)
    w.finish_all()
    w.store(tokens_of(1, 2))
    w.finish_all()
    for size in (2, 4, 6):
        part = big[: size * STEP]
        w.store(part)
        w.do(p.Flush(w.now_s))
        w.finish_all()
    lease = w.match(big + END).lease
    fetched = w.fetch(lease)
    assert fetched.waiting + fetched.unplaced + sum(len(r.slots) for r in fetched.ready) >= 2
    w.finish_all()
    w.release(holder)
    w.finish_all()
    got = [*fetched.ready, *w.arrived.get(lease, [])]
    assert 2 <= w.read(0, got, big) <= 4
    assert not w.engine.fetching.unplaced
    assert lease in w.finished


def test_a_fetch_waits_for_what_others_are_reading() -> None:
    """1. All of dram is being read by somebody, the path is on disk. 2. The fetch finds no room,
    and nothing moves; but a reader is done before long. 3. It is: the path comes, whole."""
    w = World((("dram", 4, MAPPED), ("disk", 64, ON_DISK)))
    big, small = tokens_of(1, 2, 3, 4), tokens_of(5, 6, 7, 8)
    on_disk_only(w, big)
    on_disk_only(w, small)
    reader = w.match(small + END).lease
    w.fetch(reader)
    w.finish_all()
    lease = w.match(big + END).lease
    fetched = w.fetch(lease)
    assert not w.in_flight
    assert (fetched.waiting, fetched.unplaced, fetched.ready) == (0, 4, ())
    w.release(reader)
    w.finish_all()
    assert w.read(0, w.arrived[lease], big) == 4
    assert lease in w.finished


@pytest.mark.parametrize(("patience_s", "waits_s", "ends_s"), [(10.0, 0.4, 0.6), (0.4, 0.15, 0.25)])
def test_a_reader_that_keeps_its_lease_is_not_waited_for_long(
    patience_s: float, waits_s: float, ends_s: float
) -> None:
    """1. All of dram is leased by somebody who has read it and goes on, the path is on disk. 2. The
    fetch waits for room. 3. It ends after half a second, or half of its time where that is less:
    the rest is for a prefill."""
    settings = EngineSettings(planner=PlannerSettings(mode="always_reload"))
    w = World((("dram", 4, MAPPED), ("disk", 64, ON_DISK)), settings)
    big, small = tokens_of(1, 2, 3, 4), tokens_of(5, 6, 7, 8)
    on_disk_only(w, big)
    on_disk_only(w, small)
    w.fetch(w.match(small + END).lease)
    w.finish_all()
    lease = w.match(big + END).lease
    began_s = w.now_s
    assert w.fetch(lease, patience_s=patience_s).unplaced == 4
    assert lease not in w.do(p.Tick(began_s + waits_s)).finished
    assert lease in w.do(p.Tick(began_s + ends_s)).finished
    assert not w.engine.fetching.unplaced


def test_two_fetches_with_half_the_room_each_do_not_wait_for_each_other() -> None:
    """1. Two paths of four on disk, four slots in dram: two blocks of each come. 2. Nobody
    reads, so nobody is waited for: at least one gives up its end, and nothing waits for ever."""
    w = World((("dram", 4, MAPPED), ("disk", 64, ON_DISK)))
    one, other = tokens_of(1, 2, 3, 4), tokens_of(5, 6, 7, 8)
    on_disk_only(w, one)
    on_disk_only(w, other)
    leases = [w.match(path + END).lease for path in (one, other)]
    for lease in leases:
        w.fetch(lease)
    w.finish_all()
    assert any(lease in w.finished for lease in leases)
    for lease in leases:
        w.release(lease)
        w.finish_all()
    assert not w.engine.fetching.unplaced


def test_a_fetch_larger_than_memory_waits_for_its_own_end_to_leave() -> None:
    """1. Twelve blocks of a path are on disk, its last four are all of dram, and only there.
    2. The fetch leases them all, so the end is given up; but it has to be written before it can go.
    3. It is written: as much of the front comes as dram holds, and no more of the lease is lost.
    """
    w = World((("dram", 4, MAPPED), ("disk", 64, ON_DISK)))
    big = tokens_of(*range(1, 17))
    while w.store(big).refused:
        w.finish(*list(w.in_flight)[:4])
    assert w.tiers_of(big)[-1] == "dram"
    lease = w.match(big + END).lease
    assert [run.first for run in w.fetch(lease).ready] == [12]
    w.finish_all()
    assert [run.first for run in w.arrived[lease]] == [0]
    assert w.read(0, w.arrived[lease], big) == 4
    assert lease in w.finished


def test_a_fetch_that_can_have_no_room_ends_at_once() -> None:
    """1. Somebody else leases all of dram, the path is on disk. 2. The fetch gives up its own end,
    which is of no use, down to nothing. 3. It ends there, and does not wait for its deadline."""
    w = World((("dram", 4, MAPPED), ("disk", 64, ON_DISK)))
    big, small = tokens_of(1, 2, 3, 4), tokens_of(5, 6, 7, 8)
    on_disk_only(w, big)
    w.store(small)
    holder = w.match(small + END).lease
    assert w.match(small + END).decision.reload_blocks == 4
    lease = w.match(big + END).lease
    fetched = w.fetch(lease)
    assert (fetched.waiting, fetched.unplaced, fetched.ready) == (0, 0, ())
    assert w.release(holder)


def test_what_is_given_up_on_stays_while_it_is_copied() -> None:
    """1. A client commits the end of a path and not its front: the end cannot be written down.
    2. hbm gets full, and the end is on its way from there to dram. 3. A clean stop wants it on disk
    and gives up on it: its slots stay until they were copied, or others' bytes would arrive.
    """
    w = World(THREE_TIERS)
    path = tokens_of(1, 1, 0, 0, 2, 0)
    placed = w.put(path)
    w.write(path, placed)
    w.do(p.Commit(placed.ticket, placed.indices[2:4], w.now_s, False))
    w.store(tokens_of(0, 1, 2, 2))
    assert len(w.moving("hbm", "dram")) == 2
    for _ in range(20):
        if not w.do(p.Flush(w.now_s)):
            break
        w.finish_all()
    else:
        raise AssertionError("the flush never ends")


# --- workers that come back -------------------------------------------------------------------


def test_a_worker_comes_back_with_its_rows() -> None:
    """1. A and B are on disk, its worker dies. 2. Meanwhile A is computed and stored again.
    3. The worker is back with its rows: A gains its durable copy, B is known again.
    """
    w = world()
    a, b = tokens_of(1), tokens_of(1, 2)
    on_disk_only(w, b)
    w.lose("disk")
    assert w.tiers_of(b) == []
    w.store(a)
    w.recover("disk")
    assert w.tiers_of(b) == ["hbm+disk", "disk"]
    assert len(w.rows) == 2


def test_rows_without_a_parent_are_sent_away() -> None:
    """1. A row's parent was lost with the crash. 2. Restore names it and all below it: they are
    removed from the disk, for nobody could ever reach them.
    """
    w = world()
    a = tokens_of(1, 2, 3)
    on_disk_only(w, a)
    w.lose("disk")
    keys = keys_of(a)
    w.do(p.TierUp("disk", w.now_s))
    assert w.restore([row for row in w.rows.values() if row.key != keys[1]]) == [keys[2]]
    assert w.tiers_of(a) == ["disk"]


# --- putting ----------------------------------------------------------------------------------


def test_aborted_while_the_writer_lives() -> None:
    """1. A put is given up, but its process may still write. 2. The slots are quarantined: they
    are nobody's. 3. The writer acknowledges, or is dead: they are free again.
    """
    for acknowledge in (True, False):
        w = world()
        placed = w.put(tokens_of(1, 2))
        pool = w.engine.residency.pools[0]
        w.do(p.Abort(placed.ticket, w.now_s, writer_gone=False))
        assert pool.quarantined_bytes == 2 * BLOCK_BYTES
        assert pool.available(BLOCK_BYTES) == 0
        assert w.tiers_of(tokens_of(1, 2)) == []
        assert w.store(tokens_of(3)).tier == "dram"
        if acknowledge:
            assert w.do(p.Abort(placed.ticket, w.now_s, writer_gone=False)) == 2
        else:
            assert w.do(p.WriterGone(1, w.now_s)) == 2
        assert pool.quarantined_bytes == 0


def test_aborted_by_a_dead_writer() -> None:
    """1. A writer dies before its commit. 2. Nothing is visible, its slots are free at once."""
    w = world()
    w.put(tokens_of(1, 2), owner=5)
    assert w.do(p.WriterGone(5, w.now_s)) == 2
    assert w.engine.residency.pools[0].available(BLOCK_BYTES) == 2
    assert w.match(tokens_of(1, 2) + END).hit_blocks == 0


def test_what_a_dead_writer_leaves_is_room_at_once() -> None:
    """1. B in dram is to leave for the disk, after A above it, which is only in hbm and finds no
    room in dram: another writer has it. 2. That writer, who holds no lease, dies. 3. A comes.
    """
    w = world((("hbm", 2, MAPPED), ("dram", 4, MAPPED), ("disk", 9, ON_DISK)))
    w.store(tokens_of(1))
    w.store(tokens_of(1, 2, 3))
    assert w.tiers_of(tokens_of(1, 2, 3)) == ["hbm", "dram", "dram"]
    assert w.put(tokens_of(4, 5), owner=2).tier == "dram"
    assert not w.in_flight
    w.do(p.WriterGone(2, w.now_s))
    assert len(w.moving("hbm", "dram")) == 1


def test_committed_after_it_expired() -> None:
    """1. A put takes too long, and is given up; its slots are quarantined. 2. The commit comes: it
    is refused, for the slots are not its own any more.
    """
    w = world()
    placed = w.put(tokens_of(1))
    w.now_s += 1000
    w.do(p.Tick(w.now_s))
    with pytest.raises(p.UnknownTicket):
        w.commit(placed)
    assert w.match(tokens_of(1) + END).hit_blocks == 0
    assert w.engine.residency.pools[0].quarantined_bytes == BLOCK_BYTES


def test_put_of_a_prefix_that_somebody_is_putting() -> None:
    """1. Two requests compute the same prefix. 2. The second is told which blocks are busy, and
    writes only what follows. 3. Each block is stored once; committed in either order, both are
    hits when both are there.
    """
    w = world((("hbm", 6, MAPPED),))
    short, long = tokens_of(1, 2), tokens_of(1, 2, 3)
    first = w.put(short, owner=1)
    second = w.put(long, owner=2)
    assert (second.busy, second.present, second.indices.tolist()) == (2, 0, [2])
    w.write(long, second)
    w.commit(second)
    assert w.match(long + END).hit_blocks == 0
    w.write(short, first)
    w.commit(first)
    assert w.match(long + END).hit_blocks == 3


def test_the_first_writer_of_a_prefix_gives_up() -> None:
    """1. As before, but the first writer dies. 2. What the second wrote stays behind a hole.
    3. The prefix is stored by a third: all are hits.
    """
    w = world((("hbm", 6, MAPPED),))
    short, long = tokens_of(1, 2), tokens_of(1, 2, 3)
    w.put(short, owner=1)
    second = w.put(long, owner=2)
    w.write(long, second)
    w.commit(second)
    w.do(p.WriterGone(1, w.now_s))
    assert w.match(long + END).hit_blocks == 0
    assert w.store(long, owner=3).indices.tolist() == [0, 1]
    assert w.match(long + END).hit_blocks == 3


def test_a_block_that_is_there_is_not_stored_again() -> None:
    """1. A is put again. 2. Present: no ticket, no slot, no error."""
    w = world()
    w.store(tokens_of(1))
    placed = w.put(tokens_of(1))
    assert (placed.ticket, placed.present, placed.refused) == (0, 1, 0)


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("is_late", [True, False])
def test_a_block_that_is_being_deleted_is_stored_anew(ok: bool, is_late: bool) -> None:
    """1. A's records are being deleted, and it has no other copy. 2. A is put: it was called
    present, and gone a moment later. Now it is written anew, whenever the deletion ends and even if
    it fails.
    """
    w = world()
    a = tokens_of(1, 2)
    w.store(a, durable=True)
    w.finish_all()
    assert w.do(p.Clear(0, w.now_s)).blocks == 2
    deleted = w.moving("disk", None)
    assert len(deleted) == 2
    assert w.match(a + END).hit_blocks == 0
    placed = w.put(a)
    assert (placed.present, placed.busy, placed.indices.tolist()) == (0, 0, [0, 1])
    if not is_late:
        w.finish(*deleted, ok=ok)
    assert w.put(a).busy == (0 if not ok and not is_late else 2)
    w.write(a, placed)
    assert w.commit(placed) == 2
    if is_late:
        w.finish(*deleted, ok=ok)
    w.finish_all()
    matched = w.match(a + END)
    assert matched.hit_blocks == 2
    assert w.read(0, w.fetch(matched.lease).ready, a) == 2


def test_half_a_put_is_committed() -> None:
    """1. Of three blocks the client wrote two. 2. Those are visible; the third's slot is free."""
    w = world((("hbm", 6, MAPPED),))
    a = tokens_of(1, 2, 3)
    placed = w.put(a)
    w.write(a, placed)
    assert w.do(p.Commit(placed.ticket, placed.indices[:2], w.now_s)) == 2
    assert w.tiers_of(a) == ["hbm", "hbm"]
    assert w.engine.residency.pools[0].used_bytes == 2 * BLOCK_BYTES


# --- leases -----------------------------------------------------------------------------------


def test_a_lease_expires() -> None:
    """1. A lease is not released in time. 2. It ends; fetching under it is an error, releasing it
    is none. 3. Its blocks can go.
    """
    w = world()
    a = tokens_of(1)
    w.store(a)
    lease = w.match(a + END).lease
    w.now_s += 1000
    assert w.do(p.Tick(w.now_s)).finished == [lease]
    with pytest.raises(p.UnknownLease):
        w.fetch(lease)
    assert not w.release(lease)
    assert w.do(p.Clear(0, w.now_s)).blocks == 1


def test_leased_blocks_never_go() -> None:
    """1. A is leased. 2. Everything else comes and goes. 3. A's slots hold A's bytes."""
    w = world(NO_DISK)
    a = tokens_of(1, 2)
    w.store(a)
    w.finish_all()
    lease = w.match(a + END).lease
    ready = w.fetch(lease).ready
    for other in range(10, 30):
        w.store(tokens_of(other))
        w.finish_all()
        assert w.read(0, ready, a) == 2


def test_everything_is_leased() -> None:
    """1. Every slot is leased. 2. A put finds no room, now or soon: refused, nothing has changed.
    3. A lease ends, and the next put is placed.
    """
    w = world((("hbm", 2, MAPPED), ("dram", 2, MAPPED)))
    a, b = tokens_of(1, 2), tokens_of(3, 4)
    leases = []
    for prompt in (a, b):
        w.store(prompt)
        w.finish_all()
        leases.append(w.match(prompt + END).lease)
        w.fetch(leases[-1])
        w.finish_all()
    before = [w.tiers_of(a), w.tiers_of(b)]
    placed = w.put(tokens_of(5))
    assert (placed.ticket, placed.refused, placed.room_coming) == (0, 1, False)
    assert [w.tiers_of(a), w.tiers_of(b)] == before
    w.release(leases[0])
    w.finish_all()
    for _ in range(3):
        if w.store(tokens_of(5)).ticket:
            break
        w.finish_all()
    assert w.match(tokens_of(5) + END).hit_blocks == 1


def test_full_everywhere_the_coldest_leaf_goes() -> None:
    """1. Prompts fill every tier. 2. One more comes: of the prompts that share a prefix it is the
    leaf used longest ago that is forgotten; the shared prefix stays.
    """
    w = world((("dram", 5, MAPPED),))
    w.store(tokens_of(1, 2, 3))
    w.store(tokens_of(1, 2, 4))
    w.match(tokens_of(1, 2, 3) + END)
    w.do(p.WriterGone(1, w.now_s))
    w.store(tokens_of(1, 2, 5))
    w.store(tokens_of(1, 2, 6))
    assert w.tiers_of(tokens_of(1, 2, 4)) == ["dram", "dram"]
    assert w.tiers_of(tokens_of(1, 2, 6)) == ["dram"] * 3


# --- writing down -----------------------------------------------------------------------------


def test_ancestors_are_written_before_descendants() -> None:
    """1. Many paths are wanted on disk, longest used first or last. 2. In the order in which moves
    are handed over, no block is before its parent: whenever the power goes, what is on disk is
    reachable.
    """
    w = world((("dram", 16, MAPPED), ("disk", 20, ON_DISK)))
    for prompt in ((1, 2, 3, 4), (1, 2, 5, 6), (1, 7), (8, 9, 10)):
        w.store(tokens_of(*prompt))
    while w.do(p.Flush(w.now_s)):
        for move in w.moving("dram", "disk"):
            w.finish(move)
            assert not w.orphans
    assert len(w.rows) == 10


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_a_conversation_longer_than_memory_loses_nothing(turn: int) -> None:
    """1. Its front is in hbm, its end fills dram and drains. 2. The front needs room in dram to
    pass, and the end may not be written before it: the end is written out of turn. 3. So it goes
    on, and in the end all of it is held, and on disk after a clean stop.
    """
    w = world((("hbm", 4, MAPPED), ("dram", 4, MAPPED), ("disk", 40, ON_DISK)))
    tokens = tokens_of(*range(30))
    for end in range(turn, 31, turn):
        part = tokens[: end * STEP]
        placed = w.put(part)
        while placed.ticket or w.in_flight:
            if placed.ticket:
                w.write(part, placed)
                w.commit(placed)
            w.finish_all()
            placed = w.put(part)
        assert "-" not in w.tiers_of(part)
        assert len(w.tiers_of(part)) == end
    assert w.engine.evictor.dropped == 0
    while w.do(p.Flush(w.now_s)):
        w.finish_all()
    assert all("disk" in tiers for tiers in w.tiers_of(tokens))
    assert len(w.rows) == 30


def test_a_clean_stop_with_too_small_a_disk_gives_up_the_coldest() -> None:
    """1. What memory holds is more than the disk has room for. 2. Everything is wanted there, what
    is there already too: that holds nobody back, and the coldest goes."""
    w = world((("dram", 16, MAPPED), ("disk", 24, ON_DISK)), max_moving_bytes=2 * BLOCK_BYTES)
    other = w.open(b"o" * 32, BLOCK_BYTES)
    for number in range(20):
        while not w.store(tokens_of(2 * number, 2 * number + 1), namespace=other).ticket:
            w.finish_all()
    w.finish_all()
    youngest = tokens_of(98, 99)  # of the namespace that is looked at first
    while not w.store(youngest).ticket:
        w.finish_all()
    while w.do(p.Flush(w.now_s)):
        w.finish_all()
    assert w.engine.evictor.dropped > 0
    assert w.tiers_of(youngest) == ["dram+disk", "dram+disk"]


def test_an_ancestor_only_in_hbm_is_brought_to_dram_first() -> None:
    """1. A is in hbm, its child B in dram. 2. B is to be on disk, so A must be too; there is no
    way from hbm to disk. 3. A is copied to dram and stays in hbm. 4. A is written, then B.
    """
    w = world((("hbm", 3, MAPPED), ("dram", 6, MAPPED), ("disk", 20, ON_DISK)))
    a, b = tokens_of(1, 2), tokens_of(1, 2, 3, 4)
    w.store(a)
    placed = w.put(b)
    w.write(b, placed)
    assert placed.tier == "dram"
    w.commit(placed, durable=True)
    assert w.tiers_of(b) == ["hbm", "hbm", "dram", "dram"]
    assert [w.in_flight[n].block for n in w.moving("hbm", "dram")] == [0, 1]
    assert not w.moving("dram", "disk")
    w.finish(*w.moving("hbm", "dram"))
    assert w.tiers_of(a) == ["hbm+dram", "hbm+dram"]
    depths = [w.in_flight[n].identity for n in w.moving("dram", "disk")]
    assert [identity.depth for identity in depths if identity] == [0, 1, 2, 3]
    w.finish_all()
    assert placed.ticket in w.durable
    assert not w.orphans


def test_durable_is_told_when_every_block_is_on_disk() -> None:
    """1. A put is committed durably. 2. It is a hit at once. 3. It is told as durable with the
    last of its blocks, not with the first.
    """
    w = world(DRAM_DISK)
    a = tokens_of(1, 2)
    placed = w.store(a, durable=True)
    assert w.match(a + END).hit_blocks == 2
    first, last = w.moving("dram", "disk")
    w.finish(first)
    assert placed.ticket not in w.durable
    w.finish(last)
    assert placed.ticket in w.durable


def test_a_clean_stop_writes_everything() -> None:
    """1. Blocks are in hbm, in dram, and on their way between. 2. Flush until nothing is left.
    3. All are on disk.
    """
    w = world(GPU_ONLY_HBM)
    prompts = [tokens_of(1, 2), tokens_of(1, 3, 4), tokens_of(5)]
    for prompt in prompts:
        w.store(prompt)
    for _ in range(100):
        if not w.do(p.Flush(w.now_s)):
            break
        w.finish_all()
    assert set(w.rows) == {key for prompt in prompts for key in keys_of(prompt)}
    assert not w.orphans


def test_write_through() -> None:
    """1. Committed, not durably. 2. It goes to disk at once, and stays where it is."""
    w = world(DRAM_DISK, write_policy="write_through")
    a = tokens_of(1, 2)
    w.store(a)
    assert len(w.moving("dram", "disk")) == 2
    w.finish_all()
    assert w.tiers_of(a) == ["dram+disk", "dram+disk"]
    assert not w.durable  # nobody asked


def test_write_through_selective() -> None:
    """1. Stored: nothing is written. 2. Hit once: nothing. 3. Hit twice: it is worth it."""
    w = world(DRAM_DISK, write_policy="write_through_selective", selective_hits=2)
    a = tokens_of(1, 2)
    w.store(a)
    w.match(a + END)
    assert not w.in_flight
    w.match(a + END)
    assert len(w.moving("dram", "disk")) == 2
    w.finish_all()
    assert w.tiers_of(a) == ["dram+disk", "dram+disk"]


def test_what_is_not_selected_is_forgotten_when_memory_gives_it_up() -> None:
    """1. A is hit twice: it is written. B, four blocks, is hit once for its first two, and C never.
    2. Memory gives all of them up for D. 3. Only A is found again.
    """
    w = world(
        (("dram", 8, MAPPED), ("disk", 64, ON_DISK)),
        write_policy="write_through_selective",
        selective_hits=2,
    )
    a, b, c, d = tokens_of(1), tokens_of(2, 2, 2, 2), tokens_of(3, 3, 3), tokens_of(*range(10, 18))
    for prompt in (a, b, c):
        w.store(prompt)
    for _ in range(2):
        w.release(w.match(a + END).lease)
    w.finish_all()
    w.release(w.match(tokens_of(2, 2) + END).lease)
    w.store(d)
    assert not w.in_flight
    assert w.tiers_of(a) == ["disk"]
    assert w.tiers_of(b) == w.tiers_of(c) == []
    assert set(w.rows) == set(keys_of(a))


def test_of_a_path_the_selected_front_is_written_when_memory_gives_it_up() -> None:
    """1. The front of a path is hit twice while the disk is away. 2. Memory gives the path up: its
    end is forgotten, its front is written, and is a hit.
    """
    w = world(
        (("dram", 8, MAPPED), ("disk", 64, ON_DISK)),
        write_policy="write_through_selective",
        selective_hits=2,
    )
    a = tokens_of(1, 2, 3, 4)
    w.store(a)
    w.lose("disk")
    for _ in range(2):
        w.release(w.match(a[: 2 * STEP] + END).lease)
    w.recover("disk")
    for number in range(10, 18):
        w.store(tokens_of(number))
        w.finish_all()
    assert w.tiers_of(a) == ["disk", "disk"]


def test_a_clean_stop_writes_what_is_selected() -> None:
    """1. A is selected while the disk is away, B is not. 2. A clean stop writes A."""
    w = world(DRAM_DISK, write_policy="write_through_selective", selective_hits=1)
    a, b = tokens_of(1), tokens_of(2)
    w.store(a)
    w.store(b)
    w.lose("disk")
    w.match(a + END)
    w.recover("disk")
    while w.do(p.Flush(w.now_s)):
        w.finish_all()
    assert set(w.rows) == set(keys_of(a))


def test_the_link_down_is_saturated_above_the_watermark() -> None:
    """1. Hbm is full beyond its watermark; the link to dram takes one block at a time.
    2. Nobody needs the room: cold blocks wait for the link, none is forgotten.
    """
    w = world((("hbm", 6, MAPPED), ("dram", 20, MAPPED)), max_moving_bytes=BLOCK_BYTES)
    a = tokens_of(1, 2, 3, 4, 5, 6)
    w.store(a)
    assert len(w.moving("hbm", "dram")) == 1
    assert len(w.tiers_of(a)) == 6
    w.finish_all()
    assert w.match(a + END).hit_blocks == 6


def test_a_lone_tier_is_used_to_the_last_slot() -> None:
    """1. There is nothing below dram. 2. Above its watermark nothing is forgotten; a put that needs
    the room takes the coldest leaf's.
    """
    w = world((("dram", 4, MAPPED),))
    for prompt in range(4):
        w.store(tokens_of(prompt))
    assert [w.tiers_of(tokens_of(n)) for n in range(4)] == [["dram"]] * 4
    w.store(tokens_of(9))
    assert w.tiers_of(tokens_of(9)) == ["dram"]
    assert w.tiers_of(tokens_of(0)) == []


def test_a_path_larger_than_the_memory_it_passes_through() -> None:
    """1. A path fills hbm and dram, and dram is to be emptied: its blocks drain towards the disk.
    2. They may not be written before their ancestors, which are only in hbm.
    3. The ancestors need a slot in dram, and all of dram drains: nothing moves, for ever.
    4. The end of the path is forgotten, and what is left gets through; a flush ends.
    """
    world = World((("hbm", 8, MAPPED), ("dram", 8, MAPPED), ("disk", 16, ON_DISK)))
    for number in range(24):
        world.store(tokens_of(number % 3, number // 3 % 3, 2, number // 9))
        world.finish_all()
    assert not any(world.engine.residency.draining_bytes), "something drains for ever"
    for _ in range(100):
        if not world.do(p.Flush(world.now_s)):
            break
        world.finish_all()
    else:
        raise AssertionError("the flush never ends")
    assert world.store(tokens_of(7, 8, 9)).ticket


# --- writing down: ends that move, records that go ----------------------------------------------


def test_a_path_that_waits_is_merged_with_what_hangs_below_it() -> None:
    """1. A, B are to be durable; one block at a time goes to disk. 2. C is stored below them and
    the whole is asked for: their nodes become one. 3. B is written all the same, and whoever waits
    is told.
    """
    w = world((("dram", 8, MAPPED), ("disk", 20, ON_DISK)), max_moving_bytes=BLOCK_BYTES)
    ticket = w.store(tokens_of(1, 2), durable=True).ticket
    w.store(tokens_of(1, 2, 3))
    w.release(w.match(tokens_of(1, 2, 3, 9)).lease)
    residency = w.engine.residency
    assert len(residency.namespaces[0].root.children) == 1
    assert len(next(iter(residency.namespaces[0].root.children.values()))) == 3, "one node"
    w.finish_all()
    assert w.tiers_of(tokens_of(1, 2, 3)) == ["dram+disk", "dram+disk", "dram"]
    assert ticket in w.durable


def test_a_child_waits_while_its_parents_record_is_deleted() -> None:
    """1. A's record is being deleted, which cannot be called back. 2. B, below A, is to be durable.
    3. It is written only after A has been written anew: no crash leaves it without its parent.
    """
    w = world((("dram", 8, MAPPED), ("disk", 20, ON_DISK)))
    a, b = tokens_of(1), tokens_of(1, 2)
    w.store(a, durable=True)
    w.finish_all()
    residency = w.engine.residency
    block = residency.index.match(residency.namespaces[0].root, a, STEP).ids()
    residency.start_giving_up(residency.namespaces[0], block, 1)
    residency.settle(block)
    ticket = w.store(b, durable=True).ticket
    (deletion,) = w.moving("disk", None)
    assert not w.moving("dram", "disk")
    w.finish(deletion)
    assert len(w.moving("dram", "disk")) == 2
    w.finish_all()
    assert w.orphans == []
    assert ticket in w.durable


# --- a scrub ----------------------------------------------------------------------------------


def spoiled(w: World, tokens: bytes) -> p.Arrivals:
    """A scrub found the last block bad and removed its record."""
    w.rows.pop(keys_of(tokens)[-1], None)
    return w.do(p.Spoiled("disk", DIGEST, tokens, w.now_s))


def test_a_scrub_finds_a_leased_block_bad() -> None:
    """1. A match leases a path on disk. 2. A scrub removes its middle. 3. The fetch brings what is
    before it, and ends.
    """
    w = world()
    a = tokens_of(1, 2, 3)
    on_disk_only(w, a)
    lease = w.match(tokens_of(1, 2, 3, 9)).lease
    spoiled(w, tokens_of(1, 2))
    assert w.engine.residency.corrupt[2] == 1
    w.fetch(lease)
    w.finish_all()
    assert w.engine.fetching.prefix_blocks(w.engine.residency.leases.leases[lease]) == 1
    w.release(lease)
    assert w.match(tokens_of(1, 2, 3, 9)).hit_blocks == 1


def test_a_scrub_finds_a_block_bad_that_is_being_read() -> None:
    """The read is told of it by the disk itself, and is the one that counts."""
    w = world()
    a = tokens_of(1)
    on_disk_only(w, a)
    lease = w.match(tokens_of(1, 9)).lease
    w.fetch(lease)
    (read,) = w.moving("disk", "dram")
    spoiled(w, a)
    assert w.engine.residency.corrupt[2] == 0
    w.finish(read, ok=False, corrupt=True)
    assert w.engine.residency.corrupt[2] == 1
    w.release(lease)
    assert w.tiers_of(a) == []


def test_a_scrub_finds_a_block_bad_that_nobody_knows() -> None:
    w = world()
    spoiled(w, tokens_of(5, 6))
    w.store(tokens_of(1))
    spoiled(w, tokens_of(1))
    assert w.tiers_of(tokens_of(1)) == ["hbm"]

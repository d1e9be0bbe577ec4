"""Pins: pinned blocks stay, all others are evicted as usual."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.engine import plan as p
from hicache.engine.residency.pinned import leased_share, pinned_bytes
from hicache.engine.settings import EngineSettings
from tests.engine.test_races import DRAM_DISK, END, GPU_ONLY_HBM, on_disk_only, world
from tests.engine.world import (
    BLOCK_BYTES,
    MAPPED,
    ON_DISK,
    ONE_TIER,
    TWO_TIERS,
    UNMAPPED,
    World,
    tokens_of,
)

A = tokens_of(1, 2)
B = tokens_of(3, 4, 5)
ROOMY = (("dram", 8, MAPPED), ("disk", 40, ON_DISK))


def pin(w: World, tokens: bytes, ttl_s: float = 1e6, name: str = "") -> p.PinPlaced:
    return w.do(p.PinPrompt(w.namespace, tokens, name, w.now_s, ttl_s))


def flood(w: World, times: int = 10) -> None:
    """Store far more than all tiers hold."""
    total = sum(pool.capacity_bytes for pool in w.engine.residency.pools) // BLOCK_BYTES
    for number in range(times * total // 4):
        w.store(tokens_of(*range(1000 + 4 * number, 1004 + 4 * number)))
        w.finish_all()


def test_a_pinned_prefix_survives_ten_times_what_the_tiers_hold() -> None:
    w = world(ROOMY)
    w.store(A)
    pinned = pin(w, A + END)
    assert (pinned.blocks, pinned.tier) == (2, "")
    assert pinned.pin
    flood(w)
    assert w.tiers_of(A)[0].startswith("dram"), "the copy that makes a hit fast stays, too"
    lease = w.match(A + END).lease
    assert w.read(0, w.fetch(lease).ready, A) == 2
    w.release(lease)
    assert w.do(p.Unpin(pinned.pin))
    flood(w)
    assert w.tiers_of(A) == []
    assert not w.do(p.Unpin(pinned.pin))


def test_what_is_on_disk_stays_there_and_in_memory_once_it_was_read() -> None:
    w = world(ROOMY)
    on_disk_only(w, A)
    assert pin(w, A).pin
    flood(w)
    assert w.tiers_of(A) == ["disk"] * 2
    lease = w.match(A + END).lease
    w.fetch(lease)
    w.finish_all()
    w.release(lease)
    flood(w)
    assert w.tiers_of(A) == ["dram+disk"] * 2


def test_a_pin_ends_by_its_time() -> None:
    w = world(ROOMY)
    w.store(A)
    pinned = pin(w, A, 100.0)
    w.do(p.Tick(w.now_s + 99))
    assert pinned.pin in w.engine.residency.leases.pins
    w.do(p.Tick(w.now_s + 100))
    assert not w.engine.residency.leases.pins
    assert not w.engine.residency.blocks.num_pins
    flood(w)
    assert w.tiers_of(A) == []


def test_a_pin_is_nobodys_lease() -> None:
    """A pin does not end with a session, and is not counted among leases."""
    w = world(ROOMY)
    w.store(A)
    assert pin(w, A).pin
    for owner in range(3):
        w.do(p.WriterGone(owner, w.now_s))
    assert not w.engine.residency.leases.leases
    assert len(w.engine.residency.leases.pins) == 1


def test_clear_leaves_what_is_pinned_and_nothing_else() -> None:
    """Also where it is the front of a node, whose rest goes."""
    w = world(ROOMY)
    whole = A + B
    w.store(whole)
    assert pin(w, A).pin
    residency = w.engine.residency
    w.match(whole + END)  # both parts are the youngest: they are one node again
    w.do(p.WriterGone(1, w.now_s))
    assert len({int(residency.blocks.node[block]) for block in range(5)}) == 1
    assert w.do(p.Clear(w.namespace, w.now_s)).blocks == 3
    assert w.tiers_of(whole) == ["dram"] * 2
    w.store(whole)
    assert w.tiers_of(whole) == ["dram"] * 5


def test_pins_have_their_share_of_each_tier() -> None:
    """A quarter of dram is two blocks. What several pins hold counts once."""
    w = world(ROOMY)
    w.store(A + B)
    assert pin(w, A + B) == p.PinPlaced(0, 5, "dram")
    first = pin(w, A)
    assert first.pin
    assert pin(w, A).pin
    assert pin(w, A[: len(A) // 2]).pin
    assert pin(w, A + B[: len(B) // 3]) == p.PinPlaced(0, 3, "dram")
    assert pinned_bytes(w.engine.residency, 0) == 2 * BLOCK_BYTES
    assert pin(w, tokens_of(77)) == p.PinPlaced(0, 0, "")


def test_what_would_come_unasked_counts() -> None:
    """On disk only, and more than dram could hold of pins once it is read."""
    w = world(ROOMY)
    on_disk_only(w, B)
    assert pin(w, B) == p.PinPlaced(0, 3, "dram")
    assert not w.engine.residency.leases.pins


def test_no_more_is_promoted_than_pins_may_hold() -> None:
    """A quarter of hbm is one block: the second of A stays in dram, even when it is read."""
    w = world((("hbm", 4, UNMAPPED), ("dram", 12, MAPPED), ("disk", 40, ON_DISK)))
    w.store(A)
    assert pin(w, A).pin
    for _ in range(3):
        w.release(w.match(A + END).lease)
        lease = w.match(A + END).lease
        w.fetch(lease)
        w.release(lease)
        w.finish_all()
    assert w.tiers_of(A) == ["hbm+dram", "dram"]
    other = tokens_of(6, 7)
    w.store(other)
    lease = w.match(other + END).lease
    w.fetch(lease)
    w.release(lease)
    w.finish_all()
    assert "hbm" in w.tiers_of(other)[0], "others move up as before"


def test_a_full_share_does_not_stall_demotion() -> None:
    """All that pins may hold is held: the rest of dram goes on as ever, and loses nothing."""
    w = world((("dram", 8, MAPPED), ("disk", 400, ON_DISK)))
    w.store(A)
    assert pin(w, A).pin
    prompts = [tokens_of(*range(100 + 4 * n, 104 + 4 * n)) for n in range(40)]
    for prompt in prompts:
        while (placed := w.store(prompt)).refused:
            assert placed.room_coming
            w.finish_all()
        w.finish_all()
    assert w.engine.evictor.dropped == 0
    assert all("-" not in w.tiers_of(prompt) and w.tiers_of(prompt) for prompt in prompts)
    assert w.tiers_of(A)[0].startswith("dram")
    assert not w.engine.residency.leases.leases


def test_a_flush_ends_and_writes_what_is_pinned() -> None:
    """All of memory is pinned: a clean stop does not wait for pins to end."""
    settings = EngineSettings(max_pinned=1.0)
    w = World((("dram", 4, MAPPED), ("disk", 20, ON_DISK)), settings)
    w.store(tokens_of(1, 2, 3, 4))
    assert pin(w, tokens_of(1, 2, 3, 4)).pin
    assert w.store(tokens_of(9)).refused == 1
    for _ in range(20):
        if not w.do(p.Flush(w.now_s)):
            break
        w.finish_all()
    else:
        raise AssertionError("flush never ends")
    assert w.tiers_of(tokens_of(1, 2, 3, 4)) == ["dram+disk"] * 4


def test_a_path_that_has_to_pass_pinned_memory_gives_up() -> None:
    """1. dram is pinned to the last slot, A is in hbm and can reach the disk only through dram.
    2. The stop would wait for room that no lease's end will make. It is not A's pins that it waits
       for, so the path is given up, and what is pinned stays as it is.
    """
    settings = EngineSettings(max_pinned=1.0)
    w = World((("hbm", 4, UNMAPPED), ("dram", 4, MAPPED), ("disk", 20, ON_DISK)), settings)
    w.store(A)
    w.release(w.match(A + END).lease)
    lease = w.match(A + END).lease
    w.fetch(lease)
    w.release(lease)
    w.finish_all()
    residency = w.engine.residency
    ids = residency.index.match(residency.namespaces[0].root, A, 8).ids()
    residency.vacate(ids[residency.blocks.tags[ids] >> 1 & 1 == 1], 1)
    residency.settle(ids)
    assert w.tiers_of(A) == ["hbm"] * 2
    full = tokens_of(5, 6, 7, 8)
    w.store(full)
    assert pin(w, full).pin
    for _ in range(20):
        if not w.do(p.Flush(w.now_s)):
            break
        w.finish_all()
    else:
        raise AssertionError("flush never ends")
    assert w.tiers_of(full) == ["dram+disk"] * 4
    assert w.tiers_of(A) == ["hbm"] * 2


@pytest.mark.parametrize("in_haste", [False, True])
def test_pinned_slabs_stay_however_short_memory_is(in_haste: bool) -> None:
    """Two slots to a slab: the slab with A stays, the others are given back."""
    w = World(ROOMY, EngineSettings(), slab_bytes=2 * BLOCK_BYTES)
    w.store(A)
    assert pin(w, A).pin
    for number in range(10, 16):
        w.store(tokens_of(number))
    w.finish_all()
    given: set[int] = set()
    for _ in range(20):
        given |= set(w.do(p.Shed("dram", 4, in_haste)))
        w.finish_all()
    assert len(given) == 3
    assert w.tiers_of(A)[0].startswith("dram")
    pool = w.engine.residency.pools[0]
    assert len(pool.withheld) == 3


def test_a_pin_of_what_is_leaving_keeps_it() -> None:
    """1. hbm's blocks are on their way down. 2. They are pinned: they stay, in both tiers, within
    the share."""
    w = World(TWO_TIERS, EngineSettings(max_pinned=0.5))
    w.store(A)
    w.finish_all()
    residency = w.engine.residency
    lease = w.match(A + END).lease
    w.fetch(lease)
    w.release(lease)
    w.finish_all()
    tier = 0 if "hbm" in w.tiers_of(A)[0] else 1
    ids = residency.index.match(residency.namespaces[0].root, A, 8).ids()
    residency.drain(ids, tier)
    residency.settle(ids)
    assert pin(w, A).pin
    assert not residency.draining_bytes[tier]
    w.finish_all()
    flood(w, 3)
    assert len(w.tiers_of(A)) == 2
    assert "-" not in w.tiers_of(A)


def test_a_hole_in_a_pin_is_filled_by_the_next_put() -> None:
    """A corrupt copy is gone, pinned or not. Its block is still pinned when it is stored again."""
    w = world(ROOMY)
    on_disk_only(w, A)
    assert pin(w, A).pin
    lease = w.match(A + END).lease
    w.fetch(lease)
    first, second = w.in_flight
    w.finish(second, ok=False, corrupt=True)
    w.finish(first)
    w.release(lease)
    assert w.tiers_of(A) == ["dram+disk", "-"]
    flood(w, 2)
    w.store(A)
    flood(w, 2)
    assert "-" not in w.tiers_of(A)
    (number,) = w.engine.residency.leases.pins
    assert w.do(p.Unpin(number))


def test_an_unpinned_hole_is_forgotten() -> None:
    w = world(DRAM_DISK, max_pinned=0.5)
    on_disk_only(w, A)
    pinned = pin(w, A)
    assert pinned.pin
    w.lose("disk")
    assert w.tiers_of(A) == ["-", "-"]
    assert w.match(A + END).hit_blocks == 0
    assert w.do(p.Unpin(pinned.pin))
    assert w.tiers_of(A) == []
    assert w.engine.idle_namespace(()) == 0


def test_leases_have_a_share_of_what_pins_leave() -> None:
    """What is pinned and leased counts as pinned."""
    w = World(ONE_TIER)
    w.store(A)
    w.store(B)
    assert pin(w, A).pin
    for _ in range(3):
        assert w.match(A + END).lease
    assert leased_share(w.engine.residency) == 0
    leases = [w.match(B + END).lease for _ in range(3)]
    assert leased_share(w.engine.residency) == 3 / 6
    for lease in leases:
        w.release(lease)
    assert leased_share(w.engine.residency) == 0


def test_pins_that_hold_all_that_is_left_of_memory_refuse_nobody() -> None:
    """1. The machine wants its memory, and gets all that is not pinned. 2. What is pinned is a hit,
    and nobody has to wait for that to end."""
    w = World(ONE_TIER)
    w.store(A)
    assert pin(w, A).pin
    w.do(p.Shed("dram", 6, in_haste=True))
    residency = w.engine.residency
    assert residency.pools[0].capacity_bytes == pinned_bytes(residency, 0)
    lease = w.match(A + END).lease
    assert leased_share(residency) == 0
    assert w.read(0, w.fetch(lease).ready, A) == 2


def test_the_short_way_of_making_room_passes_pinned_leaves_by() -> None:
    """The coldest of the only tier is pinned: the next one goes, and the pinned one is not looked
    at again before something has ended."""
    w = World(ONE_TIER)
    w.store(A)
    assert pin(w, A).pin
    for number in range(10, 40):
        w.store(tokens_of(number))
        assert w.tiers_of(A) == ["dram"] * 2
    residency = w.engine.residency
    assert int(np.count_nonzero(residency.blocks.tags)) == 8


def test_a_smaller_share_keeps_what_is_pinned_and_takes_no_more() -> None:
    w = world(GPU_ONLY_HBM, max_pinned=0.5)
    w.store(A)
    first = pin(w, A)
    assert first.pin
    engine = w.engine
    engine.configure(EngineSettings(max_pinned=0.1), engine.residency.tiers)
    assert pin(w, A) == p.PinPlaced(0, 2, "dram")
    assert first.pin in engine.residency.leases.pins


def test_what_many_have_pinned_is_let_go_of_by_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pins of the same prompts, let go of in any order: against a count by block. An unpin looks at
    nothing that others keep: with a thousand pins of one long prompt each took seconds."""
    w = world(ROOMY, max_pinned=1.0)
    prompts = [A, A + tokens_of(7), tokens_of(1, 8), tokens_of(9)]
    for tokens in prompts:
        w.store(tokens)
    random = np.random.default_rng(5)
    pinned: list[tuple[int, bytes]] = []
    for number in random.integers(0, len(prompts), 40).tolist():
        done = pin(w, prompts[number])
        assert done.pin
        pinned.append((done.pin, prompts[number]))
    book = w.engine.residency.leases
    monkeypatch.setattr(
        "hicache.engine.residency.leases.once_each", None
    )  # sorts all that it is given
    random.shuffle(pinned)
    while pinned:
        number, _ = pinned.pop()
        assert w.do(p.Unpin(number))
        kept = {tokens[: 8 * n] for _, tokens in pinned for n in range(1, len(tokens) // 8 + 1)}
        assert len(book.kept) == len(kept)

"""The disk tier: what is stored is found again, whole or not at all, and never as other bytes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from hicache.tiers.block import PAGE_BYTES
from hicache.tiers.disk import device as disk_device
from hicache.tiers.disk import disk_tier as disk
from hicache.tiers.disk import format as disk_format
from hicache.tiers.disk.disk_tier import DiskTier
from hicache.tiers.disk.format import (
    derive_key,
    pack_header,
    record_pages,
    unpack_header,
    usable_bytes,
)
from hicache.tiers.errors import (
    TierBroken,
    TierCorrupt,
    TierDamaged,
    TierError,
    TierFull,
    TierMissing,
    TierUnavailable,
)
from hicache.tiers.pool import SlotPool
from tests.tiers.blocks import NAMESPACE, Name, content, listed, name, rows_of

MIB = 1 << 20
BLOCK = 40_000
SLOT = 10 * PAGE_BYTES


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    with DiskTier(tmp_path / "d", 16 * MIB) as opened:
        yield opened


def put(tier: DiskTier, *numbers: int, num_bytes: int = BLOCK, slot_bytes: int = SLOT) -> None:
    tier.put(slot_bytes, [(name(n), content(n, num_bytes)) for n in numbers])


def read(tier: DiskTier, identity: Name, num_bytes: int = BLOCK, slot_bytes: int = SLOT) -> Any:
    """The bytes, or the error."""
    view = np.zeros(num_bytes, np.uint8)
    (problem,) = tier.read(slot_bytes, [(identity, view)])
    return view if problem is None else problem


def holds(tier: DiskTier, number: int, **sizes: int) -> bool:
    found = read(tier, name(number), **sizes)
    assert isinstance(found, TierMissing) or np.array_equal(found, content(number, len(found)))
    return not isinstance(found, TierMissing)


# --- round trips ---------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["fast", "batched", "sync"])
def test_blocks_are_found_after_a_restart(tmp_path: Path, durability: disk.Durability) -> None:
    with DiskTier(tmp_path, 16 * MIB, durability=durability) as tier:
        put(tier, 1, 2)
        put(tier, 3, num_bytes=100, slot_bytes=PAGE_BYTES)
        tier.delete(SLOT, [name(2).key, name(77).key])
    with DiskTier(tmp_path, 16 * MIB, durability=durability) as tier:
        assert not tier.notes
        assert holds(tier, 1)
        assert not holds(tier, 2)
        assert holds(tier, 3, num_bytes=100, slot_bytes=PAGE_BYTES)
        assert tier.num_blocks() == 2


def test_a_block_of_an_unknown_size_is_missing(tier: DiskTier) -> None:
    assert isinstance(read(tier, name(1), slot_bytes=77 * PAGE_BYTES), TierMissing)
    tier.delete(77 * PAGE_BYTES, [name(1).key])


def test_the_scan_gives_everything_and_one_namespace_at_a_time(tier: DiskTier) -> None:
    rows = []
    for namespace in (b"b" * 32, b"a" * 32):
        parent = bytes(32)
        for depth in range(5):
            row = replace(name(depth, namespace=namespace, parent=parent, depth=depth), hits=depth)
            rows.append(row)
            parent = row.key
    tier.put(SLOT, [(row, content(0, BLOCK)) for row in reversed(rows)])
    before_s = int(time.time())
    tier.note_uses(SLOT, [(rows[0].key, 7, 1234), (name(99).key, 1, 1)])
    scans = list(tier.scan())
    assert {(some.namespace, some.block_bytes, len(some)) for some in scans} == {
        (b"a" * 32, BLOCK, 5),
        (b"b" * 32, BLOCK, 5),
    }
    found = {row.key: row for row in rows_of(scans)}
    for row in rows[1:]:
        assert (found[row.key].parent, found[row.key].tokens) == (row.parent, row.tokens)
        assert found[row.key].hits == row.hits
        assert before_s - 60 <= found[row.key].used_s <= before_s, "when it was written"
    assert (found[rows[0].key].hits, found[rows[0].key].used_s) == (7, 1234)
    tier.delete(SLOT, [rows[0].key])
    tier.put(SLOT, [(rows[0], content(0, BLOCK))])
    assert {row.key: row for row in listed(tier)}[rows[0].key].hits == 0, (
        "a use goes with its block"
    )


def test_namespaces_are_described_for_people(tier: DiskTier) -> None:
    tier.describe_namespace(NAMESPACE, {"name": "smol", "dtype": "float32"})
    tier.describe_namespace(NAMESPACE, {"name": "later"})
    file = tier.path / "namespaces" / f"{NAMESPACE.hex()}.json"
    assert json.loads(file.read_text())["name"] == "smol"


def test_accounts_may_go_while_another_is_written(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A namespace is opened, and the room of all accounts is counted. 2. Another thread drops
    one that it was about to look at. The new one is written all the same."""
    tier.describe_namespace(b"a" * 32, {"name": "nothing is stored of it any more"})
    listed_by = Path.iterdir

    def listed_before_one_goes(folder: Path) -> Iterator[Path]:
        files = list(listed_by(folder))
        for file in files:
            file.unlink()
        return iter(files)

    monkeypatch.setattr(Path, "iterdir", listed_before_one_goes)
    tier.describe_namespace(NAMESPACE, {"name": "smol"})
    assert (tier.path / "namespaces" / f"{NAMESPACE.hex()}.json").exists()


def test_headers_survive_nothing_but_themselves() -> None:
    packed = pack_header(name(1), 10, 2**64 - 1, 1.5)
    header = unpack_header(packed)
    assert header is not None
    assert header.matches(name(1))
    assert (header.block_bytes, header.checksum, header.created_s) == (10, 2**64 - 1, 1.5)
    for at in range(len(packed)):
        changed = packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :]
        assert unpack_header(changed) is None
        assert unpack_header(packed[:at]) is None


def test_the_key_is_the_one_of_keys_py() -> None:
    from hicache.protocol.keys import block_key

    assert derive_key(b"n" * 32, b"p" * 32, b"t" * 64) == block_key(b"n" * 32, b"p" * 32, b"t" * 64)


# --- never wrong bytes ---------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["namespace", "parent", "tokens"])
def test_another_identity_under_the_same_key_is_corrupt(tier: DiskTier, field: str) -> None:
    put(tier, 1)
    true = name(1)
    fields = {f: getattr(true, f) for f in ("namespace", "key", "parent", "tokens", "depth")}
    asked = Name(**(fields | {field: b"x" * len(fields[field])}))
    assert isinstance(read(tier, asked), TierCorrupt)
    assert not holds(tier, 1), "a record that failed is removed"


def test_another_length_is_corrupt(tier: DiskTier) -> None:
    put(tier, 1)
    assert isinstance(read(tier, name(1), num_bytes=BLOCK - 1), TierCorrupt)


def test_swapped_values_are_corrupt(tier: DiskTier) -> None:
    put(tier, 1, 2)
    opened = tier._environments[SLOT]
    with opened.env.begin(write=True) as txn:
        one, two = (txn.get(name(n).key, b"", db=opened.blocks) for n in (1, 2))
        txn.put(name(1).key, two, db=opened.blocks)
        txn.put(name(2).key, one, db=opened.blocks)
    assert isinstance(read(tier, name(1)), TierCorrupt)
    assert isinstance(read(tier, name(2)), TierCorrupt)


def test_swapped_records_are_corrupt_and_dropped_by_the_scan(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 16 * MIB) as tier:
        put(tier, 1, 2, 3)
        opened = tier._environments[SLOT]
        with opened.env.begin(write=True) as txn:
            for db in (opened.meta, opened.blocks):
                one, two = (txn.get(name(n).key, b"", db=db) for n in (1, 2))
                txn.put(name(1).key, two, db=db)
                txn.put(name(2).key, one, db=db)
        assert isinstance(read(tier, name(1)), TierCorrupt)
    with DiskTier(tmp_path, 16 * MIB) as tier:
        assert [row.key for row in listed(tier)] == [name(3).key]
        assert tier.notes == [f"1 records of {SLOT}-byte slots were damaged"]
        assert tier.num_blocks() == 1


def test_half_a_record_is_corrupt(tier: DiskTier) -> None:
    put(tier, 1)
    opened = tier._environments[SLOT]
    with opened.env.begin(write=True) as txn:
        txn.delete(name(1).key, db=opened.blocks)
    assert isinstance(read(tier, name(1)), TierCorrupt)
    assert tier.num_blocks() == 0


def test_a_bad_record_stored_anew_meanwhile_is_left_alone(tier: DiskTier) -> None:
    """Race 1 of tiers/disk/disk_tier.py."""
    put(tier, 1)
    opened = tier._environments[SLOT]
    tier._remove_bad(opened, [(name(1).key, b"the header that was bad")])
    assert holds(tier, 1)


def test_flipped_bytes_of_blocks_are_found_out(tmp_path: Path) -> None:
    """Bits that rot in the file between two runs, inside a block's bytes."""
    with DiskTier(tmp_path, 16 * MIB) as tier:
        put(tier, *range(20))
    file = tmp_path / f"class-{SLOT}" / "data.mdb"
    raw = bytearray(file.read_bytes())
    for number in range(0, 20, 2):
        at = raw.find(content(number, BLOCK)[100:200].tobytes())
        assert at > 0
        raw[at + 3] ^= 0x40
    file.write_bytes(raw)
    with DiskTier(tmp_path, 16 * MIB) as tier:
        assert len(listed(tier)) == 20, "the scan reads no block bytes"
        for number in range(20):
            found = read(tier, name(number))
            if number % 2:
                assert np.array_equal(found, content(number, BLOCK))
            else:
                assert isinstance(found, TierCorrupt)
        assert tier.num_blocks() == 10


def test_a_failed_read_does_not_spoil_its_neighbours(tier: DiskTier) -> None:
    put(tier, 1, 3)
    views = [np.zeros(BLOCK, np.uint8) for _ in range(3)]
    results = tier.read(SLOT, [(name(n), v) for n, v in zip((1, 2, 3), views, strict=True)])
    assert [type(result) for result in results] == [type(None), TierMissing, type(None)]
    assert np.array_equal(views[2], content(3, BLOCK))


# --- faults --------------------------------------------------------------------------------------


def caught(call: Callable[..., None], *args: Any, **kwargs: Any) -> TierError | None:
    try:
        call(*args, **kwargs)
    except TierError as error:
        return error
    return None


class FailingTransaction:
    """Passes everything through, and fails the n-th put or commit."""

    def __init__(self, txn: Any, fail: Callable[[], None]) -> None:
        self._txn, self._fail = txn, fail

    def __enter__(self) -> FailingTransaction:
        self._txn.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            try:
                self._fail()
            except BaseException:
                self._txn.abort()
                raise
        self._txn.__exit__(kind, error, trace)

    def put(self, *args: Any, **kwargs: Any) -> Any:
        self._fail()
        return self._txn.put(*args, **kwargs)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._txn, attribute)


class FailingEnvironment:
    def __init__(self, env: Any, nth: int, error: Exception) -> None:
        self._env, self._left, self._error = env, nth, error

    def begin(self, write: bool = False, **kwargs: Any) -> Any:
        txn = self._env.begin(write=write, **kwargs)
        return FailingTransaction(txn, self._fail) if write else txn

    def _fail(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise self._error

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._env, attribute)


@pytest.mark.parametrize(
    ("error", "typed"),
    [
        (OSError(errno.ENOSPC, "x"), TierFull),
        (OSError(errno.EIO, "x"), TierError),
        (lmdb.CorruptedError("x"), TierDamaged),
        (lmdb.BadTxnError("x"), TierDamaged),
        (lmdb.ReadersFullError("x"), TierError),
    ],
)
def test_the_nth_step_failing_leaves_all_or_nothing(
    tmp_path: Path, error: Exception, typed: type[TierError]
) -> None:
    """For n = 1, 2, 3 … until a put of three blocks passes untouched."""
    for nth in range(1, 100):
        with DiskTier(tmp_path / str(nth), 16 * MIB) as tier:
            put(tier, 10)
            opened = tier._environments[SLOT]
            failing = FailingEnvironment(opened.env, nth, error)
            tier._environments[SLOT] = opened._replace(env=failing)  # type: ignore[arg-type]
            problem = caught(put, tier, 1, 2, 3)
            passed = problem is None
            assert passed or type(problem) is typed
            tier._environments[SLOT] = opened
            stored = [holds(tier, number) for number in (1, 2, 3)]
            assert stored == [passed] * 3
            assert holds(tier, 10)
            if passed and failing._left > 0:
                assert nth == 8, "six puts and one commit can fail"
                return
    pytest.fail("never passed untouched")


def pair(stored: list[int]) -> list[int]:
    return [len(stored), len(stored) + 1]


def test_a_put_that_meets_a_full_map_is_tried_once_more(tier: DiskTier) -> None:
    """Race 2 of disk_tier.py: pages set free by one commit serve the one after the next."""
    put(tier, 10)
    opened = tier._environments[SLOT]
    failing = FailingEnvironment(opened.env, 2, lmdb.MapFullError("x"))
    tier._environments[SLOT] = opened._replace(env=failing)  # type: ignore[arg-type]
    put(tier, 1, 2)
    assert all(holds(tier, number) for number in (1, 2, 10))


def test_a_full_map_is_typed_and_nothing_is_half_stored(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 4 * MIB) as tier:
        stored: list[int] = []
        while not (problem := caught(put, tier, *pair(stored), num_bytes=SLOT)):
            stored += pair(stored)
        assert type(problem) is TierFull
        assert 80 <= len(stored) < 100
        tier.delete(SLOT, [name(n).key for n in stored[:8]])
        put(tier, 500, 501, num_bytes=SLOT)
        assert holds(tier, 500, num_bytes=SLOT)
        assert all(holds(tier, n, num_bytes=SLOT) for n in stored[8:])
        assert (tmp_path / f"class-{SLOT}" / "data.mdb").stat().st_size <= 4 * MIB


@pytest.mark.parametrize("slot_bytes", [PAGE_BYTES, 5 * PAGE_BYTES, 64 * PAGE_BYTES])
def test_turnovers_within_usable_bytes_never_meet_a_full_map(
    tmp_path: Path, slot_bytes: int
) -> None:
    """The pool that the daemon builds bounds live bytes; evictions commit ahead of puts."""
    capacity, batch = 12 * MIB, 8
    pool = SlotPool(usable_bytes(capacity, batch * slot_bytes), pages_of=record_pages)
    rng = np.random.default_rng(1)
    data = content(0, slot_bytes)
    with DiskTier(tmp_path, capacity, durability="fast") as tier:
        held: list[tuple[int, int]] = []
        written = number = 0
        while written < 4 * capacity:
            slots = pool.allocate(slot_bytes, batch)
            if len(slots) < batch:
                rng.shuffle(held)
                gone, held = held[:batch], held[batch:]
                tier.delete(slot_bytes, [name(n).key for n, _ in gone])
                pool.free(slot_bytes, np.array([slot for _, slot in gone], np.int32))
                pool.free(slot_bytes, slots)
                continue
            numbers = range(number, number + batch)
            tier.put(slot_bytes, [(name(n), data) for n in numbers])
            held += zip(numbers, slots.tolist(), strict=True)
            number += batch
            written += batch * slot_bytes
        assert tier.num_blocks() == len(held)


def test_two_sizes_share_one_capacity(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 4 * MIB, durability="fast") as tier:
        for number in range(60):
            put(tier, number)
        numbers = iter(range(100, 200))
        wide = {"num_bytes": 80_000, "slot_bytes": 20 * PAGE_BYTES}
        while not (problem := caught(put, tier, next(numbers), **wide)):
            pass
        assert "other slot sizes" in str(problem)
        files = list(tmp_path.glob("class-*/data.mdb"))
        assert len(files) == 2
        assert sum(file.stat().st_size for file in files) <= 4 * MIB
        for number in range(60):
            tier.delete(SLOT, [name(number).key])
    with DiskTier(tmp_path, 4 * MIB, durability="fast") as tier:
        assert list(tmp_path.glob("class-*")) == [tmp_path / f"class-{20 * PAGE_BYTES}"]
        put(tier, 300, num_bytes=80_000, slot_bytes=20 * PAGE_BYTES)


# --- how the device was left ---------------------------------------------------------------------


def test_a_second_holder_is_told_who_is_first(tmp_path: Path) -> None:
    with (
        DiskTier(tmp_path, 4 * MIB),
        pytest.raises(TierUnavailable, match=f"in use by the process with pid {os.getpid()}"),
    ):
        DiskTier(tmp_path, 4 * MIB)
    DiskTier(tmp_path, 4 * MIB).close()


def _crash(path: Path, durability: disk.Durability) -> None:
    """Leave the device as a killed worker does: nothing closed, no clean mark."""
    tier = DiskTier(path, 16 * MIB, durability=durability)
    put(tier, 1)
    tier._release()


@pytest.mark.parametrize(("durability", "lost"), [("fast", True), ("batched", False)])
def test_power_loss_sets_aside_what_was_never_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: disk.Durability, lost: bool
) -> None:
    _crash(tmp_path, durability)
    with DiskTier(tmp_path, 16 * MIB, durability=durability) as tier:
        assert holds(tier, 1), "a kill alone loses nothing"
    _crash(tmp_path, durability)
    monkeypatch.setattr(disk_device, "boot_id", lambda: "another boot")
    with DiskTier(tmp_path, 16 * MIB, durability=durability) as tier:
        assert holds(tier, 1) is not lost
        assert any("the machine went down" in note for note in tier.notes) is lost
        assert bool(list(tmp_path.glob("aside-*"))) is lost
        put(tier, 2)


def test_a_clean_stop_survives_a_reboot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskTier(tmp_path, 16 * MIB, durability="fast") as tier:
        put(tier, 1)
    monkeypatch.setattr(disk_device, "boot_id", lambda: "another boot")
    with DiskTier(tmp_path, 16 * MIB, durability="fast") as tier:
        assert holds(tier, 1)


def test_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 16 * MIB) as tier:
        put(tier, 1)
    state = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps(state | {"format": 9}))
    with pytest.raises(TierUnavailable, match=r"newer hicache \(format 9"):
        DiskTier(tmp_path, 16 * MIB)
    (tmp_path / "state.json").write_text(json.dumps(state))
    with DiskTier(tmp_path, 16 * MIB) as tier:
        assert holds(tier, 1)


def test_what_nobody_can_vouch_for_is_set_aside(tmp_path: Path) -> None:
    for damage in ("missing", "unreadable", "asked"):
        with DiskTier(tmp_path, 16 * MIB) as tier:
            put(tier, 1)
        if damage == "missing":
            (tmp_path / "state.json").unlink()
        elif damage == "unreadable":
            (tmp_path / "state.json").write_text("{")
        with DiskTier(tmp_path, 16 * MIB, set_aside=damage == "asked") as tier:
            assert not holds(tier, 1)
            assert len(tier.notes) == 1
        assert len(list(tmp_path.glob("aside-*"))) == 1, "only the newest is kept"


@pytest.mark.parametrize("left", [0, 5_000, 100_000])
def test_a_truncated_file_is_set_aside_and_not_a_sigbus(tmp_path: Path, left: int) -> None:
    with DiskTier(tmp_path, 16 * MIB) as tier:
        put(tier, *range(20))
    file = tmp_path / f"class-{SLOT}" / "data.mdb"
    with file.open("r+b") as raw:
        raw.truncate(left)
    with DiskTier(tmp_path, 16 * MIB) as tier:
        assert not holds(tier, 1)
        assert len(tier.notes) == (1 if left else 0)
        put(tier, 1)
        assert holds(tier, 1)


def test_a_path_that_cannot_be_made_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierUnavailable, match="Not a directory"):
        DiskTier(tmp_path / "file" / "d", 4 * MIB)


def test_usable_bytes_leaves_room_for_three_batches() -> None:
    room = disk_format.map_bytes(256 * MIB)
    assert 255 * MIB < room < 256 * MIB
    assert usable_bytes(256 * MIB, 16 * MIB) == room - 48 * MIB
    assert usable_bytes(40 * MIB, 16 * MIB) == 0
    assert 0.94 < usable_bytes(100 << 30, 16 * MIB) / (100 << 30) < 0.95


# --- changes by other processes to an open device -----------------------------------------------


def _remove(path: Path) -> None:
    shutil.rmtree(path)


def _move(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def _remove_class(path: Path) -> None:
    shutil.rmtree(path / f"class-{SLOT}")


def _overwrite_start(path: Path) -> None:
    with (path / f"class-{SLOT}" / "data.mdb").open("r+b") as file:
        file.write(b"\xa5" * 2 * PAGE_BYTES)


def _overwrite_pages(path: Path) -> None:
    file = path / f"class-{SLOT}" / "data.mdb"
    with file.open("r+b") as out:
        for page in range(2, file.stat().st_size // PAGE_BYTES):
            out.seek(page * PAGE_BYTES)
            out.write(b"\xa5" * 16)


def _overwrite_lock(path: Path) -> None:
    (path / f"class-{SLOT}" / "lock.mdb").write_bytes(b"\xa5" * 2 * PAGE_BYTES)


@pytest.mark.parametrize(
    "hurt", [_remove, _move, _remove_class, _overwrite_start, _overwrite_pages, _overwrite_lock]
)
def test_a_put_into_a_device_that_is_gone_is_damage(
    tmp_path: Path, hurt: Callable[[Path], None]
) -> None:
    """No block is acknowledged that would be lost; a new worker creates the device again."""
    path = tmp_path / "d"
    tier = DiskTier(path, 16 * MIB)
    put(tier, 1)
    hurt(path)
    with pytest.raises(TierBroken):
        put(tier, 2)
    tier._release()
    with DiskTier(path, 16 * MIB, set_aside=hurt is _overwrite_pages) as again:
        put(again, 3)
        assert holds(again, 3)
        assert not holds(again, 2)


def test_a_new_class_in_a_device_that_is_gone_is_damage(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "d", 16 * MIB)
    shutil.rmtree(tmp_path / "d")
    with pytest.raises(TierBroken, match="deleted"):
        put(tier, 1)
    tier._release()


def test_a_device_on_a_full_volume_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not any OSError, which its worker would take for the daemon's end and say nothing."""

    def write_nothing(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_device, "write_state", write_nothing)
    for _ in range(2):  # and the lock is free again
        with pytest.raises(TierUnavailable, match="No space left"):
            DiskTier(tmp_path, 16 * MIB)

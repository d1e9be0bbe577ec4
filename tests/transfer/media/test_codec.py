"""A codec between the arena and a real disk worker: what lies on disk is encoded, what arrives is
not."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hicache.tiers.disk.disk_tier import DiskTier
from hicache.transfer.media.codec import PlainCodec, codec_of
from hicache.transfer.worker_events import WorkerRestored, WorkerRows
from tests.tiers.blocks import content, name
from tests.transfer.media.sealed_codec import SEAL_BYTES, SealedCodec
from tests.transfer.rig import BLOCK, DISK, MIB, SLOT, Rig

SEALED = "tests.transfer.media.sealed_codec:SealedCodec"


def test_a_codec_is_named_and_none_changes_nothing() -> None:
    assert isinstance(codec_of(SEALED), SealedCodec)
    plain, block = codec_of(""), content(1, BLOCK)
    assert isinstance(plain, PlainCodec)
    assert plain.encode(block) is plain.buffer(block) is block
    assert plain.stored_bytes(BLOCK) == plain.block_bytes(BLOCK) == BLOCK


def test_blocks_come_back_as_they_were(tmp_path: Path) -> None:
    rig = Rig(tmp_path, devices=[DISK], codec=SEALED)
    rig.fill("dram", *range(8))
    written = [rig.move("dram", "disk", block) for block in range(8)]
    assert all(outcome.ok for outcome in rig.run(*written))
    for block in range(8):
        rig.view("dram", block)[:] = 0
    assert all(o.ok for o in rig.run(*[rig.move("disk", "dram", block) for block in range(8)]))
    assert all(rig.holds("dram", block) for block in range(8))
    rig.close()
    with DiskTier(rig.disk_path, 32 * MIB) as tier:
        stored = np.empty(BLOCK + SEAL_BYTES, np.uint8)
        assert tier.read(SLOT, [(name(3), stored)]) == [None]
        assert np.array_equal(stored[:BLOCK], ~content(3, BLOCK))
        tier.put(SLOT, [(name(4), np.zeros(BLOCK + SEAL_BYTES, np.uint8))])
    (tmp_path / "again").mkdir()
    again = Rig(tmp_path / "again", devices=[DISK], codec=SEALED, disk_path=rig.disk_path)
    again.wait(lambda: any(isinstance(event, WorkerRestored) for event in again.events))
    rows = [event.rows for event in again.events if isinstance(event, WorkerRows)]
    assert {(some.block_bytes, some.total) for some in rows} == {(BLOCK, 8)}
    good, bad = again.run(again.move("disk", "dram", 5), again.move("disk", "dram", 4))
    assert good.ok
    assert again.holds("dram", 5)
    assert (bad.ok, bad.corrupt, bad.error) == (False, True, "the seal is broken")
    again.close()

"""What verify finds, what repair removes or rebuilds, and what neither touches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from hicache.cli import cli
from hicache.commands import disk_tools as disk_care
from hicache.tiers.disk.disk_tier import DiskTier
from hicache.tiers.errors import TierMissing, TierUnavailable
from tests.tiers.blocks import content, name

pytestmark = pytest.mark.e2e

MIB = 1 << 20
BLOCK, SLOT, NUM = 40_000, 40_960, 30


def no_progress(*_: int) -> None:
    pass


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "d"
    with DiskTier(path, 16 * MIB) as tier:
        tier.put(SLOT, [(name(n), content(n, BLOCK)) for n in range(NUM)])
    return path


def file_of(path: Path) -> Path:
    return path / f"class-{SLOT}" / "data.mdb"


def flip(path: Path, *numbers: int) -> None:
    """A bit in the bytes of these blocks."""
    raw = bytearray(file_of(path).read_bytes())
    for number in numbers:
        at = raw.find(content(number, BLOCK)[100:200].tobytes())
        raw[at] ^= 1
    file_of(path).write_bytes(raw)


def found(path: Path) -> set[int]:
    with DiskTier(path, 16 * MIB) as tier:
        numbers = set()
        for number in range(NUM):
            view = np.zeros(BLOCK, np.uint8)
            (problem,) = tier.read(SLOT, [(name(number), view)])
            assert problem is None or isinstance(problem, TierMissing)
            if problem is None:
                assert np.array_equal(view, content(number, BLOCK))
                numbers.add(number)
        return numbers


def test_all_is_well(path: Path) -> None:
    (report,) = disk_care.verify(path, no_progress)
    assert (report.is_clean, report.blocks, report.bytes) == (True, NUM, NUM * SLOT)
    assert [report.done for report in disk_care.repair(path, no_progress)] == ["nothing to do"]
    assert found(path) == set(range(NUM))


def test_rotten_blocks_are_named_and_removed(path: Path) -> None:
    flip(path, 3, 17)
    (report,) = disk_care.verify(path, no_progress)
    assert {row["key"] for row in report.bad} == {name(3).key.hex(), name(17).key.hex()}
    disk_care.repair(path, no_progress)
    (report,) = disk_care.verify(path, no_progress)
    assert (report.is_clean, report.blocks) == (True, NUM - 2)
    assert found(path) == set(range(NUM)) - {3, 17}


def test_lost_roots_are_rebuilt(path: Path) -> None:
    flip(path, 5)
    with file_of(path).open("r+b") as file:
        file.write(b"\xa5" * 8192)
    (report,) = disk_care.verify(path, no_progress)
    assert "not an LMDB file" in report.damage
    (report,) = disk_care.repair(path, no_progress)
    assert report.done == f"rebuilt: {NUM - 1} blocks of {NUM} known are whole"
    assert found(path) == set(range(NUM)) - {5}
    (report,) = disk_care.verify(path, no_progress)
    assert report.is_clean


def test_what_a_daemon_set_aside_is_rebuilt(path: Path) -> None:
    (path / "state.json").unlink()
    DiskTier(path, 16 * MIB).close()
    assert not file_of(path).exists()
    disk_care.repair(path, no_progress)
    assert found(path) == set(range(NUM))


@pytest.mark.parametrize("left", [100, 8192, 400_000])
def test_a_truncated_file_gives_what_it_holds(path: Path, left: int) -> None:
    with file_of(path).open("r+b") as file:
        file.truncate(left)
    (report,) = disk_care.verify(path, no_progress)
    assert report.damage
    disk_care.repair(path, no_progress)
    (report,) = disk_care.verify(path, no_progress)
    assert report.is_clean
    found(path)


def test_an_open_device_and_another_format_are_left_alone(path: Path) -> None:
    with DiskTier(path, 16 * MIB), pytest.raises(TierUnavailable, match="in use by"):
        disk_care.verify(path, no_progress)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"format": 2}))
    for ask in (disk_care.verify, disk_care.repair):
        with pytest.raises(TierUnavailable, match="newer hicache"):
            ask(path, no_progress)


def test_the_command_line(path: Path) -> None:
    run = CliRunner().invoke
    assert run(cli, ["verify", str(path)], standalone_mode=False).return_value == 0
    flip(path, 3)
    told = run(cli, ["verify", "--json", str(path)], standalone_mode=False)
    assert told.return_value == 1
    report = json.loads(told.stdout)
    assert report["ok"] is False
    assert report["classes"][0]["bad"][0]["key"] == name(3).key.hex()
    told = run(cli, ["disk", "repair", str(path)], standalone_mode=False)
    assert "1 bad records removed" in told.stdout

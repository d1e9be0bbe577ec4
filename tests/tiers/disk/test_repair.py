"""What verify finds, what repair removes or rebuilds, and what neither touches."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.cli import cli
from hicache.commands import disk_tools
from hicache.tiers.block import slot_bytes_for
from hicache.tiers.disk.disk_tier import DiskTier
from hicache.tiers.disk.format import derive_key
from hicache.tiers.errors import TierMissing, TierUnavailable
from tests.tiers.blocks import NAMESPACE, Name, content, name

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
    (report,) = disk_tools.verify(path, no_progress)
    assert (report.is_clean, report.blocks, report.bytes) == (True, NUM, NUM * SLOT)
    assert [report.done for report in disk_tools.repair(path, no_progress)] == ["nothing to do"]
    assert found(path) == set(range(NUM))


def test_rotten_blocks_are_named_and_removed(path: Path) -> None:
    flip(path, 3, 17)
    (report,) = disk_tools.verify(path, no_progress)
    assert {row["key"] for row in report.bad} == {name(3).key.hex(), name(17).key.hex()}
    disk_tools.repair(path, no_progress)
    (report,) = disk_tools.verify(path, no_progress)
    assert (report.is_clean, report.blocks) == (True, NUM - 2)
    assert found(path) == set(range(NUM)) - {3, 17}


def test_lost_roots_are_rebuilt(path: Path) -> None:
    flip(path, 5)
    with file_of(path).open("r+b") as file:
        file.write(b"\xa5" * 8192)
    (report,) = disk_tools.verify(path, no_progress)
    assert "not an LMDB file" in report.damage
    (report,) = disk_tools.repair(path, no_progress)
    assert report.done == f"rebuilt: {NUM - 1} blocks of {NUM} known are whole"
    assert found(path) == set(range(NUM)) - {5}
    (report,) = disk_tools.verify(path, no_progress)
    assert report.is_clean


def test_what_a_daemon_set_aside_is_rebuilt(path: Path) -> None:
    (path / "state.json").unlink()
    DiskTier(path, 16 * MIB).close()
    assert not file_of(path).exists()
    disk_tools.repair(path, no_progress)
    assert found(path) == set(range(NUM))


@pytest.mark.parametrize("left", [100, 8192, 400_000])
def test_a_truncated_file_gives_what_it_holds(path: Path, left: int) -> None:
    with file_of(path).open("r+b") as file:
        file.truncate(left)
    (report,) = disk_tools.verify(path, no_progress)
    assert report.damage
    disk_tools.repair(path, no_progress)
    (report,) = disk_tools.verify(path, no_progress)
    assert report.is_clean
    found(path)


def test_an_open_device_and_another_format_are_left_alone(path: Path) -> None:
    with DiskTier(path, 16 * MIB), pytest.raises(TierUnavailable, match="in use by"):
        disk_tools.verify(path, no_progress)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"format": 2}))
    for ask in (disk_tools.verify, disk_tools.repair):
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


SIZES = (100, 1_500, 2_100, 5_000, 40_000)
TOKENS = (16, 600, 5_000)


@dataclass(frozen=True)
class Stored:
    block_bytes: int
    num_tokens: int
    seed: int

    def name(self, number: int) -> Name:
        tokens = number.to_bytes(4, "little") * self.num_tokens
        key = derive_key(NAMESPACE, bytes(32), tokens)
        return Name(NAMESPACE, key, bytes(32), tokens, 0)


@settings(max_examples=12, deadline=None)
@given(
    blocks=st.lists(
        st.builds(Stored, st.sampled_from(SIZES), st.sampled_from(TOKENS), st.integers(0, 2)),
        min_size=1,
        max_size=12,
    ),
    is_damaged=st.booleans(),
)
def test_repair_keeps_every_whole_block(blocks: list[Stored], is_damaged: bool) -> None:
    """Of any size and token count, with equal bytes or not: in a store that is sound, and in
    one whose roots are lost."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        with DiskTier(path, 16 * MIB) as tier:
            for number, block in enumerate(blocks):
                slot = slot_bytes_for(block.block_bytes)
                tier.put(slot, [(block.name(number), content(block.seed, block.block_bytes))])
        files = list(path.glob("class-*/data.mdb"))
        before = [file.read_bytes() for file in files]
        if is_damaged:
            for file in files:
                with file.open("r+b") as raw:
                    raw.write(b"\xa5" * 8192)
        disk_tools.repair(path, no_progress)
        if not is_damaged:
            assert [file.read_bytes() for file in files] == before
        with DiskTier(path, 16 * MIB) as tier:
            for number, block in enumerate(blocks):
                view = np.zeros(block.block_bytes, np.uint8)
                slot = slot_bytes_for(block.block_bytes)
                assert tier.read(slot, [(block.name(number), view)]) == [None]
                assert np.array_equal(view, content(block.seed, block.block_bytes))


def test_a_relative_path_is_the_same_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The readers run in another folder: a sound store was reported broken, and rebuilt."""
    monkeypatch.chdir(path.parent)
    (report,) = disk_tools.verify(Path(path.name), no_progress)
    assert (report.is_clean, report.blocks) == (True, NUM)
    (report,) = disk_tools.repair(Path(path.name), no_progress)
    assert report.done == "nothing to do"


@pytest.mark.parametrize("tool", [disk_tools.verify, disk_tools.repair])
def test_what_cannot_be_read_is_not_damage(
    path: Path, monkeypatch: pytest.MonkeyPatch, tool: Callable[..., object]
) -> None:
    before = {file: file.read_bytes() for file in path.rglob("*.mdb")}
    with monkeypatch.context() as without_python:
        without_python.setattr(sys, "executable", "/bin/false")
        with pytest.raises(TierUnavailable, match="could not be read, and nothing was changed"):
            tool(path, no_progress)
    file_of(path).rename(path / "elsewhere")
    file_of(path).mkdir()
    with pytest.raises(TierUnavailable, match="could not be read"):
        tool(path, no_progress)
    file_of(path).rmdir()
    (path / "elsewhere").rename(file_of(path))
    assert {file: file.read_bytes() for file in path.rglob("*.mdb")} == before
    assert found(path) == set(range(NUM))
